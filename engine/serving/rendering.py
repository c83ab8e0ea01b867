"""Renders responses: OpenAI's completions, chats and embeddings, whole and as streams, and the Python handle's."""

import asyncio
import base64
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeAlias, TypeVar

import numpy as np

from raydix.engine.api.assembler import Piece
from raydix.engine.api.embeddings import EmbedResponse, embeddings_slices
from raydix.engine.api.generate import GenerateChunk, GenerateResponse, call_parts, reasoning_of, text_of, whole_calls
from raydix.engine.api.logprobs import (
    SMALL,
    CompletionLogprobsWriter,
    TokenBytes,
    TokenNames,
    chat_logprobs,
    num_listed,
    prompt_logprobs,
)
from raydix.engine.api.responses import Choice, Json, response_body, response_slices, total_usage
from raydix.engine.api.scoring import scores, scores_body
from raydix.engine.api.spec import EmbeddingUse, GenerationSpec
from raydix.engine.api.stream import DONE, ChunkWriter, usage_event
from raydix.engine.api.wire import OPENAI, WireFormat
from raydix.engine.core.types import TokenLogprobs
from raydix.engine.serving.job import Answer, Job

T = TypeVar("T")

SLICE_BYTES = 1 << 18  # bytes that a turn of an answer ends with
SLICE_PARTS = 512  # parts of the text after which a turn of an answer ends
LogprobsRenderer: TypeAlias = Callable[[Sequence[int], Sequence[TokenLogprobs | None]], Json]
Pieces: TypeAlias = Callable[[Answer], AsyncGenerator[Piece]]
Body: TypeAlias = bytes | AsyncGenerator[bytes]
"""A whole answer, or the slices of a large one, each made when the one before has been taken."""
Vector: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float32]]
"""An embedding. Vectors stay arrays until they are text: as Python's floats those of the largest request take four
times the memory."""


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


class RenderThread:
    """A thread beside the event loop in which the answers are rendered whose size clients choose; begun with its first
    work.

    The thread's work comes in slices that hold the interpreter's lock for some milliseconds at most, and the slices of
    all large answers take turns in the order in which they were asked for. So the event loop, which needs the lock for
    every token of every stream, waits for less than one slice, and a large answer waits for a slice of each other one.
    Small answers stay on the loop: a turn of the thread would take longer than rendering them.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "render")

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, done in the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def slices(self, parts: Iterator[bytes]) -> AsyncGenerator[bytes]:
        """Yield the text of some parts in slices, each made when the one before has been taken."""
        while data := await self.run(lambda: _next(parts)):
            yield data


def _next(parts: Iterator[bytes]) -> bytes:
    """The next slice; nothing at the end."""
    taken: list[bytes] = []
    num_bytes = 0
    for part in parts:
        taken.append(part)
        num_bytes += len(part)
        # Bounded by bytes, and by parts where these are short; never empty, as that stands for the end.
        if num_bytes >= SLICE_BYTES or (len(taken) == SLICE_PARTS and num_bytes):
            break
    return b"".join(taken)


def embedding_of(state: bytes, use: EmbeddingUse) -> Vector:
    """The embedding that a pooled hidden state (`TokenEvent.pooled`) stands for: the same values on every machine,
    since the squares are exact and their sum is rounded once."""
    values = np.frombuffer(state, "<f4")
    if not use.is_normalized:
        return values
    wide = values.astype(np.float64)
    length = math.sqrt(math.fsum((wide * wide).tolist())) or 1.0
    return (wide / length).astype("<f4")


def written_vector(vector: Vector, use: EmbeddingUse) -> object:
    """A vector as a response of `/v1/embeddings` has it. Numbers are written as Python writes the same values."""
    if use.encoding == "base64":
        return base64.b64encode(vector.tobytes()).decode()
    return vector.astype(np.float64)


@dataclass(frozen=True, slots=True)
class _JobRenderer:
    """`Rendering` of one job."""

    rendering: "Rendering"
    job: Job
    wire: WireFormat = OPENAI

    async def body(self) -> Body:
        return self.rendering.body(self.job)

    def events(self) -> AsyncGenerator[bytes]:
        return self.rendering.events(self.job)

    async def end(self) -> AsyncGenerator[bytes]:
        yield self.rendering.end_of_stream(self.job)


class Rendering:
    """Renders jobs. `pieces` runs a choice (`OutputProcessor.pieces`), `bytes_of` names a token."""

    def __init__(self, pieces: Pieces, bytes_of: TokenBytes, thread: RenderThread) -> None:
        self._pieces = pieces
        self._names = TokenNames(bytes_of)
        self.bytes_of = bytes_of
        self.thread = thread

    # Whole answers

    def body(self, job: Job) -> Body:
        """The HTTP response of a finished job."""
        # By its size alone: where the answer is made is no part of it, so the bytes are the same.
        if is_large([job]):
            return self.thread.slices(self._slices(job))
        if job.spec.has_inputs:
            return b"".join(self._slices(job))
        choices = [self.choice(job.spec, answer, index) for index, answer in enumerate(job.chosen())]
        return response_body(job.head, choices, job.usage())

    async def response(self, job: Job) -> GenerateResponse:
        """The Python handle's response of a finished job."""
        return (await self.responses(job))[0]

    async def responses(self, job: Job) -> list[GenerateResponse]:
        """Make a response for each choice of a finished job; the usage is the whole job's."""
        return await self.thread.run(partial(self._responses, job)) if is_large([job]) else self._responses(job)

    def _responses(self, job: Job) -> list[GenerateResponse]:
        return [self._response(job, answer) for answer in job.chosen()]

    def _response(self, job: Job, answer: Answer) -> GenerateResponse:
        spec = job.spec
        assert answer.finish is not None
        return GenerateResponse(
            request_id=job.request_id,
            text=answer.echo + answer.text if answer.message is None else answer.message.content,
            token_ids=tuple(answer.token_ids),
            logprobs=_of_handle(answer.logprobs) if spec.sampling.logprobs is not None else None,
            prompt_logprobs=_prompt_logprobs(spec, answer),
            prompt_token_ids=answer.generation.prompt if spec.form.return_token_ids else None,
            finish_reason=answer.finish,
            stop_reason=answer.stop_reason,
            usage=job.usage(),
            message_id=answer.message_id,
            reasoning=None if answer.message is None else answer.message.reasoning or None,
            tool_calls=whole_calls(answer.message) if answer.message is not None and spec.tools is not None else None,
        )

    def embeddings(self, job: Job) -> EmbedResponse:
        """The Python handle's response of a finished job of embeddings."""
        assert job.spec.embedding is not None
        vectors = tuple(tuple(embedding_of(state, job.spec.embedding).tolist()) for state in job.pooled())
        # Not validated: that would go through a million numbers in one hold of the interpreter's lock.
        return EmbedResponse.model_construct(request_id=job.request_id, embeddings=vectors, usage=job.usage())

    def _slices(self, job: Job) -> Iterator[bytes]:
        if (use := job.spec.embedding) is not None:
            yield from embeddings_slices(
                job.head, lambda: (written_vector(embedding_of(state, use), use) for state in job.pooled()), job.usage()
            )
        elif job.spec.scoring is not None:
            found = [scores(job.spec.scoring, answer.logprobs[0]) for answer in job.answers]
            yield scores_body(job.head, job.spec.scoring.form, found, job.usage())
        else:
            chosen = job.chosen()

            def choice_of(index: int) -> Choice:
                return self.choice(job.spec, chosen[index], index)

            yield from response_slices(job.head, len(chosen), choice_of, job.usage())

    def conversations_body(self, jobs: Sequence[Job]) -> Body:
        """The HTTP response of finished jobs with a conversation each: a choice for each. There is no one prompt whose
        token ids the response could have."""

        def choice_of(index: int) -> Choice:
            return replace(self.choice(jobs[index].spec, jobs[index].answers[0], index), prompt_token_ids=None)

        usage = total_usage([job.usage() for job in jobs])
        slices = response_slices(jobs[0].head, len(jobs), choice_of, usage)
        return self.thread.slices(slices) if is_large(jobs) else b"".join(slices)

    def choice(self, spec: GenerationSpec, answer: Answer, index: int = 0) -> Choice:
        assert answer.finish is not None
        prompt, num_of_prompt = answer.generation.prompt, spec.sampling.prompt_logprobs
        of_prompt = None
        if num_of_prompt is not None:
            shown = None if spec.all_prompt_logprobs else num_of_prompt
            of_prompt = prompt_logprobs(prompt, answer.prompt_logprobs(), shown, self.bytes_of, self._names)

        return Choice(
            index=index,
            text=answer.echo + answer.text,
            finish_reason=answer.finish,
            logprobs=self._logprobs(spec, answer),
            token_ids=answer.token_ids if spec.form.return_token_ids else None,
            prompt_token_ids=prompt if spec.form.return_token_ids else None,
            prompt_logprobs=of_prompt,
            stop_reason=answer.stop_reason,
            message_id=answer.message_id,
            message=answer.message,
        )

    def _logprobs(self, spec: GenerationSpec, answer: Answer) -> Json | None:
        """The log-probabilities of a whole answer, those of an echoed prompt before."""
        render = self.logprobs_renderer(spec)
        if render is None:
            return None
        if spec.echoes_prompt:
            token_ids = (*answer.generation.prompt, *answer.token_ids)
            return render(token_ids, [*answer.prompt_logprobs(), *answer.logprobs])
        return render(answer.token_ids, answer.logprobs)

    # Streams

    def of(self, job: Job) -> Renderer:
        """Renderer of one job over HTTP."""
        return _JobRenderer(self, job)

    def events(self, job: Job) -> AsyncGenerator[bytes]:
        """Run a job; yields the server-sent events of its choices, each as it comes. Errors as `pieces`."""
        return self._choice_events(job, job.answers[0]) if len(job.answers) == 1 else self._merged_events(job)

    def end_of_stream(self, job: Job) -> bytes:
        """The last events of a stream whose choices are finished."""
        return (usage_event(job.head, job.usage()) if job.spec.form.include_usage else b"") + DONE

    def chunk(self, job: Job, piece: Piece, *, is_first: bool) -> GenerateChunk:
        """A piece of the Python handle's answer."""
        spec, answer = job.spec, job.answers[0]
        return GenerateChunk(
            request_id=job.request_id,
            text=(answer.echo if is_first else "") + (piece.text if answer.message is None else text_of(piece.events)),
            reasoning=reasoning_of(piece.events),
            tool_calls=call_parts(piece.events, answer.message) if answer.message is not None and spec.tools else None,
            token_ids=piece.token_ids,
            logprobs=_of_handle(piece.logprobs) if spec.sampling.logprobs is not None else None,
            prompt_logprobs=_prompt_logprobs(spec, answer) if is_first else None,
            prompt_token_ids=answer.generation.prompt if is_first and spec.form.return_token_ids else None,
            finish_reason=piece.finish,
            stop_reason=piece.stop_reason,
            usage=job.usage() if piece.finish is not None else None,
            message_id=answer.message_id,
        )

    def _choice_events(self, job: Job, answer: Answer) -> AsyncGenerator[bytes]:
        spec = job.spec
        writer = ChunkWriter(job.head, answer.index, include_usage=spec.form.include_usage)
        render = self.logprobs_renderer(spec)
        has_text_alone = answer.message is None and render is None
        # Most streams: an event is a constant around the text, which spares a dictionary for each token.
        is_plain = has_text_alone and not (spec.form.return_token_ids or spec.form.continuous_usage)

        def opening() -> bytes:
            writer.usage = answer.usage().of_prompt if spec.form.continuous_usage else None
            return _opening(writer, spec, answer, render)

        def event(piece: Piece) -> bytes:
            writer.usage = answer.usage() if spec.form.continuous_usage else None
            if is_plain and piece.finish is None:
                return writer.text(piece.text) if piece.text else b""
            return _event(writer, spec, answer, piece, render)

        return stream_of(self.thread, job, answer, self._pieces(answer), opening=opening, event=event)

    async def _merged_events(self, job: Job) -> AsyncGenerator[bytes]:
        """Events of several choices, each as it comes."""
        queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()

        async def pump(answer: Answer) -> None:
            try:
                async with aclosing(self._choice_events(job, answer)) as events:
                    async for data in events:
                        queue.put_nowait(data)
                queue.put_nowait(None)
            except Exception as error:  # handed to the reader below
                queue.put_nowait(error)

        # A task for each choice, since none may wait for the others' tokens; the queue has their events as they come.
        tasks = [asyncio.create_task(pump(answer)) for answer in job.answers]
        try:
            open_streams = len(tasks)
            while open_streams:
                data = await queue.get()
                if isinstance(data, Exception):
                    raise data
                if data is None:
                    open_streams -= 1
                else:
                    yield data
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def logprobs_renderer(self, spec: GenerationSpec, *, slices: bool = True) -> LogprobsRenderer | None:
        """A function from token ids and log-probabilities to the response's object; None if none were asked for.
        `slices`: parts of a large object may be `Sliced`."""
        names = self._names if slices else None
        num_top = spec.sampling.logprobs
        if num_top is None:
            return None
        # All that the worker has sent is shown: so many were asked for.
        if spec.all_logprobs or spec.sampling.logprob_token_ids:
            num_top = None
        if spec.kind == "chat":
            return partial(
                chat_logprobs,
                token_bytes=self.bytes_of,
                num_top=num_top,
                names_ids=spec.form.tokens_as_ids,
                names=names,
            )
        return CompletionLogprobsWriter(self.bytes_of, num_top, names_ids=spec.form.tokens_as_ids, names=names).add


def is_large(jobs: Sequence[Job]) -> bool:
    """True if rendering these finished jobs takes long enough to be felt by others' streams: counted as if it had so
    many log-probabilities."""
    num_listed_all = 0
    for job in jobs:
        for answer in job.answers:
            num_listed_all += num_listed(answer.logprobs) + num_listed(answer.generation.prompt_logprobs)
            if answer.generation.pooled is not None:
                num_listed_all += len(answer.generation.pooled) // 16
            if job.spec.form.return_token_ids:
                num_listed_all += (len(answer.generation.prompt) + len(answer.token_ids)) // 8
            num_listed_all += len(answer.echo) // 64 + len(answer.pieces) // 16
    return num_listed_all > SMALL


async def stream_of(
    thread: RenderThread,
    job: Job,
    answer: Answer,
    pieces: AsyncGenerator[Piece],
    *,
    opening: Callable[[], bytes],
    event: Callable[[Piece], bytes],
) -> AsyncGenerator[bytes]:
    """Run a choice; yields the events of each piece, before those of the first the `opening`, with ids where the stream
    has any. Errors as `pieces`. What would take long is rendered in the thread."""
    is_first = True
    async with aclosing(pieces):
        async for piece in pieces:
            data = b""
            if is_first:
                is_first = False
                data = await thread.run(opening) if _has_large_opening(job.spec, answer) else opening()
            if piece.logprobs and num_listed(piece.logprobs) > SMALL:
                data += await thread.run(partial(event, piece))
            else:
                data += event(piece)
            if job.event_ids is not None:
                data = job.event_ids.mark(answer.index, piece.token_ids, data)
            if data:
                yield data


def _has_large_opening(spec: GenerationSpec, answer: Answer) -> bool:
    """True if the prompt, which the opening repeats, has much to be rendered."""
    if not (spec.form.echo or spec.form.return_token_ids):
        return False
    return len(answer.generation.prompt) // 8 + num_listed(answer.generation.prompt_logprobs) > SMALL


def _opening(writer: ChunkWriter, spec: GenerationSpec, answer: Answer, render: LogprobsRenderer | None) -> bytes:
    """Events before those of the first token."""
    opening = writer.first(answer.generation.prompt if spec.form.return_token_ids else None)
    if not (answer.echo or spec.echoes_prompt):
        return opening
    logprobs = None
    if render is not None and spec.echoes_prompt:
        logprobs = render(answer.generation.prompt, answer.prompt_logprobs())
    return opening + writer.event(answer.echo, logprobs=logprobs)


def _event(
    writer: ChunkWriter, spec: GenerationSpec, answer: Answer, piece: Piece, render: LogprobsRenderer | None
) -> bytes:
    """Events of a piece that has more than text, or that is the last."""
    token_ids = piece.token_ids if spec.form.return_token_ids else None
    logprobs = None if render is None else render(piece.token_ids, piece.logprobs)
    text, parts = piece.text, b""
    if answer.message is not None:
        text = ""
        if piece.events or piece.finish is None:
            parts = writer.parts(piece.events, answer.message, token_ids=token_ids, logprobs=logprobs)
            token_ids, logprobs = None if token_ids is None else (), None
        if piece.finish is None:
            return parts
    elif piece.finish is None:
        return writer.event(text, token_ids=token_ids, logprobs=logprobs)
    return parts + writer.finish(
        piece.finish,
        text,
        token_ids=token_ids,
        logprobs=logprobs,
        stop_reason=piece.stop_reason,
        message_id=answer.message_id,
    )


def _of_handle(logprobs: Sequence[TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities as the Python handle returns them: as tuples."""
    return tuple(map(_as_tuples, logprobs))


def _as_tuples(at: TokenLogprobs) -> TokenLogprobs:
    if isinstance(at.top_ids, tuple):
        return at
    return at._replace(top_ids=tuple(at.top_ids), top_logprobs=tuple(at.top_logprobs))


def _prompt_logprobs(spec: GenerationSpec, answer: Answer) -> tuple[TokenLogprobs | None, ...] | None:
    """Log-probabilities of the prompt, as the Python handle returns them."""
    if spec.sampling.prompt_logprobs is None:
        return None
    return tuple(None if at is None else _as_tuples(at) for at in answer.prompt_logprobs())
