"""Effectiveness of the cache: hits by source and tenant, in total and recent, and the prefixes with most hits."""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from raydix.engine.core.manager.explain import HITS, BlockSource
from raydix.engine.core.types import BlockHash, EvictionReason

WINDOW = 1000  # number of recent admissions that `hit_rate` and `return_rate` cover
MAX_PREFIXES = 1000  # remembered of each tenant
# Reasons of evictions that made room for other blocks.
ROOM_REASONS = frozenset(
    {
        EvictionReason.FULL,
        EvictionReason.EXPIRED,
        EvictionReason.QUOTA,
        EvictionReason.STORE_FULL,
        EvictionReason.DISK_FULL,
    }
)
NUM_PRIOR_BLOCKS = 64  # weight, in blocks, of the prior that half of the evicted blocks are requested again


@dataclass(slots=True)
class HotPrefix:
    """Prompts with the same first block."""

    preview: tuple[int, ...]
    """The first tokens."""
    num_requests: int = 0
    num_hit_tokens: int = 0


@dataclass(slots=True)
class TenantHits:
    """Requested and found tokens of one tenant."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0
    saved_s: float = 0.0
    """Predicted time that computing the found tokens would have taken."""


@dataclass(slots=True)
class CacheStatistics:
    """Counters that `Directory` keeps; all in tokens unless stated otherwise."""

    block_size: int
    sources: Counter[BlockSource] = field(default_factory=Counter)
    """Blocks of admitted prompts by source."""
    evicted_blocks: Counter[EvictionReason] = field(default_factory=Counter)
    """Blocks that left a place, by reason."""
    num_displaced_blocks: float = 0.0
    """Blocks that left their last place to make room, weighted less with every later admission."""
    num_returned_blocks: float = 0.0
    """Displaced blocks that a prompt requested again and had to compute, weighted likewise."""
    tenants: dict[str, TenantHits] = field(default_factory=dict)
    _lately: deque[tuple[str, int, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _prefixes: defaultdict[str, OrderedDict[BlockHash, HotPrefix]] = field(
        default_factory=lambda: defaultdict(OrderedDict)
    )

    def admitted(
        self,
        tenant: str,
        num_tokens: int,
        hashes: Sequence[BlockHash],
        runs: Iterable[tuple[BlockSource, int]],
        preview: tuple[int, ...],
        saved_s: float = 0.0,
    ) -> None:
        """Count an admission; `runs`: sources of its blocks in order, each with a number of blocks; `saved_s`:
        predicted time that the hits save."""
        # Both fade alike, so their ratio is that of about the last `WINDOW` admissions.
        self.num_displaced_blocks *= 1 - 1 / WINDOW
        self.num_returned_blocks *= 1 - 1 / WINDOW
        num_hits = 0
        for source, count in runs:
            self.sources[source] += count
            num_hits += count * self.block_size if source in HITS else 0

        use = self.tenants.setdefault(tenant, TenantHits())
        use.num_requests += 1
        use.num_prompt_tokens += num_tokens
        use.num_hit_tokens += num_hits
        use.saved_s += saved_s
        self._lately.append((tenant, num_tokens, num_hits))

        if hashes:
            own = self._prefixes[tenant]
            # Taken out and put back last: the first entry is the one that nobody has asked for longest.
            prefix = own.pop(hashes[0], None) or HotPrefix(preview)
            prefix.num_requests += 1
            prefix.num_hit_tokens += num_hits
            own[hashes[0]] = prefix
            if len(own) > MAX_PREFIXES:
                own.popitem(last=False)

    @property
    def return_rate(self) -> float:
        """Share of recently displaced blocks that a prompt requested again and had to compute."""
        returned = self.num_returned_blocks + NUM_PRIOR_BLOCKS / 2
        return min(1.0, returned / (self.num_displaced_blocks + NUM_PRIOR_BLOCKS))

    def hit_rate(self, tenant: str | None = None) -> float | None:
        """Share of prompt tokens found in the cache, over the last admissions; None without any."""
        tokens = sum(num_tokens for name, num_tokens, _ in self._lately if tenant in (None, name))
        hits = sum(num_hits for name, _, num_hits in self._lately if tenant in (None, name))
        return hits / tokens if tokens else None

    def hottest(self, tenant: str, count: int) -> list[HotPrefix]:
        """The tenant's prefixes that saved the most tokens, best first."""
        own = self._prefixes[tenant]
        return sorted(own.values(), key=lambda prefix: prefix.num_hit_tokens, reverse=True)[:count]
