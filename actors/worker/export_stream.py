"""The messages of one worker to the manager: changes of the pool, and exported segments with their payloads."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raydix.actors.messages import ExportItem
from raydix.actors.tracing import Recorder
from raydix.actors.worker.step_spans import span_of_export
from raydix.engine.core.types import SegmentHeader

if TYPE_CHECKING:
    from raydix.engine.model.exchange import ExportedSegment

logger = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 512 << 20  # payloads that wait for a reader; the pool has the others


class ExportStream:
    """A queue with one reader: the manager that registered the worker last. Not thread-safe."""

    def __init__(self, on_sent: Callable[[int], None], recorder: Recorder) -> None:
        """`on_sent` is told the bytes of each payload that is sent."""
        self._on_sent = on_sent
        self._recorder = recorder
        self._queue: asyncio.Queue[ExportItem | ExportedSegment] = asyncio.Queue()
        self._queued_bytes = 0

    @property
    def is_empty(self) -> bool:
        return self._queue.empty() and not self._queued_bytes

    def put(self, item: "ExportItem | ExportedSegment") -> None:
        """Queue a message. Of a segment beyond `MAX_QUEUED_BYTES` the manager hears only that it was not sent."""
        if not isinstance(item, ExportItem):
            if self._recorder.is_on:
                self._recorder.add([span_of_export(item.header, time.monotonic())])
            if self._queued_bytes + item.header.num_bytes > MAX_QUEUED_BYTES:
                item = _without_blocks(item.header)
            else:
                self._queued_bytes += item.header.num_bytes
        self._queue.put_nowait(item)

    def restart(self) -> None:
        """Drop what is queued, and end the stream of the present reader."""
        old, self._queue = self._queue, asyncio.Queue()
        self._queued_bytes = 0
        old.put_nowait(ExportItem())  # wakes the reader, which then ends

    async def read(self) -> AsyncIterator[Any]:
        """Yield `ExportItem`s, each followed by its payload if there is one, until the next restart."""
        queue = self._queue
        while queue is self._queue:
            item = await queue.get()
            if queue is not self._queue:
                return
            if isinstance(item, ExportItem):
                yield item
                continue

            self._queued_bytes -= item.header.num_bytes
            try:
                segment = item if item.arriving is None else await asyncio.to_thread(item.arrived)
            except Exception:  # workers that wait for these blocks must hear that none will come
                logger.exception("%d blocks not exported", len(item.header.hashes))
                yield _without_blocks(item.header)
                continue

            yield ExportItem(header=segment.header_outside(time.time() - time.monotonic()))
            if segment.header.num_bytes:
                self._on_sent(segment.header.num_bytes)
                yield segment.payload


def _without_blocks(header: SegmentHeader) -> ExportItem:
    """Message about a segment without its blocks: the unsent blocks, and the handover if there is one."""
    bare = replace(header, hashes=(), num_bytes=0, states=()) if header.handover is not None else None
    return ExportItem(header=bare, unsent=header.names)
