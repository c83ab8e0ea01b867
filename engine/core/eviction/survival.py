"""Ranking by learnt survival: estimates from the requests themselves when a prefix will be used again.

A *visit* is one request's use of its path of blocks. Another visit follows (the next turn of a chat, the next question
about a document) or none, and the chance falls with the time without one. The chance depends on facts that the server
sees. An agent comes back within seconds where its answer has calls, and where the answer ends a turn within minutes or
never: whoever says how answers end has two kinds of visits. Other visits are divided by the number of turns before, and
by the number of blocks that the request added. A life table per kind gives the worth of keeping the visit's blocks at
its age.

All blocks of a visit are worth the same: conversations are kept or given up as wholes, from their ends. When room is
short, visits near the usual think time are kept and newcomers go, beyond any order of recency (hits per second of
keeping is the measure of LHD too: Beckmann et al., NSDI '18).

Where requests part, the last common block is a *trunk*. To its worth the worth of its own uses is added, learnt in the
same way by their number.

Visits are remembered after their blocks are gone, by the hash of one block (the landmark, in the middle of the blocks
added by the request) and the hash of the last, so learning does not depend on the blocks kept. Memory is bounded by
`MAX_VISITS`.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Generic, TypeAlias

from raydix.engine.core.eviction.life_table import EDGES, NUM_BINS, LifeTable
from raydix.engine.core.eviction.ranking import Key, Visit
from raydix.engine.core.types import FinishReason

MAX_TURN = 7
MAX_ADDED = 10
NUM_TURN_KINDS = (MAX_TURN + 1) * (MAX_ADDED + 1)
NUM_KINDS = NUM_TURN_KINDS + 2
NUM_TRUNK_KINDS = 8
MAX_VISITS = 16384
# Visits by landmark, the oldest first. Unlike a plain dict, it finds its first entry in O(1) after removals.
_Memory: TypeAlias = OrderedDict[Key, Visit[Key]]


class Survival(Generic[Key]):
    """Worth by expected hits per second of keeping. `now` must not go back; its unit is the second."""

    is_renewed_by_release = False

    def __init__(self, max_visits: int = MAX_VISITS) -> None:
        self._max_visits = max_visits

        self._visits: _Memory[Key] = OrderedDict()  # visits that may still be continued, by landmark
        self._trunks: _Memory[Key] = OrderedDict()  # the last use of each trunk, by its block
        # Visits that are not over, by the bin of their age; the same for trunks and pauses below.
        self._visit_ages: list[_Memory[Key]] = [OrderedDict() for _ in range(NUM_BINS)]
        self._trunk_ages: list[_Memory[Key]] = [OrderedDict() for _ in range(NUM_BINS)]
        # Last uses by preempted or aborted requests, by their last blocks. Pauses age as visits do.
        self._pauses: _Memory[Key] = OrderedDict()
        self._pause_ages: list[_Memory[Key]] = [OrderedDict() for _ in range(NUM_BINS)]
        # Separate, because pauses say nothing about visits; no rank is read from this table.
        self._pause_table = LifeTable(NUM_KINDS)
        self._visit_table = LifeTable(NUM_KINDS)
        self._trunk_table = LifeTable(NUM_TRUNK_KINDS)

    def visit(
        self, path: Sequence[Key], num_known: int, num_blocks: int, now: float, stop: FinishReason | None = None
    ) -> Visit[Key]:
        """Learn from a request's path, and remember the visit until the next request passes its landmark."""
        previous, num_shared = self._continued(path, now)
        turn, num_again = 0, max(num_known, num_shared)

        # The request goes on from a visit whose blocks may be gone; their number is what it had then.
        if previous is not None:
            turn = previous.turn + 1
            if len(path) >= previous.length:  # evicted meanwhile, but it had been here
                num_known = max(num_known, previous.length - 1)
                is_whole = path[previous.length - 1] == previous.end
                num_again = max(num_known, num_again, previous.length * is_whole)
            self._visit_table.leave(previous.kind, previous.age_bin, returned=True)
            self._end(previous, self._visits, self._visit_ages)

        # The landmark lies in the middle of the added blocks, behind the path's first block if there are others.
        added = max(1, len(path) - num_known)
        kind = _kind(turn, added, stop)
        landmark = path[min(len(path) - 1, max(1, len(path) - added - 1 + added // 2))]
        visit = Visit(kind=kind, turn=turn, length=len(path), born=now, landmark=landmark, end=path[-1])
        visit.num_again = num_again
        visit.previous = previous
        if len(path) > 1:  # a single block says nothing of who will come
            self._remember(visit, self._visits, self._visit_ages, self._visit_table)
        return visit

    def pause(self, path: Sequence[Key], num_known: int, now: float) -> Visit[Key]:
        """A pause has the worth of a first visit of its kind and age."""
        kind = _kind(0, max(1, len(path) - num_known))
        visit = Visit(kind=kind, turn=0, length=len(path), born=now, landmark=path[-1], end=path[-1])
        self._remember(visit, self._pauses, self._pause_ages, self._pause_table)
        return visit

    def branch(self, key: Key, now: float) -> None:
        """Count the uses of a trunk, from the first time that requests part after `key`."""
        if key not in self._trunks:
            self._use_trunk(key, 0, now)

    def rank(self, key: Key, depth: int, visit: Visit[Key]) -> float:
        """Expected hits per second."""
        worth = 0.0 if visit.is_over else self._visit_table.index(visit.kind, visit.age_bin)
        trunk = self._trunks.get(key)
        if trunk is not None:
            worth += self._trunk_table.index(trunk.kind, trunk.age_bin)
        return worth

    @property
    def trunks(self) -> Mapping[Key, Visit[Key]]:
        """The last use of each trunk, by its block."""
        return self._trunks

    def age(self, now: float) -> list[Visit[Key]]:
        """Move visits to the bins of their ages; visits beyond the last bin end. Returns the moved visits."""
        moved = self._age(self._visits, self._visit_ages, self._visit_table, now)
        moved += self._age(self._pauses, self._pause_ages, self._pause_table, now)
        return moved + self._age(self._trunks, self._trunk_ages, self._trunk_table, now)

    def check_integrity(self) -> None:
        """Assert that the life tables count exactly the remembered visits."""
        for known, ages, table in (
            (self._visits, self._visit_ages, self._visit_table),
            (self._pauses, self._pause_ages, self._pause_table),
            (self._trunks, self._trunk_ages, self._trunk_table),
        ):
            table.check_integrity()
            assert sum(map(len, ages)) == len(known) <= self._max_visits
            for index, bin_ in enumerate(ages):
                for landmark, visit in bin_.items():
                    assert known[landmark] is visit and visit.landmark == landmark
                    assert visit.age_bin == index and not visit.is_over

    def _continued(self, path: Sequence[Key], now: float) -> tuple[Visit[Key] | None, int]:
        """The visit whose landmark is the furthest along `path`, and the number of leading blocks surely used by
        others."""
        visits, trunks = self._visits, self._trunks
        previous, num_shared = None, 0
        for depth, key in enumerate(path, 1):
            if key in trunks:
                num_shared = depth
                trunk = trunks[key]
                self._trunk_table.leave(trunk.kind, trunk.age_bin, returned=True)
                self._end(trunk, trunks, self._trunk_ages)
                self._use_trunk(key, trunk.turn + 1, now)
            if key in visits:
                previous, num_shared = visits[key], depth
        return previous, num_shared

    def _use_trunk(self, key: Key, num_uses: int, now: float) -> None:
        # Classes by powers of two: uses 1, 2 to 3, 4 to 7 and so on.
        kind = min(NUM_TRUNK_KINDS - 1, (num_uses + 1).bit_length() - 1)
        use = Visit(kind=kind, turn=num_uses, length=0, born=now, landmark=key, end=key)
        self._remember(use, self._trunks, self._trunk_ages, self._trunk_table)

    def _remember(self, visit: Visit[Key], known: _Memory[Key], ages: list[_Memory[Key]], table: LifeTable) -> None:
        replaced = known.get(visit.landmark)
        # At the bound the oldest is given up, as one that never came back.
        if replaced is None and len(known) >= self._max_visits:
            replaced = next(iter(known.values()))
        if replaced is not None:
            table.leave(replaced.kind, replaced.age_bin, returned=False)
            self._end(replaced, known, ages)
        known[visit.landmark] = visit
        ages[0][visit.landmark] = visit
        table.enter(visit.kind, 0)

    def _age(self, known: _Memory[Key], ages: list[_Memory[Key]], table: LifeTable, now: float) -> list[Visit[Key]]:
        moved = []
        # From the oldest bin on, so that a visit moves by one bin and is not looked at twice.
        for age_bin in range(NUM_BINS - 1, -1, -1):
            visits, end = ages[age_bin], EDGES[age_bin + 1]
            while visits and now - (visit := next(iter(visits.values()))).born >= end:
                table.leave(visit.kind, age_bin, returned=False)
                moved.append(visit)
                if age_bin + 1 == NUM_BINS:
                    self._end(visit, known, ages)
                    continue
                visits.popitem(last=False)
                visit.age_bin = age_bin + 1
                ages[age_bin + 1][visit.landmark] = visit
                table.enter(visit.kind, age_bin + 1)
        return moved

    @staticmethod
    def _end(visit: Visit[Key], known: _Memory[Key], ages: list[_Memory[Key]]) -> None:
        visit.is_over = True
        del known[visit.landmark], ages[visit.age_bin][visit.landmark]


def _kind(turn: int, num_added: int, stop: FinishReason | None = None) -> int:
    # Among agents the turn and the blocks say nothing that the answer's end does not say better, and more kinds would
    # have fewer visits each to learn from.
    if stop is not None:
        return NUM_TURN_KINDS + (stop is FinishReason.TOOL_CALLS)
    return min(turn, MAX_TURN) * (MAX_ADDED + 1) + min(num_added.bit_length() - 1, MAX_ADDED)
