"""Limit of the processor time of work that nobody waits for."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

MOST_S = 1e-3
"""Processor time that may be saved up."""


class TimeShare:
    """Processor time of a thread: a share of the time that passes. Work that takes more than is left is paid back by
    waiting."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._left_s = MOST_S
        self._since_s = time.monotonic()

    def has_time(self) -> bool:
        """True if the work may be done now."""
        now = time.monotonic()
        self._left_s = min(MOST_S, self._left_s + self._share * (now - self._since_s))
        self._since_s = now
        return self._left_s > 0

    @contextmanager
    def taken(self) -> Iterator["Stopwatch"]:
        """Take the processor time of the block, and tell it in the block."""
        stopwatch = Stopwatch()
        try:
            yield stopwatch
        finally:
            self._left_s -= stopwatch.so_far_s()


class Stopwatch:
    """Processor time of this thread since the beginning."""

    def __init__(self) -> None:
        self._begun_s = time.thread_time()

    def so_far_s(self) -> float:
        return time.thread_time() - self._begun_s
