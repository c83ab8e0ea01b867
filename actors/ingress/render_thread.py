"""A thread beside the event loop in which the answers are rendered whose size clients choose.

The thread's work comes in slices that hold the interpreter's lock for some milliseconds at most, and the slices of all
large answers take turns in the order in which they were asked for. So the event loop, which needs the lock for every
token of every stream, waits for less than one slice, and a large answer waits for a slice of each other one. Small
answers stay on the loop: a turn of the thread would take longer than rendering them.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

SLICE_BYTES = 1 << 18
"""Bytes that a turn of an answer ends with."""
SLICE_PARTS = 512
"""Parts of the text after which a turn of an answer ends."""


class RenderThread:
    """The thread of one replica; begun with its first work."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "render")

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, done in the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def slices(self, parts: Iterator[bytes]) -> AsyncGenerator[bytes]:
        """The same text in slices, each made when the one before has been taken."""
        while data := await self.run(lambda: _next(parts)):
            yield data


def _next(parts: Iterator[bytes]) -> bytes:
    """The next slice; nothing at the end."""
    taken: list[bytes] = []
    num_bytes = 0
    for part in parts:
        taken.append(part)
        num_bytes += len(part)
        if num_bytes >= SLICE_BYTES or (len(taken) == SLICE_PARTS and num_bytes):
            break
    return b"".join(taken)
