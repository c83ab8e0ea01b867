"""Pins the base images by digest: `python k8s/lock/images.py` asks their registry and writes the digests into the
Dockerfiles; `--check` refuses a Dockerfile with a base image that has none, as before a release.

A tag names another image from day to day, a digest never does. The registry is Docker Hub, or the one at `--registry`,
asked by its HTTP API; a repository that anybody may pull from hands out a token for the asking.
"""

import argparse
import json
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

DOCKERFILES = ("Dockerfile", "Dockerfile.cpu")
DOCKER_HUB = "https://registry-1.docker.io"
ARGUMENT = re.compile(r"^ARG (?P<name>\w+)=(?P<value>\S+)$", re.MULTILINE)
BASE = re.compile(r"^FROM \$\{(\w+)\}", re.MULTILINE)
DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")
# Kinds of answers, an index of all machines' images first: its digest stands for all of them.
MANIFESTS = (
    "application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.list.v2+json, "
    "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json"
)
TIMEOUT_S = 30


class PinError(Exception):
    """A base image that cannot be pinned; the message names it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="only look whether every base image has a digest")
    parser.add_argument("--registry", default=DOCKER_HUB, help="address of the registry (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parents[1], help="folder of the Dockerfiles")
    arguments = parser.parse_args()
    files = [arguments.folder / name for name in DOCKERFILES]
    try:
        if arguments.check:
            for file in files:
                check(file)
        else:
            texts = [pinned(file.read_text(), arguments.registry) for file in files]
            for file, text in zip(files, texts, strict=True):
                file.write_text(text)
    except PinError as error:
        sys.exit(f"error: {error}")


def check(file: Path) -> None:
    """Raises PinError for a base image without a digest."""
    values = dict(ARGUMENT.findall(file.read_text()))
    for name in bases(file.read_text()):
        if not DIGEST.search(values[name]):
            raise PinError(
                f"{file}: {name}={values[name]} has no digest, so that a build tomorrow may get another image: "
                f"run python k8s/lock/images.py where the registry can be reached"
            )


def pinned(text: str, registry: str) -> str:
    """A Dockerfile with today's digests of its base images."""
    values = dict(ARGUMENT.findall(text))
    for name in bases(text):
        image = DIGEST.sub("", values[name])
        digest = digest_of(re.sub(r"\$\{(\w+)\}", lambda use: values[use[1]], image), registry)
        text = text.replace(f"ARG {name}={values[name]}\n", f"ARG {name}={image}@{digest}\n")
    return text


def bases(text: str) -> list[str]:
    """Names of the arguments that name the base images of a Dockerfile's stages."""
    return list(dict.fromkeys(BASE.findall(text)))


def digest_of(image: str, registry: str) -> str:
    """The digest that the registry has for an image's tag."""
    repository, _, tag = image.partition(":")
    repository = repository if "/" in repository else f"library/{repository}"
    request = urllib.request.Request(f"{registry}/v2/{repository}/manifests/{tag}", method="HEAD")
    request.add_header("Accept", MANIFESTS)
    try:
        try:
            answer = urllib.request.urlopen(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            if error.code != 401:
                raise
            request.add_header("Authorization", f"Bearer {token(error.headers.get('WWW-Authenticate', ''))}")
            answer = urllib.request.urlopen(request, timeout=TIMEOUT_S)
        digest: str = answer.headers.get("Docker-Content-Digest", "")
    except OSError as error:  # among them HTTPError
        raise PinError(f"{image}: {registry} does not tell the digest: {error}") from error
    if not DIGEST.fullmatch(f"@{digest}"):
        raise PinError(f"{image}: {registry} tells no digest of SHA-256, but {digest!r}")
    return digest


def token(challenge: str) -> str:
    """The token that a registry asks for with its challenge, `Bearer realm="...",service="...",scope="..."`."""
    fields = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    realm = fields.pop("realm", "")
    if not challenge.startswith("Bearer ") or not realm:
        raise PinError(f"the registry asks for something else than a token: {challenge!r}")
    with urllib.request.urlopen(f"{realm}?{urllib.parse.urlencode(fields)}", timeout=TIMEOUT_S) as answer:
        found = json.load(answer)
    return str(found.get("token") or found.get("access_token"))


if __name__ == "__main__":
    main()
