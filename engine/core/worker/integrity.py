"""Consistency of a scheduler's requests, for tests and the idle worker."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from raydix.engine.core.types import BlockHash
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.core.worker.idle import IdleWork
from raydix.engine.core.worker.request import Request


def check_places(
    places: Sequence[Request], running: Collection[str], idle: IdleWork, registry: Mapping[str, Request]
) -> None:
    """Assert that each request of `registry` is in one of `places` or idle, and right for its place."""
    ids = {request.request_id for request in (*places, *idle)}
    assert len(places) + len(idle) == len(registry) == len(ids)
    idle.check_integrity()
    for request in places:
        request.check_integrity(is_running=request.request_id in running)


def check_references(pool: BlockPool, places: Iterable[Request], idle: IdleWork, extra_held: Iterable[int]) -> None:
    """Assert that all references are the requests' or in `extra_held`, and that waiting requests protect blocks."""
    held = [*extra_held, *(block for request in idle for block in request.blocks)]
    protected: list[BlockHash] = []
    for request in places:
        held += request.blocks + request.held
        protected += request.protected
    pool.check_integrity(held, protected)
