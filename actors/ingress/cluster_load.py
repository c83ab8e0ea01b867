"""The load of a replica's workers together, for clients that ask for it with their answers."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from raydix.actors.metric_values import MetricFamily
from raydix.engine.api.load_report import WorkersLoad
from raydix.engine.background import run_detached
from raydix.engine.core.types import WorkerInfo

FRESH_S = 0.5  # age up to which figures are given again; workers look at their own pools no more often
TIMEOUT_S = 0.25  # limit of a worker's answer: the head of a response waits for it
BLOCKS, AVAILABLE, WAITING = "raydix_blocks", "raydix_available_blocks", "raydix_waiting_requests"

OfWorkers: TypeAlias = Callable[[float], Awaitable[Sequence[tuple[WorkerInfo, Sequence[MetricFamily] | None]]]]
"""Asks the workers for their metrics, within seconds; None for a worker that does not answer."""


@dataclass(frozen=True, slots=True)
class _Asked:
    at: float
    load: "asyncio.Task[WorkersLoad | None]"


class ClusterLoad:
    """Asks the workers at most once in `FRESH_S`, however many requests ask."""

    def __init__(self, of_workers: OfWorkers, clock: Callable[[], float] = time.monotonic) -> None:
        self._of_workers = of_workers
        self._clock = clock
        self._asked: _Asked | None = None

    async def now(self) -> WorkersLoad | None:
        """The load of the workers that answer; None if no worker does."""
        now, asked = self._clock(), self._asked
        if asked is None or now >= asked.at + FRESH_S:
            load = run_detached(asyncio.get_running_loop().create_task, self._ask())
            asked = self._asked = _Asked(now, load)
        # A client that leaves takes no other's figures along.
        return await asyncio.shield(asked.load)

    async def _ask(self) -> WorkersLoad | None:
        answers = [families for _, families in await self._of_workers(TIMEOUT_S) if families is not None]
        num_blocks, num_available, num_waiting = (_total(answers, name) for name in (BLOCKS, AVAILABLE, WAITING))
        # A worker that has just begun has no pool to tell of.
        return None if num_blocks == 0 else WorkersLoad(1 - num_available / num_blocks, num_waiting)


def _total(answers: Sequence[Sequence[MetricFamily]], name: str) -> float:
    """Sum of a gauge over the workers."""
    found = (family.values.values() for families in answers for family in families if family.name == name)
    return sum(value for values in found for value in values if isinstance(value, float | int))
