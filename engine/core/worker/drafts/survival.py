"""Chances that a match goes on by one more token, learnt while a request decodes.

A match of m tokens of which d draft tokens were right is a match of m + d, so the chance is learnt by the length of the
match alone, and the chance of a draft is a product. Each guess counts, computed or not: so what was learnt stays up to
date while no draft pays.
"""

BOUNDS = (3, 4, 6, 9, 13, 20)
"""Lengths at which the next class of matches begins; the first class is below all."""
PRIORS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9)
"""Chances before anything was learnt, of each class."""
PRIOR_WEIGHT = 4.0
MAX_WEIGHT = 40.0
"""Guesses that count: of older ones less and less is left."""
CLASSES = tuple(sum(length >= bound for bound in BOUNDS) for length in range(BOUNDS[-1] + 1))
"""The class of each length; longer matches have the last one's."""


class Survival:
    """What one request has shown of one source."""

    def __init__(self) -> None:
        self._rates = list(PRIORS)
        self._weights = [PRIOR_WEIGHT] * len(PRIORS)

    def observe(self, length: int, *, is_right: bool) -> None:
        """Note whether the guess behind a match of so many tokens was right."""
        each = CLASSES[min(length, BOUNDS[-1])]
        self._weights[each] = weight = min(MAX_WEIGHT, self._weights[each] + 1)
        self._rates[each] += (is_right - self._rates[each]) / weight

    def chance(self, length: int) -> float:
        """The chance that the guess behind a match of so many tokens is right."""
        return self._rates[CLASSES[min(length, BOUNDS[-1])]]

    def chances(self, length: int, count: int, least: float) -> list[float]:
        """For each of the next `count` guesses the chance that this one and all before are right, as far as it is at
        least `least`."""
        found: list[float] = []
        chance = 1.0
        for further in range(count):
            chance *= self.chance(length + further)
            if chance < least:
                break
            found.append(chance)
        return found
