"""A running server's Serve handle, with types."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from raydix.engine.api.batches import LineAnswer, failed_answer
from raydix.engine.api.embeddings import EmbedRequest, EmbedResponse
from raydix.engine.api.generate import GenerateChunk, GenerateRequest, GenerateResponse
from raydix.engine.batches.offline import BatchFiles, BatchSummary, run_batch
from raydix.engine.core.batches.batch_run import Progress
from raydix.engine.core.errors import RaydixError, ServiceError

CONCURRENCY = 32  # running lines of a batch at a server with other clients
# Beginnings of the lines, by logger, in which Ray tells that a program has connected, and by which objects.
RAYS_NOTES = {
    "ray._private.worker": ("Connecting to existing Ray cluster", "Connected to Ray cluster"),
    "ray.serve": ("Started <ray.serve.",),
}


class Client:
    """Generates with a running server. Synchronous methods are for ordinary programs, the others for event loops.

    Every method raises the server's errors: RequestError for an invalid request, ServiceError for a failure.
    """

    def __init__(self, handle: Any) -> None:
        """`handle` is Serve's, of the application."""
        self._handle = handle
        self._streaming = handle.options(stream=True)

    def generate(self, request: GenerateRequest) -> GenerateResponse:
        """The whole answer."""
        response: GenerateResponse = self._handle.generate.remote(request).result()
        return response

    def stream(self, request: GenerateRequest) -> Iterator[GenerateChunk]:
        """Yield the answer's pieces as they are generated."""
        yield from self._streaming.stream.remote(request)

    async def generate_async(self, request: GenerateRequest) -> GenerateResponse:
        """The whole answer, in an event loop. Cancelling ends the request."""
        response: GenerateResponse = await self._handle.generate.remote(request)
        return response

    async def stream_async(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """The answer's pieces as they are generated, in an event loop. Closing the iterator ends the request."""
        async for chunk in self._streaming.stream.remote(request):
            yield chunk

    def embed(self, request: EmbedRequest) -> EmbedResponse:
        """A vector for each input of the request."""
        response: EmbedResponse = self._handle.embed.remote(request).result()
        return response

    async def embed_async(self, request: EmbedRequest) -> EmbedResponse:
        """A vector for each input of the request, in an event loop. Cancelling ends the request."""
        response: EmbedResponse = await self._handle.embed.remote(request)
        return response

    # Batches

    def batch(
        self,
        source: str | Path,
        output: str | Path,
        *,
        tenant: str | None = None,
        concurrency: int = CONCURRENCY,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> BatchSummary:
        """Run every line of a file of requests, in OpenAI's form for batches, and write the answers into another.

        Lines run behind the requests of the server's clients, `concurrency` at a time, lines with a common beginning
        one after the other. After an interruption the same call goes on; failed lines are in a file beside the output.
        `on_progress` is called several times a second.

        Raises:
            RequestError: the file is not valid, naming lines; or the output exists and is of another input.
            OSError: a file cannot be read or written.
        """
        return asyncio.run(
            self.batch_async(source, output, tenant=tenant, concurrency=concurrency, on_progress=on_progress)
        )

    async def batch_async(
        self,
        source: str | Path,
        output: str | Path,
        *,
        tenant: str | None = None,
        concurrency: int = CONCURRENCY,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> BatchSummary:
        """Answer a file of requests as `batch` does, in an event loop. After a cancellation the next call goes on."""
        return await run_batch(
            BatchFiles(Path(source), Path(output)),
            partial(self._answer_line, tenant),
            concurrency=concurrency,
            on_progress=on_progress,
        )

    async def _answer_line(self, tenant: str | None, url: str, body: bytes) -> LineAnswer:
        """Answer a line; a server out of reach is an answer, too, after which the line may be tried again."""
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        try:
            answer: LineAnswer = await self._handle.answer_line.remote(url, body, tenant)
        except RaydixError:
            raise
        except (RayError, RayServeException) as error:
            away = ServiceError(f"The server could not be reached: {type(error).__name__}.")
            return failed_answer(away, request_id="")
        return answer


class _WithoutNotes(logging.Filter):
    """Drops the lines of one logger that begin so; they would stand among what the program itself prints."""

    def __init__(self, beginnings: tuple[str, ...]) -> None:
        super().__init__()
        self._beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > logging.INFO or not record.getMessage().startswith(self._beginnings)


def _silence_notes() -> None:
    """Keep `RAYS_NOTES` out of this program's terminal; everything else that Ray logs stays."""
    for name, beginnings in RAYS_NOTES.items():
        logger = logging.getLogger(name)
        if not any(isinstance(each, _WithoutNotes) for each in logger.filters):
            logger.addFilter(_WithoutNotes(beginnings))


def connect(address: str | None = None, *, app_name: str = "raydix") -> Client:
    """Connect to the server that runs on a Ray cluster.

    `address` is the cluster's, as `raydix serve` prints it; None: the cluster that this program is connected to, else
    the one on this machine. Where several run there, give the address: Ray would take one of them.

    Raises:
        ConnectionError: there is no such cluster.
        ray.serve.exceptions.RayServeException: no application of this name runs there.
    """
    import ray
    from ray import serve

    _silence_notes()
    if not ray.is_initialized():
        ray.init(address=address or "auto", log_to_driver=False)
    return Client(serve.get_app_handle(app_name))
