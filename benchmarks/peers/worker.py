"""Talks to one engine's process: starts it, asks, ends it, and counts its CPU time."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.peers.process import Process, WorkerError
from benchmarks.peers.roster import Peer, Site, process_environment

__all__ = ["Introduction", "Worker", "WorkerError"]

SERVE = Path(__file__).parent / "engines" / "serve.py"

LOAD_TIMEOUT_S = 600.0
RUN_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Introduction:
    """An engine's description of itself after loading."""

    version: str
    settings: dict[str, Any]
    caches_prefixes: bool


class Worker(Process):
    """One engine's process. The engine's output goes to `log`."""

    def __init__(self, peer: Peer, site: Site, log: Path) -> None:
        self.peer = peer
        command = [str(peer.python(site)), "-P", str(SERVE), peer.engine or peer.name]
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

    def cpu_seconds(self) -> float:
        """CPU time used so far by the process and its children."""
        total = 0.0
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.process.pid)
            for member in (process, *process.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    times = member.cpu_times()
                    total += times.user + times.system
        return total
