"""The kernels' threads: what is computed does not depend on how many there are, who else asks, or a fork."""

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from raydix.kernels.cpp import cpu_ops, loader
from raydix.kernels.rms_norm import rms_norm
from tests.skips import NO_KERNELS


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    if cpu_ops() is None:
        pytest.skip(NO_KERNELS)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def rows() -> Tensor:
    return torch.randn(2000, 576).bfloat16()


def norm(rows: Tensor) -> Tensor:
    return rms_norm(rows, torch.ones(576), 1e-5)


def test_any_number_of_threads(rows: Tensor) -> None:
    torch.set_num_threads(1)
    alone = norm(rows)
    for threads in (2, 5, 3, 1, 2):  # more than cores, then fewer than there have been
        torch.set_num_threads(threads)
        for _ in range(20):
            assert torch.equal(norm(rows), alone)


def test_callers_at_the_same_time(rows: Tensor) -> None:
    torch.set_num_threads(2)
    expected = norm(rows)
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(norm, [rows] * 200):
            assert torch.equal(result, expected)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own(rows: Tensor) -> None:
    torch.set_num_threads(2)
    expected = norm(rows).view(torch.int16).numpy()
    child = os.fork()
    if child == 0:  # without torch's own threads, which do not survive this
        os._exit(0 if (norm(rows).view(torch.int16).numpy() == expected).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def at_fixed_addresses() -> list[str]:
    """The words before a command that give it the same addresses each time, where they are allowed.

    ThreadSanitizer ends a program at its start where the system chose addresses of more random bits than it takes, as
    Ubuntu's does."""
    words = ["setarch", platform.machine(), "-R"]
    if shutil.which(words[0]) is None:
        return []
    tried = subprocess.run([*words, "true"], capture_output=True, check=False)
    return words if tried.returncode == 0 else []


@pytest.mark.skipif(shutil.which("g++") is None, reason=NO_KERNELS)
def test_threads_never_meet_at_a_number_without_an_order(tmp_path: Path) -> None:
    """ThreadSanitizer ends the program with another code where two threads use a number, and nothing orders them."""
    program, source = tmp_path / "races", Path(__file__).parent / "team_races.cpp"
    flags = ("-std=c++20", "-O1", "-fsanitize=thread", "-pthread", f"-I{loader.SOURCES}")
    subprocess.run(["g++", *flags, str(source), str(loader.SOURCES / "team.cpp"), "-o", str(program)], check=True)
    done = subprocess.run([*at_fixed_addresses(), str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[:2000]
