"""The order in which cached blocks that nobody holds are given up.

Guarantees: a block is not evicted before a block that was reached through it and is evictable itself (leaf first);
expired blocks go first, then what the ranking finds least worth; a tenant above its ceiling pays with its own blocks,
and nobody else's need takes a tenant's blocks below its floor while others above theirs have a leaf to give.

Priorities count within a tenant only: the tenant that has the least worth leaf pays, with one of its lowest priority.
So no wish of a tenant's makes another's blocks go sooner. What requests that wait for their turn will use goes last, in
the same way: after the other blocks of its tenant.

A block costs O(log n) when it becomes a leaf or, being one, begins or ceases to be wanted by requests that wait, a look
at each tenant and priority when it is evicted, and O(1) when it is visited, acquired or released. Keys are whatever
names a block to the owner, such as a hash in a worker's pool. The queue has no clock.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias

from engine.core.eviction.ranking import Key, Ranking, Visit
from engine.core.types import DEFAULT_RETENTION, EvictionReason, Retention


@dataclass(frozen=True, slots=True)
class Quota:
    """Bounds on the evictable blocks of one tenant, or on their weight."""

    floor: int = 0
    ceiling: int | None = None


_WANTED = 1 << 62
"""More than any two priorities differ by."""


class _Block(Generic[Key]):
    __slots__ = (
        "depth",
        "expires_at",
        "is_claimed",
        "is_evictable",
        "is_new",
        "key",
        "num_children",
        "parent",
        "priority",
        "stamp",
        "tenant",
        "visit",
    )

    def __init__(self, key: Key, visit: Visit[Key]) -> None:
        self.key = key
        self.is_claimed = False
        """Whether a request has used it and its wishes are known; an imported block waits for the first one."""
        self.is_new = False
        """Whether it was filled by a request that has paused, and none that used it has ended yet."""
        self.tenant = ""
        self.priority = 0
        self.expires_at: float | None = None
        self.visit = visit
        self.depth = 0
        """How many blocks come before it in its sequence, as soon as a request has used it."""
        self.parent: _Block[Key] | None = None
        self.num_children = 0
        """Evictable blocks whose parent this is."""
        self.is_evictable = False
        self.stamp = 0
        """Of its valid entry in the heaps; older entries count for nothing."""

    @property
    def is_leaf(self) -> bool:
        return self.is_evictable and self.num_children == 0

    def claim(self, retention: Retention) -> None:
        """Take up a request's wishes: the tenant is the first one's, and only its own requests set the priority."""
        if self.is_claimed:
            if retention.tenant == self.tenant:
                self.priority = max(self.priority, retention.priority)
            self.expires_at = _later(self.expires_at, retention.expires_at)
        else:
            self.is_claimed = True
            self.tenant = retention.tenant
            self.priority = retention.priority
            self.expires_at = retention.expires_at


_Entry: TypeAlias = tuple[float, int, _Block[Key]]
"""Of a heap: rank or expiry, the leaf's stamp, and the leaf."""


class EvictionQueue(Generic[Key]):
    """Knows every block since its first visit; those that are not held are evictable."""

    def __init__(
        self,
        ranking: Ranking[Key],
        quotas: Mapping[str, Quota] | None = None,
        weight_of: Callable[[Key], int] | None = None,
    ) -> None:
        """`weight_of`: how much a block counts against quotas, as long as it is known; 1 unless given."""
        self._ranking = ranking
        self._weight_of: Callable[[Key], int] = weight_of or (lambda key: 1)
        self._quotas = dict(quotas or {})
        self._blocks: dict[Key, _Block[Key]] = {}
        self._heaps: dict[str, dict[int, list[_Entry[Key]]]] = defaultdict(lambda: defaultdict(list))
        """Leaves by tenant and place; the least worth ones come first."""
        self._num_wanting: dict[Key, int] = {}
        """How many requests wait to use a block, which may be here or not."""
        self._evictable: dict[str, int] = {}
        """The weight of each tenant's evictable blocks."""
        self._num_evictable = 0
        self._expiring: list[_Entry[Key]] = []
        self._num_pushed = 0
        self._aged_at: float | None = None

    def __len__(self) -> int:
        """How many blocks could be evicted."""
        return self._num_evictable

    def __contains__(self, key: Key) -> bool:
        block = self._blocks.get(key)
        return block is not None and block.is_evictable

    def __iter__(self) -> Iterator[Key]:
        """All evictable blocks, in no particular order."""
        return (key for key, block in self._blocks.items() if block.is_evictable)

    def retention_of(self, key: Key) -> Retention | None:
        """What was wished for a block; None before a request has used it."""
        block = self._blocks.get(key)
        if block is None or not block.is_claimed:
            return None
        return Retention(block.tenant, block.priority, block.expires_at)

    def visit(self, path: Sequence[Key], now: float, retention: Retention = DEFAULT_RETENTION) -> None:
        """A request has used these blocks, in sequence order and from the root on; they are held."""
        if not path:
            return
        self._age(now)
        num_known = self._num_known(path)
        num_blocks = len(self._blocks) + sum(key not in self._blocks for key in path[num_known:])
        visit = self._ranking.visit(path, num_known, num_blocks, now)
        previous, visit.previous = visit.previous, None
        if num_known:
            last = self._blocks[path[num_known - 1]]
            if last.num_children and last.visit is not previous:
                self._ranking.branch(last.key, now)
        self._assign(path, visit, retention)
        if previous is not None:
            self.requeue([previous])

    def pause(self, path: Sequence[Key], now: float, retention: Retention = DEFAULT_RETENTION) -> None:
        """A request lets go of these blocks before its end: it says what it wishes for them, and is no visit."""
        if path:
            self._age(now)
            self._assign(path, self._ranking.pause(path, self._num_known(path), now), retention, is_pause=True)

    def release(self, keys: Sequence[Key], now: float) -> None:
        """Nobody holds these blocks any more; `keys` are in sequence order."""
        if self._ranking.is_renewed_by_release:
            self._renew(keys, now)
        else:
            self._renew([key for key in keys if key not in self._blocks], now)
        for key in reversed(keys):
            block = self._blocks[key]
            assert not block.is_evictable
            block.is_evictable = True
            self._count(block, 1)
            if block.parent is not None:
                block.parent.num_children += 1
            if block.num_children == 0:
                self._push(block)

    def acquire(self, key: Key) -> None:
        """An evictable block is held again."""
        block = self._blocks[key]
        assert block.is_evictable
        block.is_evictable = False
        self._count(block, -1)
        parent = block.parent
        if parent is not None:
            parent.num_children -= 1
            if parent.is_leaf:
                self._push(parent)

    def want(self, keys: Iterable[Key]) -> None:
        """A request that waits for its turn will use these blocks: until `unwant` they go after its tenant's others."""
        for key in keys:
            self._num_wanting[key] = self._num_wanting.get(key, 0) + 1
            if self._num_wanting[key] == 1:
                self._move(key)

    def unwant(self, keys: Iterable[Key]) -> None:
        """It waits no longer."""
        for key in keys:
            self._num_wanting[key] -= 1
            if not self._num_wanting[key]:
                del self._num_wanting[key]
                self._move(key)

    def forget(self, key: Key) -> None:
        """A block that is evictable or held is gone."""
        if key in self:
            self.acquire(key)
        self._blocks.pop(key, None)

    def evict(self, now: float) -> Key:
        """Choose a block, forget it and return its key. At least one must be evictable."""
        return self.evict_with_reason(now)[0]

    def evict_with_reason(self, now: float) -> tuple[Key, EvictionReason]:
        """`evict`, and why it was this block that had to make room."""
        evicted = self._evict(now)
        assert evicted is not None, "nothing can be evicted"
        return evicted

    def evict_for(self, tenant: str, now: float) -> tuple[Key, EvictionReason] | None:
        """`evict_with_reason` for what this tenant can do without: None rather than one that another's floor covers."""
        return self._evict(now, tenant)

    def requeue(self, visits: Iterable[Visit[Key]]) -> None:
        """The worth of these visits has changed, and with it the places of their leaves."""
        for visit in visits:
            self._move(visit.leaves.get(self, visit.landmark))  # a trunk's leaf is its landmark

    def check_integrity(self, wanted: Iterable[Key] | None = None) -> None:
        """Assert that counts agree with the blocks, and with `wanted` if given, and that every leaf can be found."""
        assert wanted is None or self._num_wanting == Counter(wanted)
        evictable = [block for block in self._blocks.values() if block.is_evictable]
        assert len(self) == len(evictable)
        children = [block.parent for block in evictable]
        for block in self._blocks.values():
            assert block.num_children == sum(parent is block for parent in children)
        leaves = [block for block in evictable if block.num_children == 0]
        queued = {
            (tenant, place, block.key)
            for tenant, heaps in self._heaps.items()
            for place, heap in heaps.items()
            for _, stamp, block in heap
            if _is_valid(block, stamp)
        }
        assert queued == {(block.tenant, self._place(block), block.key) for block in leaves}
        expiring = {(expires_at, block.key) for expires_at, stamp, block in self._expiring if _is_valid(block, stamp)}
        assert expiring == {(block.expires_at, block.key) for block in leaves if block.expires_at is not None}
        for tenant, weight in self._evictable.items():
            assert weight == sum(self._weight_of(block.key) for block in evictable if block.tenant == tenant)

    def _age(self, now: float) -> None:
        if now == self._aged_at:
            return
        self._aged_at = now
        moved = self._ranking.age(now)
        if moved is None:
            self._rank_anew()
        else:
            self.requeue(moved)

    def _rank_anew(self) -> None:
        for heaps in self._heaps.values():
            heaps.clear()
        for block in self._blocks.values():
            if block.is_leaf:
                self._push(block)

    def _num_known(self, path: Sequence[Key]) -> int:
        """How many blocks at the beginning of `path` were here before the request that uses them."""
        blocks = self._blocks
        for index, key in enumerate(path):
            if key not in blocks or blocks[key].is_new:
                return index
        return len(path)

    def _assign(self, path: Iterable[Key], visit: Visit[Key], retention: Retention, *, is_pause: bool = False) -> None:
        """Make `visit` the last one of these blocks, a pause only of those without one; each is the next's parent."""
        blocks = self._blocks
        parent = None
        for depth, key in enumerate(path):
            block = blocks.get(key)
            if block is None:
                block = blocks[key] = _Block(key, visit)
                block.is_new = is_pause
            block.depth = depth
            if not is_pause or block.visit.is_over:
                block.visit = visit
            block.is_new &= is_pause
            block.claim(retention)
            if block.parent is not parent and not block.is_evictable:
                block.parent = parent
            parent = block

    def _renew(self, keys: Sequence[Key], now: float) -> None:
        """Blocks that were released without a visit, such as imported ones, get one; their parents are not known."""
        if keys:
            visit = self._ranking.pause(keys, 0, now)
            for key in keys:
                known = self._blocks.get(key)
                if known is None:
                    self._blocks[key] = _Block(key, visit)
                else:
                    known.visit = visit

    def _count(self, block: _Block[Key], change: int) -> None:
        self._num_evictable += change
        self._evictable[block.tenant] = self._evictable.get(block.tenant, 0) + change * self._weight_of(block.key)

    def _move(self, key: Key) -> None:
        """A block may have another place than before: if it is a leaf, queue it there."""
        block = self._blocks.get(key)
        if block is not None and block.is_leaf:
            self._push(block)

    def _place(self, leaf: _Block[Key]) -> int:
        """Its priority, or one above all that are not wanted."""
        return leaf.priority + _WANTED if leaf.key in self._num_wanting else leaf.priority

    def _push(self, leaf: _Block[Key]) -> None:
        self._num_pushed += 1
        leaf.stamp = self._num_pushed
        leaf.visit.leaves[self] = leaf.key
        heap = self._heaps[leaf.tenant][self._place(leaf)]
        self._put(heap, self._ranking.rank(leaf.key, leaf.depth, leaf.visit), leaf)
        if leaf.expires_at is not None:
            self._put(self._expiring, leaf.expires_at, leaf)

    def _put(self, heap: list[_Entry[Key]], order: float, leaf: _Block[Key]) -> None:
        """Add an entry; those that no longer count are swept out when they are many."""
        if len(heap) > 2 * len(self._blocks) + 64:
            heap[:] = [entry for entry in heap if _is_valid(entry[2], entry[1])]
            heapq.heapify(heap)
        heapq.heappush(heap, (order, leaf.stamp, leaf))

    def _evict(self, now: float, tenant: str | None = None) -> tuple[Key, EvictionReason] | None:
        """`tenant`: the only one that pays when none is above its floor."""
        self._age(now)
        block = self._expired(now)
        reason = EvictionReason.EXPIRED
        if block is None:
            block = self._least_worth(tenant)
            if block is None:
                return None
            reason = EvictionReason.QUOTA if self._is_above_ceiling(block.tenant) else EvictionReason.FULL
        self.forget(block.key)
        return block.key, reason

    def _expired(self, now: float) -> _Block[Key] | None:
        while self._expiring and self._expiring[0][0] <= now:
            _, stamp, block = heapq.heappop(self._expiring)
            if _is_valid(block, stamp):
                return block
        return None

    def _least_worth(self, last_payer: str | None) -> _Block[Key] | None:
        leaves = {tenant: tops for tenant in self._heaps if (tops := self._tops(tenant))}
        payers = (
            [tenant for tenant in leaves if self._is_above_ceiling(tenant)]
            or [tenant for tenant, tops in leaves.items() if self._can_spare(tops[0][2])]
            or [tenant for tenant in leaves if last_payer in (None, tenant)]
        )
        if not payers:
            return None
        payer = min(payers, key=lambda tenant: min(leaves[tenant]))
        return leaves[payer][0][2]

    def _tops(self, tenant: str) -> list[_Entry[Key]]:
        """The tenant's least worth leaf of each place that has any: the lowest priority first, wanted ones last."""
        heaps = self._heaps[tenant]
        tops = (self._top(heaps[place]) for place in sorted(heaps))
        return [top for top in tops if top is not None]

    def _top(self, heap: list[_Entry[Key]]) -> _Entry[Key] | None:
        """The least worth leaf, with its rank of now; None if all entries are of blocks that are no leaves."""
        while heap:
            rank, stamp, block = heap[0]
            if not _is_valid(block, stamp):
                heapq.heappop(heap)
            elif self._ranking.rank(block.key, block.depth, block.visit) > rank:
                heapq.heappop(heap)
                self._push(block)
            else:
                return heap[0]
        return None

    def _is_above_ceiling(self, tenant: str) -> bool:
        quota = self._quotas.get(tenant)
        return quota is not None and quota.ceiling is not None and self._evictable[tenant] > quota.ceiling

    def _can_spare(self, block: _Block[Key]) -> bool:
        """Whether its tenant is not below its floor without it."""
        quota = self._quotas.get(block.tenant)
        return quota is None or self._evictable[block.tenant] - self._weight_of(block.key) >= quota.floor


def _is_valid(block: _Block[Key], stamp: int) -> bool:
    return block.stamp == stamp and block.is_leaf


def _later(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else max(one, other)
