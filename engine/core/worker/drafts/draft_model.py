"""Interface between drafts and a smaller model with guesses, and the fitted costs of such a model.

    pass = pass_s + rows * row_s + other tokens * token_s

A *pass* computes the last token of some requests, each of which gives a *row* with the request's next guess, and tokens
before these as far as the model has not had them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from engine.core.costs import LinearFit
from engine.core.worker.request import Request

KEPT = 0.999
"""Rest of the weight of all observations after a step in which the model was not asked."""


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Seconds per unit. The defaults are low: a model is tried first, and judged later."""

    pass_s: float = 1e-3
    row_s: float = 1e-4
    token_s: float = 1e-4


class ModelCostFit:
    """Fits the costs of one model."""

    def __init__(self) -> None:
        prior = ModelCosts()
        self._fit = LinearFit((1.0, 8.0, 64.0), (prior.pass_s, prior.row_s, prior.token_s))

    def add(self, num_rows: int, num_others: int, seconds: float) -> None:
        """Observe a pass."""
        self._fit.add((1.0, num_rows, num_others), seconds)

    def rest(self) -> None:
        """Weaken the observations: a model once found dear is tried again after a while."""
        self._fit.fade(KEPT)

    def costs(self) -> ModelCosts:
        """The costs as fitted now."""
        return ModelCosts(*self._fit.solve(forgets=True))


class Wanted(NamedTuple):
    """A request, and the number of next tokens to guess."""

    request: Request
    num_tokens: int


class DraftModel(Protocol):
    """A smaller model with KV of its own for some requests. All its answers are guesses."""

    def costs(self) -> ModelCosts: ...

    def num_missing(self, request: Request, num_tokens: int) -> int | None:
        """Tokens of a request to compute before the first guess, besides its last one; None where so many guesses have
        no room."""
        ...

    def guesses(self, wanted: Sequence[Wanted]) -> Mapping[str, Sequence[int]]:
        """The next tokens of requests, as far as they can be guessed now."""
        ...

    def rest(self) -> None:
        """Note a step without guesses."""
        ...

    def keep(self, requests: Collection[Request]) -> None:
        """Forget the KV of all other requests."""
        ...

    def take_seconds(self) -> float:
        """Seconds spent since the last call."""
        ...
