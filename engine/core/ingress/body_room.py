"""Limits the bytes of unfinished request bodies that an ingress replica holds.

Above the limit the largest body is refused. So a client with many large, slow bodies loses these, and a short request
always fits.
"""

from dataclasses import dataclass, field

from raydix.engine.core.errors import OverloadedError


@dataclass(slots=True, eq=False)
class Body:
    """The received bytes of one request."""

    parts: list[bytes] = field(default_factory=list)
    num_bytes: int = 0
    is_refused: bool = False


class BodyRoom:
    """A limit of `max_bytes` for all unfinished bodies together."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bodies: set[Body] = set()
        self._num_bytes = 0

    def limit(self, max_bytes: int) -> None:
        """Take another limit; above a lower one the largest bodies are refused."""
        self._max_bytes = max_bytes
        self._refuse_largest()

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return self._num_bytes

    def begin(self) -> Body:
        """Register a body without bytes; `end` frees its bytes again."""
        body = Body()
        self._bodies.add(body)
        return body

    def grow(self, body: Body, part: bytes) -> None:
        """Keep another part of a body.

        Raises:
            OverloadedError: the body was refused as the largest, now or when another grew.
        """
        # A refused body's bytes are gone, and its sender hears of it with the next part.
        if not body.is_refused:
            body.parts.append(part)
            body.num_bytes += len(part)
            self._num_bytes += len(part)
        self._refuse_largest()
        if body.is_refused:
            raise OverloadedError(
                f"The request bodies that are arriving have more than {self._max_bytes} bytes together; try again later"
            )

    def end(self, body: Body) -> None:
        """Stop counting a body: complete, or given up."""
        if body in self._bodies:
            self._bodies.remove(body)
            self._num_bytes -= body.num_bytes

    def check_integrity(self) -> None:
        """Assert that the sum is the bodies' and within the limit."""
        assert self._num_bytes == sum(body.num_bytes for body in self._bodies) <= self._max_bytes
        assert all(sum(map(len, body.parts)) == body.num_bytes for body in self._bodies)

    def _refuse_largest(self) -> None:
        while self._num_bytes > self._max_bytes:
            self._refuse(max(self._bodies, key=lambda each: each.num_bytes))

    def _refuse(self, body: Body) -> None:
        body.is_refused = True
        body.parts.clear()
        self.end(body)
