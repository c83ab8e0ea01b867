"""Waits of the tests: for an event, never for seconds."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

WAIT_S = 120.0
"""After which a wait is hopeless, on a slow and busy machine, too. No test is about these seconds."""
PAUSE_S = 0.002


async def until(condition: Callable[[], bool | Any | Awaitable[Any]]) -> None:
    """Return once `condition` holds; `TimeoutError` where that is hopeless. It may be a coroutine function."""
    async with asyncio.timeout(WAIT_S):
        while not (await held if inspect.isawaitable(held := condition()) else held):
            await asyncio.sleep(PAUSE_S)


def until_outside(condition: Callable[[], Any], what: str = "") -> None:
    """The same for what goes on in other threads and processes; fails with `what`."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what or "hopeless"
        time.sleep(PAUSE_S)
