"""Waiting for the answers of remote calls."""

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import TypeVar

from ray.exceptions import RayError

logger = logging.getLogger(__name__)

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


async def sleep(seconds: float) -> float:
    """Sleep, and return how much longer that took, in seconds: much longer when the process was stopped meanwhile."""
    started = time.monotonic()
    await asyncio.sleep(seconds)
    return max(0.0, time.monotonic() - started - seconds)
