"""The adaptive ranking: follows the best of three orders, measured by recent hits.

No order is best for every load:

* `Survival`, where visits tell anything about the next one;
* recency, where the next visit comes after a purely random time, or where almost everything fits;
* blocks used once first, where scans pass a hot set.

So each order keeps a *ghost*: a queue of hashes without KV that sees every request, holds as many blocks as the real
queue and evicts by its own order. The real queue follows an order until another ghost has hit more since, by more than
chance explains (compare set dueling: Qureshi et al., "Adaptive Insertion Policies for High Performance Caching", ISCA
'07).

A ghost ignores tenants, priorities and expiries, and counts a request's whole run as one moment, its end.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeAlias
from zlib import crc32

from raydix.engine.core.eviction.queue import EvictionQueue
from raydix.engine.core.eviction.ranking import Key, Visit
from raydix.engine.core.eviction.survival import MAX_VISITS, Survival
from raydix.engine.core.types import FinishReason

# Clocks of the scores: requests after which a hit counts half, and standard deviations of chance that a lead must
# exceed, since a change of order costs blocks kept by the old one. The slow clock finds small leads, the fast one a
# changed load.
CLOCKS = ((2000, 1.5), (200, 2.5))
_LATEST = 2.0**48  # more than there will be visits
_Order: TypeAlias = Callable[[Key, int, Visit[Key]], float]


class Sample(Generic[Key]):
    """Sample of a path's blocks for ghosts: the blocks whose digest is a multiple of `one_in`. 1 takes all, without
    asking for digests.

    A block is in the sample or not, in every path and at every time. So a cache of the sampled blocks alone, smaller by
    the same factor, has the hit rate of the whole cache (spatial sampling: Waldspurger et al., "Efficient MRC
    Construction with SHARDS", FAST '15). Blocks are sampled, not conversations: most paths leave some blocks, and a
    block shared by everyone is a hit for all ghosts or for none, so the difference between ghosts is not affected.

    A trunk outside the sample is worth to the cache its worth to the blocks before it, which are evicted later. So the
    nearest sampled block before a trunk stands for the trunk.
    """

    def __init__(self, survival: Survival[Key], one_in: int, digest: Callable[[Any], int]) -> None:
        assert one_in > 0
        self.one_in = one_in
        self._survival = survival
        self._digest = digest
        self._path: Sequence[Key] = ()  # the last path
        self._trunk_of: dict[Key, Key] = {}  # trunks by the sampled blocks that stand for them

    def take(self, path: Sequence[Key], visit: Visit[Key], queue: object) -> Sequence[Key]:
        """The sampled blocks of a visit's path; counts in `visit` the part used before. `queue`: the one that ranks by
        `rank`."""
        if self.one_in == 1:
            visit.num_again_sampled = visit.num_again
            return path
        self._path = path

        digest, one_in, trunks = self._digest, self.one_in, self._survival.trunks
        sampled: list[Key] = []
        num_again, num_standing = 0, 0
        for depth, key in enumerate(path):
            if not digest(key) % one_in:
                sampled.append(key)
                num_again += depth < visit.num_again
            if key in trunks and num_standing < len(sampled):
                num_standing = len(sampled)  # the first trunk is the most used
                self._stand(sampled[-1], trunks[key], queue)

        visit.num_again_sampled = num_again
        return sampled

    def branch(self, key: Key, queue: object) -> None:
        """Requests part after block `key` of the last path: a trunk from now on."""
        trunks = self._survival.trunks
        if self.one_in == 1 or key not in trunks:
            return
        before = self._path[: self._path.index(key) + 1]
        nearest = next((block for block in reversed(before) if not self._digest(block) % self.one_in), None)
        if nearest is not None and self._trunk_of.get(nearest, nearest) not in trunks:
            self._stand(nearest, trunks[key], queue)

    def rank(self, key: Key, depth: int, visit: Visit[Key]) -> float:
        """`Survival.rank`, of a sampled block."""
        return self._survival.rank(self._trunk_of.get(key, key), depth, visit)

    def _stand(self, block: Key, trunk: Visit[Key], queue: object) -> None:
        trunk.leaves[queue] = block
        self._trunk_of[block] = trunk.landmark
        if len(self._trunk_of) > 2 * MAX_VISITS:
            trunks = self._survival.trunks
            self._trunk_of = {block: key for block, key in self._trunk_of.items() if key in trunks}


class Duel(Generic[Key]):
    """Ranks by the leader of its orders. `now` must not go back; its unit is the second."""

    is_renewed_by_release = False

    def __init__(
        self, survival: Survival[Key] | None = None, one_in: int = 1, digest: Callable[[Any], int] = crc32
    ) -> None:
        """`one_in`: number of blocks for each block in the ghosts' sample, chosen by `digest`."""
        self._survival: Survival[Key] = Survival() if survival is None else survival
        self._sample = Sample(self._survival, one_in, digest)
        self.ghosts = [
            Ghost(recency, recency),
            Ghost(once_first, once_first_sampled),
            Ghost(self._survival.rank, self._sample.rank),
        ]
        self._by_survival = self.ghosts[-1]
        self._leader = self.ghosts[0]
        self._num_visits = 0

    def visit(
        self, path: Sequence[Key], num_known: int, num_blocks: int, now: float, stop: FinishReason | None = None
    ) -> Visit[Key]:
        visit = self._numbered(self._survival.visit(path, num_known, num_blocks, now, stop))
        previous, visit.previous = visit.previous, None
        sampled = self._sample.take(path, visit, self._by_survival.queue)
        # A ghost holds as much of the sample as the real queue holds of all blocks.
        capacity = round(num_blocks / self._sample.one_in)
        hits = [ghost.see(sampled, visit, previous, capacity, now) for ghost in self.ghosts]
        visit.previous = previous
        # The leader's ghost is the measure and not the real queue, which still has blocks kept by earlier orders.
        par = hits[self.ghosts.index(self._leader)]
        for ghost, num_hits in zip(self.ghosts, hits, strict=True):
            for score in ghost.scores:
                score.add(num_hits - par)
        return visit

    def pause(self, path: Sequence[Key], num_known: int, now: float) -> Visit[Key]:
        return self._numbered(self._survival.pause(path, num_known, now))

    def branch(self, key: Key, now: float) -> None:
        self._survival.branch(key, now)
        self._sample.branch(key, self._by_survival.queue)

    def rank(self, key: Key, depth: int, visit: Visit[Key]) -> float:
        return self._leader.order(key, depth, visit)

    def age(self, now: float) -> Iterable[Visit[Key]] | None:
        moved = self._survival.age(now)
        self._by_survival.queue.requeue(moved)
        for scores in zip(*(ghost.scores for ghost in self.ghosts), strict=True):
            best = max(scores, key=lambda score: score.lead)
            # By more than chance explains: a change of order costs the blocks that the old one has kept.
            if best.is_certain:
                self._follow(self.ghosts[scores.index(best)])
                return None
        return moved if self._leader is self._by_survival else ()

    def _follow(self, leader: "Ghost[Key]") -> None:
        """Restart the leads; the spread of chance leads is kept."""
        for old, new in zip(self._leader.scores, leader.scores, strict=True):
            old.spread = new.spread
        self._leader = leader
        for ghost in self.ghosts:
            for score in ghost.scores:
                score.lead = 0.0

    def check_integrity(self) -> None:
        """Assert the integrity of the learnt tables and of the ghosts."""
        self._survival.check_integrity()
        for ghost in self.ghosts:
            ghost.queue.check_integrity()

    def _numbered(self, visit: Visit[Key]) -> Visit[Key]:
        self._num_visits += 1
        visit.number = self._num_visits
        return visit


class GhostScore:
    """Score of one ghost against the leader's, by one clock."""

    def __init__(self, half_life: int, certainty: float) -> None:
        self._decay = 0.5 ** (1 / half_life)
        self._certainty = certainty
        self.lead = 0.0
        """Hits more than the leader's, since it leads; older ones count less."""
        self.spread = 0.0
        """The lead's variance if the two were equally good: the sum of its steps' squares."""

    def add(self, num_more: int) -> None:
        """The ghost has hit `num_more` blocks of a request more than the leader's ghost."""
        self.lead = self.lead * self._decay + num_more
        self.spread = self.spread * self._decay + num_more**2

    @property
    def is_certain(self) -> bool:
        return self.lead > self._certainty * math.sqrt(self.spread)


class Ghost(Generic[Key]):
    """Simulated contents of the real queue under one fixed order, with the hits that it would have had."""

    is_renewed_by_release = False

    def __init__(self, order: _Order[Key], rank: _Order[Key]) -> None:
        """`order`: of all blocks; `rank`: the same for the sampled blocks."""
        self.order = order
        self.rank = rank
        self.queue: EvictionQueue[Key] = EvictionQueue(self)
        self.scores = [GhostScore(half_life, certainty) for half_life, certainty in CLOCKS]
        self._latest: Visit[Key] | None = None

    def see(
        self, path: Sequence[Key], visit: Visit[Key], previous: Visit[Key] | None, capacity: int, now: float
    ) -> int:
        """Process a request that used `path` and continued `previous`; returns how many of the blocks were in the
        ghost."""
        queue = self.queue
        # A hit needs all blocks before it, so blocks behind the first that is missing do not count.
        num_hits = next((count for count, key in enumerate(path) if key not in queue), len(path))
        for key in path:
            if key in queue:
                queue.acquire(key)

        # Room for the whole path, as the request holds all of it at its end.
        num_more = len(queue) + len(path) - capacity
        if num_more > 0:
            queue.evict_many(min(num_more, len(queue)), now)

        self._latest = visit
        queue.visit(path, now)
        queue.release(path, now)
        if previous is not None:
            queue.requeue([previous])
        return num_hits

    def visit(
        self, path: Sequence[Key], num_known: int, num_blocks: int, now: float, stop: FinishReason | None = None
    ) -> Visit[Key]:
        """The real queue's visit, from which `Survival` has learnt already."""
        assert self._latest is not None
        return self._latest

    def pause(self, path: Sequence[Key], num_known: int, now: float) -> Visit[Key]:
        raise AssertionError("a ghost sees requests that have ended")

    def branch(self, key: Key, now: float) -> None:
        """The real queue tells `Survival`."""

    def age(self, now: float) -> Iterable[Visit[Key]]:
        """`Duel.age` does it for all."""
        return ()


def recency(key: Key, depth: int, visit: Visit[Key]) -> float:
    """LRU."""
    return visit.number


def once_first(key: Key, depth: int, visit: Visit[Key]) -> float:
    """Blocks that were used once, then LRU."""
    return visit.number + (_LATEST if depth < visit.num_again else 0.0)


def once_first_sampled(key: Key, depth: int, visit: Visit[Key]) -> float:
    """Worth as `once_first`, for a block with `depth` sampled blocks before it."""
    return visit.number + (_LATEST if depth < visit.num_again_sampled else 0.0)
