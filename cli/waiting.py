"""What a command waits for: a spinner at a terminal; elsewhere, as in a container's log, a line every few seconds."""

import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
from rich.console import Console

from raydix.actors.processes import TICKS_PER_S, stat_of

INTERVAL_S = 5.0  # longest silence without a terminal while a command waits


def age_s() -> float:
    """Time since this process began: imports count, too."""
    stat = stat_of(Path("/proc/self"))
    if stat is None:  # no Linux; psutil knows the start to a second
        return time.time() - psutil.Process().create_time()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - stat.started / TICKS_PER_S


class Waiting:
    """Shows what is being waited for, until the block ends."""

    def __init__(self, console: Console, what: str, interval_s: float = INTERVAL_S) -> None:
        self._console = console
        self._what = what
        self._interval_s = interval_s
        self._spinner = console.status(what) if console.is_terminal else None
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="waiting", daemon=True)

    def update(self, what: str) -> None:
        """Wait for something else from now on."""
        self._what = what
        if self._spinner is not None:
            self._spinner.update(what)

    def __enter__(self) -> Self:
        if self._spinner is not None:
            self._spinner.start()
        else:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._has_ended.set()
        if self._spinner is not None:
            self._spinner.stop()
        else:
            self._thread.join()

    def _run(self) -> None:
        while not self._has_ended.wait(self._interval_s):
            self._console.print(f"{self._what}, {age_s():.0f} s so far", soft_wrap=True)
