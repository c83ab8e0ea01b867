"""Values of drafts: guesses and counts."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from raydix.engine.core.types import DraftSource

# Places in a draft by name, from the first to the last of each.
DEPTHS = MappingProxyType({"1": (1, 1), "2": (2, 2), "3-4": (3, 4), "5-8": (5, 8), "9+": (9, 1 << 30)})


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
