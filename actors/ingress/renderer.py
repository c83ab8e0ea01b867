"""The interface between a job and the API that its request came by."""

from collections.abc import AsyncGenerator
from typing import Protocol

from engine.api.wire import WireFormat


class Renderer(Protocol):
    """Renders the answer to one request over HTTP."""

    @property
    def wire(self) -> WireFormat:
        """Form of errors in the answer's stream."""

    async def body(self) -> bytes:
        """The response of a job that has been collected."""

    def events(self) -> AsyncGenerator[bytes]:
        """Run the job; yields the server-sent events of its choices, each as it comes.

        Raises:
            ServiceError: the generation failed.
        """

    def end(self) -> bytes:
        """The last events of a stream whose choices are finished."""
