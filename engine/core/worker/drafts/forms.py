"""Interface between drafts and the grammars of requests."""

from collections.abc import Sequence
from typing import Protocol

from engine.core.worker.drafts.rows import Row


class Forms(Protocol):
    """The grammars of requests, by each request's tokens so far."""

    def num_allowed(self, request: Row, token_ids: Sequence[int]) -> int:
        """Number of these next tokens, from the first, that the request's grammar allows."""
        ...

    def forced(self, request: Row) -> Sequence[int]:
        """Next tokens of which each is the only one that the request's grammar allows in its place."""
        ...
