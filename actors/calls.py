"""Making remote calls, and waiting for their answers.

When Ray cancels a task it cancels the calls made by that task as well, even those that clean up after it and those that
others rely on by then. So calls for more than one request's own sake are made in a context of their own, in which Ray
knows of no task.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextvars import Context
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


def apart(call: Callable[..., Any], *args: Any) -> Any:
    """What `call(*args)` returns, made as no part of the current task."""
    return Context().run(call, *args)


class Background:
    """Tasks that nobody waits for: kept alive until they end, and an error that one of them raises is logged. They are
    no part of the task that starts them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run `work` beside the caller."""
        task: asyncio.Task[Any] = apart(asyncio.get_running_loop().create_task, work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a background task failed", exc_info=error)
