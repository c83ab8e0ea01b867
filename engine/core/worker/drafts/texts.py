"""Known texts in which the last tokens of a request may stand, and the match of one request in such texts.

A text belongs to whoever writes it; one that is being written grows at its end. An `END` in a text matches nothing, and
no guess goes beyond.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from raydix.engine.core.worker.drafts.suffix import MAX_MATCH, MIN_MATCH, Places, SourceRecord

END = -1  # mark in place of a token: the end of an answer in a text of several
# New tokens of a request with which its guesses are compared; of more, after a while without drafts, only the last
# tokens count, and the others are indexed as a prompt is.
MAX_COMPARED = 64


class DraftText(Protocol):
    """Tokens, and the places of the first ones."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def places(self) -> Places: ...


class RunningText(NamedTuple):
    """The tokens of a request that runs, with the places in them."""

    token_ids: Sequence[int]
    places: Places


class Volume:
    """Answers one behind the other, each with the last tokens of its prompt before and an `END` behind."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.places = Places()

    @property
    def num_missing(self) -> int:
        """Tokens not indexed yet."""
        return len(self.token_ids) - len(self.places)

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> int:
        """Write an answer behind the others; returns the number of tokens written."""
        before = len(self.token_ids)
        self.token_ids += prompt[-MAX_MATCH:]
        self.token_ids += answer
        self.token_ids.append(END)
        return len(self.token_ids) - before

    def index(self, most: int) -> int:
        """Index up to so many more tokens; returns their number."""
        first = len(self.places)
        end = min(len(self.token_ids), first + most)
        for position in range(first, end):
            self.places.append(self.token_ids, position)
        return end - first

    def clear(self) -> None:
        """Forget all answers, where a match has found one, too."""
        self.token_ids.clear()
        self.places = Places()


class TextMatch:
    """The match of one request's last tokens in some texts."""

    def __init__(self) -> None:
        self.length = 0
        """Tokens of the match; 0 without one."""
        self._text: DraftText | None = None
        self._next = 0  # position behind the match in its text: the guess
        self._num_compared = 0  # tokens of the request already seen

    def follow(self, texts: Sequence[DraftText], token_ids: Sequence[int], survival: SourceRecord) -> None:
        """Compare the request's new tokens with the guesses, and look for a match if there is none. Of two texts the
        later one counts first."""
        if len(token_ids) - self._num_compared > MAX_COMPARED:
            self.length = 0
        elif self._text is not None:
            for position in range(self._num_compared, len(token_ids)):
                self._compare(self._text, token_ids[position], survival)
        self._num_compared = len(token_ids)
        if not self.length:
            self._text = None
            if texts and len(token_ids) >= MIN_MATCH:
                self._search(texts, token_ids[-MAX_MATCH:])

    def guess(self, count: int) -> list[int]:
        """The `count` tokens that followed in the text, or fewer up to the end there; none without a match."""
        if not self.length or self._text is None:
            return []
        return up_to_end(self._text.token_ids[self._next : self._next + count])

    def _compare(self, text: DraftText, token_id: int, survival: SourceRecord) -> None:
        if not self.length:
            return
        if self._next >= len(text.token_ids):  # it grows more slowly than the request, or was cleared
            self.length = 0
            return
        guess = text.token_ids[self._next]
        if guess != END:
            survival.observe(self.length, is_right=guess == token_id)
        self.length = min(self.length + 1, MAX_MATCH) if guess == token_id else 0
        self._next += 1

    def _search(self, texts: Sequence[DraftText], tail: Sequence[int]) -> None:
        """Find the longest match, the latest of equally long ones."""
        for text in reversed(texts):
            place = text.places.latest(tail[-MIN_MATCH:])
            if place >= 0:
                length, behind = text.places.longest(text.token_ids, place, tail)
                if length > self.length:
                    self.length, self._next, self._text = length, behind, text


def up_to_end(token_ids: Sequence[int]) -> list[int]:
    """The tokens of the first answer."""
    found = list(token_ids)
    return found[: found.index(END)] if END in found else found
