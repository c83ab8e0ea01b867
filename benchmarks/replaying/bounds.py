"""What one cache for all requests would hit: without end, with a policy, and with Belady's foresight.

Hits are the leading blocks of a prompt that are in the cache; requests take no time.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from benchmarks.replaying.traces import TraceRequest
from engine.core.eviction.policies import EvictionPolicy, make_queue
from engine.core.eviction.queue import EvictionQueue
from engine.core.types import BlockHash

NEVER = 1 << 60


def hit_rates(trace: Sequence[TraceRequest], capacity: int) -> dict[str, float]:
    """Hits per block of the prompts, for an infinite cache, each policy and Belady's, at `capacity` blocks."""
    policies = {policy.value: with_policy(trace, capacity, policy) for policy in EvictionPolicy}
    return {"infinite": with_policy(trace, NEVER, EvictionPolicy.LRU), **policies, "belady": belady(trace, capacity)}


def with_policy(trace: Sequence[TraceRequest], capacity: int, policy: EvictionPolicy) -> float:
    """The hit rate of a policy in one cache."""
    queue: EvictionQueue[BlockHash] = make_queue(policy)
    num_hits = 0
    for request in trace:
        num_hits += _num_leading(queue, request.hashes)
        for key in request.hashes:
            if key in queue:
                queue.acquire(key)
        while len(queue) + len(request.hashes) > capacity and len(queue):
            queue.evict(request.arrival_s)
        queue.visit(request.hashes, request.arrival_s)
        queue.release(request.hashes, request.arrival_s)
        while len(queue) > capacity:
            queue.evict(request.arrival_s)
    return num_hits / sum(len(request.hashes) for request in trace)


def belady(trace: Sequence[TraceRequest], capacity: int) -> float:
    """The hit rate of evicting what is needed last (Belady, IBM Systems Journal 1966), children before parents."""
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
    """For each request and block the number of the next request that has it."""
    seen: dict[BlockHash, int] = {}
    uses = []
    for number in range(len(trace) - 1, -1, -1):
        uses.append([seen.get(key, NEVER) for key in trace[number].hashes])
        seen.update(dict.fromkeys(trace[number].hashes, number))
    return uses[::-1]


def _num_leading(cache: EvictionQueue[BlockHash] | dict[BlockHash, int], hashes: Sequence[BlockHash]) -> int:
    return next((count for count, key in enumerate(hashes) if key not in cache), len(hashes))
