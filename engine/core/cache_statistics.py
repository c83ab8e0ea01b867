"""How well the cache does: hits by source and tenant, over all time and lately, and the prefixes that are hit most."""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.core.explain import HITS, BlockSource
from engine.core.types import BlockHash

WINDOW = 1000
"""Admissions that count as lately."""
MAX_PREFIXES = 1000
"""Remembered of each tenant."""


@dataclass(slots=True)
class HotPrefix:
    """Prompts that begin with the same block."""

    preview: tuple[int, ...]
    """The first tokens."""
    num_requests: int = 0
    num_hit_tokens: int = 0


@dataclass(slots=True)
class TenantUse:
    """What one tenant's requests asked for and found."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0


@dataclass(slots=True)
class CacheStatistics:
    """Counters that `Directory` keeps; all in tokens unless they say otherwise."""

    block_size: int
    sources: Counter[BlockSource] = field(default_factory=Counter)
    """Blocks of admitted prompts by where they came from."""
    evicted_blocks: Counter[str] = field(default_factory=Counter)
    """Blocks that left a place, by reason."""
    tenants: dict[str, TenantUse] = field(default_factory=dict)
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
    ) -> None:
        """A request was placed; `runs` says where how many of its blocks in a row come from."""
        num_hits = 0
        for source, count in runs:
            self.sources[source] += count
            num_hits += count * self.block_size if source in HITS else 0
        use = self.tenants.setdefault(tenant, TenantUse())
        use.num_requests += 1
        use.num_prompt_tokens += num_tokens
        use.num_hit_tokens += num_hits
        self._lately.append((tenant, num_tokens, num_hits))
        if hashes:
            own = self._prefixes[tenant]
            prefix = own.pop(hashes[0], None) or HotPrefix(preview)
            prefix.num_requests += 1
            prefix.num_hit_tokens += num_hits
            own[hashes[0]] = prefix
            if len(own) > MAX_PREFIXES:
                own.popitem(last=False)

    def hit_rate(self, tenant: str | None = None) -> float | None:
        """Share of prompt tokens found in the cache, over the last admissions; None if there were none."""
        tokens = sum(num_tokens for name, num_tokens, _ in self._lately if tenant in (None, name))
        hits = sum(num_hits for name, _, num_hits in self._lately if tenant in (None, name))
        return hits / tokens if tokens else None

    def hottest(self, tenant: str, count: int) -> list[HotPrefix]:
        """The tenant's prefixes that saved the most tokens, best first."""
        own = self._prefixes[tenant]
        return sorted(own.values(), key=lambda prefix: prefix.num_hit_tokens, reverse=True)[:count]
