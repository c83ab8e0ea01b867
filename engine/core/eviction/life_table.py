"""Chances of a return by kind of visit and age, and the worth that follows from the chances.

For each kind and each bin of age the table counts the visits that left the bin, and the part of them followed by
another visit (the actuarial estimate: a visit still in the bin counts half). A kind with few visits leans on the pooled
shape, scaled to the kind's own frequency of returns.

The worth of a visit of some age is the greatest ratio, over all moments to give up, of the hits until then to the
seconds kept until then: its index (Gittins, "Bandit Processes and Dynamic Allocation Indices", 1979). The worth may
rise with age before it falls.
"""

from collections.abc import Sequence
from itertools import pairwise

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
    """Counts per kind and bin, and the indices computed from them."""

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
