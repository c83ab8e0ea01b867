"""From text to the answers of APIs that have one choice, whole and as streams (`engine.api.answers`)."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing

from actors.ingress.job import Answer, Job
from actors.ingress.renderer import Renderer
from actors.ingress.rendering import Pieces, Rendering, stream_of
from actors.ingress.stored_responses import StoredResponses
from engine.api.answers import AnswerContext, AnswerWriter
from engine.api.anthropic.answers import MessageWriter
from engine.api.assembler import Piece
from engine.api.openai_responses.answers import ResponseWriter
from engine.api.responses import Choice, Json
from engine.api.spec import Api, GenerationSpec
from engine.api.wire import WireFormat


class AnswerRenderer:
    """Renders one job with a writer of its API. `pieces` runs the choice, `choice_of` describes its end, before which
    `on_end` is awaited."""

    def __init__(
        self,
        job: Job,
        writer: AnswerWriter,
        pieces: Pieces,
        choice_of: Callable[[GenerationSpec, Answer], Choice],
        on_end: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        [self._answer] = job.answers
        self._job = job
        self._writer = writer
        self._pieces = pieces
        self._choice_of = choice_of
        self._on_end = on_end

    @property
    def wire(self) -> WireFormat:
        """Form of errors in the answer's stream."""
        return self._writer.wire

    async def body(self) -> bytes:
        """The response of a job that has been collected."""
        if self._on_end is not None:
            await self._on_end()
        return self._writer.body(self._choice(), self._job.usage())

    async def events(self) -> AsyncGenerator[bytes]:
        """Run the job; yields its events but the last. Errors as `pieces`."""
        answer, has_logprobs = self._answer, self._job.spec.sampling.logprobs is not None

        def opening() -> bytes:
            return self._writer.first(answer.usage())

        def event(piece: Piece) -> bytes:
            if has_logprobs:
                answer.logprobs += piece.logprobs
            return self._writer.piece(piece)

        async with aclosing(stream_of(self._job, answer, self._pieces(answer), opening=opening, event=event)) as stream:
            async for data in stream:
                yield data

        if self._on_end is not None:
            await self._on_end()

    def end(self) -> bytes:
        """The last events of a stream whose choice is finished."""
        return self._writer.end(self._choice(), self._job.usage())

    def _choice(self) -> Choice:
        return self._choice_of(self._job.spec, self._answer)


def renderers(
    rendering: Rendering, pieces: Pieces, responses: StoredResponses
) -> Mapping[Api, Callable[[Job], Renderer]]:
    """The renderer of a job, by the API of its request."""

    def of_message(job: Job) -> Renderer:
        return AnswerRenderer(job, MessageWriter(_context_of(job, rendering)), pieces, rendering.choice)

    def of_response(job: Job) -> Renderer:
        writer = ResponseWriter(_context_of(job, rendering))

        async def keep() -> None:
            await _keep(job, writer, rendering, responses)

        return AnswerRenderer(job, writer, pieces, rendering.choice, on_end=keep)

    return {"openai": rendering.of, "messages": of_message, "responses": of_response}


def _context_of(job: Job, rendering: Rendering) -> AnswerContext:
    render = rendering.logprobs_renderer(job.spec)

    def logprobs(piece: Piece) -> Json:
        assert render is not None
        return render(piece.token_ids, piece.logprobs)

    return AnswerContext(
        job.head,
        job.spec,
        rendering.bytes_of,
        job.marked_tokens,
        logprobs=None if render is None else logprobs,
        message=job.answers[0].message,
    )


async def _keep(job: Job, writer: ResponseWriter, rendering: Rendering, responses: StoredResponses) -> None:
    """Store the response of a finished job if its request asks for it, and note in the answer whether it is stored."""
    assert job.spec.turn is not None
    if not job.spec.turn.is_stored:
        return
    [answer] = job.answers
    answer.message_id = job.head.id
    response = writer.response(rendering.choice(job.spec, answer), job.usage())
    if not await responses.keep(job, response):
        answer.message_id = None
