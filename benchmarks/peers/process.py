"""Processes of engines: started, asked in JSON lines, and ended."""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.roster import Peer, Site, process_environment

FOLDER = Path(__file__).parent
LOAD_TIMEOUT_S = 600.0
RUN_TIMEOUT_S = 300.0


def serving(python: Path, file: str) -> list[str]:
    """The command that puts a file of this folder behind JSON lines."""
    return [str(python), "-P", str(FOLDER / "serve.py"), str(FOLDER / file)]


class WorkerError(Exception):
    """A program cannot go on; the message is one line."""


class PeerProcess:
    """A running program, in a session of its own. What the program prints goes to `log`."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.log = log
        self._closed = False
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                bufsize=0,
                cwd=log.parent,
                env=environment,
                start_new_session=True,
            )

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return the program's reply. Raises WorkerError if the reply is an error, or if there is none in time."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise WorkerError(f"its process has ended, see {self.log.name}") from error
        reply: dict[str, Any] = json.loads(self._line(timeout_s))
        if "error" in reply:
            raise WorkerError(str(reply["error"]).partition("\n")[0])
        return reply

    @property
    def is_open(self) -> bool:
        return not self._closed

    def close(self) -> None:
        """End the process and its children."""
        if self._closed:
            return
        self._closed = True
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()

    def _line(self, timeout_s: float) -> bytes:
        """The next line of the process's replies."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        received = b""
        while not received.endswith(b"\n"):
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise WorkerError(f"no answer within {timeout_s:.0f} s")
            data = self.process.stdout.read(1 << 20)
            if not data:
                raise WorkerError(f"its process ended, see {self.log.name}")
            received += data
        return received


@dataclass(frozen=True, slots=True)
class Introduction:
    """An engine's description of itself after loading."""

    version: str
    settings: dict[str, Any]
    caches_prefixes: bool


class EngineProcess(PeerProcess):
    """One engine's process. The engine's output goes to `log`."""

    def __init__(self, peer: Peer, site: Site, log: Path) -> None:
        self.peer = peer
        command = serving(peer.python(site), f"engines/{peer.engine or peer.name}.py")
        super().__init__(command, log, process_environment(peer, site))
        try:
            self.introduction = Introduction(**self.ask({"load": peer.options(site)}, LOAD_TIMEOUT_S))
        except BaseException:
            self.close()
            raise

    def generate(self, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds from submission to the last token, and the tokens of each prompt."""
        reply = self.ask({"prompts": prompts, "max_tokens": max_tokens}, RUN_TIMEOUT_S)
        return float(reply["seconds"]), reply["tokens"]
