"""Locks the Python packages: `uvx --with packaging python k8s/lock/update.py [cpu] [gpu] [constraints]` writes cpu.txt
and gpu.txt beside this file and constraints.txt in the repository's root, or some of them, anew.

uv resolves pyproject.toml, with the extras that an operator may turn on, for Python 3.12. Of each package the one wheel
stays that pip takes on the image's machine.

* The CPU image has Debian 12 or newer, on x86-64 and arm64. torch and triton are left out: PyTorch's CPU builds lie in
  an index of their own, which the Dockerfile lets uv find, and the C++ kernels take triton's place.
* The GPU image has the Ubuntu of Ray's images, on x86-64, and the versions of cpu.txt. torch is PyPI's build, which
  brings CUDA's libraries along.
* constraints.txt holds the versions that `make` installs, those for development among them: for each Python and machine
  that raydix runs on, without hashes. torch and triton are left out, since the machine decides about their build.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

FOLDER = Path(__file__).parent
EXTRAS = ("otel",)  # of pyproject.toml, in both images: what is no key of a configuration would need another image


@dataclass(frozen=True)
class Image:
    """What an image takes wheels for."""

    glibc: int
    """Minor version of the C library."""
    machines: tuple[str, ...]
    options: tuple[str, ...]
    """Options of uv: packages to leave out, versions to keep to."""
    heading: str


IMAGES = {
    "cpu": Image(
        glibc=36,
        machines=("x86_64", "aarch64"),
        options=("--excludes", "excluded.txt"),
        heading="""\
# The Python packages of the CPU image but torch and raydix: Python 3.12, Linux with glibc 2.36 or newer, x86-64 and
# arm64. Made by update.py beside this file.
""",
    ),
    "gpu": Image(
        glibc=35,
        machines=("x86_64",),
        options=("--constraint", "cpu.txt"),
        heading="""\
# The Python packages of the GPU image but raydix: Python 3.12, Linux with glibc 2.35 or newer, x86-64, CUDA's libraries
# among them. Made by update.py beside this file.
""",
    ),
}


CONSTRAINTS = """\
# The versions that `make` installs, of all packages but torch, triton and raydix. Made by k8s/lock/update.py.
"""


def main() -> None:
    """Write the files that the command line names, or all of them."""
    for name in sys.argv[1:] or [*IMAGES, "constraints"]:
        if name == "constraints":
            write_constraints()
        else:
            write_lock(name)


def write_constraints() -> None:
    """Write the versions for each Python and machine, of what serves and of the tools for development."""
    command = ["uv", "pip", "compile", "../../pyproject.toml", "cpu.in", "--extra", "dev", "--universal", "--quiet"]
    command += ["--python-version", "3.11", "--excludes", "excluded.txt", "--no-header", "--no-annotate"]
    done = subprocess.run(command, cwd=FOLDER, stdout=subprocess.PIPE, text=True, check=True)
    # A constraint cannot have extras.
    versions = re.sub(r"\[[^]]*\]", "", done.stdout)
    (FOLDER.parents[1] / "constraints.txt").write_text(CONSTRAINTS + versions)


def write_lock(name: str) -> None:
    """Write the lock file of an image."""
    image = IMAGES[name]
    chosen: dict[str, set[str]] = {}
    for machine in image.machines:
        for package in resolved(name, machine):
            requirement = f"{package['name']}=={package['version']}"
            chosen.setdefault(requirement, set()).add(digest(package, machine, image.glibc))
    lines = []
    for requirement, digests in sorted(chosen.items()):
        lines.append(" \\\n    ".join([requirement, *(f"--hash=sha256:{each}" for each in sorted(digests))]))
    (FOLDER / f"{name}.txt").write_text(image.heading + "\n".join(lines) + "\n")


def resolved(name: str, machine: str) -> list[dict[str, Any]]:
    """The packages that uv takes for an image on a machine, with their wheels."""
    image = IMAGES[name]
    command = ["uv", "pip", "compile", "../../pyproject.toml", f"{name}.in", "--quiet", "--format", "pylock.toml"]
    command += [option for extra in EXTRAS for option in ("--extra", extra)]
    command += ["--python-version", "3.12", "--python-platform", f"{machine}-manylinux_2_{image.glibc}"]
    done = subprocess.run([*command, *image.options], cwd=FOLDER, stdout=subprocess.PIPE, text=True, check=True)
    packages: list[dict[str, Any]] = tomllib.loads(done.stdout)["packages"]
    return packages


def digest(package: dict[str, Any], machine: str, glibc: int) -> str:
    """The hash of the best wheel for a machine."""
    wheels = {wheel_name(wheel): wheel["hashes"]["sha256"] for wheel in package["wheels"]}
    chosen: str = wheels[best(list(wheels), machine, glibc)]
    return chosen


def wheel_name(wheel: dict[str, Any]) -> str:
    """A wheel's file name: given, or the end of its address."""
    name: str = wheel.get("name") or wheel["url"].rsplit("/", 1)[1]
    return name


def best(names: list[str], machine: str, glibc: int) -> str:
    """The wheel whose tags come first in the order in which pip prefers them."""
    of_name = {name: parse_wheel_filename(name)[3] for name in names}
    for tag in tags(machine, glibc):
        for name, own in of_name.items():
            if tag in own:
                return name
    raise SystemExit(f"no wheel for {machine} among {', '.join(names)}")


def tags(machine: str, glibc: int) -> Iterator[Tag]:
    """The tags that Python 3.12 takes on Linux, best first."""
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(glibc, 4, -1)]
    platforms += [f"manylinux{old}_{machine}" for old in ("2014", "2010", "1")] + [f"linux_{machine}"]
    yield from cpython_tags((3, 12), platforms=platforms)
    yield from compatible_tags((3, 12), "cp312", platforms)


if __name__ == "__main__":
    main()
