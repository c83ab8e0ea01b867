"""Building and loading the C++ kernels: the cache, several processes at once, and machines without a compiler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpp import cpu_ops, loader

ROOT = Path(__file__).parents[2]
USE = """
import logging, torch
logging.basicConfig(format="%(levelname)s %(message)s")
from kernels.cpp import cpu_ops
from kernels.rms_norm import rms_norm
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
    out, complaint = start(tmp_path, **environment).communicate(timeout=120)
    assert out == "reference\n"
    assert complaint.count("WARNING") == 1
    assert len(complaint.splitlines()) == 1
    assert reason in complaint


def test_a_failing_compiler_is_one_warning(tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such machine' >&2\nexit 1\n")
    compiler.chmod(0o755)
    out, complaint = start(tmp_path, CXX=str(compiler)).communicate(timeout=120)
    assert out == "reference\n"
    assert len(complaint.splitlines()) == 1
    assert "error: no such machine" in complaint


COMPILER = """#!/bin/sh
# Takes its time, writes down that it ran, and gives a library built earlier.
for argument; do [ "$before" = -o ] && out=$argument; before=$argument; done
echo run >> {log}
case "$*" in
  *-shared*) head -c 1000 {built} > "$out"; sleep 0.5; cp {built} "$out" ;;
  *) : > "$out" ;;
esac
"""


@pytest.mark.skipif(cpu_ops() is None, reason="no C++ kernels on this machine")
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


@pytest.mark.skipif(cpu_ops() is None, reason="no C++ kernels on this machine")
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_there_is_one_openmp_runtime() -> None:
    names = {Path(line.split()[-1]).name for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    assert len([name for name in names if name.startswith(("libgomp", "libomp", "libiomp"))]) == 1


def test_the_reference_can_be_asked_for(tmp_path: Path) -> None:
    assert start(tmp_path, RAYDIX_KERNELS="reference").communicate(timeout=120) == ("reference\n", "")
