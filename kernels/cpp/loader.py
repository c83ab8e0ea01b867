"""Builds the C++ kernels once per machine and loads them.

The shared object lies in a per-user cache under a name that hashes sources, torch, Python and instruction set, so
another version never meets it. It is built under a file lock into a temporary folder and moved into place, so several
processes may start at once and none sees half a file. Nothing here raises: what goes wrong is one warning, and every
operation then runs on its PyTorch reference.
"""

import functools
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

MODULE = "raydix_kernels"
SOURCES = Path(__file__).parent
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c")
INSTRUCTION_SETS = {
    "avx512_bf16": (*AVX512, "-mavx512bf16"),
    "avx512": AVX512,
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "plain": (),
}
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-pthread", "-ffp-contract=off", "-fvisibility=hidden", "-w", "-Wno-psabi")


class BuildError(Exception):
    """The kernels cannot be built here; the message says why."""


@functools.cache
def cpu_ops() -> Any | None:
    """The extension module with the C++ kernels, or `None` where it cannot be built (said once, as a warning).

    `RAYDIX_KERNELS` chooses an instruction set (avx512_bf16, avx512, avx2, plain) or "reference" for none;
    `RAYDIX_CACHE` where the build is kept. The first call on a machine compiles for some fifteen seconds.
    """
    chosen = os.environ.get("RAYDIX_KERNELS") or instruction_set()
    if chosen == "reference":
        return None
    try:
        return load(library(chosen))
    except (BuildError, OSError, ImportError) as error:
        logger.warning("CPU kernels unavailable, running on the slow PyTorch reference: %s", error)
        return None


def instruction_set() -> str:
    """The best of `INSTRUCTION_SETS` this CPU has."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability.startswith("AVX512"):
        return "avx512_bf16" if torch.cpu._is_avx512_bf16_supported() else "avx512"
    return "avx2" if capability == "AVX2" else "plain"


def load(path: Path) -> Any:
    """Imports the extension module at `path`."""
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_loader(MODULE, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def library(chosen: str) -> Path:
    """The shared object for one instruction set, built if the cache has none."""
    if chosen not in INSTRUCTION_SETS:
        raise BuildError(f"unknown instruction set {chosen!r}; known are {', '.join(INSTRUCTION_SETS)}")
    folder = cache_folder()
    path = folder / f"{MODULE}-{chosen}-{digest(chosen)}.so"
    if not path.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock")):
            if not path.exists():
                build(chosen, path)
    return path


def cache_folder() -> Path:
    """Where builds are kept: `kernels` in `RAYDIX_CACHE` or `~/.cache/raydix`."""
    return Path(os.environ.get("RAYDIX_CACHE") or Path.home() / ".cache" / "raydix").expanduser() / "kernels"


def digest(chosen: str) -> str:
    """What the binary depends on, as a hash."""
    state = hashlib.sha256()
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        state.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    facts = (torch.__version__, sysconfig.get_config_var("SOABI"), platform.machine(), FLAGS, INSTRUCTION_SETS[chosen])
    state.update(repr(facts).encode())
    return state.hexdigest()[:20]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path`; the kernel drops it if this process dies."""
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(chosen: str, path: Path) -> None:
    """Compiles every source at once, links, and moves the result to `path`."""
    from torch.utils.cpp_extension import include_paths

    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise BuildError("no C++ compiler found (install g++, or name one in CXX)")
    include = [f"-I{folder}" for folder in (*include_paths(), sysconfig.get_paths()["include"])]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        objects, running = [], []
        # The bindings take longest and know no instruction set.
        for source in sorted(SOURCES.glob("*.cpp"), key=lambda s: s.name != "bindings.cpp"):
            flags = include if source.name == "bindings.cpp" else INSTRUCTION_SETS[chosen]
            objects.append(f"{scratch}/{source.stem}.o")
            running.append(start([compiler, *FLAGS, abi, *flags, "-c", str(source), "-o", objects[-1]]))
        finish(running)
        torch_libraries = Path(torch.__file__).parent / "lib"
        linked = f"{scratch}/{path.name}"
        names = ("-ltorch_cpu", "-ltorch_python", "-lc10")
        finish([start([compiler, "-shared", *objects, f"-L{torch_libraries}", *names, "-o", linked])])
        Path(linked).replace(path)


def start(command: list[str]) -> "subprocess.Popen[str]":
    """Starts one compiler process, its complaints kept."""
    try:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        raise BuildError(f"cannot run {command[0]}: {error.strerror}") from error


def finish(processes: Sequence["subprocess.Popen[str]"]) -> None:
    """Waits for all of them, then raises with the first line of complaint of one that failed."""
    complaints = [process.communicate()[1] for process in processes]
    for process, complaint in zip(processes, complaints, strict=True):
        if process.returncode:
            lines = complaint.splitlines() or ["no reason given"]
            raise BuildError(f"the C++ compiler failed: {next((line for line in lines if 'error' in line), lines[0])}")
