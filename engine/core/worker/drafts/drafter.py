"""Proposes drafts for the requests that decode: from the tokens of each, its client's prediction, past answers of its
salt, and its grammar.

A draft ends before the first token that the request's grammar forbids, and its forced tokens are certain.
"""

from raydix.engine.core.settings import DraftLimits
from raydix.engine.core.types import DraftSource, Stage
from raydix.engine.core.worker.drafts.draft import Draft, decode_step
from raydix.engine.core.worker.drafts.form_guesser import FormGuesser, LearntChoices
from raydix.engine.core.worker.drafts.forms import CERTAIN, Forms
from raydix.engine.core.worker.drafts.guesser import Guesser
from raydix.engine.core.worker.drafts.suffix import MAX_MATCH
from raydix.engine.core.worker.drafts.texts import Past
from raydix.engine.core.worker.request import Request
from raydix.engine.core.worker.scheduler import Scheduler

# Chance that a draft token must have beside many decodes: where it must be so likely, only the guesses of grammars are
# looked for.
SURE = 0.8


class Drafter:
    """Proposes the drafts of one worker, within `limits`."""

    def __init__(self, limits: DraftLimits, forms: Forms | None = None) -> None:
        """`forms`: None where no request has a grammar."""
        self._limits = limits
        self._form_guesser: FormGuesser | None = None
        if forms is not None and DraftSource.GRAMMAR in limits.sources:
            self._form_guesser = FormGuesser(forms, LearntChoices() if DraftSource.PAST in limits.sources else None)
        self._num_steps = 0
        self.past = Past(limits.past_tokens)
        self._guesser = Guesser(limits, self.past)

    def propose(self, scheduler: Scheduler) -> list[Draft]:
        """Drafts for the next step; none where no draft would be worth its time."""
        if self._form_guesser is not None:
            self._form_guesser.follow(scheduler.running.values())
        decoding = [request for request in scheduler.running.values() if request.num_remaining == 1]
        if not decoding:
            return []
        costs = scheduler.swap_policy.costs
        step = decode_step(costs, [len(request.token_ids) for request in decoding])
        least = step.least_chance(step.cost_s(costs, 0))
        # So many decode that even a token which cannot be wrong is not worth its time.
        if least >= CERTAIN:
            return []

        wanting = [request for request in decoding if _wants_drafts(request)]
        if least >= SURE:
            wanting, guesses = [request for request in wanting if request.assignment.sampling.grammar is not None], {}
        else:
            guesses = self._guesser.guesses(wanting, scheduler, step)
        self._num_steps += 1
        begin = self._num_steps % max(1, len(wanting))  # each in its turn, since the time of choices is limited
        turns = [*wanting[begin:], *wanting[:begin]]
        drafts = [self._by_form(request, guesses.get(request.request_id), least) for request in turns]
        return [draft for draft in drafts if draft is not None and draft.token_ids]

    def ended(self, request: Request) -> None:
        """Keep the answer of an ending request, for later ones of its salt."""
        if DraftSource.PAST in self._limits.sources and _wants_drafts(request):
            token_ids, end = request.token_ids, request.assignment.num_prompt_tokens
            self.past.add(request.assignment.salt.answers, token_ids[max(0, end - MAX_MATCH) : end], token_ids[end:])
        if self._form_guesser is not None:
            self._form_guesser.ended(request)

    def reset(self) -> None:
        """Forget all past answers."""
        self.past.clear()
        if self._form_guesser is not None:
            self._form_guesser.reset()

    def _by_form(self, request: Request, guess: Draft | None, least: float) -> Draft | None:
        """The request's draft, by its grammar if it has one."""
        if request.assignment.sampling.grammar is None or self._form_guesser is None:
            return guess
        return self._form_guesser.draft(request, guess, self._guesser.longest(request), least)


def _wants_drafts(request: Request) -> bool:
    """True if drafts may shorten the request's answer here."""
    return request.assignment.sampling.speculation and request.assignment.stage is not Stage.PREFILL
