"""What answers have taken where their grammars allowed a few tokens only, such as `true` or `false`.

Answers of one salt teach nothing to another's. A place is known by the tokens that are allowed there, whatever stands
before: grammars differ, and their choices repeat.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from engine.core.worker.drafts.forms import FormToken

FEW = 4
"""Most tokens between which a guess is made."""
MAX_PLACES = 1024
"""Places kept, of all salts together; the least recently used one is forgotten first."""
MAX_COUNT = 64
"""Answers that count for a place: then all counts are halved, so that later answers count more."""
DOUBT = 0.5
"""Answers assumed to have taken another token."""


class Choices:
    """Counts of the tokens taken, by salt and by the tokens allowed."""

    def __init__(self) -> None:
        self._counts: OrderedDict[tuple[bytes, tuple[int, ...]], dict[int, float]] = OrderedDict()

    def likeliest(self, salt: bytes, allowed: tuple[int, ...]) -> int | None:
        """The token taken most often; None where none was taken yet. Of equals it is the one taken first."""
        counts = self._counts.get((salt, allowed))
        if counts is None:
            return None
        self._counts.move_to_end((salt, allowed))
        return max(counts, key=lambda token_id: counts[token_id])

    def chance(self, salt: bytes, allowed: tuple[int, ...]) -> float:
        """The chance that the likeliest token is taken again; 0 where there is none."""
        counts = self._counts.get((salt, allowed))
        return 0.0 if counts is None else max(counts.values()) / (sum(counts.values()) + DOUBT)

    def took(self, salt: bytes, allowed: tuple[int, ...], token_id: int) -> None:
        """Count the token that an answer took."""
        counts = self._counts.setdefault((salt, allowed), {})
        self._counts.move_to_end((salt, allowed))
        counts[token_id] = counts.get(token_id, 0) + 1
        if sum(counts.values()) > MAX_COUNT:
            for each in counts:
                counts[each] /= 2
        if len(self._counts) > MAX_PLACES:
            self._counts.popitem(last=False)

    def learn(self, salt: bytes, walk: Iterable[FormToken], token_ids: Sequence[int]) -> None:
        """Count what an answer took at the places of a walk, given the answer's tokens. Behind the first difference the
        answer was not at the walk's places."""
        for guess, token_id in zip(walk, token_ids, strict=False):
            if token_id in guess.allowed:
                self.took(salt, guess.allowed, token_id)
            if token_id != guess.token_id:
                break

    def clear(self) -> None:
        """Forget all answers."""
        self._counts.clear()

    @property
    def num_places(self) -> int:
        return len(self._counts)
