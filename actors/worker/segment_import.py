"""Segments that the manager delivers: fetched from the object store, and their blocks taken into the pool.

A segment of another node may be slow to come, or may never come: the node is cut off or gone, and Ray finds that out
late. So the requests that wait for the segment compute its blocks after a patience that the manager derives from what
the link has taken so far. The fetch goes on meanwhile: what comes late is taken into the pool for later requests.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ray.exceptions import RayError

from raydix.actors.calls import answer
from raydix.actors.messages import Imported, ImportReport
from raydix.engine.core.types import SegmentHeader

if TYPE_CHECKING:
    import ray

    from raydix.engine.model.engine import Engine

logger = logging.getLogger(__name__)

T = TypeVar("T")

FETCH_TIMEOUT_S = 20.0  # time after which a fetch is given up


class AskEngine(Protocol):
    """Runs a question in the engine's thread and returns its answer."""

    def __call__(self, question: "Callable[[Engine], T]") -> Awaitable[T]: ...


async def import_segment(
    ask: AskEngine, header: SegmentHeader, payload: "Sequence[ray.ObjectRef[Any]]", patience_s: float | None
) -> ImportReport:
    """Fetch a segment and have the engine take its blocks into the pool.

    `payload` holds one reference, or none for no bytes. `patience_s`: time after which the requests that wait for the
    segment compute its blocks; None: when the fetch has failed.
    """
    content, is_late = None, False
    started = time.monotonic()
    if payload:
        fetch = asyncio.ensure_future(answer(payload[0], FETCH_TIMEOUT_S))
        await asyncio.wait([fetch], timeout=patience_s)
        if not fetch.done():
            logger.warning("segment of %d blocks is late: requests compute them", len(header.hashes))
            await ask(lambda engine: engine.exchange.import_segment(header, None, time.monotonic()))
        try:
            content = await fetch
        except (RayError, TimeoutError) as error:
            logger.warning("segment of %d blocks not fetched: %s", len(header.hashes), type(error).__name__)
            is_late = isinstance(error, TimeoutError)
    fetched = time.monotonic()

    def take(engine: "Engine") -> tuple[bool, float]:
        began = time.monotonic()
        return engine.exchange.import_segment(header, content, fetched), time.monotonic() - began

    intact, take_s = await ask(take)
    if payload and content is None:
        return ImportReport(Imported.NOT_FETCHED, fetched - started if is_late else None)
    if not intact:
        return ImportReport(Imported.DAMAGED)
    return ImportReport(Imported.TAKEN, None if content is None else fetched - started + take_s)
