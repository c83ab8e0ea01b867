"""Renders text as the answers of APIs that have one choice, whole and as streams (`raydix.engine.api.answers`)."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing

from raydix.engine.api.answers import AnswerContext, AnswerWriter
from raydix.engine.api.anthropic.answers import MessageWriter
from raydix.engine.api.assembler import Piece
from raydix.engine.api.openai_responses.answers import ResponseWriter
from raydix.engine.api.responses import Choice, Json, TokenUsage
from raydix.engine.api.slices import whole
from raydix.engine.api.spec import Api
from raydix.engine.api.wire import WireFormat
from raydix.engine.serving.job import Job
from raydix.engine.serving.kept_conversations import KeptConversations
from raydix.engine.serving.rendering import Body, Pieces, Renderer, Rendering, is_large, stream_of
from raydix.engine.serving.stored_responses import StoredResponses


class AnswerRenderer:
    """Renders one job with a writer of its API. `pieces` runs the choice, `rendering` describes its end, before which
    `on_end` is awaited."""

    def __init__(
        self,
        job: Job,
        writer: AnswerWriter,
        pieces: Pieces,
        rendering: Rendering,
        on_end: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        [self._answer] = job.answers
        self._job = job
        self._writer = writer
        self._pieces = pieces
        self._rendering = rendering
        self._on_end = on_end

    @property
    def wire(self) -> WireFormat:
        """Form of errors in the answer's stream."""
        return self._writer.wire

    async def body(self) -> Body:
        """The response of a job that has been collected."""
        if self._on_end is not None:
            await self._on_end()
        if is_large([self._job]):
            return self._rendering.thread.slices(self._ending(self._writer.body))
        return b"".join(self._ending(self._writer.body))

    async def events(self) -> AsyncGenerator[bytes]:
        """Run the job; yields its events but the last. Errors as `pieces`."""
        answer, has_logprobs = self._answer, self._job.spec.sampling.logprobs is not None

        def opening() -> bytes:
            return self._writer.first(answer.usage())

        def event(piece: Piece) -> bytes:
            if has_logprobs:
                answer.logprobs += piece.logprobs
            return self._writer.piece(piece)

        events = stream_of(
            self._rendering.thread, self._job, answer, self._pieces(answer), opening=opening, event=event
        )
        async with aclosing(events) as stream:
            async for data in stream:
                yield data

        if self._on_end is not None:
            await self._on_end()

    async def end(self) -> AsyncGenerator[bytes]:
        """The last events of a stream whose choice is finished."""
        events = self._ending(self._writer.end)
        if is_large([self._job]):
            async for data in self._rendering.thread.slices(events):
                yield data
        else:
            yield b"".join(events)

    def _ending(self, write: Callable[[Choice, TokenUsage], Iterator[bytes]]) -> Iterator[bytes]:
        """What a method of the writer makes of the finished choice; nothing is done before the first slice is asked
        for."""
        yield from write(self._rendering.choice(self._job.spec, self._answer), self._job.usage())


def renderers(
    rendering: Rendering, pieces: Pieces, responses: StoredResponses, conversations: KeptConversations
) -> Mapping[Api, Callable[[Job], Renderer]]:
    def of_message(job: Job) -> Renderer:
        return AnswerRenderer(job, MessageWriter(_context_of(job, rendering)), pieces, rendering)

    def of_response(job: Job) -> Renderer:
        writer = ResponseWriter(_context_of(job, rendering))

        async def keep() -> None:
            await _keep(job, writer, rendering, responses, conversations)

        return AnswerRenderer(job, writer, pieces, rendering, on_end=keep)

    return {"openai": rendering.of, "messages": of_message, "responses": of_response}


def _context_of(job: Job, rendering: Rendering) -> AnswerContext:
    render = rendering.logprobs_renderer(job.spec, slices=False)

    def logprobs(piece: Piece) -> Json:
        assert render is not None
        return render(piece.token_ids, piece.logprobs)

    return AnswerContext(
        head=job.head,
        spec=job.spec,
        token_bytes=rendering.bytes_of,
        marked_tokens=job.marked_tokens,
        diagnosis=None if job.diagnosis is None else job.diagnosis.cache_miss,
        edits=job.edits,
        summary=job.summary,
        num_had_events=job.num_had_events,
        logprobs=None if render is None else logprobs,
        message=job.answers[0].message,
    )


async def _keep(
    job: Job, writer: ResponseWriter, rendering: Rendering, responses: StoredResponses, conversations: KeptConversations
) -> None:
    """Store the response of a finished job, and add it to its conversation, as its request asks; the answer tells
    whether that was done."""
    [answer], turn = job.answers, job.spec.turn
    assert turn is not None
    if job.is_repeated:
        answer.message_id = job.head.id
        return

    # Before the response is kept: one that has ended is not generated again if this process dies in between. One in the
    # background that is generated twice is added once; one that is cancelled in this very moment may stay there.
    if turn.conversation is not None:
        output = writer.output(rendering.choice(job.spec, answer))
        writer.is_in_conversation = await conversations.add(job, output)
    if not turn.is_stored:
        return
    answer.message_id = job.head.id

    def response() -> bytes:
        return whole(writer.response(rendering.choice(job.spec, answer), job.usage()))

    text = await rendering.thread.run(response) if is_large([job]) else response()
    if not await responses.keep(job, text):
        answer.message_id = None
