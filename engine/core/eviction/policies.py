"""Eviction policies by the names that the configuration has for them."""

from collections.abc import Mapping
from enum import StrEnum

from engine.core.eviction.duel import Duel
from engine.core.eviction.queue import EvictionQueue, Quota
from engine.core.eviction.ranking import Key, LeastRecent, Ranking


class EvictionPolicy(StrEnum):
    """How cached blocks are ranked."""

    ADAPTIVE = "adaptive"
    """By whichever of three orders hits most: expected hits per second, recency, or used once first (`duel`)."""
    LRU = "lru"


def make_queue(policy: EvictionPolicy, quotas: Mapping[str, Quota] | None = None) -> EvictionQueue[Key]:
    """An empty queue of that policy, with the quotas of the tenants that have any."""
    ranking: Ranking[Key] = Duel() if policy is EvictionPolicy.ADAPTIVE else LeastRecent()
    return EvictionQueue(ranking, quotas)
