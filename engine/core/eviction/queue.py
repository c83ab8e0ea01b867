"""The order of eviction of cached blocks that nobody holds, with these guarantees:

* leaf first: a block is not evicted before an evictable block that was reached through it;
* expired blocks first, then the blocks of least worth by the ranking;
* quotas: a tenant above its ceiling loses its own blocks first, and no other tenant's need takes blocks below a
  tenant's floor while tenants above their floors have a leaf;
* priorities count within a tenant only: the tenant with the leaf of least worth loses a leaf of its lowest priority, so
  no tenant's hints make another tenant's blocks go sooner;
* *protected* blocks, which waiting requests will use, are evicted after all other blocks of their tenant.

A block costs O(log n) when it becomes a leaf or, as a leaf, begins or ceases to be protected; one look at each tenant
and priority when evicted; O(1) when visited, acquired or released. A key is the owner's name of a block, such as a hash
in a worker's pool. The queue has no clock.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias

from raydix.engine.core.eviction.ranking import Key, Ranking, Visit
from raydix.engine.core.eviction.retention import later
from raydix.engine.core.types import DEFAULT_RETENTION, EvictionReason, FinishReason, Retention


class CachedBlock(Generic[Key]):
    """Record of a block in an eviction queue, which owns it: place in its sequence, last visit, hints of requests."""

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
        """True once a request has used the block and given its hints; an imported block waits for the first request."""
        self.is_new = False
        """True if filled by a paused request, and not yet used by a request that has ended."""
        self.tenant = ""
        self.priority = 0
        self.expires_at: float | None = None
        self.visit = visit
        self.depth = 0
        """Number of blocks before this one in its sequence; known once a request has used the block."""
        self.parent: CachedBlock[Key] | None = None
        self.num_children = 0
        """Evictable blocks whose parent is this one."""
        self.is_evictable = False
        self.stamp = 0
        """Stamp of the valid entry in the heaps; entries with another stamp are stale."""

    @property
    def is_leaf(self) -> bool:
        return self.is_evictable and self.num_children == 0

    def claim(self, retention: Retention) -> None:
        """Apply a request's hints: the first request sets the tenant, and only this tenant's requests set the
        priority."""
        if self.is_claimed:
            if retention.tenant == self.tenant:
                self.priority = max(self.priority, retention.priority)
            self.expires_at = later(self.expires_at, retention.expires_at)
        else:
            self.is_claimed = True
            self.tenant = retention.tenant
            self.priority = retention.priority
            self.expires_at = retention.expires_at


@dataclass(frozen=True, slots=True)
class Quota:
    """Bounds on the evictable blocks of one tenant, or on their weight."""

    floor: int = 0
    ceiling: int | None = None


_PROTECTED = 1 << 62  # more than the difference of any two priorities

# Entry of a heap: rank or expiry, the leaf's stamp, and the leaf.
_Entry: TypeAlias = tuple[float, int, CachedBlock[Key]]


class EvictionQueue(Generic[Key]):
    """Knows every block since its first visit; blocks without a holder are evictable."""

    def __init__(
        self,
        ranking: Ranking[Key],
        quotas: Mapping[str, Quota] | None = None,
        weight_of: Callable[[Key], int] | None = None,
    ) -> None:
        """`weight_of`: weight of a known block against quotas; 1 unless given."""
        self._ranking = ranking
        self._weight_of: Callable[[Key], int] = weight_of or (lambda key: 1)
        self._quotas = dict(quotas or {})
        self._blocks: dict[Key, CachedBlock[Key]] = {}
        # Leaves by tenant and place; least worth first.
        self._heaps: dict[str, dict[int, list[_Entry[Key]]]] = defaultdict(lambda: defaultdict(list))
        # Number of waiting requests that will use a block, in the cache or not.
        self._num_protecting: dict[Key, int] = {}
        self._evictable: dict[str, int] = {}  # the weight of the evictable blocks of each tenant with a quota
        self._num_evictable = 0

        self._expiring: list[_Entry[Key]] = []
        self._num_pushed = 0
        self._aged_at: float | None = None

    def limit(self, quotas: Mapping[str, Quota]) -> None:
        """Take other quotas, from the next eviction on."""
        self._quotas = dict(quotas)
        self._evictable = {}
        for block in self._blocks.values():
            if block.is_evictable:
                self._count(block, 1)

    def __len__(self) -> int:
        """Number of evictable blocks."""
        return self._num_evictable

    def __contains__(self, key: Key) -> bool:
        block = self._blocks.get(key)
        return block is not None and block.is_evictable

    def __iter__(self) -> Iterator[Key]:
        """All evictable blocks, in no particular order."""
        return (key for key, block in self._blocks.items() if block.is_evictable)

    def retention_of(self, key: Key) -> Retention | None:
        """Retention of a block; None before a request has used the block."""
        block = self._blocks.get(key)
        if block is None or not block.is_claimed:
            return None
        return Retention(block.tenant, block.priority, block.expires_at)

    def visit(
        self,
        path: Sequence[Key],
        now: float,
        retention: Retention = DEFAULT_RETENTION,
        marked: Sequence[Retention] = (),
        stop: FinishReason | None = None,
    ) -> None:
        """A request has used the held blocks of `path`, in sequence order and from the root on. `marked`: retention of
        the first blocks, where it is another; `stop`: the reason of the answer's end, where it is known."""
        if not path:
            return
        self._age(now)
        # Blocks [0, num_known) were used before this request; the rest is new with it.
        num_known = self._num_known(path)
        num_blocks = len(self._blocks) + sum(key not in self._blocks for key in path[num_known:])
        visit = self._ranking.visit(path, num_known, num_blocks, now, stop)
        previous, visit.previous = visit.previous, None
        if num_known:
            last = self._blocks[path[num_known - 1]]
            # The path leaves the tree behind a block with other children: a fork of two requests, and no mere
            # continuation.
            if last.num_children and last.visit is not previous:
                self._ranking.branch(last.key, now)
        self._assign(path, visit, retention, marked)
        if previous is not None:
            self.requeue([previous])

    def pause(
        self,
        path: Sequence[Key],
        now: float,
        retention: Retention = DEFAULT_RETENTION,
        marked: Sequence[Retention] = (),
    ) -> None:
        """A request releases the blocks of `path` before its end, with its hints; not a visit. `marked`: as `visit`."""
        if path:
            self._age(now)
            visit = self._ranking.pause(path, self._num_known(path), now)
            self._assign(path, visit, retention, marked, is_pause=True)

    def release(self, keys: Sequence[Key], now: float) -> None:
        """Make blocks without a holder evictable; `keys` are in sequence order."""
        if self._ranking.is_renewed_by_release:
            self._renew(keys, now)
        else:
            self._renew([key for key in keys if key not in self._blocks], now)

        # From the last block on: a parent has its evictable children counted before its own turn.
        self._num_evictable += len(keys)
        blocks, quotas = self._blocks, self._quotas
        for key in reversed(keys):
            block = blocks[key]
            assert not block.is_evictable
            block.is_evictable = True
            # Weights are counted for quotas only: most queues have none.
            if quotas:
                self._count(block, 1)
            if block.parent is not None:
                block.parent.num_children += 1
            if block.num_children == 0:
                self._push(block)

    def acquire(self, key: Key) -> None:
        """Hold an evictable block again."""
        block = self._blocks[key]
        assert block.is_evictable
        block.is_evictable = False
        self._num_evictable -= 1
        self._count(block, -1)
        parent = block.parent
        if parent is not None:
            parent.num_children -= 1
            # Its last evictable child is held, so the parent is next on its path.
            if parent.is_leaf:
                self._push(parent)

    def protect(self, keys: Iterable[Key]) -> None:
        """A waiting request will use these blocks: until `unprotect` they go after the tenant's other blocks."""
        protecting, blocks = self._num_protecting, self._blocks
        for key in keys:
            count = protecting[key] = protecting.get(key, 0) + 1
            # Only the first protection moves a block: further ones change its count alone.
            if count == 1 and key in blocks:
                self._move(key)

    def unprotect(self, keys: Iterable[Key]) -> None:
        """End one request's protection."""
        protecting, blocks = self._num_protecting, self._blocks
        for key in keys:
            if protecting[key] > 1:
                protecting[key] -= 1
                continue
            del protecting[key]
            if key in blocks:
                self._move(key)

    def forget(self, key: Key) -> None:
        """Remove an evictable or held block."""
        if key in self:
            self.acquire(key)
        self._blocks.pop(key, None)

    def evict(self, now: float) -> Key:
        """Choose a block, forget it and return its key. At least one block must be evictable."""
        return self.evict_many(1, now)[0][0]

    def evict_many(self, count: int, now: float) -> list[tuple[Key, EvictionReason]]:
        """Choose and forget `count` blocks, one after the other; returns each with the reason. At least `count` must be
        evictable."""
        self._age(now)
        evicted: list[tuple[Key, EvictionReason]] = []
        while len(evicted) < count:
            chosen = self._choose(now)
            assert chosen is not None, "nothing can be evicted"
            leaf, reason = chosen
            run = [leaf.key]
            # A whole run goes at once where nobody else's turn can come between: the usual case, and the dear one.
            if reason is EvictionReason.FULL and not self._quotas:
                run = self._run_to(leaf, count - len(evicted))
            else:
                self.forget(leaf.key)
            evicted += [(key, reason) for key in run]
        return evicted

    def evict_for(self, tenant: str, now: float) -> tuple[Key, EvictionReason] | None:
        """Evict one block, as `evict_many`, in favour of a tenant; None if only blocks under other tenants' floors are
        left."""
        self._age(now)
        chosen = self._choose(now, tenant)
        if chosen is None:
            return None
        leaf, reason = chosen
        self.forget(leaf.key)
        return leaf.key, reason

    def requeue(self, visits: Iterable[Visit[Key]]) -> None:
        """Queue the leaves of visits anew whose worth has changed."""
        for visit in visits:
            self._move(visit.leaves.get(self, visit.landmark))  # a trunk's leaf is its landmark

    def check_integrity(self, protected: Iterable[Key] | None = None) -> None:
        """Assert that counts agree with the blocks, and with `protected` if given, and that every leaf is queued."""
        assert protected is None or self._num_protecting == Counter(protected)
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
        # Many calls come at one moment; the ranking ages once.
        if now == self._aged_at:
            return
        self._aged_at = now
        moved = self._ranking.age(now)
        # Another order leads: every rank has changed.
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
        """Number of leading blocks of `path` known before the request."""
        blocks = self._blocks
        for index, key in enumerate(path):
            if key not in blocks or blocks[key].is_new:
                return index
        return len(path)

    def _assign(
        self,
        path: Iterable[Key],
        visit: Visit[Key],
        retention: Retention,
        marked: Sequence[Retention],
        *,
        is_pause: bool = False,
    ) -> None:
        """Set the last visit of these blocks (a pause only where the last visit is over); each is the next one's
        parent."""
        blocks = self._blocks
        parent = None
        for depth, key in enumerate(path):
            block = blocks.get(key)
            if block is None:
                block = blocks[key] = CachedBlock(key, visit)
                block.is_new = is_pause
            elif not is_pause:
                block.visit = visit
                block.is_new = False
            # A block in use by another request keeps that request's visit: the pause says nothing of it.
            elif block.visit.is_over:
                block.visit = visit

            block.depth = depth
            block.claim(marked[depth] if depth < len(marked) else retention)
            # The parent of an evictable block counts it as a child, so the link may change only while it is held.
            if block.parent is not parent and not block.is_evictable:
                block.parent = parent
            parent = block

    def _renew(self, keys: Sequence[Key], now: float) -> None:
        """Give a visit to blocks released without one, such as imported blocks; their parents are unknown."""
        if keys:
            visit = self._ranking.pause(keys, 0, now)
            for key in keys:
                known = self._blocks.get(key)
                if known is None:
                    self._blocks[key] = CachedBlock(key, visit)
                else:
                    known.visit = visit

    def _count(self, block: CachedBlock[Key], change: int) -> None:
        if block.tenant in self._quotas:
            weight = change * self._weight_of(block.key)
            self._evictable[block.tenant] = self._evictable.get(block.tenant, 0) + weight

    def _move(self, key: Key) -> None:
        """Queue a block anew if it is a leaf, since its place may have changed."""
        block = self._blocks.get(key)
        if block is not None and block.is_leaf:
            self._push(block)

    def _place(self, leaf: CachedBlock[Key]) -> int:
        """The leaf's priority; above all unprotected leaves if protected."""
        return leaf.priority + _PROTECTED if leaf.key in self._num_protecting else leaf.priority

    def _push(self, leaf: CachedBlock[Key]) -> None:
        self._num_pushed += 1
        # Older entries of the leaf become stale by this: nothing is looked for in a heap.
        leaf.stamp = self._num_pushed
        leaf.visit.leaves[self] = leaf.key
        heap = self._heaps[leaf.tenant][self._place(leaf)]
        self._put(heap, self._ranking.rank(leaf.key, leaf.depth, leaf.visit), leaf)
        if leaf.expires_at is not None:
            self._put(self._expiring, leaf.expires_at, leaf)

    def _put(self, heap: list[_Entry[Key]], order: float, leaf: CachedBlock[Key]) -> None:
        """Add an entry; sweep out stale entries when they are many."""
        # Swept at more than twice the blocks, so each entry costs O(1) of a sweep; the constant spares small queues.
        if len(heap) > 2 * len(self._blocks) + 64:
            heap[:] = [entry for entry in heap if _is_valid(entry[2], entry[1])]
            heapq.heapify(heap)
        heapq.heappush(heap, (order, leaf.stamp, leaf))

    def _choose(self, now: float, tenant: str | None = None) -> tuple[CachedBlock[Key], EvictionReason] | None:
        """The next leaf to evict, and the reason. `tenant`: the only one to lose a leaf when none is above its
        floor."""
        block = self._expired(now)
        if block is not None:
            return block, EvictionReason.EXPIRED
        block = self._least_worth(tenant)
        if block is None:
            return None
        return block, EvictionReason.QUOTA if self._is_above_ceiling(block.tenant) else EvictionReason.FULL

    def _run_to(self, leaf: CachedBlock[Key], most: int) -> list[Key]:
        """Forget `leaf` and its ancestors, up to `most`, as long as each is the next to go.

        Next to go: a leaf of the same visit and in the same place, worth no more. Without quotas no other tenant's turn
        comes in between.
        """
        rank, place, visit = self._ranking.rank, self._place(leaf), leaf.visit
        worth = rank(leaf.key, leaf.depth, visit)
        keys: list[Key] = []
        block: CachedBlock[Key] | None = leaf

        while block is not None:
            del self._blocks[block.key]
            block.is_evictable = False
            keys.append(block.key)
            parent = block.parent
            if parent is None:
                break
            parent.num_children -= 1
            if not parent.is_leaf:
                break

            goes_on = (
                len(keys) < most
                and parent.visit is visit
                and parent.tenant == leaf.tenant
                and parent.expires_at is None
                and self._place(parent) == place
                and rank(parent.key, parent.depth, visit) <= worth
            )
            if not goes_on:
                self._push(parent)
                break
            block = parent

        self._num_evictable -= len(keys)
        return keys

    def _expired(self, now: float) -> CachedBlock[Key] | None:
        while self._expiring and self._expiring[0][0] <= now:
            _, stamp, block = heapq.heappop(self._expiring)
            if _is_valid(block, stamp):
                return block
        return None

    def _least_worth(self, last_payer: str | None) -> CachedBlock[Key] | None:
        leaves = {tenant: tops for tenant in self._heaps if (tops := self._tops(tenant))}
        # Who loses a leaf: tenants above their ceilings, else those above their floors, else only the tenant in need,
        # if one is named.
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
        """The tenant's leaf of least worth in each place: lowest priority first, protected ones last."""
        heaps = self._heaps[tenant]
        tops = (self._top(heaps[place]) for place in sorted(heaps))
        return [top for top in tops if top is not None]

    def _top(self, heap: list[_Entry[Key]]) -> _Entry[Key] | None:
        """The leaf of least worth, with its current rank; None if all entries are stale."""
        while heap:
            rank, stamp, block = heap[0]
            if not _is_valid(block, stamp):
                heapq.heappop(heap)
            # The rank has risen since the entry was made; leaves whose rank falls are queued anew (`requeue`).
            elif self._ranking.rank(block.key, block.depth, block.visit) > rank:
                heapq.heappop(heap)
                self._push(block)
            else:
                return heap[0]
        return None

    def _is_above_ceiling(self, tenant: str) -> bool:
        quota = self._quotas.get(tenant)
        return quota is not None and quota.ceiling is not None and self._evictable.get(tenant, 0) > quota.ceiling

    def _can_spare(self, block: CachedBlock[Key]) -> bool:
        """True if the tenant is not below its floor without the block."""
        quota = self._quotas.get(block.tenant)
        return quota is None or self._evictable[block.tenant] - self._weight_of(block.key) >= quota.floor


def _is_valid(block: CachedBlock[Key], stamp: int) -> bool:
    return block.stamp == stamp and block.is_leaf
