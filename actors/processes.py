"""Processes of this node as the kernel sees them: alive and computing, although nothing answers, or not.

A process whose interpreter lock is held, or whose event loop is busy, answers no call and sends no heartbeat, and looks
dead. But the kernel counts its processor time, whatever its Python does. A process that is stopped (SIGSTOP), that has
ended, or that waits for something that does not come uses none.

Only processes of the same node can be looked at: of a silent process elsewhere nobody can say that it computes.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from raydix.engine.core.signs_of_life import SignsOfLife
from raydix.engine.core.types import ProcessName

# Share of a processor that a process has at least while it computes; idle threads of Ray use about a hundredth.
MIN_SHARE = 0.05
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STOPPED = "TtZXx"  # states of a process that does not run: stopped, traced, dead


def own_process(node: str) -> ProcessName:
    """The name of this process, which runs on this node."""
    stat = stat_of(Path("/proc/self"))
    return ProcessName(node, os.getpid(), 0 if stat is None else stat.started)


class ProcessWatch:
    """Looks at other processes of this node."""

    def __init__(self, node: str) -> None:
        self._node = node
        # Time of the last look at each process, in seconds, and the processor time until then, in ticks.
        self._used: dict[ProcessName, tuple[float, int]] = {}

    def computes(self, process: ProcessName | None, now: float) -> bool:
        """True if a process has computed since the last look at it, or is about to. False for one that does not exist
        any more or is stopped, for this one, and for those of other nodes, which cannot be seen."""
        if process is None or process.node != self._node or process.pid == os.getpid():
            return False
        folder = Path(f"/proc/{process.pid}")
        stat = stat_of(folder)
        if stat is None or stat.started != process.started or stat.state in _STOPPED:
            self._used.pop(process, None)
            return False

        num_ticks = stat.num_ticks
        looked_at, before = self._used.get(process, (now, num_ticks))
        self._used[process] = now, num_ticks
        has_computed = now > looked_at and num_ticks - before >= MIN_SHARE * (now - looked_at) * TICKS_PER_S
        return has_computed or _is_runnable(folder)

    def look_at_quiet(self, signs: SignsOfLife, processes: Mapping[str, ProcessName | None], silence_s: float) -> None:
        """Tell those that have sent nothing for `silence_s` and compute from those that may be dead. `processes`: by
        the names that `signs` has."""
        now = time.monotonic()
        for name in signs.quiet(now, silence_s):
            if self.computes(processes.get(name), now):
                signs.computes(name, now)

    def forget(self, process: ProcessName | None) -> None:
        """Look at a process no more, for now."""
        if process is not None:
            self._used.pop(process, None)


class Stat(NamedTuple):
    """A process or thread in /proc."""

    state: str
    num_ticks: int
    """Processor time, in the process and in the kernel."""
    started: int
    """Start, in ticks since the machine's."""


def stat_of(folder: Path) -> Stat | None:
    """The process or thread of a folder in /proc; None if there is none, or no such file system."""
    try:
        # Behind the name, which may have spaces and parentheses.
        fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return Stat(fields[0], int(fields[11]) + int(fields[12]), int(fields[19]))
    except (OSError, IndexError, ValueError):
        return None


def is_there(process: ProcessName) -> bool:
    """True if a process of this node lives and is not stopped."""
    stat = stat_of(Path(f"/proc/{process.pid}"))
    return stat is not None and stat.started == process.started and stat.state not in _STOPPED


def is_running(pid: int, native_id: int) -> bool:
    """True if a thread of a process of this node has a processor, or waits for one where others take all."""
    stat = stat_of(Path(f"/proc/{pid}/task/{native_id}"))
    return stat is not None and stat.state == "R"


def _is_runnable(folder: Path) -> bool:
    """True if some thread of a process runs."""
    try:
        threads = list((folder / "task").iterdir())
    except OSError:
        return False
    return any(stat is not None and stat.state == "R" for stat in map(stat_of, threads))
