"""Hits of one cache for all requests: without end, in an order of eviction, and with Belady's foresight.

Hits are the leading blocks of a prompt that are in the cache; requests take no time.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from benchmarks.replaying.traces import TraceRequest
from raydix.engine.core.eviction.policies import EvictionPolicy, make_queue
from raydix.engine.core.eviction.queue import EvictionQueue
from raydix.engine.core.eviction.ranking import LeastRecent, Visit
from raydix.engine.core.types import BlockHash, FinishReason

NEVER = 1 << 50


def hit_rates(trace: Sequence[TraceRequest], capacity: int) -> dict[str, float]:
    """Hits per block of the prompts of an infinite cache, and with `capacity` blocks of each order and Belady's."""
    return {
        "infinite": with_queue(trace, NEVER, make_queue(EvictionPolicy.LRU)),
        **{
            policy.value: with_queue(trace, capacity, make_queue(policy, num_blocks=capacity))
            for policy in EvictionPolicy
        },
        "once_first": with_queue(trace, capacity, EvictionQueue(OnceFirst())),
        "belady": belady(trace, capacity),
    }


class OnceFirst(LeastRecent[BlockHash]):
    """The other simple order: blocks that one request ever used go first, then the least recently used."""

    is_renewed_by_release = False

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[BlockHash] = set()
        self._seen_again: set[BlockHash] = set()

    def visit(
        self,
        path: Sequence[BlockHash],
        num_known: int,
        num_blocks: int,
        now: float,
        stop: FinishReason | None = None,
    ) -> Visit[BlockHash]:
        self._seen_again.update(self._seen.intersection(path))
        self._seen.update(path)
        return super().visit(path, num_known, num_blocks, now)

    def rank(self, key: BlockHash, depth: int, visit: Visit[BlockHash]) -> float:
        return visit.number + (NEVER if key in self._seen_again else 0)


def with_queue(trace: Sequence[TraceRequest], capacity: int, queue: EvictionQueue[BlockHash]) -> float:
    """Hit rate of one cache that evicts from `queue`, which is empty."""
    num_hits = 0
    for request in trace:
        num_hits += _num_leading(queue, request.hashes)
        for key in request.hashes:
            if key in queue:
                queue.acquire(key)
        num_more = len(queue) + len(request.hashes) - capacity
        if num_more > 0:
            queue.evict_many(min(num_more, len(queue)), request.arrival_s)
        queue.visit(request.hashes, request.arrival_s, stop=request.stop)
        queue.release(request.hashes, request.arrival_s)
        while len(queue) > capacity:
            queue.evict(request.arrival_s)
    return num_hits / sum(len(request.hashes) for request in trace)


def belady(trace: Sequence[TraceRequest], capacity: int) -> float:
    """Hit rate of evicting the block needed last (Belady, IBM Systems Journal 1966), children before parents."""
    next_use = _next_uses(trace)
    due: dict[BlockHash, int] = {}
    queue: list[tuple[int, int, BlockHash]] = []
    num_hits = 0
    for request, uses in zip(trace, next_use, strict=True):
        num_hits += _num_leading(due, request.hashes)
        for depth, (key, use) in enumerate(zip(request.hashes, uses, strict=True)):
            due[key] = use
            heapq.heappush(queue, (-use, -depth, key))
        while len(due) > capacity:
            use, _, key = heapq.heappop(queue)
            if due.get(key) == -use:
                del due[key]
    return num_hits / sum(len(request.hashes) for request in trace)


def _next_uses(trace: Sequence[TraceRequest]) -> list[list[int]]:
    """The number of the next request that has the block, for each request and block."""
    seen: dict[BlockHash, int] = {}
    uses = []
    for number in range(len(trace) - 1, -1, -1):
        uses.append([seen.get(key, NEVER) for key in trace[number].hashes])
        seen.update(dict.fromkeys(trace[number].hashes, number))
    return uses[::-1]


def _num_leading(cache: EvictionQueue[BlockHash] | dict[BlockHash, int], hashes: Sequence[BlockHash]) -> int:
    return next((count for count, key in enumerate(hashes) if key not in cache), len(hashes))
