"""Earlier places of one request's last tokens: in its prompt and answer, in texts of its own (a client's prediction of
the answer, answers to the same question elsewhere), and in texts of its worker (past answers, and answers under way).

Each text of the request's own stands behind the end of the prompt, as the answer will: so the first token of the answer
finds it already.
"""

from collections.abc import Mapping, Sequence

from raydix.engine.core.types import DraftSource
from raydix.engine.core.worker.drafts.suffix import MAX_MATCH, SourceRecord, SuffixIndex
from raydix.engine.core.worker.drafts.texts import RunningText, TextMatch, Volume

OwnTexts = Mapping[DraftSource, Sequence[Sequence[int]]]
"""Guesses of the whole answer by source, the likeliest last."""


class Suffixes:
    """A request's index, its matches in other texts, and its record of the guesses of each source."""

    def __init__(self, num_known: int, prompt: Sequence[int] = (), own_texts: OwnTexts | None = None) -> None:
        """`num_known`: the request's tokens when decoding begins, indexed without a comparison of guesses. `prompt`:
        at least its last tokens, needed where there are `own_texts`."""
        self.index = SuffixIndex()
        self.survivals = {source: SourceRecord() for source in DraftSource}
        self.volumes: dict[DraftSource, Volume] = {}
        """The request's own texts."""
        for source, texts in (own_texts or {}).items():
            for text in texts:
                self.volumes.setdefault(source, Volume()).add(prompt, text)
        self.matches = {source: TextMatch() for source in self.volumes}
        """Matches of the request's last tokens in the volumes."""
        self.past = TextMatch()
        """Match in past answers."""
        self.siblings = TextMatch()
        """Match in answers under way to the same question."""
        self.tail = tuple(prompt[-MAX_MATCH:])
        """The end of the prompt."""
        self._num_known = num_known

    @property
    def num_missing(self) -> int:
        """Tokens of the known ones that are not indexed yet."""
        return max(0, self._num_known - self.index.num_indexed)

    @property
    def num_tokens(self) -> int:
        """Tokens of all indexes, so far or soon."""
        own = sum(len(volume.token_ids) for volume in self.volumes.values())
        return own + max(self._num_known, self.index.num_indexed)

    def know(self, num_tokens: int) -> None:
        """Index the first tokens of the request without a comparison of guesses."""
        self._num_known = num_tokens

    def index_volumes(self, most: int) -> int:
        """Index up to so many more tokens of the request's own texts; returns their number."""
        left = most
        for volume in self.volumes.values():
            left -= volume.index(left)
        return most - left

    def text(self, token_ids: Sequence[int]) -> RunningText:
        """The request's own tokens, for others."""
        return RunningText(token_ids, self.index.places)


def num_wanted(num_known: int, tail: Sequence[int], own_texts: OwnTexts) -> int:
    """Tokens of all indexes of a request to be."""
    texts = [text for texts in own_texts.values() for text in texts]
    return num_known + sum(len(tail) + len(text) + 1 for text in texts)
