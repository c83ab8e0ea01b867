"""Guesses of requests' next tokens by a smaller model: asked for as far as they are worth the model's time and the time
of checking them.

A pass of the model lengthens the drafts of all requests in it by a token. So passes are added one by one, each with the
requests for which the token pays, while what the pass may bring is worth what it takes. The tokens that the model must
compute before its first guess for a request count, spread over the tokens still to come.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from engine.core.costs import WorkerCosts
from engine.core.types import DraftSource
from engine.core.worker.drafts.agreement import Agreements
from engine.core.worker.drafts.budget import MARGIN, MAX_TOKENS, DecodeStep
from engine.core.worker.drafts.draft import Draft
from engine.core.worker.drafts.draft_model import DraftModel, ModelCosts, Wanted
from engine.core.worker.drafts.guesser import draft_of, is_better, num_expected
from engine.core.worker.request import Request

HORIZON = 128
"""Most tokens of an answer over which the beginning is spread: nobody knows how long the answer will be."""


class Ask(NamedTuple):
    """A request for which the model may be asked."""

    request: Request
    chances: Sequence[float]
    """For each of its next tokens the chance that the model guesses this one and all before: as many as may be
    drafted."""
    check_s: float
    """Time of checking one guess."""
    num_missing: int
    """Tokens to compute before the first guess, besides the request's last one."""

    def cost_s(self, costs: ModelCosts, depth: int) -> float:
        """Time of another guess behind `depth` others, in a pass that is run anyway."""
        sampling = self.request.assignment.sampling
        num_left = min(HORIZON, max(1, sampling.max_tokens - self.request.num_output))
        begin_s = 0.0 if depth else self.num_missing * costs.token_s / num_left
        return self.check_s + costs.row_s + begin_s


class ModelGuesser:
    """The guesses of one worker's draft model."""

    def __init__(self, model: DraftModel) -> None:
        self._model = model
        self._agreements = Agreements()

    def keep(self, requests: Collection[Request]) -> None:
        """Forget all other requests: those that have ended or were preempted."""
        self._model.keep(requests)
        self._agreements.keep({request.request_id for request in requests})

    def take_seconds(self) -> float:
        """Seconds that the model has taken since the last call."""
        return self._model.take_seconds()

    def guesses(
        self,
        wanting: Sequence[Request],
        others: Mapping[str, Draft],
        step: DecodeStep,
        costs: WorkerCosts,
        longest: Callable[[Request], int],
    ) -> dict[str, Draft]:
        """Drafts of the model, for requests of which it promises more than the drafts of `others`, which cost nothing.

        `longest`: tells the longest draft for a request.
        """
        asks = []
        for request in wanting:
            check_s = step.cost_s(costs, len(request.token_ids))
            ask = self._ask(request, others.get(request.request_id), longest(request), check_s)
            if ask is not None:
                asks.append(ask)

        counts = num_guesses(asks, step, self._model.costs())
        wanted = [Wanted(ask.request, count) for ask, count in zip(asks, counts, strict=True) if count]
        if not wanted:
            self._model.rest()
            return {}
        found = self._model.guesses(wanted)
        drafts = [self._draft(ask, found.get(ask.request.request_id, ())) for ask in asks]
        return {draft.request_id: draft for draft in drafts if is_better(draft, others.get(draft.request_id))}

    def _ask(self, request: Request, other: Draft | None, longest: int, check_s: float) -> Ask | None:
        """The question for a request, after the comparison of the latest guesses; None if there is none to ask."""
        agreement = self._agreements.of(request.request_id)
        agreement.follow(request.token_ids)
        chances = agreement.chances(longest)
        if not longest or num_expected(other) >= sum(chances):
            return None
        num_missing = self._model.num_missing(request, longest)
        return None if num_missing is None else Ask(request, chances, check_s, num_missing)

    def _draft(self, ask: Ask, token_ids: Sequence[int]) -> Draft:
        self._agreements.of(ask.request.request_id).guessed(len(ask.request.token_ids), token_ids)
        return draft_of(ask.request, DraftSource.MODEL, token_ids, ask.chances[: len(token_ids)])


def num_guesses(asks: Sequence[Ask], step: DecodeStep, costs: ModelCosts) -> list[int]:
    """The number of tokens to guess for each request."""
    counts = [0] * len(asks)
    num_tokens, seconds, left = float(step.num_decodes), step.seconds, MAX_TOKENS
    for depth in range(max((len(ask.chances) for ask in asks), default=0)):
        least = MARGIN * num_tokens / seconds
        joining = [
            index
            for index, ask in enumerate(asks)
            if counts[index] == depth < len(ask.chances) and ask.chances[depth] > least * ask.cost_s(costs, depth)
        ][:left]
        gain = sum(asks[index].chances[depth] for index in joining)
        cost_s = costs.pass_s + sum(asks[index].cost_s(costs, depth) for index in joining)
        if gain <= least * cost_s:
            break

        num_tokens += gain
        seconds += cost_s
        left -= len(joining)
        for index in joining:
            counts[index] += 1
    return counts
