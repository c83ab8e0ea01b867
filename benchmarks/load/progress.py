"""A progress bar that costs microseconds: drawing with a library takes milliseconds, which would show in the gaps."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Sequence

from benchmarks.load.arrivals import Limits

EVERY_S = 0.5
WIDTH = 30


def bar(fraction: float, ended: int, failed: int, running: int, elapsed_s: float) -> str:
    """One line for `ended` requests of which `failed` did."""
    filled = round(WIDTH * min(1.0, fraction))
    failures = f", {failed} failed" if failed else ""
    return f"[{'█' * filled}{'·' * (WIDTH - filled)}] {ended} done{failures}, {running} running, {elapsed_s:.0f} s"


class Progress:
    """Draws on a terminal twice a second while its block runs, and wipes its line at the end."""

    def __init__(self, limits: Limits, now: Callable[[], float], records: Sequence[object], wanted: bool) -> None:
        self._limits = limits
        self._now = now
        self._records = records
        self._wanted = wanted and sys.stderr.isatty()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Progress:
        if self._wanted:
            self._task = asyncio.create_task(self._draw())
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    async def _draw(self) -> None:
        failed = seen = 0
        while True:
            failed += sum(getattr(record, "error", None) is not None for record in self._records[seen:])
            seen, elapsed_s = len(self._records), self._now()
            by_number = seen / self._limits.requests if self._limits.requests else 0.0
            by_time = elapsed_s / self._limits.duration_s if self._limits.duration_s else 0.0
            line = bar(max(by_number, by_time), seen, failed, self._limits.sent - seen, elapsed_s)
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
            await asyncio.sleep(EVERY_S)
