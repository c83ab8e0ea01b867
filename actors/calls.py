"""Waiting for the answer of a remote call."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from ray.exceptions import RayError

logger = logging.getLogger(__name__)


async def answer(ref: Any, timeout_s: float | None = None) -> Any:
    """What a call returned. Raises what it raised, and TimeoutError when that takes longer than `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        return await ref


async def quietly(ref: Any) -> Any:
    """Wait for a call whose failure is somebody else's to notice; what it returned, or None if it failed."""
    try:
        return await ref
    except RayError as error:
        logger.debug("call failed: %s", type(error).__name__)
        return None


class Background:
    """Tasks that nobody waits for: kept alive until they end, and an error that one of them raises is logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run `work` beside the caller."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a background task failed", exc_info=error)
