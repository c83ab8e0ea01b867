"""Follows a request from its bytes to its answer, for the HTTP routes and the Python handle.

A request goes down once, through `Preparation`, and its answer comes up once, through `OutputProcessor` and
`Rendering`; `Accounting` sees its end. `raydix.actors.ingress.build` puts these together.
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, replace
from http import HTTPStatus

from raydix.actors.ingress.adapters import AdapterOperations
from raydix.actors.ingress.cache_control import CacheOperations
from raydix.actors.ingress.cluster_load import ClusterLoad
from raydix.actors.ingress.cluster_metrics import ClusterMetrics
from raydix.actors.ingress.cluster_trace import ClusterTrace
from raydix.actors.ingress.dispatcher import Dispatcher
from raydix.actors.ingress.queue_watch import QueueWatch
from raydix.actors.ingress.telemetry import Telemetry
from raydix.engine.api.batches import LineAnswer, failed_answer
from raydix.engine.api.embeddings import EmbedRequest, EmbedResponse, as_embed_request
from raydix.engine.api.generate import GenerateChunk, GenerateRequest, GenerateResponse, as_generate_request
from raydix.engine.api.responses import Json, model_object
from raydix.engine.api.routes import ROUTES
from raydix.engine.api.spec import Api
from raydix.engine.background import Background
from raydix.engine.core.errors import RaydixError, ServiceError
from raydix.engine.core.ingress.answer_room import AnswerRoom, RoomClaim
from raydix.engine.core.ingress.room import Allowance, Room
from raydix.engine.core.tenants import EVERYONE, Tenant, Tenants
from raydix.engine.serving.accounting import BATCH, Accounting, internal_error
from raydix.engine.serving.background_responses import BackgroundResponses
from raydix.engine.serving.compaction import Compaction
from raydix.engine.serving.job import Job
from raydix.engine.serving.kept_conversations import KeptConversations
from raydix.engine.serving.load_log import LoadLog
from raydix.engine.serving.output import OutputProcessor
from raydix.engine.serving.preparation import Preparation, RequestHeaders
from raydix.engine.serving.reader_pool import RequestReader
from raydix.engine.serving.rendering import Renderer, Rendering, joined
from raydix.engine.serving.request_table import RequestTable
from raydix.engine.serving.served_model import ServedModels
from raydix.engine.serving.stored_responses import StoredResponses
from raydix.engine.serving.tokenization import Tokenization

_WIRES = {route.name: route.wire for route in ROUTES if route.is_answer}  # form of errors by the name of the route
SMALL_BYTES = 1 << 20  # answers below this size claim no memory: the limit of requests bounds them


@dataclass(frozen=True, slots=True)
class ReplicaLimits:
    """Limits of one replica."""

    max_requests: int
    max_waiting_bytes: int
    """Bytes of the requests that wait to be read."""
    answer_bytes: int
    """Bytes of large answers under way."""
    reader_processes: int | None = None
    """Processes that read long requests; None for as many as suit the machine."""


@dataclass(frozen=True, slots=True)
class FrontendParts:
    """The parts of one replica's frontend, and the served model."""

    models: ServedModels
    tenants: Tenants
    cache: CacheOperations
    adapters: AdapterOperations
    tokenization: Tokenization
    room: Room
    reader: RequestReader
    dispatcher: Dispatcher
    preparation: Preparation
    output: OutputProcessor
    responses: StoredResponses
    conversations: KeptConversations
    rendering: Rendering
    answer_room: AnswerRoom
    renderers: Mapping[Api, Callable[[Job], Renderer]]
    accounting: Accounting
    requests: RequestTable
    queues: QueueWatch
    trace: ClusterTrace
    metrics: ClusterMetrics
    telemetry: Telemetry | None = None


class Frontend:
    """Everything that one ingress replica does for a request, apart from HTTP."""

    def __init__(self, parts: FrontendParts) -> None:
        self.tenants = parts.tenants
        self.cache = parts.cache
        self.adapters = parts.adapters
        self.tokenization = parts.tokenization
        self.accounting = parts.accounting
        self.requests = parts.requests
        self.metrics = parts.metrics
        self.cluster_load = ClusterLoad(parts.metrics.of_workers)
        self.trace = parts.trace
        self.telemetry = parts.telemetry
        self._queues = parts.queues
        self._models = parts.models
        self._room = parts.room
        self._reader = parts.reader
        self._dispatcher = parts.dispatcher
        self.preparation = parts.preparation
        self.output = parts.output
        self.rendering = parts.rendering
        self._answer_room = parts.answer_room
        self.compaction = Compaction(
            preparation=parts.preparation,
            output=parts.output,
            accounted=self.accounted,
            reader=parts.reader,
            prepare=parts.dispatcher.prepare,
        )
        self._renderers = parts.renderers
        self._tasks = Background()
        self.responses = parts.responses
        self.conversations = parts.conversations
        self.background = BackgroundResponses(
            parts.responses,
            parts.preparation,
            parts.tenants,
            begin_anew=self.compaction.begin_anew,
            renderer=self.renderer,
            events=self.events,
        )

    def start(self) -> None:
        """Begin to follow the workers; needs a running event loop."""
        self._reader.start()
        self._dispatcher.start()
        self.background.start()
        self._tasks.start(LoadLog(self.requests).run())
        self._tasks.start(self._queues.run())

    async def close(self) -> None:
        """End the processes that read long requests, and send the last spans."""
        await self._reader.close()
        if self.telemetry is not None:
            await self.telemetry.close()

    def change(self, limits: ReplicaLimits, tenants: Iterable[Tenant], name_of_key: Mapping[str, str]) -> None:
        """Take other limits and know these tenants alone, from the next request on; requests under way go on."""
        self.preparation.limit(limits.max_requests)
        self._reader.limit(limits.max_waiting_bytes, limits.reader_processes)
        self._answer_room.limit(limits.answer_bytes)
        self.tenants.change(tenants, name_of_key)
        self.accounting.know(self.tenants.names)

    async def check_ready(self) -> None:
        """Raises ServiceError unless a request could be served now."""
        if not await self._dispatcher.can_serve():
            raise ServiceError("no worker is ready", retry_after_s=5)

    def model_object(self, name: str | None = None, tenant: Tenant = EVERYONE) -> Json:
        """The model that is served, or that one of a tenant's which has this name. Raises ModelNotFoundError if there
        is none."""
        model, adapter = self._models.model, self._models.adapter(name, tenant)
        return model_object(
            model.name,
            created=model.created,
            max_model_len=model.max_model_len,
            adapter=None if adapter is None else adapter.name,
        )

    def model_objects(self, tenant: Tenant) -> list[Json]:
        """The model that is served, and each adapter of it that the tenant's requests may name."""
        return [self.model_object(name, tenant) for name in self._models.names(tenant)]

    def allowance(self, tenant: Tenant) -> Allowance:
        """Limit of the tenant's requests under way, and what is left of it."""
        return self._room.allowance(tenant)

    def load(self, tenant: Tenant) -> int:
        """Number of the tenant's answers under way; of all tenants' for an administrator."""
        return self._room.num_held if tenant.is_admin else self._room.held_by(tenant)

    # HTTP

    @contextmanager
    def accounted(self, job: Job) -> Iterator[None]:
        """Have the request in the table of requests; close the job and account for the request when the block ends."""
        with closing(job), self.accounting.request(job), self.requests.shown(job):
            if self.telemetry is None:
                yield
                return
            with self.telemetry.request(job):
                yield

    @contextmanager
    def all_accounted(self, jobs: Sequence[Job]) -> Iterator[None]:
        """Account for several jobs as `accounted` does for one."""
        with ExitStack() as stack:
            for job in jobs:
                stack.enter_context(self.accounted(job))
            yield

    @asynccontextmanager
    async def answer_room(self, *jobs: Job) -> AsyncGenerator[None]:
        """Hold memory for the jobs' answers, where they may be large, until the block ends; waits for it first."""
        num_bytes = sum(job.held_bytes(self._models.model.hidden_size) for job in jobs)
        # Most answers are small, and wait for nobody.
        if num_bytes < SMALL_BYTES:
            yield
            return
        # The claim stands from here on in the order of arrival, until it is left below, granted or not.
        granted = asyncio.Event()
        claim = RoomClaim(jobs[0].tenant.name, num_bytes, granted.set)
        self._answer_room.ask(claim)
        try:
            await granted.wait()
            yield
        finally:
            self._answer_room.leave(claim)

    def renderer(self, job: Job) -> Renderer:
        """Renderer of a job, in the form of the API that its request came by."""
        return self._renderers[job.spec.api](job)

    async def events(self, job: Job, renderer: Renderer) -> AsyncGenerator[bytes]:
        """Run a job; yields the server-sent events of its response, and accounts for the request. Errors as
        `OutputProcessor.collect`."""
        with self.accounted(job):
            async with self.answer_room(job):
                async with aclosing(renderer.events()) as events:
                    async for data in events:
                        yield data
                # A stream that can be resumed has the place of its end in its last event, so the end is one piece.
                if job.event_ids is not None:
                    yield job.event_ids.mark_end(await joined(renderer.end()))
                    return
                async with aclosing(renderer.end()) as events:
                    async for data in events:
                        yield data

    # Batches

    async def answer_line(self, route: str, body: bytes, tenant: Tenant) -> LineAnswer:
        """Answer a line of a batch; an error is an answer."""
        name, wire = uuid.uuid4().hex, _WIRES[route]
        try:
            job = await self.preparation.of_line(route, body, tenant, name)
            if job.begins_anew:
                job = await self.compaction.begin_anew(job, RequestHeaders(name=name), is_line=True)
            with self.accounted(job):
                async with self.answer_room(job):
                    await self.output.collect(job)
                    return LineAnswer(HTTPStatus.OK, name, await joined(await self.renderer(job).body()))
        # A line's error is its answer: the batch goes on.
        except RaydixError as error:
            self.accounting.refused(error, BATCH)
            return failed_answer(error, name, wire)
        except Exception as error:
            return failed_answer(internal_error(error, request_id=name), name, wire)

    @property
    def num_under_way(self) -> int:
        """Requests of clients, and not of batches, that have not ended."""
        return self._room.num_held

    # Python handle

    async def generate(self, request: GenerateRequest | Mapping[str, object]) -> GenerateResponse:
        """Answer one request as a whole.

        Raises:
            RequestError: the request is not valid; names the field.
            ServiceError: it could not be served now.
        """
        with self.accounting.handle():
            job = await self._prepare(as_generate_request(request), stream=False)
            with self.accounted(job):
                async with self.answer_room(job):
                    await self.output.collect(job)
            return await self.rendering.response(job)

    async def generate_choices(self, request: GenerateRequest, n: int) -> list[GenerateResponse]:
        """`n` whole answers to one request, which share the prompt's KV; errors as `generate`."""
        with self.accounting.handle():
            spec = replace(request.spec(), n=n)
            job = await self.preparation.of_spec(spec, self.tenants.named(request.tenant))
            with self.accounted(job):
                async with self.answer_room(job):
                    await self.output.collect(job)
            return await self.rendering.responses(job)

    async def embed(self, request: EmbedRequest | Mapping[str, object]) -> EmbedResponse:
        """Embed the inputs of one request; errors as `generate`."""
        with self.accounting.handle():
            valid = as_embed_request(request)
            job = await self.preparation.of_spec(valid.spec(), self.tenants.named(valid.tenant))
            with self.accounted(job):
                async with self.answer_room(job):
                    await self.output.collect(job)
            return await asyncio.to_thread(self.rendering.embeddings, job)

    async def stream(self, request: GenerateRequest | Mapping[str, object]) -> AsyncGenerator[GenerateChunk]:
        """Answer one request piece by piece; errors as `generate`."""
        with self.accounting.handle():
            job = await self._prepare(as_generate_request(request), stream=True)
            is_first = True
            with self.accounted(job):
                async with self.answer_room(job), aclosing(self.output.pieces(job.answers[0])) as pieces:
                    async for piece in pieces:
                        yield self.rendering.chunk(job, piece, is_first=is_first)
                        is_first = False

    async def _prepare(self, request: GenerateRequest, *, stream: bool) -> Job:
        tenant = self.tenants.named(request.tenant)
        return await self.preparation.of_spec(request.spec(stream=stream), tenant)
