"""Eviction policies by the names that the configuration has for them."""

from collections.abc import Mapping
from enum import StrEnum

from engine.core.eviction.queue import EvictionQueue, Quota
from engine.core.eviction.ranking import Key, LeastRecent, Ranking
from engine.core.eviction.survival import Survival


class EvictionPolicy(StrEnum):
    """How cached blocks are ranked."""

    ADAPTIVE = "adaptive"
    """By expected hits per second of keeping them, learnt from the requests (`survival`)."""
    LRU = "lru"


def make_queue(policy: EvictionPolicy, quotas: Mapping[str, Quota] | None = None) -> EvictionQueue[Key]:
    """An empty queue of that policy, with the quotas of the tenants that have any."""
    ranking: Ranking[Key] = Survival() if policy is EvictionPolicy.ADAPTIVE else LeastRecent()
    return EvictionQueue(ranking, quotas)
