"""Interface between drafts and the grammars of requests."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from engine.core.worker.drafts.rows import Row


class FormToken(NamedTuple):
    """A guess of a token by a grammar."""

    token_id: int | None
    """None where none of several is known to be likely: the end of a walk."""
    allowed: tuple[int, ...] = ()
    """The tokens allowed there, in the order of their ids; none where the token is forced."""


Choose = Callable[[tuple[int, ...]], int | None]
"""Chooses the likeliest of the tokens allowed at a place; None if it is not known."""


class Forms(Protocol):
    """The grammars of requests, by each request's tokens so far."""

    def num_allowed(self, request: Row, token_ids: Sequence[int]) -> int:
        """Number of these next tokens, from the first, that the request's grammar allows."""
        ...

    def forced(self, request: Row) -> Sequence[int]:
        """Next tokens of which each is the only one that the request's grammar allows in its place."""
        ...

    def walk(self, request: Row, count: int, few: int, choose: Choose) -> Sequence[FormToken]:
        """At most `count` next tokens: forced ones, and chosen ones of at most `few` allowed. The walk ends where more
        are allowed, or none is chosen."""
        ...
