"""Interface between drafts and the grammars of requests."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from raydix.engine.core.worker.drafts.rows import Row

CERTAIN = 1.0  # chance of a forced token


class LikelyToken(NamedTuple):
    """A token of a few, with its chance."""

    token_id: int
    chance: float


class FormToken(NamedTuple):
    """A guess of a token by a grammar."""

    token_id: int | None
    """None where no token is known or likely enough, or no time is left: the end of a walk."""
    chance: float = CERTAIN
    """Chance of this token and of all before in the walk to be right."""
    place: bytes = b""
    """Name of the set of tokens allowed there; empty where the token is forced."""


Choose = Callable[[bytes], LikelyToken | None]
"""Chooses the likeliest token at a place; None if it is not known."""


class Forms(Protocol):
    """The grammars of requests, by each request's tokens so far."""

    def num_allowed(self, request: Row, token_ids: Sequence[int]) -> int:
        """Number of these next tokens, from the first, that the request's grammar allows."""
        ...

    def forced(self, request: Row) -> Sequence[int]:
        """Next tokens of which each is the only one that the request's grammar allows in its place."""
        ...

    def walk(self, request: Row, count: int, least: float, choose: Choose) -> Sequence[FormToken]:
        """Walk along at most `count` next tokens: forced ones, and chosen ones where a few are allowed. The walk ends
        where many are allowed, or where its chance would fall below `least`."""
        ...
