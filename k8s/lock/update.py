"""Locks the Python packages of the CPU image: `uvx --with packaging python k8s/lock/update.py` writes cpu.txt anew.

uv resolves pyproject.toml for Python 3.12, without torch and triton: PyTorch's CPU builds lie in an index of their own,
which the Dockerfile lets uv find, and the C++ kernels take triton's place. Of each package the wheels stay that pip
takes on Debian 12 or newer, on x86-64 and arm64.
"""

import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

FOLDER = Path(__file__).parent
GLIBC = 36
MACHINES = ("x86_64", "aarch64")
HEADING = """\
# The Python packages of the CPU image but torch and raydix: Python 3.12, Linux with glibc 2.36 or newer, x86-64 and
# arm64. Made by update.py beside this file.
"""


def main() -> None:
    """Write cpu.txt."""
    chosen: dict[str, set[str]] = {}
    for machine in MACHINES:
        for package in resolved(machine):
            requirement = f"{package['name']}=={package['version']}"
            chosen.setdefault(requirement, set()).add(digest(package, machine))
    lines = []
    for requirement, digests in sorted(chosen.items()):
        lines.append(" \\\n    ".join([requirement, *(f"--hash=sha256:{each}" for each in sorted(digests))]))
    (FOLDER / "cpu.txt").write_text(HEADING + "\n".join(lines) + "\n")


def resolved(machine: str) -> list[dict[str, Any]]:
    """The packages that uv takes on a machine, with their wheels."""
    command = ["uv", "pip", "compile", "../../pyproject.toml", "cpu.in", "--quiet", "--format", "pylock.toml"]
    command += ["--python-version", "3.12", "--python-platform", f"{machine}-manylinux_2_{GLIBC}"]
    command += ["--excludes", "excluded.txt"]
    done = subprocess.run(command, cwd=FOLDER, stdout=subprocess.PIPE, text=True, check=True)
    packages: list[dict[str, Any]] = tomllib.loads(done.stdout)["packages"]
    return packages


def digest(package: dict[str, Any], machine: str) -> str:
    """The hash of the best wheel for a machine."""
    wheels = {wheel_name(wheel): wheel["hashes"]["sha256"] for wheel in package["wheels"]}
    chosen: str = wheels[best(list(wheels), machine)]
    return chosen


def wheel_name(wheel: dict[str, Any]) -> str:
    """A wheel's file name: given, or the end of its address."""
    name: str = wheel.get("name") or wheel["url"].rsplit("/", 1)[1]
    return name


def best(names: list[str], machine: str) -> str:
    """The wheel whose tags come first in the order in which pip prefers them."""
    of_name = {name: parse_wheel_filename(name)[3] for name in names}
    for tag in tags(machine):
        for name, own in of_name.items():
            if tag in own:
                return name
    raise SystemExit(f"no wheel for {machine} among {', '.join(names)}")


def tags(machine: str) -> Iterator[Tag]:
    """The tags that Python 3.12 takes on Linux, best first."""
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(GLIBC, 4, -1)]
    platforms += [f"manylinux{old}_{machine}" for old in ("2014", "2010", "1")] + [f"linux_{machine}"]
    yield from cpython_tags((3, 12), platforms=platforms)
    yield from compatible_tags((3, 12), "cp312", platforms)


if __name__ == "__main__":
    main()
