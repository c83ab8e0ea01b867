"""Earlier places of one request's last tokens: in its prompt and answer, in a client's prediction of the answer, and in
past answers.

A prediction stands before the request's tokens as the answer will stand behind them: after the end of the prompt. So
the first token of the answer finds it already.
"""

from collections.abc import Sequence

from engine.core.types import DraftSource
from engine.core.worker.drafts.past import PastMatch
from engine.core.worker.drafts.suffix import END, MAX_MATCH, SuffixIndex
from engine.core.worker.drafts.survival import Survival


class Suffixes:
    """A request's index, its match in past answers, and its record of the guesses of each source."""

    def __init__(self, num_known: int, prompt: Sequence[int] = (), prediction: Sequence[int] = ()) -> None:
        """`num_known`: the request's tokens when decoding begins, indexed without a comparison of guesses. `prompt`:
        needed where there is a prediction."""
        self.index = SuffixIndex()
        self.past = PastMatch()
        self.survivals = {source: Survival() for source in DraftSource}
        self._ahead = [*prompt[-MAX_MATCH:], *prediction, END] if prediction else []
        self._tokens: list[int] = []
        """The prediction and the request's tokens, if there is a prediction."""
        self._num_known = num_known

    @property
    def num_known(self) -> int:
        """Tokens that are indexed without a comparison of guesses."""
        return len(self._ahead) + self._num_known

    @property
    def num_missing(self) -> int:
        """Tokens of the known ones that are not indexed yet."""
        return max(0, self.num_known - self.index.num_indexed)

    @property
    def num_tokens(self) -> int:
        """Tokens of the index, so far or soon."""
        return max(self.num_known, self.index.num_indexed)

    def sequence(self, token_ids: list[int]) -> list[int]:
        """The indexed sequence of a request with these tokens."""
        if not self._ahead:
            return token_ids
        self._tokens = self._tokens or list(self._ahead)
        self._tokens += token_ids[len(self._tokens) - len(self._ahead) :]
        return self._tokens

    def know(self, num_tokens: int) -> None:
        """Index the first tokens of the request without a comparison of guesses."""
        self._num_known = num_tokens

    def source_at(self, position: int) -> DraftSource:
        """Source of the guess at a position of the sequence."""
        return DraftSource.PREDICTION if position < len(self._ahead) else DraftSource.REQUEST

    def survival_at(self, position: int) -> Survival:
        return self.survivals[self.source_at(position)]
