"""Tokens taken in answers where grammars allowed a few, such as `true` or `false`.

Answers of one salt teach nothing to another's. A place is known by the tokens allowed there, whatever stands before:
grammars differ, and their choices repeat.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from raydix.engine.core.worker.drafts.forms import Choice, FormToken

MAX_PLACES = 1024
"""Places kept, of all salts together; the least recently used one is forgotten first."""
MAX_COUNT = 64
"""Tokens counted at a place; at more, all counts are halved, so that later answers count more."""
DOUBT = 1.0
"""Added to the count of all tokens at a place, so that no choice is certain."""


class Choices:
    """Counts of the tokens taken, by salt and place."""

    def __init__(self) -> None:
        self._counts: OrderedDict[tuple[bytes, bytes], dict[int, float]] = OrderedDict()

    def likeliest(self, salt: bytes, place: bytes) -> Choice | None:
        """The token taken most often, of equals the one taken first; None where none was taken yet."""
        counts = self._counts.get((salt, place))
        if counts is None:
            return None
        self._counts.move_to_end((salt, place))
        token_id = max(counts, key=lambda each: counts[each])
        return Choice(token_id, counts[token_id] / (sum(counts.values()) + DOUBT))

    def took(self, salt: bytes, place: bytes, token_id: int) -> None:
        """Count the token taken in an answer."""
        counts = self._counts.pop((salt, place), {})
        counts[token_id] = counts.get(token_id, 0) + 1
        if sum(counts.values()) > MAX_COUNT:
            counts = {each: count / 2 for each, count in counts.items() if count >= 1}
        self._counts[salt, place] = counts
        if len(self._counts) > MAX_PLACES:
            self._counts.popitem(last=False)

    def learn(self, salt: bytes, walk: Iterable[FormToken], token_ids: Sequence[int]) -> None:
        """Count what an answer took at the places of a walk, up to the first token that differs: behind it the answer
        was elsewhere."""
        for guess, token_id in zip(walk, token_ids, strict=False):
            if guess.place:
                self.took(salt, guess.place, token_id)
            if token_id != guess.token_id:
                break

    def clear(self) -> None:
        """Forget all answers."""
        self._counts.clear()

    @property
    def num_places(self) -> int:
        return len(self._counts)
