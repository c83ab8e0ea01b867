"""`k8s/lock/images.py` against a registry of the test's own, which wants a token first."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

K8S = Path(__file__).parents[2] / "k8s"
PYTHON, RAY = "sha256:" + "a1" * 32, "sha256:" + "b2" * 32


class Registry(ThreadingHTTPServer):
    """Answers for two images to whoever has a token."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.digests = {
            "/v2/library/python/manifests/3.12-slim": PYTHON,
            "/v2/rayproject/ray/manifests/2.60.0-py312-gpu": RAY,
        }
        self.asked: list[str] = []


class Handler(BaseHTTPRequestHandler):
    server: Registry

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        body = json.dumps({"token": "t"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self) -> None:
        if self.headers.get("Authorization") != "Bearer t":
            self.send_response(401)
            scope = f"repository:{self.path.split('/manifests')[0].removeprefix('/v2/')}:pull"
            realm = f"{self.server.url}/token"
            self.send_header("WWW-Authenticate", f'Bearer realm="{realm}",service="registry",scope="{scope}"')
        elif (digest := self.server.digests.get(self.path)) is None:
            self.send_response(404)
        else:
            assert "index" in self.headers["Accept"].split(",")[0], "one digest for all machines"
            self.send_response(200)
            self.send_header("Docker-Content-Digest", digest)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Says nothing."""


@pytest.fixture
def registry() -> Iterator[Registry]:
    with Registry() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The Dockerfiles as they are."""
    for name in ("Dockerfile", "Dockerfile.cpu"):
        (tmp_path / name).write_text((K8S / name).read_text())
    return tmp_path


def images(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(K8S / "lock/images.py"), "--folder", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_digests_of_today_are_written_once(folder: Path, registry: Registry) -> None:
    for _ in range(2):  # the second time in place of the first one's
        done = images(folder, "--registry", registry.url)
        assert done.returncode == 0, done.stderr
        assert f"ARG PYTHON_IMAGE=python:3.12-slim@{PYTHON}\n" in (folder / "Dockerfile.cpu").read_text()
        gpu = (folder / "Dockerfile").read_text()
        assert f"ARG BASE_IMAGE=rayproject/ray:${{RAY_VERSION}}-py312-gpu@{RAY}\n" in gpu
    assert "/token?service=registry&scope=repository%3Alibrary%2Fpython%3Apull" in registry.asked
    assert images(folder, "--check").returncode == 0
    changed = [
        (before, after)
        for name in ("Dockerfile", "Dockerfile.cpu")
        for before, after in zip(
            (K8S / name).read_text().split("\n"), (folder / name).read_text().split("\n"), strict=True
        )
        if before != after
    ]
    assert len(changed) == 2


def test_a_base_image_without_a_digest_is_refused(folder: Path) -> None:
    file = folder / "Dockerfile.cpu"
    file.write_text(file.read_text().replace("python:3.12-slim", f"python:3.12-slim@{PYTHON}"))
    refused = images(folder, "--check")
    assert refused.returncode == 1 and "Dockerfile: BASE_IMAGE=rayproject/ray" in refused.stderr, refused.stderr


def test_a_tag_that_the_registry_does_not_have_changes_nothing(folder: Path, registry: Registry) -> None:
    del registry.digests["/v2/library/python/manifests/3.12-slim"]
    refused = images(folder, "--registry", registry.url)
    assert refused.returncode == 1 and "python:3.12-slim" in refused.stderr, refused.stderr
    for name in ("Dockerfile", "Dockerfile.cpu"):
        assert (folder / name).read_text() == (K8S / name).read_text()


def test_a_registry_that_cannot_be_reached_is_named(folder: Path, registry: Registry) -> None:
    refused = images(folder, "--registry", "http://127.0.0.1:1")
    assert refused.returncode == 1 and "http://127.0.0.1:1 does not tell the digest" in refused.stderr
    assert "Traceback" not in refused.stderr
