"""Resets of the workers' pools. A reset ends when everything that the worker exported before it is indexed."""

import asyncio
import contextlib
from collections.abc import Mapping

from actors.calls import quietly
from actors.rpc import WorkerClient

UNDER_WAY_S = 5.0
"""Time that a reset waits for exports and deliveries which began before it."""


class PoolResets:
    """Resets under way, for each worker."""

    def __init__(self) -> None:
        self._awaited: dict[str, asyncio.Event] = {}

    async def reset(self, clients: Mapping[str, WorkerClient]) -> int:
        """Have workers forget their cached blocks; returns how many blocks."""
        return sum(await asyncio.gather(*[self._reset(*each) for each in clients.items()]))

    def exports_over(self, worker_id: str) -> None:
        """A worker's export stream has come to the reset of the pool, or to its end."""
        is_over = self._awaited.pop(worker_id, None)
        if is_over is not None:
            is_over.set()

    async def _reset(self, worker_id: str, client: WorkerClient) -> int:
        is_over = self._awaited.setdefault(worker_id, asyncio.Event())
        num_blocks = await quietly(client.reset_cache())
        if num_blocks is None:
            return 0
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(is_over.wait(), UNDER_WAY_S)
        return num_blocks
