"""The front: OpenAI's HTTP API and the Python handle, each turned into generations for the dispatcher.

A request becomes one `GenerationSpec`, its prompts become token ids, and each choice of each prompt becomes one
generation. What comes back is assembled into text and rendered: as a whole, as server-sent events, or as the handle's
typed chunks.
"""

import asyncio
import hashlib
import logging
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from ray import serve
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from actors.dispatcher import Dispatcher, Generation, ModelFacts
from actors.http import (
    ClientGoneError,
    EventStreamResponse,
    error_response,
    json_response,
    read_body,
    while_connected,
)
from actors.metrics import IngressMetrics
from configs.schema import Config
from engine.api.assembler import ChoiceAssembler, Piece
from engine.api.generate import GenerateChunk, GenerateRequest, GenerateResponse, as_generate_request
from engine.api.logprobs import CompletionLogprobs, chat_logprobs
from engine.api.requests import parse_chat, parse_completion
from engine.api.responses import (
    Choice,
    Json,
    ResponseHead,
    Usage,
    model_body,
    model_object,
    models_body,
    response_body,
    response_id,
    total_usage,
    version_body,
)
from engine.api.spec import GenerationSpec, Prompt, require_token_ids, sampling_params
from engine.api.stream import DONE, ChunkWriter, usage_event
from engine.core.detokenizer import ByteDetokenizer, Detokenizer, PrefixDetokenizer
from engine.core.errors import ModelNotFoundError, NotFoundError, RaydixError, RequestError, ServiceError
from engine.core.types import FinishReason, TokenLogprobs
from engine.model.build import DTYPES, kv_fingerprint, model_len
from engine.model.config import ModelConfig
from engine.model.sources import model_name, resolve_model
from engine.model.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

LONG_TEXT = 20_000
"""Characters from which on a prompt is tokenized beside the event loop."""

app = FastAPI(title="raydix", version=version("raydix"), openapi_url=None)


@dataclass(slots=True, eq=False)
class _Answer:
    """One choice under way."""

    generation: Generation
    assembler: ChoiceAssembler
    index: int
    first_token_at: float | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    finish: FinishReason | None = None


@dataclass(slots=True, eq=False)
class _Job:
    """One request under way."""

    request_id: str
    spec: GenerationSpec
    head: ResponseHead
    answers: list[_Answer]
    arrived_at: float

    def usage(self) -> Usage:
        """Prompt tokens once per prompt, generated tokens of every choice."""
        n = self.spec.n
        return total_usage(
            [
                Usage(
                    len(first.generation.prompt),
                    sum(len(answer.token_ids) for answer in self.answers[start : start + n]),
                    min(first.generation.cached_tokens or 0, len(first.generation.prompt)),
                )
                for start in range(0, len(self.answers), n)
                for first in [self.answers[start]]
            ]
        )


@serve.ingress(app)
class Ingress:
    """One replica of the front. The hosts are arguments so that Serve deploys them with it."""

    async def __init__(self, config: Mapping[str, Any], *hosts: object) -> None:  # type: ignore[misc]
        self._config = Config.model_validate(config)
        context = serve.get_replica_context()
        model, cache = self._config.model, self._config.cache
        folder = await asyncio.to_thread(resolve_model, model.source)
        self._model_config = ModelConfig.from_folder(folder)
        self._max_model_len = model_len(self._model_config, model.max_model_len)
        self._model_name = model.name or model_name(model.source)
        self._created = int(time.time())
        self._tokenizer = await asyncio.to_thread(Tokenizer, folder)
        self._token_bytes = self._tokenizer.token_bytes()
        self._named_bytes = self._tokenizer.token_bytes(skip_special_tokens=False)
        self._metrics = IngressMetrics()
        self._dispatcher = Dispatcher(
            f"ingress-{context.replica_id.unique_id}-{secrets.token_hex(4)}",
            context.app_name,
            ModelFacts(
                kv_fingerprint(folder, DTYPES[model.dtype], cache.block_size), cache.block_size, cache.await_timeout_s
            ),
            self._config.ingress.max_queued_requests,
            self._metrics.failed_over,
        )
        self._dispatcher.start()

    # HTTP

    @app.post("/v1/completions")
    async def completions(self, request: Request) -> Response:
        body = await read_body(request, self._config.ingress.max_body_bytes)
        return await self._respond(request, parse_completion(body))

    @app.post("/v1/chat/completions")
    async def chat_completions(self, request: Request) -> Response:
        body = await read_body(request, self._config.ingress.max_body_bytes)
        return await self._respond(request, parse_chat(body))

    @app.get("/v1/models")
    async def models(self) -> Response:
        return json_response(models_body([self._model_object()]))

    @app.get("/v1/models/{name:path}")
    async def model(self, name: str) -> Response:
        self._check_model(name)
        return json_response(model_body(self._model_object()))

    @app.get("/health")
    async def health(self) -> Response:
        """200 only when a request could be served."""
        workers = await self._dispatcher.workers()
        if not workers:
            raise ServiceError("no worker is ready", retry_after_s=5)
        return json_response(b'{"status":"ok"}')

    @app.get("/version")
    async def show_version(self) -> Response:
        return json_response(version_body(app.version))

    # Python handle

    async def generate(self, request: GenerateRequest | Mapping[str, object]) -> GenerateResponse:
        """Answer one request as a whole.

        Raises:
            RequestError: the request is not valid; names the field.
            ServiceError: it could not be served now.
        """
        job = await self._job(as_generate_request(request).spec())
        try:
            await self._collect(job)
        finally:
            self._log(job)
        answer = job.answers[0]
        assert answer.finish is not None
        return GenerateResponse(
            request_id=job.request_id,
            text="".join(answer.text),
            token_ids=tuple(answer.token_ids),
            logprobs=tuple(answer.logprobs) if job.spec.logprobs is not None else None,
            prompt_token_ids=answer.generation.prompt if job.spec.return_token_ids else None,
            finish_reason=answer.finish,
            usage=job.usage(),
        )

    async def stream(self, request: GenerateRequest | Mapping[str, object]) -> AsyncIterator[GenerateChunk]:
        """Answer one request piece by piece; errors as `generate`."""
        job = await self._job(as_generate_request(request).spec(stream=True))
        prompt_token_ids = job.answers[0].generation.prompt if job.spec.return_token_ids else None
        try:
            async with aclosing(self._pieces(job.answers[0])) as pieces:
                async for piece in pieces:
                    yield GenerateChunk(
                        request_id=job.request_id,
                        text=piece.text,
                        token_ids=piece.token_ids,
                        logprobs=piece.logprobs if job.spec.logprobs is not None else None,
                        prompt_token_ids=prompt_token_ids,
                        finish_reason=piece.finish,
                        usage=job.usage() if piece.finish is not None else None,
                    )
                    prompt_token_ids = None
        finally:
            self._log(job)

    # Requests to generations

    async def _respond(self, request: Request, spec: GenerationSpec) -> Response:
        job = await self._job(spec)
        headers = {"x-request-id": job.request_id}
        if spec.stream:
            return EventStreamResponse(self._events(job), headers)
        try:
            await while_connected(request, self._collect(job))
        except ClientGoneError:
            return Response(status_code=499)
        finally:
            self._log(job)
        return json_response(response_body(job.head, self._choices(job), job.usage()), headers=headers)

    async def _job(self, spec: GenerationSpec) -> _Job:
        """Check the model, tokenize, and set up one generation per choice."""
        if spec.model is not None:
            self._check_model(spec.model)
        self._dispatcher.reserve(spec.num_choices)
        arrived_at = time.monotonic()
        prompts = [await self._token_ids(prompt, spec.prompt_param) for prompt in spec.prompts]
        if spec.kind == "chat":
            prompts = [await self._chat_token_ids(spec)]
        request_id = spec.request_id or uuid.uuid4().hex
        head = ResponseHead(spec.kind, response_id(spec.kind, request_id), int(time.time()), self._model_name)
        default_seed = secrets.randbits(62)
        answers = [
            self._answer(spec, request_id, prompts[index // spec.n], index, default_seed)
            for index in range(spec.n * len(prompts))
        ]
        return _Job(request_id, spec, head, answers, arrived_at)

    def _answer(
        self, spec: GenerationSpec, request_id: str, prompt: tuple[int, ...], index: int, default_seed: int
    ) -> _Answer:
        sampling = sampling_params(
            spec,
            prompt_len=len(prompt),
            max_model_len=self._max_model_len,
            eos_token_ids=self._tokenizer.eos_token_ids,
            vocab_size=self._model_config.vocab_size,
            default_seed=default_seed,
            choice=index,
        )
        salt = b"" if spec.cache_salt is None else hashlib.blake2b(spec.cache_salt.encode(), digest_size=16).digest()
        generation = Generation(
            f"{request_id}-{index}", prompt, sampling, salt=salt, session=spec.session_id or spec.user
        )
        return _Answer(generation, ChoiceAssembler(self._detokenizer(), spec.stop, spec.include_stop), index)

    async def _token_ids(self, prompt: Prompt, param: str) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            require_token_ids(prompt, self._model_config.vocab_size, param)
            return prompt
        encode = self._tokenizer.encode
        token_ids = await asyncio.to_thread(encode, prompt) if len(prompt) > LONG_TEXT else encode(prompt)
        if not token_ids:
            raise RequestError(f"'{param}' has no tokens.", param=param)
        return tuple(token_ids)

    async def _chat_token_ids(self, spec: GenerationSpec) -> tuple[int, ...]:
        length = sum(len(str(message.get("content", ""))) for message in spec.messages)
        render = self._tokenizer.apply_chat_template
        if length > LONG_TEXT:
            return tuple(await asyncio.to_thread(render, spec.messages))
        return tuple(render(spec.messages))

    def _detokenizer(self) -> Detokenizer:
        if self._token_bytes is not None:
            return ByteDetokenizer(self._token_bytes)
        return PrefixDetokenizer(self._tokenizer.decode)

    def _check_model(self, name: str) -> None:
        if name != self._model_name:
            raise ModelNotFoundError(
                f"The model '{name}' does not exist; this server has '{self._model_name}'.", param="model"
            )

    def _model_object(self) -> Json:
        return model_object(self._model_name, created=self._created, max_model_len=self._max_model_len)

    # Generations to responses

    async def _pieces(self, answer: _Answer) -> AsyncIterator[Piece]:
        """The choice's pieces; ends the generation when a stop string has ended the choice."""
        async with aclosing(self._dispatcher.generate(answer.generation)) as batches:
            async for events in batches:
                if answer.first_token_at is None:
                    answer.first_token_at = time.monotonic()
                piece = answer.assembler.push(events)
                answer.token_ids += piece.token_ids
                answer.finish = piece.finish
                yield piece
                if piece.finish is not None:
                    return

    async def _collect(self, job: _Job) -> None:
        async def collect(answer: _Answer) -> None:
            async with aclosing(self._pieces(answer)) as pieces:
                async for piece in pieces:
                    answer.text.append(piece.text)
                    answer.logprobs += piece.logprobs

        async with asyncio.TaskGroup() as group:
            for answer in job.answers:
                group.create_task(collect(answer))

    def _choices(self, job: _Job) -> list[Choice]:
        spec = job.spec
        choices = []
        for answer in job.answers:
            assert answer.finish is not None
            render = self._logprobs_renderer(spec)
            choices.append(
                Choice(
                    answer.index,
                    "".join(answer.text),
                    answer.finish,
                    render(answer.token_ids, answer.logprobs) if render is not None else None,
                    answer.token_ids if spec.return_token_ids else None,
                    answer.generation.prompt if spec.return_token_ids else None,
                )
            )
        return choices

    def _logprobs_renderer(self, spec: GenerationSpec) -> Any:
        """A function from token ids and log-probabilities to the response's object; None if none were asked for."""
        if spec.logprobs is None:
            return None
        if spec.kind == "chat":
            return lambda token_ids, logprobs: chat_logprobs(token_ids, logprobs, self._bytes_of)
        return CompletionLogprobs(self._bytes_of).add

    def _bytes_of(self, token_id: int) -> bytes:
        if self._named_bytes is not None:
            return self._named_bytes[token_id]
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()

    async def _events(self, job: _Job) -> AsyncIterator[bytes]:
        """The server-sent events of a streamed response."""
        try:
            if len(job.answers) == 1:
                async with aclosing(self._choice_events(job, job.answers[0])) as events:
                    async for data in events:
                        yield data
            else:
                async with aclosing(self._merged_events(job)) as events:
                    async for data in events:
                        yield data
            last = usage_event(job.head, job.usage()) if job.spec.include_usage else b""
            yield last + DONE
        finally:
            self._log(job)

    async def _choice_events(self, job: _Job, answer: _Answer) -> AsyncIterator[bytes]:
        spec = job.spec
        writer = ChunkWriter(job.head, answer.index, include_usage=spec.include_usage)
        render = self._logprobs_renderer(spec)
        is_plain = render is None and not spec.return_token_ids
        opening = writer.first(answer.generation.prompt if spec.return_token_ids else None)
        async with aclosing(self._pieces(answer)) as pieces:
            async for piece in pieces:
                if is_plain and piece.finish is None:
                    data = writer.text(piece.text) if piece.text else b""
                else:
                    write = writer.event if piece.finish is None else _finishing(writer, piece.finish)
                    data = write(
                        piece.text,
                        token_ids=piece.token_ids if spec.return_token_ids else None,
                        logprobs=render(piece.token_ids, piece.logprobs) if render is not None else None,
                    )
                if opening or data:
                    yield opening + data
                opening = b""

    async def _merged_events(self, job: _Job) -> AsyncIterator[bytes]:
        """The events of several choices, each as it comes."""
        queue: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue()

        async def pump(answer: _Answer) -> None:
            try:
                async with aclosing(self._choice_events(job, answer)) as events:
                    async for data in events:
                        queue.put_nowait(data)
                queue.put_nowait(None)
            except Exception as error:  # handed to the reader below
                queue.put_nowait(error)

        tasks = [asyncio.create_task(pump(answer)) for answer in job.answers]
        try:
            open_streams = len(tasks)
            while open_streams:
                data = await queue.get()
                if isinstance(data, BaseException):
                    raise data
                if data is None:
                    open_streams -= 1
                else:
                    yield data
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _log(self, job: _Job) -> None:
        """One line and one set of observations per request."""
        now = time.monotonic()
        finished = all(answer.finish is not None for answer in job.answers)
        outcome = str(job.answers[0].finish) if finished else "aborted"
        usage = job.usage()
        first = min((a.first_token_at for a in job.answers if a.first_token_at is not None), default=None)
        ttft_s = None if first is None else first - job.arrived_at
        tpot_s = None
        if first is not None and len(job.answers) == 1 and usage.completion_tokens > 1:
            tpot_s = (now - first) / (usage.completion_tokens - 1)
        hits = {"cache": usage.cached_tokens}
        self._metrics.finished(outcome, usage.prompt_tokens, usage.completion_tokens, hits, ttft_s, tpot_s)
        logger.info(
            "%s %s: %d prompt tokens (%d cached), %d generated, first after %s, %.3f s in all",
            job.request_id,
            outcome,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            "-" if ttft_s is None else f"{ttft_s:.3f} s",
            now - job.arrived_at,
        )


def _finishing(writer: ChunkWriter, reason: FinishReason) -> Any:
    def write(text: str, *, token_ids: Sequence[int] | None, logprobs: Json | None) -> bytes:
        return writer.finish(reason, text, token_ids=token_ids, logprobs=logprobs)

    return write


@app.exception_handler(RaydixError)
async def _raydix_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RaydixError)
    return error_response(error)


@app.exception_handler(HTTPException)
async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    wrapped = NotFoundError(f"{request.method} {request.url.path}: {error.detail}.")
    wrapped.status = error.status_code
    return error_response(wrapped)


@app.exception_handler(Exception)
async def _unexpected_error(_: Request, error: Exception) -> Response:
    logger.exception("unexpected error", exc_info=error)
    wrapped = ServiceError("An internal error occurred; it has been logged.")
    wrapped.status = 500
    return error_response(wrapped)
