"""How well the cache does: hits by source and tenant, over all time and lately, and the prefixes that are hit most."""

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.core.explain import HITS, BlockSource
from engine.core.types import BlockHash

WINDOW = 1000
"""Admissions that count as lately."""
MAX_PREFIXES = 1000


@dataclass(slots=True)
class HotPrefix:
    """Prompts that begin with the same block."""

    tenant: str
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
    _prefixes: OrderedDict[tuple[str, BlockHash], HotPrefix] = field(default_factory=OrderedDict)

    def admitted(
        self,
        tenant: str,
        num_tokens: int,
        hashes: Sequence[BlockHash],
        sources: Sequence[BlockSource],
        preview: tuple[int, ...],
    ) -> None:
        """A request was placed."""
        num_hits = sum(source in HITS for source in sources) * self.block_size
        self.sources.update(sources)
        use = self.tenants.setdefault(tenant, TenantUse())
        use.num_requests += 1
        use.num_prompt_tokens += num_tokens
        use.num_hit_tokens += num_hits
        self._lately.append((tenant, num_tokens, num_hits))
        if hashes:
            key = tenant, hashes[0]
            prefix = self._prefixes.pop(key, None) or HotPrefix(tenant, preview)
            prefix.num_requests += 1
            prefix.num_hit_tokens += num_hits
            self._prefixes[key] = prefix
            if len(self._prefixes) > MAX_PREFIXES:
                self._prefixes.popitem(last=False)

    def hit_rate(self, tenant: str | None = None) -> float | None:
        """Share of prompt tokens found in the cache, over the last admissions; None if there were none."""
        tokens = sum(num_tokens for name, num_tokens, _ in self._lately if tenant in (None, name))
        hits = sum(num_hits for name, _, num_hits in self._lately if tenant in (None, name))
        return hits / tokens if tokens else None

    def hottest(self, tenant: str, count: int) -> list[HotPrefix]:
        """The tenant's prefixes that saved the most tokens, best first."""
        own = [prefix for prefix in self._prefixes.values() if prefix.tenant == tenant]
        return sorted(own, key=lambda prefix: prefix.num_hit_tokens, reverse=True)[:count]
