"""Guesses of requests' next tokens by their grammars: forced tokens and, where a grammar allows a few, the one taken by
most answers of the salt."""

from collections.abc import Iterable, Sequence

from engine.core.types import DraftSource
from engine.core.worker.drafts.choices import FEW, Choices
from engine.core.worker.drafts.draft import Draft
from engine.core.worker.drafts.forms import Forms, FormToken
from engine.core.worker.drafts.guesser import draft_of
from engine.core.worker.drafts.model_guesser import is_better
from engine.core.worker.request import Request

SURE = 0.8
"""Where a draft token must be as likely as this, beside many decodes, few are, and none are looked for but certain
ones."""
CERTAIN = 1.0
"""Chance of a forced token."""


class FormGuesser:
    """The guesses by the grammars of one worker's requests."""

    def __init__(self, forms: Forms, choices: Choices | None) -> None:
        """`choices`: None where nothing is learnt of an answer for another one; then only forced tokens are guessed."""
        self._forms = forms
        self._choices = choices
        self._walks: dict[str, tuple[int, Sequence[FormToken]]] = {}
        """For each request its latest walk, and the number of tokens before it."""

    def follow(self, requests: Iterable[Request]) -> None:
        """Learn from the tokens behind the latest walks, and forget the walks."""
        walks, self._walks = self._walks, {}
        for request in requests:
            self._learn(request, walks.get(request.request_id))

    def ended(self, request: Request) -> None:
        """Learn from the last tokens of a request that ends."""
        self._learn(request, self._walks.pop(request.request_id, None))

    def reset(self) -> None:
        """Forget what was learnt."""
        self._walks.clear()
        if self._choices is not None:
            self._choices.clear()

    def draft(self, request: Request, guess: Draft | None, longest: int, least: float) -> Draft:
        """The request's draft by its grammar: the allowed part of a guess, or the grammar's own, whichever promises
        more. At most `longest` tokens; each of the grammar's own is right with a chance of `least` or more."""
        own = self._own_draft(request, longest, least)
        if guess is None:
            return own
        allowed = guess.token_ids[: self._forms.num_allowed(request, guess.token_ids)]
        num_forced = min(own.chances.count(CERTAIN), len(allowed))

        # The guess goes on behind the forced tokens, which it has in common with the grammar.
        chance = guess.chances[num_forced - 1] if num_forced else 1.0
        behind = tuple(each / chance for each in guess.chances[num_forced : len(allowed)])
        cut = guess._replace(token_ids=allowed, chances=(CERTAIN,) * num_forced + behind)
        return cut if is_better(cut, own) else own

    def _own_draft(self, request: Request, longest: int, least: float) -> Draft:
        token_ids, chances, chance = list[int](), list[float](), CERTAIN
        for token_id, allowed in self._walk(request, longest, least):
            if allowed and self._choices is not None:
                chance *= self._choices.chance(request.assignment.salt.private, allowed)
            if token_id is None or chance < least:
                break
            token_ids.append(token_id)
            chances.append(chance)
        return draft_of(request, DraftSource.GRAMMAR, token_ids, chances)

    def _walk(self, request: Request, longest: int, least: float) -> Sequence[FormToken]:
        """The request's next tokens as far as its grammar and earlier choices tell them."""
        choices, salt = self._choices, request.assignment.salt.private
        if choices is None or least >= SURE:
            return [FormToken(token_id) for token_id in self._forms.forced(request)[:longest]]

        def choose(allowed: tuple[int, ...]) -> int | None:
            return choices.likeliest(salt, allowed) if choices.chance(salt, allowed) >= least else None

        walk = self._forms.walk(request, longest, FEW, choose)
        if any(each.allowed for each in walk):
            self._walks[request.request_id] = len(request.token_ids), walk
        return walk

    def _learn(self, request: Request, walk: tuple[int, Sequence[FormToken]] | None) -> None:
        if walk is not None and self._choices is not None:
            num_before, tokens = walk
            new = request.token_ids[num_before : num_before + len(tokens)]
            self._choices.learn(request.assignment.salt.private, tokens, new)
