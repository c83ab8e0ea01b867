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
from itertools import pairwise
from typing import Generic, TypeAlias

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
NUM_BINS = 26
# Bins of age in seconds: 0 to 1, to 1.4, to 2, ... to 5793.
EDGES = (0.0, *(2.0 ** (index / 2) for index in range(NUM_BINS)))
WIDTHS = tuple(end - start for start, end in pairwise(EDGES))

PRIOR_VISITS = 1.0  # visits of a kind that weigh as much for the kind as the pooled table
# Chance of a return in each bin without observations. The index then falls with age, as LRU.
PRIOR_CHANCE = 0.04
REFRESH_AFTER = 64  # departures from bins of a kind until its indices are computed anew
HALVE_AFTER = 1 << 17  # departures until all counts are halved, so that the table follows a changing load


class LifeTable:
    """Chances of a return by kind of visit and age, and the worth that follows from them.

    For each kind and each bin of age the table counts the visits that left the bin, and the part of them followed by
    another visit (the actuarial estimate: a visit still in the bin counts half). A kind with few visits leans on the
    pooled shape, scaled to the kind's own frequency of returns.

    The worth of a visit of some age is the greatest ratio, over all moments to give up, of the hits until then to the
    seconds kept until then: its index (Gittins, "Bandit Processes and Dynamic Allocation Indices", 1979). The worth may
    rise with age before it falls.
    """

    def __init__(self, num_kinds: int) -> None:
        self._here = [[0] * NUM_BINS for _ in range(num_kinds)]
        self._left = [[0.0] * NUM_BINS for _ in range(num_kinds)]
        self._returned = [[0.0] * NUM_BINS for _ in range(num_kinds)]
        self._pooled_here = [0] * NUM_BINS
        self._pooled_left = [0.0] * NUM_BINS
        self._pooled_returned = [0.0] * NUM_BINS
        self._indices: list[list[float]] = [[] for _ in range(num_kinds)]
        self._num_new = [REFRESH_AFTER] * num_kinds
        self._num_departures = 0

    def enter(self, kind: int, age_bin: int) -> None:
        """Count a visit that has reached a bin of age."""
        self._here[kind][age_bin] += 1
        self._pooled_here[age_bin] += 1

    def leave(self, kind: int, age_bin: int, returned: bool) -> None:
        """Count a visit that left a bin: followed by another visit (`returned`), or grown older."""
        self._here[kind][age_bin] -= 1
        self._pooled_here[age_bin] -= 1
        self._left[kind][age_bin] += 1
        self._pooled_left[age_bin] += 1
        self._returned[kind][age_bin] += returned
        self._pooled_returned[age_bin] += returned
        self._num_new[kind] += 1
        self._num_departures += 1
        if self._num_departures >= HALVE_AFTER:
            self._halve()

    def index(self, kind: int, age_bin: int) -> float:
        """Expected hits per second of keeping a visit of this kind and age."""
        # Kept for a while: each eviction asks, and some departures hardly change the chances.
        if self._num_new[kind] >= REFRESH_AFTER:
            self._num_new[kind] = 0
            self._indices[kind] = best_rates(self.chances(kind))
        return self._indices[kind][age_bin]

    def chances(self, kind: int) -> list[float]:
        """Chance of a return before the visit leaves its bin, for each bin."""
        pooled_at_risk = [gone + here / 2 for gone, here in zip(self._pooled_left, self._pooled_here, strict=True)]
        pooled = [
            (returned + PRIOR_CHANCE * PRIOR_VISITS) / (at_risk + PRIOR_VISITS)
            for returned, at_risk in zip(self._pooled_returned, pooled_at_risk, strict=True)
        ]
        at_risk = [gone + here / 2 for gone, here in zip(self._left[kind], self._here[kind], strict=True)]
        expected = sum(count * chance for count, chance in zip(at_risk, pooled, strict=True))
        # How much more often this kind returns than the pooled table would have it.
        ratio = (sum(self._returned[kind]) + PRIOR_VISITS) / (expected + PRIOR_VISITS)
        # The prior is one return among as many visits as it takes on average; below certainty, however high the ratio.
        return [
            (returned + PRIOR_VISITS) / (count + PRIOR_VISITS / min(0.99, chance * ratio))
            for returned, count, chance in zip(self._returned[kind], at_risk, pooled, strict=True)
        ]

    def check_integrity(self) -> None:
        """Assert that the pooled counts are the sums over kinds."""
        for age_bin in range(NUM_BINS):
            assert self._pooled_here[age_bin] == sum(here[age_bin] for here in self._here)
            assert all(here[age_bin] >= 0 for here in self._here)

    def _halve(self) -> None:
        self._num_departures = 0
        for counts in (*self._left, *self._returned, self._pooled_left, self._pooled_returned):
            counts[:] = [count / 2 for count in counts]


def best_rates(chances: Sequence[float]) -> list[float]:
    """The index at the start of each bin, given the chance of a return in each."""
    return [_best_rate(chances[start:], WIDTHS[start:]) for start in range(NUM_BINS)]


def _best_rate(chances: Sequence[float], widths: Sequence[float]) -> float:
    alive, hits, kept_s, best = 1.0, 0.0, 0.0, 0.0
    for chance, width in zip(chances, widths, strict=True):
        hits += alive * chance
        # A visit that returns within a bin was kept for half of the bin on average.
        kept_s += alive * width * (1 - chance / 2)
        alive *= 1 - chance
        best = max(best, hits / kept_s)
    return best


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
