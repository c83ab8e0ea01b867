"""Values of drafts, guesses and counts, and the choice of the draft tokens that a step computes: those by which the
worker's decodes get more tokens per second.

A step of n decodes yields n tokens in t seconds. A draft token that is right with chance p, and makes the step c
seconds longer, raises the rate if p / c is above it: so tokens are taken in falling order of p / c while that holds.
Beside many decodes n / t is large, and no draft is worth its time.

Prefills in the same step do not count as time: otherwise drafts would look cheap exactly where they delay a prompt.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from types import MappingProxyType
from typing import NamedTuple

from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.types import DraftSource

# Places in a draft by name, from the first to the last of each.
DEPTHS = MappingProxyType({"1": (1, 1), "2": (2, 2), "3-4": (3, 4), "5-8": (5, 8), "9+": (9, 1 << 30)})
MARGIN = 1.1  # a draft token must be so many times as good as needed, since costs and chances are estimates
LEAST_CHANCE = 0.05
LEAST_SHARE = 1 / 256  # part of a step that a draft token takes at least, whatever the fit says
MAX_TOKENS = 128  # draft tokens of one step: their rows of logits are held at once


class Draft(NamedTuple):
    """Guess of a request's next tokens."""

    request_id: str
    source: DraftSource
    token_ids: tuple[int, ...]
    chances: tuple[float, ...]
    """Chance of each token that this token and all before it are right; never rising."""


@dataclass(slots=True)
class DraftCounts:
    """Draft tokens of one source since the engine began."""

    lengths: Counter[int] = field(default_factory=Counter)
    """Drafts by the number of their tokens that were computed in a step."""
    survivals: Counter[int] = field(default_factory=Counter)
    """Drafts by the number of their tokens that were sampled in their place, and so became part of an answer."""

    @property
    def num_drafted(self) -> int:
        """Computed tokens."""
        return _num_tokens(self.lengths)

    @property
    def num_accepted(self) -> int:
        """Tokens that became part of an answer."""
        return _num_tokens(self.survivals)

    def add(self, num_drafted: int, num_accepted: int) -> None:
        self.lengths[num_drafted] += 1
        self.survivals[num_accepted] += 1

    def since(self, before: "DraftCounts") -> "DraftCounts":
        """The growth since an earlier time."""
        return DraftCounts(self.lengths - before.lengths, self.survivals - before.survivals)


def by_depth(drafts: Mapping[int, int]) -> dict[str, int]:
    """The number of tokens at each of `DEPTHS`, the place in a draft counted from 1, from the number of drafts by
    their number of tokens."""
    return {
        name: sum(count * max(0, min(length, last) - first + 1) for length, count in drafts.items())
        for name, (first, last) in DEPTHS.items()
    }


def _num_tokens(drafts: Mapping[int, int]) -> int:
    return sum(length * count for length, count in drafts.items())


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A step's decodes, without drafts."""

    num_decodes: int
    seconds: float

    def cost_s(self, costs: WorkerCosts, num_before: int) -> float:
        """Time of one draft token behind so many others."""
        return max(costs.draft_token_s + num_before * costs.pair_s, LEAST_SHARE * self.seconds)

    def least_chance(self, cost_s: float) -> float:
        """Chance below which a draft token of this time does not pay."""
        return max(LEAST_CHANCE, MARGIN * cost_s * self.num_decodes / self.seconds)


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """Tokens of a draft that a step may compute."""

    draft: Draft
    num_tokens: int
    """Leading tokens of the draft that may be computed."""
    cost_s: float
    weight: float
    """Part of the token budget that each token takes."""


def decode_step(costs: WorkerCosts, contexts: Sequence[int]) -> DecodeStep:
    """The step of the decodes behind so many tokens each."""
    seconds = costs.decode_step_s(len(contexts)) + sum(contexts) * costs.pair_s
    return DecodeStep(len(contexts), max(seconds, 1e-9))


def share(candidates: Sequence[DraftCandidate], step: DecodeStep, budget: float) -> list[int]:
    """The number of tokens to compute of each candidate."""
    counts = [0] * len(candidates)
    num_tokens, seconds, left = float(step.num_decodes), step.seconds, min(budget, MAX_TOKENS)
    best = [_entry(each, 0, index) for index, each in enumerate(candidates) if each.num_tokens > 0]
    heapify(best)
    while best:
        negative_value, index = heappop(best)
        candidate = candidates[index]
        # The heap's best is below the rate of the step so far, and so are all others.
        if -negative_value <= MARGIN * num_tokens / seconds:
            break
        # This one is done with, as its tokens count only in order; others may weigh less.
        if candidate.weight > left:
            continue

        num_tokens += candidate.draft.chances[counts[index]]
        seconds += candidate.cost_s
        left -= candidate.weight
        counts[index] += 1
        if counts[index] < candidate.num_tokens:
            heappush(best, _entry(candidate, counts[index], index))
    return counts


def _entry(candidate: DraftCandidate, count: int, index: int) -> tuple[float, int]:
    """The heap's entry of a candidate's next token: the best first, the earlier of equally good ones."""
    return -candidate.draft.chances[count] / candidate.cost_s, index
