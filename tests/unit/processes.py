"""Real processes that answer nothing, for tests of whether they count as dead."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.core.types import ProcessName

HOLDS_LOCK = """
import re
print(flush=True)
re.match("(a+)+$", "a" * 60 + "b")  # C code that returns to no other thread for longer than any test takes
"""
WAITS = "print(flush=True); import time; time.sleep(3600)"


class Process:
    """A Python process that runs `code`."""

    def __init__(self, code: str) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert self._process.stdout is not None and self._process.stdout.readline() == b"\n"

    def name(self, node: str) -> ProcessName:
        stat = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return ProcessName(node, self._process.pid, int(stat[19]))

    def stop(self) -> None:
        """SIGSTOP; returns when the process is stopped."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def kill(self, *, is_reaped: bool = True) -> None:
        self._process.kill()
        if is_reaped:
            self._process.wait()
        else:  # it stays a zombie
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)

    def close(self) -> None:
        self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextmanager
def running(code: str = HOLDS_LOCK) -> Iterator[Process]:
    process = Process(code)
    try:
        yield process
    finally:
        process.close()
