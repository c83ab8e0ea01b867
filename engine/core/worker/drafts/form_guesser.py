"""Guesses of requests' next tokens by their grammars: forced tokens, and the likeliest where a few are allowed.

Where a grammar allows a few tokens, such as `true` or `false`, the guess is the one taken most often in answers of the
salt.

Answers of one salt teach nothing to another's. A place is known by the tokens allowed there, whatever stands before:
grammars differ, and their choices repeat.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from raydix.engine.core.types import DraftSource, Sampling
from raydix.engine.core.worker.drafts.draft import Draft
from raydix.engine.core.worker.drafts.forms import CERTAIN, Forms, FormToken, LikelyToken
from raydix.engine.core.worker.drafts.guesser import draft_of, is_better
from raydix.engine.core.worker.request import Request

MAX_PLACES = 1024  # places kept, of all salts together; the least recently used one is forgotten first
MAX_COUNT = 64  # tokens counted at a place; at more, all counts are halved, so that later answers count more
DOUBT = 1.0  # added to the count of all tokens at a place, so that no choice is certain


class LearntChoices:
    """Counts of the tokens taken, by salt and place."""

    def __init__(self) -> None:
        self._counts: OrderedDict[tuple[bytes, bytes], dict[int, float]] = OrderedDict()

    def likeliest(self, salt: bytes, place: bytes) -> LikelyToken | None:
        """The token taken most often, of equals the one taken first; None where none was taken yet."""
        counts = self._counts.get((salt, place))
        if counts is None:
            return None
        self._counts.move_to_end((salt, place))
        token_id = max(counts, key=lambda each: counts[each])
        return LikelyToken(token_id, counts[token_id] / (sum(counts.values()) + DOUBT))

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


class FormGuesser:
    """The guesses by the grammars of one worker's requests."""

    def __init__(self, forms: Forms, choices: LearntChoices | None) -> None:
        """`choices`: None where nothing is learnt; then only forced tokens are guessed."""
        self._forms = forms
        self._choices = choices
        # Latest walk of each request, with the number of tokens before the walk.
        self._walks: dict[str, tuple[int, Sequence[FormToken]]] = {}

    def follow(self, requests: Iterable[Request]) -> None:
        """Learn from the tokens behind the latest walks, and forget the walks."""
        walks, self._walks = self._walks, {}
        for request in requests:
            self._learn(request, walks.get(request.request_id))

    def ended(self, request: Request) -> None:
        """Learn from the last tokens of an ending request."""
        self._learn(request, self._walks.pop(request.request_id, None))

    def reset(self) -> None:
        """Forget what was learnt."""
        self._walks.clear()
        if self._choices is not None:
            self._choices.clear()

    def draft(self, request: Request, guess: Draft | None, longest: int, least: float) -> Draft:
        """The request's draft by its grammar: the allowed part of a guess, or the grammar's own, whichever promises
        more. The grammar's own has at most `longest` tokens, and ends where its chance would fall below `least`."""
        walk = self._walk(request, longest, least)
        known = [each.token_id for each in walk if each.token_id is not None]
        own = draft_of(request, DraftSource.GRAMMAR, known, [each.chance for each in walk])
        if guess is None:
            return own
        allowed = guess.token_ids[: self._forms.num_allowed(request, guess.token_ids)]
        num_forced = min(own.chances.count(CERTAIN), len(allowed))

        # The guess goes on behind the forced tokens, which it has in common with the grammar.
        chance = guess.chances[num_forced - 1] if num_forced else 1.0
        behind = tuple(each / chance for each in guess.chances[num_forced : len(allowed)])
        cut = guess._replace(token_ids=allowed, chances=(CERTAIN,) * num_forced + behind)
        return cut if is_better(cut, own) else own

    def _walk(self, request: Request, longest: int, least: float) -> Sequence[FormToken]:
        """The request's next tokens as far as its grammar and earlier choices tell them."""
        choices, salt = self._choices, request.assignment.salt.answers
        if choices is None or is_restricted(request.assignment.sampling):
            return [FormToken(token_id) for token_id in self._forms.forced(request)[:longest]]

        def choose(place: bytes) -> LikelyToken | None:
            return choices.likeliest(salt, place)

        walk = self._forms.walk(request, longest, least, choose)
        if any(each.place for each in walk):
            self._walks[request.request_id] = len(request.token_ids), walk
        return walk

    def _learn(self, request: Request, walk: tuple[int, Sequence[FormToken]] | None) -> None:
        if walk is not None and self._choices is not None:
            num_before, guesses = walk
            new = request.token_ids[num_before : num_before + len(guesses)]
            self._choices.learn(request.assignment.salt.answers, guesses, new)


def is_restricted(sampling: Sampling) -> bool:
    """True if some tokens are forbidden or preferred besides the grammar: such choices tell nothing of other
    requests."""
    never_ends = not sampling.stop_token_ids or sampling.min_tokens > 0
    is_part = sampling.allowed_token_ids is not None or bool(sampling.bad_words)
    return never_ends or is_part or bool(sampling.logit_bias)
