"""Eviction policies by their names in the configuration."""

from collections.abc import Mapping
from enum import StrEnum

from raydix.engine.core.eviction.duel import Duel
from raydix.engine.core.eviction.queue import EvictionQueue, Quota
from raydix.engine.core.eviction.ranking import Key, LeastRecent, Ranking

GHOST_BLOCKS = 512  # minimum of blocks in a ghost of a large pool
# Maximum of blocks for each block in the ghosts' sample: the real queue then has most of the cost of a block.
MOST_SAMPLED = 16


class EvictionPolicy(StrEnum):
    """Rankings of cached blocks."""

    ADAPTIVE = "adaptive"
    """The best of three orders by recent hits (`duel`): expected hits per second, recency, or used once first."""
    LRU = "lru"


def make_queue(
    policy: EvictionPolicy, quotas: Mapping[str, Quota] | None = None, num_blocks: int | None = None
) -> EvictionQueue[Key]:
    """An empty queue of `policy` for a pool of `num_blocks` (None: unknown), with the quotas of tenants."""
    ranking: Ranking[Key] = Duel(one_in=sampling(num_blocks)) if policy is EvictionPolicy.ADAPTIVE else LeastRecent()
    return EvictionQueue(ranking, quotas)


def sampling(num_blocks: int | None) -> int:
    """Number of blocks for each block in the ghosts' sample."""
    return 1 if num_blocks is None else max(1, min(MOST_SAMPLED, num_blocks // GHOST_BLOCKS))
