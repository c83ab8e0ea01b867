"""Real processes that answer nothing, for tests of whether they count as dead."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from raydix.engine.core.types import ProcessName

HOLDS_LOCK = """
import re
print(flush=True)
re.match("(a+)+$", "a" * 60 + "b")  # C code that returns to no other thread for longer than any test takes
"""
WAITS = "print(flush=True); import time; time.sleep(3600)"


class Process:
    """A Python process that runs `code`, and has printed an empty line."""

    def __init__(self, code: str, *args: str) -> None:
        command = [sys.executable, "-c", code, *args]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None and self._process.stdout.readline() == b"\n"

    def name(self, node: str) -> ProcessName:
        return ProcessName(node, self._process.pid, int(self._stat()[19]))

    def state(self) -> str:
        """The kernel's letter for what the process does."""
        return self._stat()[0]

    def _stat(self) -> list[str]:
        return Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()

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

    def let_go(self) -> None:
        """Give the process a line that it waits for."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def wait(self) -> None:
        """Return when the process has ended."""
        self._process.wait(60)

    def close(self) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def running(code: str = HOLDS_LOCK, *args: str) -> Iterator[Process]:
    process = Process(code, *args)
    try:
        yield process
    finally:
        process.close()
