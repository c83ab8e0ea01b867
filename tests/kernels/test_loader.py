"""Building and loading the C++ kernels: the cache, several processes at once, and machines without a compiler."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from raydix.kernels.cpp import cpu_ops, loader
from tests.skips import NO_KERNELS

ROOT = Path(__file__).parents[2]
USE = """
import logging, torch
logging.basicConfig(format="%(levelname)s %(message)s")
from raydix.kernels.cpp import cpu_ops
from raydix.kernels.rms_norm import rms_norm
x = torch.ones(2, 32)
assert torch.allclose(rms_norm(x, x[0], 0.0), x)
assert torch.allclose(rms_norm(x, x[0], 0.0), x)
print("kernels" if cpu_ops() else "reference")
"""


def start(cache: Path, code: str = USE, **environment: str) -> "subprocess.Popen[str]":
    """A fresh Python that uses a kernel, with its own cache."""
    env = os.environ | {"RAYDIX_CACHE": str(cache), "PYTHONPATH": str(ROOT)} | environment
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=ROOT)


@pytest.mark.parametrize(
    ("environment", "reason"),
    [({"PATH": "/nonexistent", "CXX": ""}, "no C++ compiler"), ({"CXX": "/nonexistent/g++"}, "cannot run")],
)
def test_without_a_compiler_the_reference_runs(tmp_path: Path, environment: dict[str, str], reason: str) -> None:
    out, complaint = start(tmp_path, **environment).communicate(timeout=500)
    assert out == "reference\n"
    assert complaint.count("WARNING") == 1
    assert len(complaint.splitlines()) == 1
    assert reason in complaint


def test_a_failing_compiler_is_one_warning(tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such machine' >&2\nexit 1\n")
    compiler.chmod(0o755)
    out, complaint = start(tmp_path, CXX=str(compiler)).communicate(timeout=500)
    assert out == "reference\n"
    assert len(complaint.splitlines()) == 1
    assert "error: no such machine" in complaint


@pytest.mark.skipif(shutil.which("g++") is None, reason=NO_KERNELS)
@pytest.mark.parametrize("instructions", loader.INSTRUCTION_SETS)
def test_every_instruction_set_compiles_without_a_warning(instructions: str) -> None:
    """A machine compiles only the kernels for its own processor."""
    sources = [path for path in loader.SOURCES.glob("*.cpp") if path.name != "bindings.cpp"]
    strict = ("-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-Wno-psabi")
    command = ["g++", *strict, *loader.INSTRUCTION_SETS[instructions], *map(str, sources)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:2000]


COMPILER = """#!/bin/sh
# Takes its time, writes down that it ran, and gives a library built earlier.
for argument; do [ "$before" = -o ] && out=$argument; before=$argument; done
echo run >> {log}
case "$*" in
  *-shared*) head -c 1000 {built} > "$out"; sleep 0.5; cp {built} "$out" ;;
  *) : > "$out" ;;
esac
"""


@pytest.mark.skipif(cpu_ops() is None, reason=NO_KERNELS)
def test_several_processes_build_once(tmp_path: Path) -> None:
    log, compiler = tmp_path / "log", tmp_path / "compiler"
    compiler.write_text(COMPILER.format(log=log, built=loader.library(loader.instruction_set())))
    compiler.chmod(0o755)
    running = [start(tmp_path, CXX=str(compiler), RAYDIX_KERNELS="") for _ in range(4)]
    for process in running:
        assert process.communicate(timeout=240) == ("kernels\n", "")
    steps = len(list(loader.SOURCES.glob("*.cpp"))) + 1
    assert len(log.read_text().splitlines()) == steps
    assert [path.suffix for path in sorted((tmp_path / "kernels").iterdir())] == [".lock", ".so"]


def test_a_build_removes_what_killed_ones_left(tmp_path: Path) -> None:
    """Not the folder of a build under way, nor finished objects and locks, however old."""
    names = ("tmpold", "tmpyoung", "raydix_kernels-avx2-0.so", "raydix_kernels-avx2-0.lock")
    for name in names[:2]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "bindings.o").write_bytes(b"half")
    for name in names[2:]:
        (tmp_path / name).touch()
    for name in ("tmpold", *names[2:]):
        os.utime(tmp_path / name, (0.0, 0.0))
    loader.remove_killed(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*names} - {"tmpold"}
    loader.remove_killed(tmp_path / "nowhere")


WITHOUT_COMPILER = {"PATH": "/nonexistent", "CXX": "", "RAYDIX_KERNELS": ""}


@pytest.mark.skipif(cpu_ops() is None, reason=NO_KERNELS)
def test_prebuilt_kernels_need_no_compiler(tmp_path: Path) -> None:
    cache, prebuilt = tmp_path / "cache", tmp_path / "prebuilt"
    prebuilt.mkdir()
    shutil.copy(loader.library(loader.instruction_set()), prebuilt)
    process = start(cache, RAYDIX_PREBUILT_KERNELS=str(prebuilt), **WITHOUT_COMPILER)
    assert process.communicate(timeout=500) == ("kernels\n", "")
    assert not cache.exists()


def test_prebuilt_kernels_of_another_version_are_left(tmp_path: Path) -> None:
    name = f"{loader.MODULE}-{loader.instruction_set()}-{'0' * 20}.so"
    (tmp_path / name).write_bytes(b"made of other sources")
    out, complaint = start(tmp_path, RAYDIX_PREBUILT_KERNELS=str(tmp_path), **WITHOUT_COMPILER).communicate(timeout=500)
    assert out == "reference\n"
    assert complaint.count("WARNING") == 1
    assert f"{tmp_path} has no {loader.file_name(loader.instruction_set())}" in complaint


@pytest.mark.skipif(cpu_ops() is None, reason=NO_KERNELS)
def test_prebuilt_kernels_that_do_not_load_are_built_here(tmp_path: Path) -> None:
    compiler, prebuilt = tmp_path / "compiler", tmp_path / "prebuilt"
    prebuilt.mkdir()
    damaged = prebuilt / loader.file_name(loader.instruction_set())
    damaged.write_bytes(b"made for another machine")
    compiler.write_text(COMPILER.format(log=tmp_path / "log", built=loader.library(loader.instruction_set())))
    compiler.chmod(0o755)
    environment = {"RAYDIX_PREBUILT_KERNELS": str(prebuilt), "RAYDIX_KERNELS": ""}
    out, complaint = start(tmp_path / "cache", CXX=str(compiler), **environment).communicate(timeout=240)
    assert out == "kernels\n"
    assert complaint.count("WARNING") == 1
    assert str(damaged) in complaint and "file too short" in complaint

    # Without a compiler both reasons are told.
    without = WITHOUT_COMPILER | environment
    out, complaint = start(tmp_path / "empty", **without).communicate(timeout=500)
    assert out == "reference\n"
    assert complaint.count("WARNING") == 2
    assert str(damaged) in complaint and "no C++ compiler" in complaint


def prebuild(folder: Path, *sets: str, compiler: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "raydix.kernels.cpp.prebuild", str(folder), *sets]
    env = os.environ | {"PYTHONPATH": str(ROOT), "CXX": str(compiler)}
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=240)


@pytest.mark.skipif(cpu_ops() is None, reason=NO_KERNELS)
def test_the_prebuild_command_makes_what_the_loader_finds(tmp_path: Path) -> None:
    log, compiler, folder = tmp_path / "log", tmp_path / "compiler", tmp_path / "prebuilt"
    best = loader.instruction_set()
    compiler.write_text(COMPILER.format(log=log, built=loader.library(best)))
    compiler.chmod(0o755)
    done = prebuild(folder, best, "plain", compiler=compiler)
    names = [loader.file_name(best), loader.file_name("plain")]
    assert (done.returncode, done.stdout) == (0, "".join(f"{folder / name}\n" for name in names))
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    process = start(tmp_path / "cache", RAYDIX_PREBUILT_KERNELS=str(folder), **WITHOUT_COMPILER)
    assert process.communicate(timeout=500) == ("kernels\n", "")

    # What is there already is not built again.
    steps = len(log.read_text().splitlines())
    assert prebuild(folder, best, "plain", compiler=compiler).returncode == 0
    assert len(log.read_text().splitlines()) == steps


def test_the_prebuild_command_says_what_is_wrong(tmp_path: Path) -> None:
    missing = prebuild(tmp_path / "out", "plain", compiler=tmp_path / "nothing")
    assert (missing.returncode, missing.stderr) == (
        1,
        f"error: cannot run {tmp_path}/nothing: No such file or directory\n",
    )
    unknown = prebuild(tmp_path / "out", "avx9", compiler=tmp_path / "nothing")
    assert unknown.returncode == 2
    assert "unknown instruction set 'avx9'" in unknown.stderr


@pytest.mark.skipif(cpu_ops() is None, reason=NO_KERNELS)
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_there_is_one_openmp_runtime() -> None:
    names = {Path(line.split()[-1]).name for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    assert len([name for name in names if name.startswith(("libgomp", "libomp", "libiomp"))]) == 1


def test_the_reference_can_be_asked_for(tmp_path: Path) -> None:
    assert start(tmp_path, RAYDIX_KERNELS="reference").communicate(timeout=500) == ("reference\n", "")


def test_finished_kernels_are_found_without_torch(tmp_path: Path) -> None:
    code = "import sys; from raydix.kernels.cpp import loader; print(loader.is_at_hand(), 'torch' in sys.modules)"
    out, complaint = start(tmp_path, code=code).communicate(timeout=500)
    assert (out, complaint) == ("False False\n", "")

    library = tmp_path / "kernels" / loader.file_name(loader.instruction_set())
    library.parent.mkdir()
    library.touch()
    out, complaint = start(tmp_path, code=code).communicate(timeout=500)
    assert (out, complaint) == ("True False\n", "")
