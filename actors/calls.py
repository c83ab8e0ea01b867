"""Making remote calls, and waiting for their answers.

When Ray cancels a task, Ray also cancels the calls made by the task, including clean-up calls and calls that other
requests rely on. So a call that serves more than its own request is detached: made in a context without a task of Ray.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context
from typing import ParamSpec, TypeVar

from ray.exceptions import RayError

from raydix.engine.core.log_fields import about

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


async def answer(call: Awaitable[T], timeout_s: float | None = None) -> T:
    """Return the result of a call. Raises the call's error, and TimeoutError after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        return await call


async def quietly(call: Awaitable[T]) -> T | None:
    """Return the result of a call, or None after a failure: for calls whose failure is noticed elsewhere."""
    try:
        return await call
    except RayError as error:
        logger.debug("call failed: %s", type(error).__name__)
        return None


def run_detached(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return `function(*args, **kwargs)`. Calls sent by the function are no part of the current task."""
    return Context().run(function, *args, **kwargs)


async def sleep(seconds: float) -> float:
    """Sleep, and return how much longer that took, in seconds: much longer when the process was stopped meanwhile."""
    started = time.monotonic()
    await asyncio.sleep(seconds)
    return max(0.0, time.monotonic() - started - seconds)


class Background:
    """Detached tasks: kept alive until their end, and no part of the task that starts them. Errors are logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()

    def start(self, work: Coroutine[object, object, object]) -> asyncio.Task[object]:
        """Run `work` beside the caller."""
        task = run_detached(asyncio.get_running_loop().create_task, work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def ended(self, timeout_s: float) -> None:
        """Wait for the end of the tasks that run now, for at most `timeout_s`."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            name = task.get_coro().__qualname__  # type: ignore[union-attr]
            logger.error("background task %s failed", name, exc_info=error, extra=about("task_failed", task=name))
