"""Restarts of a server that fails, with pauses, until it is given up."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from raydix.cli import restart
from raydix.cli.restart import MAX_DELAY_S, MAX_FAILURES, WINDOW_S, Restarts

REPOSITORY = Path(__file__).resolve().parents[2]


def test_pauses_double_and_it_gives_up() -> None:
    restarts = Restarts()
    assert [restarts.failed(float(now)) for now in range(MAX_FAILURES)] == [1.0, 2.0, 4.0, 8.0, None]


def test_failures_that_are_far_apart_are_no_reason_to_give_up() -> None:
    restarts = Restarts()
    delays = [restarts.failed(number * WINDOW_S / 3) for number in range(20)]
    assert None not in delays
    assert max(delay or 0.0 for delay in delays) <= MAX_DELAY_S
    assert restarts.num_failures == 20


class TestSupervisor:
    """With a small program in place of the server."""

    @pytest.fixture
    def supervise(self, tmp_path: Path) -> Supervise:
        return Supervise(tmp_path)

    def test_a_wrong_configuration_is_no_reason_to_try_again(self, supervise: Supervise) -> None:
        done = supervise("sys.exit(2)")
        assert (done.returncode, done.stderr) == (2, "")
        assert supervise.num_starts == 1

    def test_it_starts_again_until_the_server_ends_well(self, supervise: Supervise) -> None:
        done = supervise("os.kill(os.getpid(), signal.SIGKILL) if starts == 1 else sys.exit(2 if starts == 2 else 0)")
        assert done.returncode == 0
        assert supervise.num_starts == 3
        assert done.stderr.splitlines() == [
            "raydix: the server ended (SIGKILL) and starts again in 0 s",
            "raydix: the server ended (exit code 2) and starts again in 0 s",
        ]

    def test_it_gives_up(self, supervise: Supervise) -> None:
        done = supervise("sys.exit(1)")
        assert done.returncode == 1
        assert supervise.num_starts == MAX_FAILURES
        assert done.stderr.splitlines()[-1].startswith(f"raydix: the server ended {MAX_FAILURES} times in 600 s; ")

    def test_a_signal_ends_both(self, supervise: Supervise) -> None:
        """The server that hears nothing of it by itself is told."""
        done = supervise("os.kill(os.getppid(), signal.SIGTERM); signal.sigwait({signal.SIGTERM})", block=True)
        assert done.returncode == 0
        assert supervise.num_starts == 1


class Supervise:
    """Runs the supervisor, whose server is a line of Python that knows how often it was started."""

    def __init__(self, folder: Path) -> None:
        self._starts = folder / "starts"

    def __call__(self, line: str, block: bool = False) -> subprocess.CompletedProcess[str]:
        server = f"""
import os, pathlib, signal, sys
file = pathlib.Path({str(self._starts)!r})
starts = len(file.read_text()) + 1 if file.exists() else 1
file.write_text("x" * starts)
{"signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})" if block else ""}
{line}
"""
        program = f"""
import argparse, sys
from raydix.cli import restart
restart.FIRST_DELAY_S = 0.01
restart._command = lambda options: [sys.executable, "-c", {server!r}]
sys.exit(restart.run(argparse.Namespace()))
"""
        return subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY, timeout=60, check=False
        )

    @property
    def num_starts(self) -> int:
        return len(self._starts.read_text())


def test_the_server_gets_the_same_arguments() -> None:
    options = argparse.Namespace(config=["cpu", "tenants.yaml"], model=None, host="127.0.0.1", port=9000)
    words = restart._command(options)[3:]
    assert words == ["serve", "--config", "cpu", "--config", "tenants.yaml", "--host", "127.0.0.1", "--port", "9000"]


def test_a_server_whose_supervisor_is_gone_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(restart.SUPERVISOR, raising=False)
    assert not restart.is_orphaned()
    monkeypatch.setenv(restart.SUPERVISOR, str(os.getppid()))
    assert not restart.is_orphaned()
    monkeypatch.setenv(restart.SUPERVISOR, str(os.getpid()))
    assert restart.is_orphaned()
