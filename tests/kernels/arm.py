"""Runs tests of kernels on an emulated ARM processor, `python -m tests.kernels.arm [PYTEST ARGUMENT ...]`.

Python, torch and what the tests import for ARM go to `.arm`, about 1 GB: Python from the Debian packages of this
machine's release, the rest from PyPI. The kernels are compiled by a cross compiler and run by qemu, some ten to fifty
times slower than by a real processor. Needs Debian or Ubuntu with the packages `qemu-user` and
`g++-aarch64-linux-gnu`.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".arm"
SYSTEM, SITE, DONE = FOLDER / "system", FOLDER / "site", FOLDER / "done"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

DEBIAN = (
    *("libc6", "libgcc-s1", "libstdc++6", "zlib1g", "libexpat1", "libffi8", "libbz2-1.0", "liblzma5", "libssl3"),
    *(f"{kind}python{PYTHON}{part}" for kind, part in (("", ""), ("", "-minimal"), ("lib", "-minimal"))),
    *(f"libpython{PYTHON}{part}" for part in ("-stdlib", "-dev")),
)
PYPI = ("numpy<3", "pytest", "transformers<6", "sympy", "networkx", "jinja2", "filelock", "fsspec", "typing_extensions")
# The last one whose build for ARM on PyPI needs no CUDA. The kernels' interface to torch is the same in later ones.
TORCH = "torch==2.8.0"


def main(arguments: Sequence[str]) -> int:
    """Prepare `.arm` if need be and run pytest there: its exit code, or 1 after a line that says what is missing."""
    if missing := [name for name in (COMPILER, EMULATOR, "apt-get", "dpkg") if shutil.which(name) is None]:
        print(f"error: {', '.join(missing)} not found; on Debian: apt install qemu-user g++-aarch64-linux-gnu")
        return 1
    if not DONE.exists():
        prepare()
    options = ["-o", "addopts=", "-p", "no:cacheprovider", "-W", "ignore"]
    interpreter = SYSTEM / "usr" / "bin" / f"python{PYTHON}"
    command = [EMULATOR, str(interpreter), "-m", "pytest", *options, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment(), check=False).returncode


def environment() -> dict[str, str]:
    """The variables under which the emulated Python finds its libraries, and the kernels their compiler."""
    return {
        **os.environ,
        "QEMU_LD_PREFIX": str(SYSTEM),
        "PYTHONHOME": str(SYSTEM / "usr"),
        "PYTHONPATH": f"{ROOT}:{SITE}",
        "CPLUS_INCLUDE_PATH": str(SYSTEM / "usr" / "include"),
        "CXX": COMPILER,
        "RAYDIX_CACHE": str(FOLDER / "cache"),
    }


def prepare() -> None:
    """Download what an ARM machine would have installed."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    packages, lists = FOLDER / "packages", FOLDER / "lists"
    for folder in (packages, lists / "partial"):
        folder.mkdir(parents=True)
    # A state of its own: this machine's package manager is not to know of another architecture.
    state = {"APT::Architecture": "arm64", "APT::Architectures": "arm64", "Dir::State::lists": str(lists)}
    state |= {"Dir::State::status": "/dev/null", "Dir::Cache": str(packages), "APT::Sandbox::User": "root"}
    apt = ["apt-get", "-qq", *(part for key, value in state.items() for part in ("-o", f"{key}={value}"))]
    subprocess.run([*apt, "update"], check=True)
    subprocess.run([*apt, "download", *DEBIAN], cwd=packages, check=True)
    for package in packages.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(package), str(SYSTEM)], check=True)
    platforms = [f"--platform=manylinux{name}_aarch64" for name in ("2014", "_2_17", "_2_28")]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", f"--target={SITE}", "--only-binary=:all:", *platforms]
    # The dependencies of torch would be chosen for this machine, with CUDA.
    subprocess.run([*pip, "--no-deps", TORCH], check=True)
    subprocess.run([*pip, *PYPI], check=True)
    DONE.touch()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
