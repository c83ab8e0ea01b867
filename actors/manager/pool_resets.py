"""Resets of the workers' pools. A reset ends when everything that the worker exported before it is indexed.

Resets may overlap, and one that was given up may be answered later. So each has a number, with which the worker's
export stream names it.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Mapping

from raydix.actors.calls import quietly
from raydix.actors.rpc import WorkerClient

UNDER_WAY_S = 5.0  # time that a reset waits for exports and deliveries which began before it


class PoolResets:
    """Resets under way, for each worker."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._awaited: dict[tuple[str, int], asyncio.Event] = {}

    async def reset(self, clients: Mapping[str, WorkerClient]) -> int:
        """Have workers forget their cached blocks; returns how many blocks."""
        return sum(await asyncio.gather(*[self._reset(*each) for each in clients.items()]))

    def exports_over(self, worker_id: str, number: int) -> None:
        """A worker's export stream has come to the reset of this number."""
        if is_over := self._awaited.get((worker_id, number)):
            is_over.set()

    def stream_over(self, worker_id: str) -> None:
        """A worker's export stream has come to its end: no reset of this worker is waited for."""
        for (awaited_id, _), is_over in self._awaited.items():
            if awaited_id == worker_id:
                is_over.set()

    async def _reset(self, worker_id: str, client: WorkerClient) -> int:
        key = (worker_id, next(self._numbers))
        is_over = self._awaited[key] = asyncio.Event()
        try:
            num_blocks = await quietly(client.reset_cache(key[1]))
            if num_blocks is None:
                return 0
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(is_over.wait(), UNDER_WAY_S)
            return num_blocks
        finally:
            del self._awaited[key]
