"""The adaptive ranking: whichever of three orders would have hit most of late.

No order is best for every load. `Survival` is where visits tell anything about the next one; recency is where the next
one comes after a purely random time or where everything almost fits; and where scans pass a hot set, blocks that were
used once go first. So each order keeps a *ghost*: a queue of hashes without KV that sees every request, holds as many
blocks as the real one and evicts by its own order. The real queue follows an order until another's ghost has hit more
since, by more than chance explains (compare set dueling: Qureshi et al., "Adaptive Insertion Policies for High
Performance Caching", ISCA '07).

A ghost knows no tenants, priorities or expiries, and takes each request for as long as its end.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeAlias

from engine.core.eviction.queue import EvictionQueue
from engine.core.eviction.ranking import Key, Visit
from engine.core.eviction.survival import Survival

CLOCKS = ((2000, 1.5), (200, 2.5))
"""After how many requests a hit counts half, and how many standard deviations of chance a lead must exceed: changing
the order costs blocks that the old one kept. The slow clock finds small leads, the fast one that the load is another.
"""
_LATEST = 2.0**48
"""More than there will be visits."""
_Order: TypeAlias = Callable[[Key, int, Visit[Key]], float]


class Duel(Generic[Key]):
    """Ranks by the leader of its orders. `now` must not go back; its unit is the second."""

    is_renewed_by_release = False

    def __init__(self, survival: Survival[Key] | None = None) -> None:
        self._survival: Survival[Key] = Survival() if survival is None else survival
        self.ghosts = [Ghost(order) for order in (recency, once_first, self._survival.rank)]
        self._by_survival = self.ghosts[-1]
        self._leader = self.ghosts[0]
        self._num_visits = 0

    def visit(self, path: Sequence[Key], num_known: int, num_blocks: int, now: float) -> Visit[Key]:
        visit = self._numbered(self._survival.visit(path, num_known, num_blocks, now))
        previous = visit.previous
        hits = []
        for ghost in self.ghosts:
            visit.previous = previous
            hits.append(ghost.see(path, visit, num_blocks, now))
        visit.previous = previous
        par = hits[self.ghosts.index(self._leader)]
        for ghost, num_hits in zip(self.ghosts, hits, strict=True):
            for score in ghost.scores:
                score.add(num_hits - par)
        return visit

    def pause(self, path: Sequence[Key], num_known: int, now: float) -> Visit[Key]:
        return self._numbered(self._survival.pause(path, num_known, now))

    def branch(self, key: Key, now: float) -> None:
        self._survival.branch(key, now)

    def rank(self, key: Key, depth: int, visit: Visit[Key]) -> float:
        return self._leader.rank(key, depth, visit)

    def age(self, now: float) -> Iterable[Visit[Key]] | None:
        moved = self._survival.age(now)
        self._by_survival.queue.requeue(moved)
        for scores in zip(*(ghost.scores for ghost in self.ghosts), strict=True):
            best = max(scores, key=lambda score: score.lead)
            if best.is_certain:
                self._follow(self.ghosts[scores.index(best)])
                return None
        return moved if self._leader is self._by_survival else ()

    def _follow(self, leader: "Ghost[Key]") -> None:
        """Leads count from now on; how far chance alone may carry them is known from before."""
        for old, new in zip(self._leader.scores, leader.scores, strict=True):
            old.spread = new.spread
        self._leader = leader
        for ghost in self.ghosts:
            for score in ghost.scores:
                score.lead = 0.0

    def check_integrity(self) -> None:
        """Assert that what is learnt and what the ghosts hold are whole."""
        self._survival.check_integrity()
        for ghost in self.ghosts:
            ghost.queue.check_integrity()

    def _numbered(self, visit: Visit[Key]) -> Visit[Key]:
        self._num_visits += 1
        visit.number = self._num_visits
        return visit


class Score:
    """How one ghost does against the leader's, by one clock."""

    def __init__(self, half_life: int, certainty: float) -> None:
        self._decay = 0.5 ** (1 / half_life)
        self._certainty = certainty
        self.lead = 0.0
        """Hits more than the leader's, since it leads; older ones count less."""
        self.spread = 0.0
        """The lead's variance if the two were equally good: the sum of its steps' squares."""

    def add(self, num_more: int) -> None:
        """The ghost has hit so many blocks of a request more than the leader's."""
        self.lead = self.lead * self._decay + num_more
        self.spread = self.spread * self._decay + num_more**2

    @property
    def is_certain(self) -> bool:
        return self.lead > self._certainty * math.sqrt(self.spread)


class Ghost(Generic[Key]):
    """What the real queue would hold if it always followed one order, and how much that would have hit."""

    is_renewed_by_release = False

    def __init__(self, rank: _Order[Key]) -> None:
        self.rank = rank
        self.queue: EvictionQueue[Key] = EvictionQueue(self)
        self.scores = [Score(half_life, certainty) for half_life, certainty in CLOCKS]
        self._latest: Visit[Key] | None = None

    def see(self, path: Sequence[Key], visit: Visit[Key], num_blocks: int, now: float) -> int:
        """A request has used `path`; the real queue knows `num_blocks` with it. Returns how many were here."""
        queue = self.queue
        num_hits = next((count for count, key in enumerate(path) if key not in queue), len(path))
        for key in path:
            if key in queue:
                queue.acquire(key)
        while queue and len(queue) + len(path) > num_blocks:
            queue.evict(now)
        self._latest = visit
        queue.visit(path, now)
        queue.release(path, now)
        return num_hits

    def visit(self, path: Sequence[Key], num_known: int, num_blocks: int, now: float) -> Visit[Key]:
        """The real queue's visit: what is learnt is learnt once."""
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
