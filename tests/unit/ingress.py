"""An ingress replica built through its constructors, with a tokenizer of letters, and a reader and a dispatcher of the
tests: what a request costs, which workers it has and whether it fails is said by the test."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from struct import pack
from typing import Any, TypeAlias, cast

from starlette.types import ASGIApp

from raydix.actors.ingress.adapters import AdapterLimits, AdapterOperations
from raydix.actors.ingress.cache_control import CacheOperations
from raydix.actors.ingress.cluster_metrics import ClusterMetrics, ReplicaMetrics
from raydix.actors.ingress.cluster_trace import ClusterTrace
from raydix.actors.ingress.dispatcher import Dispatcher
from raydix.actors.ingress.frontend import Frontend, FrontendParts
from raydix.actors.ingress.manager_link import Call, ManagerAnswers, ManagerLink
from raydix.actors.ingress.queue_watch import QueueWatch
from raydix.actors.local import LocalRuntime
from raydix.actors.metric_values import MetricFamily
from raydix.actors.metrics import ReplicaQueues
from raydix.actors.rpc import ManagerClient
from raydix.actors.tracing import Recorded, Recorder
from raydix.engine.api.context_edits import edited
from raydix.engine.api.conversations import parse_conversations
from raydix.engine.api.openai_responses.conversations import resolved
from raydix.engine.api.routes import parse
from raydix.engine.api.spec import GenerationSpec, Prompt
from raydix.engine.core.answers.prompt_form import MODEL_TEMPLATE, ChatTemplate
from raydix.engine.core.answers.transcripts import EncodedText
from raydix.engine.core.doctor import Miss
from raydix.engine.core.errors import ServiceError, StartupError
from raydix.engine.core.hashing import root_hash
from raydix.engine.core.ingress.answer_room import AnswerRoom
from raydix.engine.core.ingress.generation import Generation
from raydix.engine.core.ingress.parsers import HERMES, ToolFormat
from raydix.engine.core.ingress.parsers.harmony import TOKENS
from raydix.engine.core.ingress.room import Room
from raydix.engine.core.memory.response_store import ResponseStore
from raydix.engine.core.tenants import EVERYONE, Tenants
from raydix.engine.core.types import Adapter, FinishReason, PromptEvent, TokenEvent, TokenLogprobs
from raydix.engine.model.tokenizer import RenderedChat, Tokenizer
from raydix.engine.serving.accounting import Accounting, FinishedRequest, Refusals
from raydix.engine.serving.answer_rendering import renderers
from raydix.engine.serving.chats import Chats
from raydix.engine.serving.choices import PreparationFacts
from raydix.engine.serving.kept_conversations import KeptConversations
from raydix.engine.serving.output import OutputProcessor, Vocabulary
from raydix.engine.serving.preparation import Preparation
from raydix.engine.serving.prompt_records import PromptRecords, parts_of
from raydix.engine.serving.reader_pool import ReaderLoad, RequestReader
from raydix.engine.serving.reader_work import Conversations, NextTurn, Reading, ReadingFacts, Request, TokenRequest
from raydix.engine.serving.reading import Reader
from raydix.engine.serving.rendering import Rendering, RenderThread, joined
from raydix.engine.serving.request_table import RequestTable
from raydix.engine.serving.served_model import ServedModel, ServedModels
from raydix.engine.serving.stored_responses import StoredResponses
from raydix.engine.serving.tokenization import Tokenization
from raydix.engine.serving.transcripts import Transcripts
from tests.unit.waits import WAIT_S

MODEL = "letters"
END = 0
"""The id that ends an answer; its name is `</s>`."""
VOCAB = 128
BLOCK_SIZE = 4
CONTEXT = 64
HIDDEN = 2
MARKERS = {"[TOOL_CALLS]": 1}
"""Ids of special tokens that belong to calls."""
HARMONY_MARKERS = {name: 2 + index for index, name in enumerate(TOKENS)}
"""Ids of the special tokens of answers in harmony."""
ANSWER = "one two."
ROOT = root_hash("letters/plain")
FINGERPRINT = f"fp_{ROOT.hex()[:10]}"

Served: TypeAlias = Callable[..., Any]
"""Runs a function while the routes answer from a replica built by the test (the fixture `served`)."""


class LetterTokenizer(Tokenizer):
    """An id for each ASCII character. `has_table`: the ids' bytes are known; `opening`: the beginning of an answer in
    the chat template; `markers`: ids of special tokens."""

    def __init__(
        self, *, has_table: bool = True, opening: str = "assistant: ", markers: Mapping[str, int] = MARKERS
    ) -> None:
        self._has_table = has_table
        self._opening = opening
        self._markers = markers
        self.eos_token_ids = [END]

    @property
    def vocab_size(self) -> int:
        return VOCAB

    def special_id(self, name: str) -> int | None:
        return self._markers.get(name)

    added_id = special_id

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [*text.encode("ascii")]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        special = {END: "</s>", **{token_id: name for name, token_id in self._markers.items()}}
        if skip_special_tokens:
            special = dict.fromkeys(special, "")
        return "".join(special[token_id] if token_id in special else chr(token_id) for token_id in token_ids)

    def names(self, token_ids: Sequence[int]) -> list[str]:
        return ["</s>" if token_id == END else chr(token_id) for token_id in token_ids]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template: ChatTemplate = MODEL_TEMPLATE,
        begins_answer: bool = True,
        special_tokens: bool = False,
    ) -> RenderedChat:
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return RenderedChat("".join([*lines, self._opening * begins_answer]), None)

    def encode_with_borders(self, text: str, mark: str | None = None) -> EncodedText:
        return EncodedText(text, self.encode(text), ())

    def fewest_tokens(self, text: str) -> int:
        return len(text)

    def token_bytes(self, skip_special_tokens: bool = True) -> list[bytes] | None:
        if not self._has_table:
            return None
        return [self.decode([token_id], skip_special_tokens).encode() for token_id in range(VOCAB)]


class FakeReader(RequestReader):
    """Reads at once, in the test's own process; a chat's prompt is the messages' text. Fails with `failure`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.failure: Exception | None = None
        self.next_turns: list[NextTurn] = []
        self.is_started = False
        self.max_waiting_bytes: int | None = None

    def start(self) -> None:
        self.is_started = True

    @property
    def load(self) -> ReaderLoad:
        return ReaderLoad(0, 0, 0)

    def limit(self, max_waiting_bytes: int, num_processes: int | None = None) -> None:
        self.max_waiting_bytes = max_waiting_bytes

    async def read(self, request: Request, size: int, tenant: str = "") -> Reading:
        if self.failure is not None:
            raise self.failure
        spec = request
        if isinstance(spec, tuple):
            spec = parse(*spec)
        if spec.is_unresolved:
            return Reading(spec)
        if spec.compaction is not None:
            return replace(await self.read(replace(spec, compaction=None), size, tenant), unread=spec)
        if spec.turn is not None and spec.turn.earlier:
            spec = resolved(spec)
        if spec.given_prompt is not None:
            return self._real().read(spec)
        if spec.kind == "chat":
            return self._read_chat(spec)
        return Reading(spec, tuple(map(self._ids, spec.prompts)))

    def _read_chat(self, spec: GenerationSpec) -> Reading:
        """A letter stands for each answer that has ids of its own."""
        edits = None
        if spec.edits is not None:
            messages, edits = edited(
                spec.messages, spec.edits, lambda chat: sum(len(str(message["content"])) for message in chat)
            )
            spec = replace(spec, messages=messages)
        continued = {answer.index for answer in spec.continued}
        parts = ["\0" if index in continued else str(message["content"]) for index, message in enumerate(spec.messages)]
        starts = [0, *accumulate(map(len, parts))]
        chat = EncodedText(
            "".join(parts),
            self._ids("".join(parts)),
            [(starts[index], starts[index]) for index in sorted(continued)],
            {starts[index]: index for index in continued},
        )
        return Reading(
            spec,
            chat=chat,
            marked_tokens=tuple(starts[mark.index] + mark.length for mark in spec.retention.marks),
            edits=edits,
            parts=parts_of(spec),
            prediction=self._ids(spec.prediction or ""),
        )

    async def read_all(self, conversations: Conversations, tenant: str = "") -> list[Reading]:
        return [await self.read(spec, 0) for spec in parse_conversations(conversations.body)]

    async def tokens(self, request: TokenRequest, tenant: str = "") -> bytes:
        reader = self._real()
        answer = reader.tokenize if request.route == "tokenize" else reader.detokenize
        return answer(request.body, request.models)

    async def next_turn(self, turn: NextTurn, size: int) -> Sequence[int]:
        self.next_turns.append(turn)
        return ()

    def _real(self) -> Reader:
        facts = ReadingFacts(ServedModel(MODEL, CONTEXT, VOCAB), Path(), special_tokens_in_messages=False)
        return Reader(facts, self._tokenizer)

    def _ids(self, prompt: Prompt) -> Any:
        return tuple(self._tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt


@dataclass
class FakeDispatcher(Dispatcher):
    """Answers every generation with the letters of `answer`, one event each."""

    answer: str = ANSWER
    finish: FinishReason = FinishReason.STOP
    fails_after: int | None = None
    """Number of tokens after which a generation fails."""
    hangs_after: int | None = None
    """Number of tokens after which nothing more comes."""
    may_begin: asyncio.Event | None = None
    """Generations wait for it."""
    ends_at: int | None = None
    """Token that ends an answer beside the last one."""
    listed: TokenLogprobs | None = None
    """Log-probabilities of every token, where the request asks for any."""
    draws: bool = False
    """Answers depend on the choice's seed."""
    together: int = 1
    """Events that come at a time."""
    is_ready: bool = True
    error: Exception | None = None
    """An unforeseen error of every generation."""
    begun: list[Generation] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    prepared: list[Sequence[int]] = field(default_factory=list)
    """Prompts to be computed at idle priority."""
    is_started: bool = False

    def start(self) -> None:
        self.is_started = True

    async def can_serve(self) -> bool:
        return self.is_ready

    def prepare(self, generation: Generation, token_ids: Sequence[int]) -> None:
        self.prepared.append(token_ids)

    def stopped(self, generation: Generation) -> None:
        generation.is_stopped = True

    async def generate(self, generation: Generation) -> AsyncGenerator[list[TokenEvent]]:
        self.begun.append(generation)
        if self.error is not None:
            raise self.error
        if self.may_begin is not None:
            await self.may_begin.wait()
        draws = self.draws and generation.sampling.temperature > 0
        answer = f"{generation.sampling.seed % 1000:03} {self.answer}" if draws else self.answer
        batch: list[TokenEvent] = []
        try:
            for position in range(len(answer) + 1):
                await asyncio.sleep(0)
                if position == self.fails_after:
                    generation.failure = ServiceError("every worker died")
                    raise generation.failure
                if position == self.hangs_after:
                    await asyncio.Event().wait()
                batch += self._events(generation, position, answer)
                if batch and (len(batch) == self.together or generation.is_over):
                    yield batch
                    batch = []
                if generation.is_over:
                    return
        finally:
            self.ended.append(generation.request_id)

    def _events(self, generation: Generation, position: int, answer: str) -> list[TokenEvent]:
        """The event of one position, taken by the generation as the real dispatcher has it."""
        sampling, is_last = generation.sampling, position == len(answer)
        if position == 0 and sampling.prompt_logprobs is not None:
            named = range(VOCAB) if sampling.prompt_logprobs == VOCAB else ()
            scores = tuple(scored(token_id, named) for token_id in generation.prompt[1:])
            generation.take_scores(PromptEvent(generation.request_id, 0, 1, scores))
        token_id: int | None = END if is_last else ord(answer[position])
        finish = self.finish if is_last or token_id == self.ends_at else None
        if sampling.max_tokens == 0:
            token_id, finish = None, FinishReason.LENGTH
        elif position + 1 == sampling.max_tokens:
            finish = FinishReason.LENGTH
        logprobs = (
            None if sampling.logprobs is None or token_id is None else scored(token_id, sampling.logprob_token_ids)
        )
        if logprobs is not None and self.listed is not None:
            logprobs = self.listed
        pooled = None if sampling.pooling is None else state_of(generation.prompt)
        event = TokenEvent(
            generation.request_id, 0, position, token_id, finish, logprobs, cached_tokens=2, pooled=pooled
        )
        return generation.take(event, "w")


def in_harmony(text: str) -> str:
    """The `answer` whose letters are the tokens of a text in harmony."""
    for name, token_id in HARMONY_MARKERS.items():
        text = text.replace(name, chr(token_id))
    return text


def state_of(prompt: Sequence[int]) -> bytes:
    """The pooled hidden state that `FakeDispatcher` gives for a prompt: its length and its first id."""
    return pack("<2f", len(prompt), prompt[0])


def scored(token_id: int, named: Sequence[int] = ()) -> TokenLogprobs:
    """Log-probabilities of the token and the one before it, or of the `named` ones."""
    top = tuple(named) or (token_id, token_id - 1)
    return TokenLogprobs(-0.5, top, tuple(-0.5 - number for number in range(len(top))), 1)


OWN_METRICS = (MetricFamily("raydix_requests", "counter", "Requests.", {(("tenant", "a"),): 3.0}),)


class FakeLink(ManagerLink):
    """A manager out of reach, or one that remembers transcripts."""

    def __init__(self) -> None:
        super().__init__(LocalRuntime())
        self.kept: dict[bytes, Any] = {}
        self.responses = ResponseStore(1 << 20, 60.0)
        self.is_away = False
        self.memory = Memory
        self.now = 0.0
        """The manager's clock."""

    async def ask(self, call: Call[Any], *, timeout_s: float = 0, is_prompt: bool = False) -> Any:
        if self.is_away:
            raise ServiceError("away")
        return await call(self.memory(self.kept, self.responses, self.now))


class Memory(ManagerClient):
    def __init__(self, kept: dict[bytes, Any], responses: ResponseStore, now: float) -> None:
        self.loaded_adapters = self.reports = cast(Any, self)  # one double for all
        self._kept = kept
        self._responses = responses
        self._now = now

    def of_answers(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, method.__name__)(*args, **kwargs)

    async def remember(self, transcripts: Any) -> list[bool]:
        self._kept.update({name: token_ids for name, token_ids, _ in transcripts})
        return [True] * len(transcripts)

    async def recall(self, names: Any) -> Any:
        return [self._kept.get(name) for name in names]

    async def keep_response(self, name: bytes, parent: bytes | None, data: bytes, tenant: str) -> bool:
        return self._responses.keep(name, parent, data, self._now, tenant)

    async def replace_response(self, name: bytes, beginning: bytes, data: bytes) -> bool:
        return self._responses.replace(name, beginning, data, self._now) is not None

    async def renew_responses(self, claims: Any) -> Any:
        return self._responses.renew(claims, self._now), self._responses.abandoned(self._now)

    async def find_response(self, name: bytes, with_earlier: bool) -> list[bytes]:
        return self._responses.find(name, self._now, with_earlier=with_earlier)

    async def delete_response(self, name: bytes) -> bool:
        return self._responses.delete(name)

    async def explain(self, name: str, tenant: str | None) -> Any:
        return [{"choice": 0}] if name == "known" else []

    async def cache_report(self, tenant: str, is_admin: bool) -> Any:
        return {"hottest_prefixes": [{"token_ids": [104, 105]}]}

    async def misses(self, tenant: str, period_s: float) -> list[Miss]:
        return []

    async def unload_adapter(self, name: str) -> bool:
        return False

    async def reset_cache(self) -> dict[str, int]:
        return {"blocks": 3}

    async def metrics(self) -> tuple[MetricFamily, ...]:
        return ()

    async def trace(self, seconds: float) -> Recorded:
        return Recorded("kv_cache_manager", "manager", (), 0)


class Ledger:
    """Metrics of ended requests, kept."""

    def __init__(self) -> None:
        self.ended: list[FinishedRequest] = []
        self.refusals: list[tuple[str, int, str]] = []
        self.known: list[str] = []
        """Tenants that came while the replica ran."""

    def finished(self, request: FinishedRequest) -> None:
        self.ended.append(request)

    def know(self, tenants: Iterable[str]) -> None:
        self.known += tenants

    def look(self, queues: ReplicaQueues) -> None:
        self.queues = queues

    def refused(self, route: str, status: int, code: str) -> None:
        self.refusals.append((route, status, code))


NO_LIMITS = AdapterLimits()


def identify(name: str, folder: str) -> Adapter:
    """An adapter whose weights are what its folder's file says. Raises StartupError where there is none."""
    try:
        weights = (Path(folder) / "adapter_model.safetensors").read_bytes()
    except OSError:
        raise StartupError(f"{folder} is not an adapter's folder") from None
    return Adapter(name, folder, weights[:16].ljust(16))


class Replica:
    """All parts of an ingress replica behind HTTP. Each reading of the clock is a second later."""

    def __init__(
        self,
        *,
        max_requests: int = 10,
        tenants: Tenants | None = None,
        has_table: bool = True,
        prefix_caching: bool = True,
        public_prefixes: tuple[tuple[int, ...], ...] = (),
        max_model_len: int = CONTEXT,
        tool_format: ToolFormat = HERMES,
        has_reasoning: bool = False,
        description: Mapping[str, object] | None = None,
        adapters: Sequence[Adapter] = (),
        adapter_limits: AdapterLimits = NO_LIMITS,
        manager: ManagerLink | None = None,
    ) -> None:
        markers = HARMONY_MARKERS if tool_format.has_channels else MARKERS
        tokenizer = LetterTokenizer(has_table=has_table, markers=markers)
        self._now = 0.0
        self.room = Room(max_requests)
        self.reader = FakeReader(tokenizer)
        self.answer_room = AnswerRoom(64 << 20)
        self.dispatcher = FakeDispatcher()
        self.manager = FakeLink()
        """The manager, unless another one was given."""
        link = self.manager if manager is None else manager
        self.ledger = Ledger()
        self.records = PromptRecords(tokenizer.decode)
        vocabulary = Vocabulary(tokenizer)
        self.chats = Chats(
            tokenizer=tokenizer,
            vocab_size=VOCAB,
            max_model_len=max_model_len,
            new_detokenizer=vocabulary.detokenizer,
            transcripts=Transcripts(ManagerAnswers(link), b"root", lambda hit: None),
            reader=self.reader,
            prepare=self.dispatcher.prepare,
        )
        self.responses = StoredResponses(ManagerAnswers(link), b"root", self.chats.shown)
        conversations = KeptConversations(ManagerAnswers(link), b"root", self.chats.shown)
        model = ServedModel(MODEL, max_model_len, VOCAB, HIDDEN, created=1)
        tenants = tenants or Tenants()
        models = self.models = ServedModels(model, adapters, tenants)
        facts = PreparationFacts(
            model=model,
            eos_token_ids=(END,),
            block_size=BLOCK_SIZE,
            public_prefixes=public_prefixes,
            prefix_caching=prefix_caching,
            tool_format=tool_format,
            has_reasoning=has_reasoning,
        )
        self.preparation = Preparation(
            facts,
            reader=self.reader,
            room=self.room,
            chats=self.chats,
            responses=self.responses,
            conversations=conversations,
            vocabulary=vocabulary,
            root=lambda: ROOT,
            records=self.records,
            models=models,
            clock=self.clock,
        )
        self.output = OutputProcessor(
            self.dispatcher.generate,
            self.dispatcher.stopped,
            self.chats,
            prefix_caching=prefix_caching,
            clock=self.clock,
        )
        self.rendering = Rendering(self.output.pieces, vocabulary.bytes_of, RenderThread())
        self.accounting = Accounting(self.ledger, Refusals(), self.clock)
        self.requests = RequestTable(lambda: self._now, lambda: 1000.0, period_s=0.001)
        own = ReplicaMetrics("r", lambda: OWN_METRICS)
        metrics = ClusterMetrics(own, link, lambda: (), LocalRuntime().find_worker)
        parts = FrontendParts(
            models=models,
            tenants=tenants,
            adapters=AdapterOperations(link, models, adapter_limits, identify),
            cache=CacheOperations(link, tokenizer.decode, self.records),
            tokenization=Tokenization(self.reader, self.room, models, description),
            room=self.room,
            reader=self.reader,
            dispatcher=self.dispatcher,
            preparation=self.preparation,
            output=self.output,
            responses=self.responses,
            conversations=conversations,
            rendering=self.rendering,
            answer_room=self.answer_room,
            renderers=renderers(self.rendering, self.output.pieces, self.responses, conversations),
            accounting=self.accounting,
            requests=self.requests,
            trace=ClusterTrace(Recorder("r", "ingress"), lambda: (), LocalRuntime().find_worker, link),
            queues=QueueWatch(self.ledger, self.requests, self.room, self.reader),
            metrics=metrics,
        )
        self.frontend = Frontend(parts)

    def clock(self) -> float:
        self._now += 1.0
        return self._now

    async def job(self, route: Any = "completion", **fields: Any) -> Any:
        """The job of a body with these fields."""
        job = await self.frontend.preparation.of_body(route, body_of(route, **fields), EVERYONE)
        return await self.frontend.compaction.begin_anew(job) if job.begins_anew else job

    async def closed_job(self, route: Any = "completion", **fields: Any) -> Any:
        """As `job`, for a look at the job without running it."""
        job = await self.job(route, **fields)
        job.close()
        return job

    async def streamed(self, route: Any = "completion", **fields: Any) -> list[Any]:
        """The objects of a streamed answer; its `[DONE]` is a string."""
        job = await self.job(route, stream=True, **fields)
        events = self.frontend.events(job, self.frontend.renderer(job))
        return objects_of(b"".join([data async for data in events]))

    async def whole(self, route: Any = "completion", **fields: Any) -> Any:
        """The object of a whole answer."""
        job = await self.job(route, **fields)
        with self.frontend.accounted(job):
            await self.frontend.output.collect(job)
        return json.loads(await joined(await self.frontend.renderer(job).body()))


def body_of(route: str, **fields: Any) -> bytes:
    content: dict[str, Any] = {"prompt": "hi"}
    if route == "responses":
        return json.dumps({"model": MODEL, "input": "hi", **fields}).encode()
    if route != "completion":
        content = {"messages": [{"role": "user", "content": "hi"}]}
    return json.dumps({"model": MODEL, "max_tokens": 20, **content, **fields}).encode()


def objects_of(stream: bytes) -> list[Any]:
    """The data of server-sent events."""
    lines = [line.removeprefix("data: ") for line in stream.decode().split("\n\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@dataclass
class Reply:
    """An HTTP response that an application sent."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def call(
    app: ASGIApp,
    method: str,
    path: str,
    body: bytes | Sequence[bytes] = b"",
    *,
    headers: dict[str, str] | None = None,
    leaves_at: Callable[[Reply], bool] | None = None,
    reply: Reply | None = None,
) -> Reply:
    """Send a request to an ASGI application, a body of several parts in several messages; the response is written into
    `reply`. The client leaves after a part of the response for which `leaves_at` holds, or right after its own request
    if `leaves_at` holds for nothing sent yet."""
    parts = [body] if isinstance(body, bytes) else list(body)
    inbox = [
        {"type": "http.request", "body": part, "more_body": number < len(parts)}
        for number, part in enumerate(parts, start=1)
    ]
    reply, gone = reply or Reply(), asyncio.Event()
    if leaves_at is not None and leaves_at(reply):
        gone.set()
    target, _, query = path.partition("?")
    given = {"host": "test", "content-type": "application/json"} | (headers or {})
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": target,
        "raw_path": target.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "client": ("127.0.0.1", 1),
        "server": ("test", 80),
        "state": {},
    }

    async def receive() -> Any:
        if inbox:
            return inbox.pop(0)
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            reply.body += message.get("body", b"")
        if leaves_at is not None and leaves_at(reply):
            gone.set()

    async with asyncio.timeout(WAIT_S):
        await app(scope, receive, send)
    return reply
