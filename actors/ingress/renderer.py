"""The interface between a job and the API that its request came by."""

from collections.abc import AsyncGenerator
from typing import Protocol, TypeAlias

from raydix.engine.api.wire import WireFormat

Body: TypeAlias = bytes | AsyncGenerator[bytes]
"""A whole answer, or the slices of a large one, each made when the one before has been taken."""


async def joined(body: Body) -> bytes:
    """A whole answer in one piece."""
    return body if isinstance(body, bytes) else b"".join([data async for data in body])


class Renderer(Protocol):
    """Renders the answer to one request over HTTP."""

    @property
    def wire(self) -> WireFormat:
        """Form of errors in the answer's stream."""

    async def body(self) -> Body:
        """The response of a job that has been collected."""

    def events(self) -> AsyncGenerator[bytes]:
        """Run the job; yields the server-sent events of its choices, each as it comes.

        Raises:
            ServiceError: the generation failed.
        """

    def end(self) -> AsyncGenerator[bytes]:
        """The last events of a stream whose choices are finished."""
