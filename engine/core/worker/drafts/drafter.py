"""Proposes drafts for the requests that decode: from the tokens of each, its client's prediction, past answers of its
salt, and its grammar.

Reads the scheduler and writes to `Request.suffixes` alone. Of the guesses of several sources the one with the most
expected tokens is used. A draft ends before the first token that the request's grammar forbids, and has every token
that the grammar forces. The scheduler's decisions depend only on the lengths and chances of the proposals, so a
recording of its stimuli needs no tokens.
"""

from collections.abc import Collection, Sequence

from engine.core.settings import DraftLimits
from engine.core.types import DraftSource, Stage
from engine.core.worker.drafts.budget import DecodeStep, decode_step
from engine.core.worker.drafts.draft import Draft
from engine.core.worker.drafts.forms import Forms
from engine.core.worker.drafts.past import Past
from engine.core.worker.drafts.suffixes import Suffixes
from engine.core.worker.request import Request
from engine.core.worker.scheduler import Scheduler

INDEXED_PER_STEP = 1024
"""Tokens of prompts indexed before one step, about a millisecond's work; a longer prompt takes several steps."""
MAX_FOLLOWED = 64
"""New tokens of a request with which its guesses are compared. More of them, after a while without drafts, are indexed
as a prompt is."""
SURE = 0.8
"""Where a draft token must be as likely as this, beside many decodes, few are, and none are looked for but certain
ones."""
CERTAIN = 1.0
"""Chance of a forced token."""


class Drafter:
    """Proposes the drafts of one worker, within `limits`."""

    def __init__(self, limits: DraftLimits, forms: Forms | None = None) -> None:
        """`forms`: None where no request has a grammar."""
        self._limits = limits
        self._forms = forms if DraftSource.GRAMMAR in limits.sources else None
        self.past = Past(limits.past_tokens)

    def propose(self, scheduler: Scheduler) -> list[Draft]:
        """Drafts for the next step; none where no draft would be worth its time."""
        decoding = [request for request in scheduler.running.values() if request.num_remaining == 1]
        if not decoding:
            return []
        costs = scheduler.swap_policy.costs
        step = decode_step(costs, [len(request.token_ids) for request in decoding])
        least = step.least_chance(step.cost_s(costs, 0))
        if least >= CERTAIN:
            return []

        wanting = [request for request in decoding if _wants_drafts(request)]
        if least >= SURE:
            wanting, guesses = [request for request in wanting if request.assignment.sampling.grammar is not None], {}
        else:
            guesses = self._guesses(wanting, scheduler, step)
        drafts = [self._formed(request, guesses.get(request.request_id)) for request in wanting]
        return [draft for draft in drafts if draft is not None and draft.token_ids]

    def ended(self, request: Request) -> None:
        """Keep the answer of an ending request, for later ones of its salt."""
        if DraftSource.PAST in self._limits.sources and _wants_drafts(request):
            end = request.assignment.num_prompt_tokens
            self.past.add(request.assignment.salt.private, request.token_ids[:end], request.token_ids[end:])

    def _guesses(self, wanting: Sequence[Request], scheduler: Scheduler, step: DecodeStep) -> dict[str, Draft]:
        """Drafts found in known texts, by request."""
        self._begin([request for request in wanting if request.suffixes is None], scheduler)
        self.past.index(INDEXED_PER_STEP)
        guesses, left = dict[str, Draft](), INDEXED_PER_STEP
        for request in wanting:
            suffixes = request.suffixes
            if suffixes is not None:
                least = step.least_chance(step.cost_s(scheduler.swap_policy.costs, len(request.token_ids)))
                left -= _index(request, suffixes, left)
                found = [self._own_guess(request, suffixes, least), self._past_guess(request, suffixes, least)]
                guesses[request.request_id] = max(found, key=_num_expected)
        return guesses

    def _begin(self, requests: Sequence[Request], scheduler: Scheduler) -> None:
        """Give requests that begin to decode an index, as far as the memory of all allows."""
        if not requests:
            return
        known = [request.suffixes for request in scheduler.requests() if request.suffixes is not None]
        num_tokens = sum(suffixes.num_tokens for suffixes in known)
        for request in requests:
            assignment = request.assignment
            prediction = assignment.prediction if DraftSource.PREDICTION in self._limits.sources else ()
            prompt = request.token_ids[: assignment.num_prompt_tokens]
            suffixes = Suffixes(len(request.token_ids), prompt, prediction)
            num_tokens += suffixes.num_tokens
            if num_tokens > self._limits.index_tokens:
                return
            request.suffixes = suffixes

    def _own_guess(self, request: Request, suffixes: Suffixes, least: float) -> Draft:
        """The request's draft from its own tokens and the prediction, as long as each token may be worth its time."""
        index = suffixes.index
        source = suffixes.source_at(index.next)
        if suffixes.num_missing or not index.length or source not in self._limits.sources:
            return Draft(request.request_id, source, (), ())
        chances = suffixes.survivals[source].chances(index.length, self._most(request), least)
        return _draft(request, source, index.guess(suffixes.sequence(request.token_ids), len(chances)), chances)

    def _past_guess(self, request: Request, suffixes: Suffixes, least: float) -> Draft:
        """The request's draft from past answers, as long as each token may be worth its time."""
        match, survival = suffixes.past, suffixes.survivals[DraftSource.PAST]
        match.follow(self.past.volumes(request.assignment.salt.private), request.token_ids, survival)
        if not match.length:
            return Draft(request.request_id, DraftSource.PAST, (), ())
        chances = survival.chances(match.length, self._most(request), least)
        return _draft(request, DraftSource.PAST, match.guess(len(chances)), chances)

    def _formed(self, request: Request, guess: Draft | None) -> Draft | None:
        """The request's draft by its grammar: the allowed part of the guess, or the forced tokens."""
        if request.assignment.sampling.grammar is None or self._forms is None:
            return guess
        forced = self._forms.forced(request)[: self._most(request)]
        forced = _before_stop(forced, request.assignment.sampling.stop_token_ids)
        allowed: tuple[int, ...] = ()
        if guess is not None:
            allowed = guess.token_ids[: self._forms.num_allowed(request, guess.token_ids)]
        if guess is None or len(allowed) <= len(forced):
            return Draft(request.request_id, DraftSource.GRAMMAR, tuple(forced), (CERTAIN,) * len(forced))

        # The guess goes on behind the forced tokens, which it has in common with the grammar.
        chance = guess.chances[len(forced) - 1] if forced else 1.0
        behind = [each / chance for each in guess.chances[len(forced) : len(allowed)]]
        return guess._replace(token_ids=allowed, chances=(CERTAIN,) * len(forced) + tuple(behind))

    def _most(self, request: Request) -> int:
        """Longest draft for a request: its last token needs none behind."""
        return max(0, min(self._limits.depth, request.assignment.sampling.max_tokens - request.num_output - 1))


def _wants_drafts(request: Request) -> bool:
    """True if drafts may shorten the request's answer here."""
    return request.assignment.sampling.speculation and request.assignment.stage is not Stage.PREFILL


def _draft(request: Request, source: DraftSource, token_ids: Sequence[int], chances: Sequence[float]) -> Draft:
    """The draft of a guess, up to a token that ends the answer."""
    token_ids = _before_stop(token_ids, request.assignment.sampling.stop_token_ids)
    return Draft(request.request_id, source, tuple(token_ids), tuple(chances[: len(token_ids)]))


def _num_expected(draft: Draft) -> float:
    """Tokens of a draft that are right, on average."""
    return sum(draft.chances)


def _index(request: Request, suffixes: Suffixes, left: int) -> int:
    """Index the request's tokens, at most `left` of the ones known before guessing; returns the number of these."""
    index, sequence = suffixes.index, suffixes.sequence(request.token_ids)
    if len(sequence) - index.num_indexed > MAX_FOLLOWED:
        suffixes.know(len(request.token_ids))
    count = min(suffixes.num_missing, left)
    if count:
        index.extend(sequence, index.num_indexed + count)
    if not suffixes.num_missing:
        index.follow(sequence, suffixes.survival_at)
    return count


def _before_stop(token_ids: Sequence[int], stop_token_ids: Collection[int]) -> Sequence[int]:
    """The tokens before the first that ends an answer, or may not be sampled yet: no row is needed behind it."""
    end = next((index for index, token_id in enumerate(token_ids) if token_id in stop_token_ids), len(token_ids))
    return token_ids[:end]
