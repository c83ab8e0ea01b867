"""Processes of this node as the kernel sees them: alive and computing, although nothing answers, or not.

A process whose interpreter lock is held, or whose event loop is busy, answers no call and sends no heartbeat, and looks
dead. But the kernel counts its processor time, whatever its Python does. A process that is stopped (SIGSTOP), that has
ended, or that waits for something that does not come uses none.

Only processes of the same node can be looked at: of a silent process elsewhere nobody can say that it computes.
"""

import os
from pathlib import Path

from engine.core.types import ProcessName

MIN_SHARE = 0.05
"""Share of a processor that a process has at least while it computes; idle threads of Ray use about a hundredth."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STOPPED = "TtZXx"
"""States of a process that does not run: stopped, traced, dead."""


def own_process(node: str) -> ProcessName:
    """The name of this process, which runs on this node."""
    stat = _stat(Path("/proc/self"))
    return ProcessName(node, os.getpid(), 0 if stat is None else int(stat[_STARTED]))


class ProcessWatch:
    """Looks at other processes of this node."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._used: dict[ProcessName, tuple[float, int]] = {}
        """Time of the last look at each process, in seconds, and the processor time until then, in ticks."""

    def computes(self, process: ProcessName | None, now: float) -> bool:
        """True if a process has computed since the last look at it, or is about to. False for one that does not exist
        any more or is stopped, for this one, and for those of other nodes, which cannot be seen."""
        if process is None or process.node != self._node or process.pid == os.getpid():
            return False
        folder = Path(f"/proc/{process.pid}")
        stat = _stat(folder)
        if stat is None or int(stat[_STARTED]) != process.started or stat[_STATE] in _STOPPED:
            self._used.pop(process, None)
            return False

        num_ticks = int(stat[_USER]) + int(stat[_SYSTEM])
        looked_at, before = self._used.get(process, (now, num_ticks))
        self._used[process] = now, num_ticks
        has_computed = now > looked_at and num_ticks - before >= MIN_SHARE * (now - looked_at) * _TICKS_PER_S
        return has_computed or _is_runnable(folder)

    def forget(self, process: ProcessName | None) -> None:
        """Look at a process no more, for now."""
        if process is not None:
            self._used.pop(process, None)


_STATE, _USER, _SYSTEM, _STARTED = 0, 11, 12, 19
"""Fields behind the name in /proc/*/stat: state, processor time in the process and in the kernel, start."""


def _stat(folder: Path) -> list[str] | None:
    """The fields of a process or thread behind its name; None if there is none, or no such file system."""
    try:
        return (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _is_runnable(folder: Path) -> bool:
    """True if a thread of a process has a processor, or waits for one where others take all."""
    try:
        threads = list((folder / "task").iterdir())
    except OSError:
        return False
    stats = map(_stat, threads)
    return any(stat is not None and stat[_STATE] == "R" for stat in stats)
