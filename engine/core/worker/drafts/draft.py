"""Values of drafts: guesses and counts."""

from dataclasses import dataclass
from typing import NamedTuple

from engine.core.types import DraftSource


class Draft(NamedTuple):
    """Guess of a request's next tokens."""

    request_id: str
    source: DraftSource
    token_ids: tuple[int, ...]
    chances: tuple[float, ...]
    """For each token the chance that this token and all before it are right; never rising."""


@dataclass(slots=True)
class DraftCounts:
    """Draft tokens of one source since the engine began."""

    num_drafted: int = 0
    """Computed in a step."""
    num_accepted: int = 0
    """Equal to the token sampled in their place, and so part of an answer."""
