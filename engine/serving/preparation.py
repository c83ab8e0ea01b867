"""Prepares the generations of a request, straight down: validate, tokenize, reserve room.

A request counts against the limits from its arrival on. Preparation makes one `Generation` per choice and starts none.
"""

import re
import secrets
import time
import uuid
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Self

from raydix.engine.api.context_edits import ContextEdits
from raydix.engine.api.fields import REQUEST_ID_PATTERN
from raydix.engine.api.openai_responses.stored import Run
from raydix.engine.api.reconnecting import BEGINNING, HEADER
from raydix.engine.api.responses import ResponseHead, response_id, system_fingerprint
from raydix.engine.api.resuming import MAX_CHOICES, EventId, EventIds, Origin, seal_of
from raydix.engine.api.spec import CompactionUse, GenerationSpec
from raydix.engine.api.trace_context import TraceContext
from raydix.engine.core.divergence import PromptPart, PromptRecord
from raydix.engine.core.errors import AnswerChangedError, RequestError
from raydix.engine.core.hashing import adapted
from raydix.engine.core.ingress.room import Permit, Room
from raydix.engine.core.objectives import NO_OBJECTIVES, Objectives, WhenLate
from raydix.engine.core.tenants import Tenant
from raydix.engine.core.types import Adapter, BlockHash
from raydix.engine.serving.chats import Chats
from raydix.engine.serving.choices import Choices, PreparationFacts
from raydix.engine.serving.job import Answer, Job
from raydix.engine.serving.kept_conversations import KeptConversations
from raydix.engine.serving.output import Vocabulary
from raydix.engine.serving.prompt_records import Hints, PromptRecords
from raydix.engine.serving.reader_pool import RequestReader, size_of
from raydix.engine.serving.reader_work import Conversations, Reading, Request
from raydix.engine.serving.served_model import ServedModels
from raydix.engine.serving.stored_responses import StoredResponses

INPUTS_AT_ONCE = 64  # inputs of one request for embeddings or scores that run at a time: some full steps of an engine
LINES_AT_ONCE = 64  # lines of batches that find room beside each other, however many inputs for embeddings each has
LINE_PRIORITY = 2**63 - 1  # `priority` of a line of a batch: the lowest


@dataclass(frozen=True, slots=True)
class StreamStart:
    """A client's wish, in a header, for a stream whose events have ids (`raydix.engine.api.resuming`): behind the event
    `last`, or from the beginning."""

    last: EventId | None = None

    @classmethod
    def read(cls, header: str) -> Self:
        """Parse the header's value. Raises RequestError for a value that is no id."""
        return cls(None if header == BEGINNING else EventId.read(header))

    def check(self, spec: GenerationSpec, compaction: CompactionUse | None = None) -> None:
        """Raise RequestError for a request whose answer has no events, or too many choices, or is a summary alone.
        `compaction`: the way in which its conversation is to begin anew."""
        if spec.turn is not None and spec.turn.in_background:
            raise RequestError(
                f"'{HEADER}' is not for a response in the background, whose stream `GET /v1/responses/{{id}}` reads "
                "again with 'stream' and 'starting_after'.",
                param=HEADER,
            )
        if not spec.form.stream:
            raise RequestError(f"'{HEADER}' is for streams: set 'stream' to true, or leave it out.", param=HEADER)
        # The chat of a stream that can be gone on with is answered as it is: a second summary would have other words.
        if compaction is not None and compaction.threshold == 0:
            raise RequestError(
                f"'{HEADER}' is not for an answer that is a summary alone: leave it out, or 'compaction'.", param=HEADER
            )
        if spec.num_choices > MAX_CHOICES:
            raise RequestError(
                f"A stream with '{HEADER}' has at most {MAX_CHOICES} choices, got {spec.num_choices}.", param=HEADER
            )

    def origin(self, new: Origin) -> Origin:
        """The origin of the stream to go on with, or a `new` one. Raises AnswerChangedError if the stream is of another
        model."""
        if self.last is None:
            return new
        # Another model would give other tokens behind the same ids, and the client would get half an answer of each.
        self.last.require_model(new.fingerprint)
        return self.last.origin

    def give_ids(self, job: Job, origin: Origin) -> None:
        """Have the events of a job of this origin get ids. Raises RequestError if `last` is of another request."""
        prompts = [answer.generation.prompt for answer in job.answers[:: job.spec.num_samples]]
        seal = seal_of(origin, job.spec, job.tenant.name, prompts)
        if self.last is not None:
            self.last.require(seal, len(job.answers))
        # After the seal was checked: an event id of another request must not begin a stream.
        job.event_ids = EventIds(origin, seal, len(job.answers), self.last)
        for answer in job.answers:
            answer.is_by_token = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHeaders:
    """The part of a request that stands in its headers, and counts where the body says nothing."""

    session: str | None = None
    objectives: Objectives = NO_OBJECTIVES
    name: str | None = None
    """Id of the request, which need not be unique. A new id takes the place of one of invalid form."""
    last_event_id: str | None = None
    """Wish for a stream whose events have ids (`raydix.engine.api.resuming`), in the form of its header."""
    trace: TraceContext | None = None
    """Place of the request in a trace, if there is one."""

    def completed(self, spec: GenerationSpec) -> GenerationSpec:
        """Give a request the session and the objectives that its body does not name."""
        own = spec.service
        service = replace(
            # The body goes before the headers: a proxy sets headers for all requests, and a client knows its own one.
            own,
            session_id=own.session_id or self.session,
            objectives=own.objectives.over(self.objectives),
        )
        return replace(spec, service=service)


NO_HEADERS = RequestHeaders()


def _as_line(spec: GenerationSpec) -> GenerationSpec:
    """The request of a line of a batch, behind all requests of clients. Raises RequestError for what no line has."""
    if spec.form.stream:
        raise RequestError("'stream' is not supported in a batch.", param="stream")
    if spec.service.priority:
        raise RequestError("'priority' is not supported in a batch, which has the lowest.", param="priority")
    return replace(spec, service=replace(spec.service, priority=LINE_PRIORITY))


def _request_id(spec: GenerationSpec, name: str | None, unique: str) -> str:
    """The name that the request has, or else `name` if its form is valid, or else `unique`."""
    is_named = name is not None and re.fullmatch(REQUEST_ID_PATTERN, name)
    return spec.service.request_id or (name if is_named else None) or unique


def _unique_id(spec: GenerationSpec, request_id: str, origin: Origin) -> str:
    """The name of a request's choices without their index. A stored response, whose id is not the request's, is
    explained by its own id, too, so that id is a part of the name."""
    attempt = secrets.token_hex(4)
    return f"{request_id}-{attempt}" if spec.turn is None else f"{request_id}-{origin.name}.{attempt}"


def _num_permits(spec: GenerationSpec, most: int) -> int:
    """Answers of a request that run at a time; of inputs at most `most`, and one in any case."""
    if not spec.has_inputs:
        return spec.num_choices
    return max(1, min(spec.num_choices, INPUTS_AT_ONCE, most))


def _hand_out(permits: list[Permit], answers: Sequence[Answer]) -> None:
    """Give the first answers a permit each; each other answer is to succeed an earlier one, and gets its permit. These
    are parts of a request under way, which is neither refused nor put behind others for being late."""
    # These are admitted when earlier ones have ended, when their time is long over: refusing or demoting them for that
    # would break the request apart.
    for waiting in answers[len(permits) :]:
        waiting.generation.objectives = replace(waiting.generation.objectives, when_late=WhenLate.WAIT)
    for answer, waiting in zip_longest(answers, answers[len(permits) :]):
        answer.successor = waiting
        if permits:
            answer.permit = permits.pop()


def _require_same(began: str | None, served: str | None) -> None:
    """Raise AnswerChangedError if an answer that one model began would go on with another one."""
    # Before the workers have registered the fingerprint is not known, and the same model is assumed.
    if None not in (began, served) and began != served:
        raise AnswerChangedError(
            f"The response cannot be generated with the same bits: {began} began it, and {served} is served now."
        )


class Preparation:
    """Makes jobs of requests. `root` stands for the model and the arithmetic of the workers, once these are known."""

    def __init__(
        self,
        facts: PreparationFacts,
        *,
        reader: RequestReader,
        room: Room,
        chats: Chats,
        responses: StoredResponses,
        conversations: KeptConversations,
        vocabulary: Vocabulary,
        root: Callable[[], BlockHash | None],
        records: PromptRecords,
        models: ServedModels | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._facts = facts
        self._models = models or ServedModels(facts.model)
        self._records = records
        self._reader = reader
        self._room = room
        # Lines of batches take no places of clients' requests; their number is limited before.
        self._line_room = Room(room.max_requests)
        self._choices = Choices(facts, chats, vocabulary)
        self._responses = responses
        self._conversations = conversations
        self._root = root
        self._clock = clock

    def limit(self, max_requests: int) -> None:
        """Take another limit of clients' requests, and of lines of batches."""
        self._room.limit(max_requests)
        self._line_room.limit(max_requests)

    async def of_body(
        self,
        route: str,
        body: bytes,
        tenant: Tenant,
        headers: RequestHeaders = NO_HEADERS,
    ) -> Job:
        """The job of a request in an HTTP body. The caller closes the job.

        Raises:
            RequestError: the request is not valid; names the field.
            ServiceError: there is no room for the request, or the reading failed.
        """
        wanted = None if headers.last_event_id is None else StreamStart.read(headers.last_event_id)
        return await self._prepare((route, body), len(body), tenant, headers, start=wanted)

    async def of_conversations(self, body: bytes, tenant: Tenant, headers: RequestHeaders = NO_HEADERS) -> list[Job]:
        """A job for each of several conversations in an HTTP body, which find room together or not at all; arguments
        and errors as `of_body`."""
        arrived_at = self._clock()
        # A body counts as one request until it is known how many conversations are in it.
        with self._room.reserve(1, tenant):
            readings = await self._reader.read_all(Conversations(body), tenant.name)
        unique = uuid.uuid4().hex
        jobs: list[Job] = []
        with self._room.reserve(len(readings), tenant) as permits:
            try:
                for number, reading in enumerate(readings):
                    spec = headers.completed(reading.spec)
                    tenant.require_priority(spec.service.priority)
                    adapter = self._models.adapter(spec.model, tenant)
                    own = _request_id(spec, headers.name, unique)
                    origin = self._new_origin(own, self._fingerprint(adapter))
                    unique_id = f"{own}-{number}-{secrets.token_hex(4)}"
                    with self._models.use(adapter) as use:
                        answers = await self._choices.begin(
                            replace(reading, spec=spec), tenant, origin, unique_id, adapter
                        )
                        _hand_out([permits.pop()], answers)
                        head = self._head(spec, origin, adapter)
                        name = f"{own}-{number}"
                        jobs.append(
                            Job(
                                request_id=name,
                                spec=spec,
                                tenant=tenant,
                                head=head,
                                answers=answers,
                                arrived_at=arrived_at,
                                adapter_use=use,
                                trace=headers.trace,
                            )
                        )
            except BaseException:
                for job in jobs:
                    job.close()
                raise
        return jobs

    async def of_line(self, route: str, body: bytes, tenant: Tenant, name: str) -> Job:
        """The job of a line of a batch, with a name of the server's; errors as `of_body`, and RequestError for a
        stream."""
        return await self._prepare((route, body), len(body), tenant, RequestHeaders(name=name), is_line=True)

    async def of_spec(
        self,
        spec: GenerationSpec,
        tenant: Tenant,
        headers: RequestHeaders = NO_HEADERS,
        *,
        origin: Origin | None = None,
        is_line: bool = False,
        part_of: Job | None = None,
    ) -> Job:
        """The job of a request in normal form, of this `origin` or a new one; arguments and errors as `of_body`.
        `is_line`: the request is a line of a batch. `part_of`: the job, let in and not running, of whose request this
        one is a part: the place in the room and the time of the arrival are that job's."""
        return await self._prepare(
            spec, size_of(spec), tenant, headers, origin=origin, is_line=is_line, part_of=part_of
        )

    async def again(self, run: Run, tenant: Tenant) -> Job:
        """The job of a response in the background that is generated again, with the same bits; errors as `of_body`, and
        AnswerChangedError if another model is served now."""
        request = ("responses", run.body)
        headers = RequestHeaders(session=run.session, name=run.origin.name)
        return await self._prepare(request, len(run.body), tenant, headers, origin=run.origin, earlier=run.earlier)

    async def num_tokens(self, route: str, body: bytes, tenant: Tenant) -> tuple[int, ContextEdits | None]:
        """Number of tokens of the prompt in an HTTP body, and the edits that it asks for; errors as `of_body`."""
        reading = await self._read((route, body), len(body), tenant, self._room)
        if reading.chat is None:
            return sum(map(len, reading.prompts)), None
        # One token stands for each answer that is named by its ids.
        answers = (each.token_ids for each in reading.spec.continued if each.token_ids is not None)
        num_tokens = len(reading.chat.token_ids) + sum(len(token_ids) - 1 for token_ids in answers)
        return num_tokens, reading.edits

    async def _prepare(
        self,
        request: Request,
        size: int,
        tenant: Tenant,
        headers: RequestHeaders,
        *,
        is_line: bool = False,
        start: StreamStart | None = None,
        origin: Origin | None = None,
        earlier: bytes = b"",
        part_of: Job | None = None,
    ) -> Job:
        arrived_at = self._clock() if part_of is None else part_of.arrived_at
        room = self._line_room if is_line else self._room
        # Reading takes a place of its own, and gives it back before the choices take theirs: while a body is read
        # nobody knows how many choices it has. A part of a job is read in the job's place.
        reading_room = room if part_of is None else None
        resumed = None if start is None or start.last is None else start.last.origin.name
        reading = await self._read(request, size, tenant, reading_room, earlier, resumed)
        spec = headers.completed(reading.spec)
        if is_line:
            spec = _as_line(spec)
        self._check(spec, tenant)
        if start is not None:
            start.check(spec, None if reading.unread is None else reading.unread.compaction)
        adapter = self._models.adapter(spec.model, tenant)
        fingerprint = self._fingerprint(adapter)
        if origin is not None:
            _require_same(origin.fingerprint, fingerprint)
        new_origin = partial(self._new_origin, fingerprint=fingerprint)
        request_id, origin = self._named(spec, headers.name, start, origin, new_origin)
        # A line with a thousand inputs leaves room for the other lines of the batch.
        most = min(room.most(tenant), room.max_requests // LINES_AT_ONCE) if is_line else room.most(tenant)
        # Nothing is awaited since the adapter was looked up: it is held from there to the request's end.
        count = _num_permits(spec, most)
        handed = [] if part_of is None else part_of.hand_over(count)
        with room.reserve(count, tenant, handed) as permits, self._models.use(adapter) as use:
            job = Job(
                request_id=request_id,
                spec=spec,
                tenant=tenant,
                head=self._head(spec, origin, adapter),
                answers=await self._choices.begin(
                    replace(reading, spec=spec), tenant, origin, _unique_id(spec, request_id, origin), adapter
                ),
                arrived_at=arrived_at,
                marked_tokens=reading.marked_tokens,
                edits=reading.edits,
                unread=reading.unread,
                adapter_use=use,
                trace=headers.trace,
            )
            if start is not None:
                start.give_ids(job, origin)
            if spec.turn is not None and spec.turn.in_background:
                if isinstance(request, tuple):
                    job.run = Run(
                        body=request[1],
                        session=headers.session,
                        streams=spec.form.stream,
                        origin=origin,
                        earlier=reading.earlier,
                    )
                # A stream that is read again has the same events, with the same numbers.
                for answer in job.answers:
                    answer.is_by_token = True
            # Decided once: each look at a conversation takes time in proportion to its length.
            job.begins_anew = job.is_to_begin_anew()
            # Nobody looks for the prompt of a line, nor of a conversation that begins anew before it is answered.
            self._record(job, reading.parts, is_kept=not (is_line or job.begins_anew))
            _hand_out(permits, job.answers)
        return job

    def _record(self, job: Job, parts: tuple[PromptPart, ...], *, is_kept: bool) -> None:
        """Keep what later prompts are compared with, and compare this one if its request asks. `parts`: the prompt's,
        which were made where it was read."""
        spec, answer = job.spec, job.answers[0]
        is_needed = is_kept or spec.previous_message is not None
        # Without a cache there are no hits to explain.
        if spec.kind != "chat" or not is_needed or not self._facts.prefix_caching:
            return
        generation = answer.generation
        token_ids = array("I", generation.prompt)
        record = PromptRecord(token_ids, parts, generation.salt.answers, self._facts.block_size)
        if spec.previous_message is not None:
            job.diagnosis = self._records.diagnosis(spec.previous_message, job.tenant, record)
        if is_kept:
            hints = Hints(spec.ignored, spec.applied)
            self._records.add(job.head.id, job.tenant.name, generation.session, record, hints)

    def _check(self, spec: GenerationSpec, tenant: Tenant) -> None:
        """Raise RequestError for a request that this tenant or model cannot have."""
        tenant.require_priority(spec.service.priority)
        if spec.embedding is not None:
            spec.embedding.check(self._facts.model.hidden_size)

    async def _read(
        self,
        request: Request,
        size: int,
        tenant: Tenant,
        room: Room | None,
        earlier: bytes = b"",
        resumed: str | None = None,
    ) -> Reading:
        """Read a request, with the stored response or the conversation that it goes on from; `earlier` is the latter as
        it was when an answer was first asked for, `resumed` the name of the response whose stream goes on. Without a
        `room` the caller has a place already."""
        place: AbstractContextManager[object] = nullcontext() if room is None else room.reserve(1, tenant)
        with place:
            reading = await self._reader.read(request, size, tenant.name)
            # Looked up here, and not where requests are read: the names are a tenant's, and change while readers live.
            self._models.adapter(reading.spec.model, tenant)
            if reading.spec.is_unresolved:
                whole = await self._going_on(reading.spec, tenant, earlier, resumed)
                # Read a second time, with the earlier turns in it: only the reader knows that a body goes on from one,
                # and only the manager has it.
                reading = await self._reader.read(whole, size_of(whole), tenant.name)
                reading = replace(reading, earlier=b"" if whole.turn is None else whole.turn.earlier)
        return replace(reading, unread=self._unread(reading))

    def _unread(self, reading: Reading) -> GenerationSpec | None:
        """The request of a reading as the client sent it, with its earlier turns, where it may be compacted."""
        whole, read = reading.unread, reading.spec
        if whole is None or whole.compaction is None:
            return None
        messages = read.messages if reading.edits is None else reading.edits.original or read.messages
        compaction = whole.compaction.within(self._facts.model.max_model_len)
        return replace(whole, messages=messages, continued=read.continued, turn=read.turn, compaction=compaction)

    async def _going_on(
        self, spec: GenerationSpec, tenant: Tenant, earlier: bytes, resumed: str | None
    ) -> GenerationSpec:
        """The request with all that its prompt is made of."""
        turn = spec.turn
        if turn is None:
            return spec
        # A response that is generated again brings the conversation of then: by now others may have been added.
        if turn.conversation is not None and not earlier:
            salt = spec.retention.salt
            earlier = await self._conversations.of_request(turn.conversation, tenant, salt, resumed)
        if turn.previous is not None:
            spec = await self._responses.going_on(spec, tenant)
        return replace(spec, turn=replace(turn, is_whole=True, earlier=earlier))

    def _named(
        self,
        spec: GenerationSpec,
        name: str | None,
        start: StreamStart | None,
        given: Origin | None,
        new_origin: Callable[[str], Origin],
    ) -> tuple[str, Origin]:
        """Id of a request, and the origin of its answer: the `given` or a new one, or that of the stream to go on with.

        A stored response has a name of its own. Where its stream has ids, so that there may be several attempts, the
        name is the id of each: Serve gives every attempt another header. Raises AnswerChangedError if the stream is of
        another model.
        """
        unique = uuid.uuid4().hex
        request_id = _request_id(spec, name, unique)
        origin = given or new_origin(request_id if spec.turn is None else unique)
        if start is not None:
            origin = start.origin(origin)
            request_id = spec.service.request_id or origin.name
        return origin.name if spec.turn is None else request_id, origin

    def _new_origin(self, name: str, fingerprint: str | None) -> Origin:
        return Origin(name, int(time.time()), secrets.randbits(62), fingerprint)

    def _fingerprint(self, adapter: Adapter | None) -> str | None:
        """Name of everything that the bits of an answer with this adapter depend on, once it is known."""
        root = self._root()
        return system_fingerprint(root if root is None or adapter is None else adapted(root, adapter.digest))

    def _head(self, spec: GenerationSpec, origin: Origin, adapter: Adapter | None) -> ResponseHead:
        return ResponseHead(
            kind=spec.kind,
            id=response_id(spec, origin.name),
            created=origin.created,
            model=self._facts.model.name if adapter is None else adapter.name,
            system_fingerprint=origin.fingerprint,
        )
