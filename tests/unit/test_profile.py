"""The profile of processes that compute and of ones that wait."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.profile import ProfileError, found, profile

BUSY = "print(flush=True)\nwhile True: sum(range(1000))"
IDLE = "import time; print(flush=True); time.sleep(3600)"
PARENT = f"""
import subprocess, sys
for program in {[BUSY, IDLE]!r}:
    subprocess.Popen([sys.executable, "-c", program])
{IDLE}
"""


def test_each_process_gets_a_line_the_busiest_first(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        server = psutil.Process(parent.pid)
        try:
            assert parent.stdout is not None
            for _ in range(3):
                parent.stdout.readline()
            lines = profile(server, 1, tmp_path / "graphs", native=False)
        finally:
            for process in (*server.children(), server):
                process.kill()
    assert len(lines) == 3
    seconds = [float(line.split()[0]) for line in lines]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > 0
    busiest = lines[0].split("  ")[-1].strip()
    may_not_trace = busiest.startswith("no graph: ") and "permi" in busiest.lower()
    assert may_not_trace or Path(busiest).read_text().startswith("<?xml")


def test_a_process_that_is_not_there_is_named() -> None:
    with pytest.raises(psutil.NoSuchProcess), subprocess.Popen(["true"]) as over:
        over.wait()
        found(over.pid)


def test_a_server_without_python_is_refused(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            with pytest.raises(ProfileError, match="runs no Python"):
                profile(psutil.Process(process.pid), 1, tmp_path, native=False)
        finally:
            process.kill()
