"""`raydix serve --local` in a process of its own."""

import re
import subprocess
import sys
import threading
from pathlib import Path
from queue import Queue

import pytest

from raydix.cli.cluster import free_port
from raydix.engine.core.errors import StartupError
from raydix.engine.model.sources import DEFAULT_MODEL, resolve_model


def require_default_model() -> None:
    """Skip the test where the default model is not installed."""
    try:
        resolve_model(DEFAULT_MODEL)
    except StartupError as error:
        pytest.skip(str(error))


class Process:
    """A server that runs in a process of its own, and the lines that it has written."""

    def __init__(self, *options: str, folder: Path | None = None, env: dict[str, str] | None = None) -> None:
        self.port, self.options = free_port(), options
        command = [sys.executable, "-m", "raydix", "serve", "--local", "--port", str(self.port), *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=folder, env=env)
        self.lines: list[str] = []
        self._new: Queue[str | None] = Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._new.put(line.rstrip())
        self._new.put(None)

    def until(self, pattern: str) -> str:
        """The first line with this pattern; fails when the process ends without one."""
        while (line := self._new.get()) is not None:
            self.lines.append(line)
            if re.search(pattern, line):
                return line
        raise AssertionError(f"ended without {pattern!r}: {self.lines}")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
