"""Builds the C++ kernels once per machine and loads them.

The shared object lies in a per-user cache under a name that hashes sources, torch, Python and instruction set, so
another version never meets it. A folder with objects built elsewhere (`raydix.kernels.cpp.prebuild`) is looked through
first; their names hash the same facts, so an object of another version counts as absent. The build runs under a file
lock in a temporary folder and is moved into place, so several processes may start at once and none sees half a file.
The next build removes the folders of builds that were killed.

A finished build from elsewhere that does not load (another C library, another machine) is a warning, and the kernels
are built here. `cpu_ops` raises nothing: an error is one warning, and every operation then runs on its PyTorch
reference.
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
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MODULE = "raydix_kernels"
PREBUILT = "RAYDIX_PREBUILT_KERNELS"  # environment variable that names a folder of finished builds
SOURCES = Path(__file__).parent
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c")
# The compiler's flags, by kind of processor and instruction set, the best first.
X86 = {
    "amx_bf16": (*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    "avx512_bf16": (*AVX512, "-mavx512bf16"),
    "avx512": AVX512,
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "plain": (),
}
ARM = {"neon": ("-DRAYDIX_NEON",), "plain": ()}
OTHER: dict[str, tuple[str, ...]] = {"plain": ()}
MACHINES = {"x86_64": X86, "AMD64": X86, "aarch64": ARM, "arm64": ARM}
INSTRUCTION_SETS = MACHINES.get(platform.machine(), OTHER)
KILLED_S = 3600.0  # age of a temporary folder whose build has been killed: a build takes a minute or two
REFERENCE = "reference"  # no C++ kernels: PyTorch computes
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-pthread", "-ffp-contract=off", "-fvisibility=hidden", "-w", "-Wno-psabi")


class BuildError(Exception):
    """The kernels cannot be built here; the message says why."""


@functools.cache
def cpu_ops() -> Any | None:
    """The extension module with the C++ kernels, or `None` where it cannot be built (said once, as a warning).

    `RAYDIX_KERNELS` chooses an instruction set (amx_bf16, avx512_bf16, avx512, avx2, neon, plain) or "reference" for
    none; `RAYDIX_PREBUILT_KERNELS` a folder of finished builds; `RAYDIX_CACHE` where the build is kept. The first call
    on a machine without a finished build compiles for some fifteen seconds.
    """
    if chosen() == REFERENCE:
        return None
    try:
        return kernels(chosen())
    except (BuildError, OSError, ImportError) as error:
        logger.warning("CPU kernels unavailable, running on the slow PyTorch reference: %s", error)
        return None


def arithmetic() -> str:
    """Name of the arithmetic on this CPU. Machines with different names may round differently."""
    return REFERENCE if cpu_ops() is None else chosen()


def chosen() -> str:
    """The instruction set that the environment asks for, or the CPU's best."""
    return os.environ.get("RAYDIX_KERNELS") or instruction_set()


def is_at_hand() -> bool:
    """True if nothing has to be built for this CPU, found without torch; False also where only torch can tell."""
    asked = os.environ.get("RAYDIX_KERNELS")
    if asked == REFERENCE:
        return True
    instructions = asked or _announced_set()
    if instructions not in INSTRUCTION_SETS:
        return False
    return prebuilt_library(instructions) is not None or (cache_folder() / file_name(instructions)).exists()


def _announced_set() -> str | None:
    """The best of `INSTRUCTION_SETS` by Linux's list of what the CPU has; None if there is no list."""
    if INSTRUCTION_SETS is not X86:
        return instruction_set()  # which needs no torch there
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    has = set(next((line for line in lines if line.startswith("flags")), "").split())
    # As torch decides in `instruction_set`: another answer here would look for an object that is never used.
    if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= has:
        if "avx512_bf16" not in has:
            return "avx512"
        return "amx_bf16" if {"amx_tile", "amx_bf16"} <= has else "avx512_bf16"
    return "avx2" if {"avx2", "fma"} <= has else "plain"


def instruction_set() -> str:
    """The best of `INSTRUCTION_SETS` this CPU has."""
    # Every ARM processor of 64 bits has NEON.
    if INSTRUCTION_SETS is not X86:
        return next(iter(INSTRUCTION_SETS))
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    if capability.startswith("AVX512"):
        if _has_tiles():
            return "amx_bf16"
        return "avx512_bf16" if torch.cpu._is_avx512_bf16_supported() else "avx512"
    return "avx2" if capability == "AVX2" else "plain"


def _has_tiles() -> bool:
    """True if the CPU multiplies matrix tiles and Linux lets this process; the request for them enables them."""
    import torch

    return bool(torch.cpu._is_avx512_bf16_supported() and torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx())


def load(path: Path) -> Any:
    """Imports the extension module at `path`."""
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_loader(MODULE, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def kernels(instructions: str) -> Any:
    """The extension module for one instruction set: the prebuilt one, or where there is none that loads, the cache's.

    Raises:
        BuildError: the instruction set is unknown or not there, or no finished build loads and none can be made.
    """
    if instructions not in INSTRUCTION_SETS:
        raise BuildError(f"unknown instruction set {instructions!r}; known are {', '.join(INSTRUCTION_SETS)}")
    # Without the permission of Linux the first tile instruction would end the process.
    if instructions == "amx_bf16" and not _has_tiles():
        raise BuildError("this CPU has no matrix tiles (AMX), or the system keeps them")
    if (prebuilt := prebuilt_library(instructions)) is not None:
        try:
            return load(prebuilt)
        # Another C library than that of the build, say: it is not a reason to run on the reference.
        except (OSError, ImportError) as error:
            logger.warning("prebuilt kernels not loaded, building them here: %s: %s", prebuilt, error)
    return load(library(instructions))


def library(instructions: str) -> Path:
    """The shared object in the cache for one instruction set, built if it is not there."""
    folder = cache_folder()
    path = folder / file_name(instructions)
    # Looked at twice: another process may have built the object while this one waited for the lock.
    if not path.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock")):
            if not path.exists():
                remove_killed(folder)
                build(instructions, path)
    return path


def remove_killed(folder: Path) -> None:
    """Removes the temporary folders of builds that were killed. Another instruction set may be built at this moment,
    under another lock, so that young ones stay."""
    for each in folder.glob(f"{tempfile.gettempprefix()}*"):
        try:
            is_killed = time.time() - each.stat().st_mtime > KILLED_S
        except FileNotFoundError:  # its build has just ended
            continue
        if is_killed:
            logger.info("removing what a killed build left: %s", each)
            shutil.rmtree(each, ignore_errors=True)


def prebuilt_library(instructions: str) -> Path | None:
    """The object in the folder that `RAYDIX_PREBUILT_KERNELS` names, `None` without a folder or a fitting object."""
    folder = os.environ.get(PREBUILT)
    if not folder:
        return None
    path = Path(folder).expanduser() / file_name(instructions)
    if not path.exists():
        logger.info("no kernels for %s of this version in %s", instructions, folder)
        return None
    return path


def file_name(instructions: str) -> str:
    """Name of a shared object, with the hash of everything that it depends on."""
    return f"{MODULE}-{instructions}-{digest(instructions)}.so"


def cache_folder() -> Path:
    """Folder of the builds: `kernels` in `RAYDIX_CACHE` or `~/.cache/raydix`."""
    return Path(os.environ.get("RAYDIX_CACHE") or Path.home() / ".cache" / "raydix").expanduser() / "kernels"


def digest(instructions: str) -> str:
    """Hash of everything that the binary depends on."""
    state = hashlib.sha256()
    # Names are hashed too: the same text under another name is another build.
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        state.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    facts = (
        # The binary links torch and Python, and neither promises its interface to another version.
        version("torch"),
        sysconfig.get_config_var("SOABI"),
        platform.machine(),
        FLAGS,
        INSTRUCTION_SETS[instructions],
    )
    state.update(repr(facts).encode())
    return state.hexdigest()[:20]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path`; the kernel drops it if this process dies."""
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(instructions: str, path: Path) -> None:
    """Compiles every source at once, links, and moves the result to `path`."""
    import torch
    from torch.utils.cpp_extension import include_paths

    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise BuildError(f"no C++ compiler found (install g++, or name one in CXX){_missing_from_prebuilt(path.name)}")
    include = [f"-I{folder}" for folder in (*include_paths(), sysconfig.get_paths()["include"])]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    # On the file system of the target, so that the last step is a renaming and nobody loads half a file.
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        objects, running = [], []
        # The bindings take longest and know no instruction set.
        for source in sorted(SOURCES.glob("*.cpp"), key=lambda s: s.name != "bindings.cpp"):
            flags = include if source.name == "bindings.cpp" else INSTRUCTION_SETS[instructions]
            objects.append(f"{scratch}/{source.stem}.o")
            running.append(start([compiler, *FLAGS, abi, *flags, "-c", str(source), "-o", objects[-1]]))
        finish(running)
        torch_libraries = Path(torch.__file__).parent / "lib"
        linked = f"{scratch}/{path.name}"
        names = ("-ltorch_cpu", "-ltorch_python", "-lc10")
        finish([start([compiler, "-shared", *objects, f"-L{torch_libraries}", *names, "-o", linked])])
        Path(linked).replace(path)


def _missing_from_prebuilt(name: str) -> str:
    """Half a sentence about the folder of finished builds, where there is one without a fitting object."""
    folder = os.environ.get(PREBUILT)
    return f", and {folder} has no {name}" if folder and not (Path(folder).expanduser() / name).exists() else ""


def start(command: list[str]) -> "subprocess.Popen[str]":
    """Starts one compiler process, with its messages captured."""
    try:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        raise BuildError(f"cannot run {command[0]}: {error.strerror}") from error


def finish(processes: Sequence["subprocess.Popen[str]"]) -> None:
    """Waits for all of them, then raises with the first message of a failed one."""
    # All are waited for before the first complaint is raised: the temporary folder goes away with it.
    complaints = [process.communicate()[1] for process in processes]
    for process, complaint in zip(processes, complaints, strict=True):
        if process.returncode:
            lines = complaint.splitlines() or ["no reason given"]
            raise BuildError(f"the C++ compiler failed: {next((line for line in lines if 'error' in line), lines[0])}")
