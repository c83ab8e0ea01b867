"""Tasks of the event loop that outlive the request by which they were started.

When Ray cancels a task, Ray also cancels the calls made by the task, including clean-up calls and calls that other
requests rely on. So work that serves more than its own request is detached: begun in a context without the current
task's variables, by which Ray knows that task.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import ParamSpec, TypeVar

from raydix.engine.core.log_fields import about

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


def run_detached(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return `function(*args, **kwargs)`. Calls sent by the function are no part of the current task."""
    return Context().run(function, *args, **kwargs)


class Background:
    """Detached tasks: kept alive until their end, and no part of the task that starts them. Errors are logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()

    def start(self, work: Coroutine[object, object, object]) -> asyncio.Task[object]:
        """Run `work` beside the caller."""
        task = run_detached(asyncio.get_running_loop().create_task, work)
        self._tasks.add(task)  # the event loop itself keeps no task alive
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
