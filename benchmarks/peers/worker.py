"""Talks to one engine's process: starts it, asks, ends it, and knows how much CPU time it has used."""

import json
import os
import select
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.peers.roster import Peer, Site, process_environment

SERVE = Path(__file__).parent / "engines" / "serve.py"

LOAD_TIMEOUT_S = 600.0
RUN_TIMEOUT_S = 300.0


class WorkerError(Exception):
    """An engine cannot go on; the message is one line."""


@dataclass(frozen=True, slots=True)
class Introduction:
    """What an engine says of itself once it is loaded."""

    version: str
    settings: dict[str, Any]
    caches_prefixes: bool


class Worker:
    """One engine's process. What the engine prints goes to `log`."""

    def __init__(self, peer: Peer, site: Site, log: Path) -> None:
        self.peer = peer
        self.log = log
        self._closed = False
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [str(peer.python(site)), "-P", str(SERVE), peer.engine or peer.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                bufsize=0,
                cwd=log.parent,
                env=process_environment(peer, site),
                start_new_session=True,
            )
        try:
            self.introduction = Introduction(**self._ask({"load": peer.options(site)}, LOAD_TIMEOUT_S))
        except BaseException:
            self.close()
            raise

    def generate(self, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds from submission to the last token, and the tokens of each prompt."""
        reply = self._ask({"prompts": prompts, "max_tokens": max_tokens}, RUN_TIMEOUT_S)
        return float(reply["seconds"]), reply["tokens"]

    def cpu_seconds(self) -> float:
        """CPU time used so far by the process and those it started."""
        total = 0.0
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.process.pid)
            for member in (process, *process.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    times = member.cpu_times()
                    total += times.user + times.system
        return total

    @property
    def is_open(self) -> bool:
        return not self._closed

    def close(self) -> None:
        """End the process and whatever it started: its session is its own."""
        if self._closed:
            return
        self._closed = True
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()

    def _ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise WorkerError(f"its process has ended, see {self.log.name}") from error
        reply: dict[str, Any] = json.loads(self._line(timeout_s))
        if "error" in reply:
            raise WorkerError(str(reply["error"]).partition("\n")[0])
        return reply

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
