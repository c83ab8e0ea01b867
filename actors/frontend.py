"""From requests to generations and back to text: what the HTTP routes and the Python handle share.

A request becomes one `GenerationSpec`, its prompts become token ids, and each choice of each prompt becomes one
generation for the dispatcher. What comes back is assembled into text and rendered: as a whole or as server-sent events.
"""

import asyncio
import logging
import re
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from actors.cache_control import CacheControl
from actors.dispatcher import Dispatcher, ModelFacts
from actors.manager_link import ManagerLink
from actors.metrics import IngressMetrics
from actors.transcripts import Conversation, Transcripts
from configs.schema import Config
from configs.settings import tenants
from engine.api.assembler import ChoiceAssembler, Piece
from engine.api.generate import REQUEST_ID_PATTERN
from engine.api.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from engine.api.responses import Choice, Json, ResponseHead, Usage, model_object, response_id, total_usage
from engine.api.spec import GenerationSpec, Prompt, require_token_ids, sampling_params
from engine.api.stream import DONE, ChunkWriter, usage_event
from engine.core.detokenizer import ByteDetokenizer, Detokenizer, PrefixDetokenizer
from engine.core.errors import ModelNotFoundError, RequestError, ServiceError, StartupError
from engine.core.generation import Generation
from engine.core.hashing import root_hash
from engine.core.room import Room
from engine.core.tenants import Tenant, num_public_tokens, salt_of
from engine.core.transcripts import EncodedText
from engine.core.types import CacheWish, FinishReason, TokenLogprobs
from engine.model.build import DTYPES, kv_fingerprint, model_len
from engine.model.config import ModelConfig
from engine.model.sources import model_name, resolve_model
from engine.model.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

LogprobsRenderer = Callable[[Sequence[int], Sequence[TokenLogprobs | None]], Json]

LONG_TEXT = 20_000
"""Characters from which on a request's prompts are tokenized beside the event loop."""


@dataclass(slots=True, eq=False)
class Answer:
    """One choice under way."""

    generation: Generation
    assembler: ChoiceAssembler
    index: int
    echo: str = ""
    """The prompt's text, where the answer is to begin with it."""
    first_token_at: float | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    finish: FinishReason | None = None
    conversation: Conversation | None = None
    """What the answer continues, where it is to be remembered."""

    def prompt_logprobs(self) -> list[TokenLogprobs | None]:
        """One for each token of the prompt; complete when the first piece has come."""
        return [None, *self.generation.prompt_logprobs]


@dataclass(slots=True, eq=False)
class Job:
    """One request under way."""

    request_id: str
    spec: GenerationSpec
    tenant: Tenant
    head: ResponseHead
    answers: list[Answer]
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


class Frontend:
    """The model's tokenizer and the dispatcher behind one ingress replica."""

    def __init__(self, config: Config, app_name: str, replica_id: str) -> None:
        model, cache = config.model, config.cache
        folder = resolve_model(model.source)
        self._model_config = ModelConfig.from_folder(folder)
        self._max_model_len = model_len(self._model_config, model.max_model_len)
        self._model_name = model.name or model_name(model.source)
        self._created = int(time.time())
        self._tokenizer = Tokenizer(folder)
        self._token_bytes = self._tokenizer.token_bytes()
        self._named_bytes = self._tokenizer.token_bytes(skip_special_tokens=False)
        self._public_prefixes = _public_prefixes(self._tokenizer, cache.public_prefixes)
        self.tenants = tenants(config)
        self._metrics = IngressMetrics()
        dtype = DTYPES[model.dtype]
        self._root = root_hash(
            kv_fingerprint(model.source, folder, dtype, model.quantization, model.deterministic, cache.block_size)
        )
        manager = ManagerLink(app_name)
        self._transcripts = Transcripts(manager, self._metrics.looked_up) if cache.transcript_mib else None
        self.cache = CacheControl(manager, self._tokenizer.decode)
        self._room = Room(config.ingress.max_queued_requests)
        self._dispatcher = Dispatcher(
            f"{replica_id}-{secrets.token_hex(4)}",
            app_name,
            manager,
            ModelFacts(self._root, cache.block_size, cache.await_timeout_s),
            self._room,
            self._metrics.failed_over,
        )

    def start(self) -> None:
        """Begin to follow the workers; needs a running event loop."""
        self._dispatcher.start()

    async def check_ready(self) -> None:
        """Raises ServiceError unless a request could be served now."""
        if not await self._dispatcher.workers():
            raise ServiceError("no worker is ready", retry_after_s=5)

    # Requests to generations

    async def job(self, spec: GenerationSpec, tenant: Tenant, request_id: str | None = None) -> Job:
        """Check the model, tokenize, and set up one generation per choice.

        `tenant` is whose request it is. `request_id` is the name that others gave it; the job goes by it if it can. It
        need not be unique.
        """
        if spec.model is not None:
            self.check_model(spec.model)
        arrived_at = time.monotonic()
        if spec.request_id is not None:
            request_id = spec.request_id
        elif request_id is None or not re.fullmatch(REQUEST_ID_PATTERN, request_id):
            request_id = uuid.uuid4().hex
        head = ResponseHead(spec.kind, response_id(spec.kind, request_id), int(time.time()), self._model_name)
        with self._room.reserve(spec.num_choices, tenant):
            answers = await self._answers(spec, tenant, f"{request_id}-{secrets.token_hex(4)}")
            self._room.expect(answer.generation for answer in answers)
        return Job(request_id, spec, tenant, head, answers, arrived_at)

    async def _answers(self, spec: GenerationSpec, tenant: Tenant, unique_id: str) -> list[Answer]:
        """One for each choice of each prompt."""
        prompts = await self._token_ids(spec)
        conversation = None
        if spec.kind == "chat":
            chat = await self._encode_chat(spec)
            conversation = await self._conversation(spec, tenant, chat)
            prompts = [tuple(chat.token_ids) if conversation is None else conversation.token_ids]
        default_seed = secrets.randbits(62)
        answers = [
            self._answer(spec, tenant, unique_id, prompts[index // spec.n], index, default_seed)
            for index in range(spec.n * len(prompts))
        ]
        for answer in answers:
            answer.conversation = conversation
        return answers

    def _answer(
        self,
        spec: GenerationSpec,
        tenant: Tenant,
        unique_id: str,
        prompt: tuple[int, ...],
        index: int,
        default_seed: int,
    ) -> Answer:
        sampling = sampling_params(
            spec,
            prompt_len=len(prompt),
            max_model_len=self._max_model_len,
            eos_token_ids=self._tokenizer.eos_token_ids,
            vocab_size=self._model_config.vocab_size,
            default_seed=default_seed,
            choice=index,
        )
        salt = salt_of(tenant.name, spec.cache_salt, num_public_tokens(prompt, self._public_prefixes))
        cache = CacheWish(tenant.name, spec.cache_priority, spec.cache_ttl_s)
        generation = Generation(
            f"{unique_id}-{index}", prompt, sampling, salt, cache, session=spec.session_id or spec.user
        )
        assembler = ChoiceAssembler(self._detokenizer(), spec.stop, spec.include_stop, spec.min_tokens)
        return Answer(generation, assembler, index, self._echo(spec.prompts[index // spec.n]) if spec.echo else "")

    def _echo(self, prompt: Prompt) -> str:
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt, skip_special_tokens=False)

    async def _token_ids(self, spec: GenerationSpec) -> list[tuple[int, ...]]:
        """Of each prompt of a completion."""

        def encode() -> list[tuple[int, ...]]:
            return [self._encode(prompt, spec.prompt_param) for prompt in spec.prompts]

        length = sum(len(prompt) for prompt in spec.prompts if isinstance(prompt, str))
        return await asyncio.to_thread(encode) if length > LONG_TEXT else encode()

    def _encode(self, prompt: Prompt, param: str) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            require_token_ids(prompt, self._model_config.vocab_size, param)
            return prompt
        token_ids = self._tokenizer.encode(prompt)
        if not token_ids:
            raise RequestError(f"'{param}' has no tokens.", param=param)
        return tuple(token_ids)

    async def _encode_chat(self, spec: GenerationSpec) -> EncodedText:
        length = sum(len(str(message.get("content", ""))) for message in spec.messages)
        encode = self._tokenizer.encode_chat
        return await asyncio.to_thread(encode, spec.messages) if length > LONG_TEXT else encode(spec.messages)

    async def _conversation(self, spec: GenerationSpec, tenant: Tenant, chat: EncodedText) -> Conversation | None:
        """What a chat continues; asks for what it was if it has answers already."""
        if self._transcripts is None:
            return None
        root = self._root + salt_of(tenant.name, spec.cache_salt).private
        answered = any(message["role"] == "assistant" for message in spec.messages)
        longest = self._max_model_len - (spec.max_tokens or 1)
        return await self._transcripts.resume(chat, root, ask=answered, max_tokens=longest)

    def _detokenizer(self) -> Detokenizer:
        if self._token_bytes is not None:
            return ByteDetokenizer(self._token_bytes)
        return PrefixDetokenizer(self._tokenizer.decode)

    def check_model(self, name: str) -> None:
        if name != self._model_name:
            raise ModelNotFoundError(
                f"The model '{name}' does not exist; this server has '{self._model_name}'.", param="model"
            )

    def model_object(self) -> Json:
        return model_object(self._model_name, created=self._created, max_model_len=self._max_model_len)

    # Generations to responses

    async def pieces(self, answer: Answer) -> AsyncGenerator[Piece]:
        """The choice's pieces; ends the generation when a stop string has ended the choice."""
        async with aclosing(self._dispatcher.generate(answer.generation)) as batches:
            async for events in batches:
                if answer.first_token_at is None:
                    answer.first_token_at = time.monotonic()
                piece = answer.assembler.push(events)
                answer.token_ids += piece.token_ids
                answer.text.append(piece.text)
                answer.finish = piece.finish
                answer.generation.is_stopped = piece.finish is FinishReason.STOP
                yield piece
                if piece.finish is not None:
                    self._remember(answer)
                    return

    def _remember(self, answer: Answer) -> None:
        """Record a chat's answer under its text, if the text tells which ids it stands for."""
        if self._transcripts is not None and answer.conversation is not None:
            text = "".join(answer.text)
            shown = self._tokenizer.shown(answer.token_ids, text)
            if shown is not None:
                self._transcripts.record(answer.conversation, text, shown)

    async def collect(self, job: Job) -> None:
        async def collect(answer: Answer) -> None:
            async with aclosing(self.pieces(answer)) as pieces:
                async for piece in pieces:
                    answer.logprobs += piece.logprobs

        try:
            async with asyncio.TaskGroup() as group:
                for answer in job.answers:
                    group.create_task(collect(answer))
        except ExceptionGroup as errors:  # the first to fail has ended the others
            raise errors.exceptions[0] from None

    def choices(self, job: Job) -> list[Choice]:
        spec = job.spec
        choices = []
        for answer in job.answers:
            assert answer.finish is not None
            prompt = answer.generation.prompt
            render = self._logprobs_renderer(spec)
            logprobs = None
            if render is not None and spec.echo:
                logprobs = render((*prompt, *answer.token_ids), [*answer.prompt_logprobs(), *answer.logprobs])
            elif render is not None:
                logprobs = render(answer.token_ids, answer.logprobs)
            of_prompt = None
            if spec.prompt_logprobs is not None:
                of_prompt = prompt_logprobs(prompt, answer.prompt_logprobs(), spec.prompt_logprobs, self._bytes_of)
            choices.append(
                Choice(
                    answer.index,
                    answer.echo + "".join(answer.text),
                    answer.finish,
                    logprobs,
                    answer.token_ids if spec.return_token_ids else None,
                    prompt if spec.return_token_ids else None,
                    of_prompt,
                )
            )
        return choices

    def _logprobs_renderer(self, spec: GenerationSpec) -> LogprobsRenderer | None:
        """A function from token ids and log-probabilities to the response's object; None if none were asked for."""
        if spec.logprobs is None:
            return None
        if spec.kind == "chat":
            return lambda token_ids, logprobs: chat_logprobs(token_ids, logprobs, self._bytes_of)
        return CompletionLogprobs(self._bytes_of, spec.logprobs).add

    def _bytes_of(self, token_id: int) -> bytes:
        if self._named_bytes is not None:
            return self._named_bytes[token_id]
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()

    async def events(self, job: Job) -> AsyncGenerator[bytes]:
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
            self.log(job)

    async def _choice_events(self, job: Job, answer: Answer) -> AsyncGenerator[bytes]:
        spec = job.spec
        writer = ChunkWriter(job.head, answer.index, include_usage=spec.include_usage)
        render = self._logprobs_renderer(spec)
        is_plain = render is None and not spec.return_token_ids
        opening = writer.first(answer.generation.prompt if spec.return_token_ids else None)
        is_first = True
        async with aclosing(self.pieces(answer)) as pieces:
            async for piece in pieces:
                if spec.echo and is_first:
                    logprobs = None if render is None else render(answer.generation.prompt, answer.prompt_logprobs())
                    opening += writer.event(answer.echo, logprobs=logprobs)
                is_first = False
                if is_plain and piece.finish is None:
                    data = writer.text(piece.text) if piece.text else b""
                else:
                    token_ids = piece.token_ids if spec.return_token_ids else None
                    logprobs = None if render is None else render(piece.token_ids, piece.logprobs)
                    if piece.finish is None:
                        data = writer.event(piece.text, token_ids=token_ids, logprobs=logprobs)
                    else:
                        data = writer.finish(piece.finish, piece.text, token_ids=token_ids, logprobs=logprobs)
                if opening or data:
                    yield opening + data
                opening = b""

    async def _merged_events(self, job: Job) -> AsyncGenerator[bytes]:
        """The events of several choices, each as it comes."""
        queue: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue()

        async def pump(answer: Answer) -> None:
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

    def log(self, job: Job) -> None:
        """One line and one set of observations per request."""
        now = time.monotonic()
        finished = all(answer.finish is not None for answer in job.answers)
        failed = any(answer.generation.failure is not None for answer in job.answers)
        outcome = str(job.answers[0].finish) if finished else "failed" if failed else "aborted"
        usage = job.usage()
        first = min((a.first_token_at for a in job.answers if a.first_token_at is not None), default=None)
        ttft_s = None if first is None else first - job.arrived_at
        tpot_s = None
        if first is not None and len(job.answers) == 1 and usage.completion_tokens > 1:
            tpot_s = (now - first) / (usage.completion_tokens - 1)
        imported = min(usage.cached_tokens, sum(a.generation.imported_tokens for a in job.answers[:: job.spec.n]))
        hits = {"local": usage.cached_tokens - imported, "imported": imported}
        self._metrics.finished(
            job.tenant.name, outcome, usage.prompt_tokens, usage.completion_tokens, hits, ttft_s, tpot_s
        )
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


def _public_prefixes(tokenizer: Tokenizer, system_messages: Sequence[str]) -> list[tuple[int, ...]]:
    try:
        return [tokenizer.chat_beginning(text) for text in system_messages]
    except RequestError as error:
        raise StartupError(f"cache.public_prefixes: {error}") from None
