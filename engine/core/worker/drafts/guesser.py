"""Guesses of requests' next tokens from known texts: each request's own tokens, its client's prediction, answers of the
cluster to the same prompt, past answers of its salt, and answers under way to the same question.

Reads the scheduler and writes to `Request.suffixes` alone. Of the guesses of several sources the one counts that
promises most tokens.
"""

from collections.abc import Collection, Sequence

from raydix.engine.core.answers.continuations import unpacked
from raydix.engine.core.settings import DraftLimits
from raydix.engine.core.types import DraftSource
from raydix.engine.core.worker.drafts.draft import DecodeStep, Draft
from raydix.engine.core.worker.drafts.suffix import MAX_MATCH
from raydix.engine.core.worker.drafts.texts import (
    MAX_COMPARED,
    DraftText,
    OwnTexts,
    Past,
    Suffixes,
    TextMatch,
    num_wanted,
)
from raydix.engine.core.worker.request import Request
from raydix.engine.core.worker.scheduler import Scheduler

# Tokens of prompts indexed before one step, about a millisecond's work; a longer prompt takes several steps.
INDEXED_PER_STEP = 1024
MAX_SIBLINGS = 8  # answers under way in which one request looks for its last tokens


class Guesser:
    """Guesses for the requests of one worker, within `limits`."""

    def __init__(self, limits: DraftLimits, past: Past) -> None:
        self._limits = limits
        self._past = past

    def guesses(self, wanting: Sequence[Request], scheduler: Scheduler, step: DecodeStep) -> dict[str, Draft]:
        """Drafts found in known texts, by request; a draft may be empty."""
        self._begin([request for request in wanting if request.suffixes is None], scheduler)
        self._past.index(INDEXED_PER_STEP)
        # What one step may index is shared: a long prompt that arrives delays nobody's step by more.
        left, known = INDEXED_PER_STEP, list[tuple[Request, Suffixes]]()
        for request in wanting:
            if request.suffixes is not None:
                left -= _index(request, request.suffixes, left)
                known.append((request, request.suffixes))

        costs, drafts = scheduler.swap_policy.costs, dict[str, Draft]()
        siblings = siblings_of(known) if DraftSource.PAST in self._limits.sources else {}
        for request, suffixes in known:
            least = step.least_chance(step.cost_s(costs, len(request.token_ids)))
            found = self._all_guesses(request, suffixes, siblings.get(request.request_id, ()), least)
            # One draft for each request: the tokens of two could not be checked in the same rows.
            drafts[request.request_id] = max(found, key=num_expected)
        return drafts

    def longest(self, request: Request) -> int:
        """Longest draft for a request: its last token needs none behind."""
        return max(0, min(self._limits.depth, request.assignment.sampling.max_tokens - request.num_output - 1))

    def _begin(self, requests: Sequence[Request], scheduler: Scheduler) -> None:
        """Give requests that begin to decode an index, as far as the memory of all allows."""
        if not requests:
            return
        known = [request.suffixes for request in scheduler.requests.values() if request.suffixes is not None]
        num_tokens = sum(suffixes.num_tokens for suffixes in known)
        for request in requests:
            end = request.assignment.num_prompt_tokens
            tail = request.token_ids[max(0, end - MAX_MATCH) : end]
            own_texts = self._own_texts(request)
            num_tokens += num_wanted(len(request.token_ids), tail, own_texts)
            # First come, first served: a request without an index decodes without such drafts.
            if num_tokens > self._limits.index_tokens:
                return
            request.suffixes = Suffixes(len(request.token_ids), tail, own_texts)

    def _own_texts(self, request: Request) -> OwnTexts:
        """The guesses of a request's whole answer that came with the request."""
        texts = dict[DraftSource, Sequence[Sequence[int]]]()
        if request.assignment.prediction and self._uses(DraftSource.PREDICTION):
            texts[DraftSource.PREDICTION] = [request.assignment.prediction]
        if request.assignment.continuations and self._uses(DraftSource.CLUSTER):
            texts[DraftSource.CLUSTER] = [unpacked(each) for each in request.assignment.continuations]
        return texts

    def _uses(self, source: DraftSource) -> bool:
        return source in self._limits.sources

    def _all_guesses(
        self, request: Request, suffixes: Suffixes, siblings: Sequence[DraftText], least: float
    ) -> list[Draft]:
        """The request's draft from each of its sources, as long as each token may be worth its time."""
        past = self._past.volumes(request.assignment.salt.answers)
        places: list[tuple[DraftSource, TextMatch, Sequence[DraftText]]] = [
            (DraftSource.PAST, suffixes.past, past),
            (DraftSource.PAST, suffixes.siblings, siblings),
            *((source, suffixes.matches[source], [volume]) for source, volume in suffixes.volumes.items()),
        ]
        found = [self._own_guess(request, suffixes, least)]
        for source, match, texts in places:
            match.follow(texts, request.token_ids, suffixes.survivals[source])
            if match.length:
                chances = suffixes.survivals[source].chances(match.length, self.longest(request), least)
                found.append(draft_of(request, source, match.guess(len(chances)), chances))
        return found

    def _own_guess(self, request: Request, suffixes: Suffixes, least: float) -> Draft:
        """The request's draft from its own tokens."""
        source, index = DraftSource.REQUEST, suffixes.index
        # An index of a part of the tokens would miss the latest places, which are the likeliest.
        if suffixes.num_missing or not index.length or not self._uses(source):
            return Draft(request.request_id, source, (), ())
        chances = suffixes.survivals[source].chances(index.length, self.longest(request), least)
        return draft_of(request, source, index.guess(request.token_ids, len(chances)), chances)


def siblings_of(known: Sequence[tuple[Request, Suffixes]]) -> dict[str, list[DraftText]]:
    """Answers under way to the same question as each request's, of the same salt: to another sample of the same
    prompt, or to somebody who asks just then."""
    # Alone there is no other answer to look into.
    if len(known) < 2:
        return {}
    groups: dict[tuple[object, ...], list[tuple[str, DraftText]]] = {}
    for request, suffixes in known:
        # Same salt, length and last tokens. A wrong guess costs time only, so the whole prompts are not compared.
        question = request.assignment.salt.answers, request.assignment.num_prompt_tokens, suffixes.tail
        groups.setdefault(question, []).append((request.request_id, suffixes.text(request.token_ids)))
    last = {question: group[-MAX_SIBLINGS - 1 :] for question, group in groups.items()}
    return {
        name: [text for other, text in last[question] if other != name][-MAX_SIBLINGS:]
        for question, group in groups.items()
        for name, _ in group
    }


def draft_of(request: Request, source: DraftSource, token_ids: Sequence[int], chances: Sequence[float]) -> Draft:
    """The draft of a guess, up to a token that ends the answer."""
    token_ids = before_stop(token_ids, request.assignment.sampling.stop_token_ids)
    return Draft(request.request_id, source, tuple(token_ids), tuple(chances[: len(token_ids)]))


def before_stop(token_ids: Sequence[int], stop_token_ids: Collection[int]) -> Sequence[int]:
    """The tokens before the first that ends an answer, or may not be sampled yet: no row is needed behind it."""
    end = next((index for index, token_id in enumerate(token_ids) if token_id in stop_token_ids), len(token_ids))
    return token_ids[:end]


def num_expected(draft: Draft | None) -> float:
    """Tokens of a draft that are right, on average."""
    return 0.0 if draft is None else sum(draft.chances)


def is_better(draft: Draft, other: Draft | None) -> bool:
    """True if a draft promises more tokens than the other one."""
    return num_expected(draft) > num_expected(other)


def _index(request: Request, suffixes: Suffixes, left: int) -> int:
    """Index tokens that were known before guessing, at most `left`, and the request's new ones; returns the number of
    the known ones."""
    count = suffixes.index_volumes(left)
    index, token_ids = suffixes.index, request.token_ids
    # After a while without drafts too much has come to compare it with guesses: it is known text, as a prompt is.
    if len(token_ids) - index.num_indexed > MAX_COMPARED:
        suffixes.know(len(token_ids))
    num_new = min(suffixes.num_missing, left - count)
    if num_new:
        index.extend(token_ids, index.num_indexed + num_new)
    if not suffixes.num_missing:
        index.follow(token_ids, suffixes.survivals[DraftSource.REQUEST])
    return count + num_new
