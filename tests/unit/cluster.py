"""A whole cluster in one thread, without Ray: a directory, engines with fake models, and an ingress.

The directory, the engines and the ingress's `Dispatch` are the real ones. The parties here stand in for the actors
around them, which only carry out instructions. What one says to another is a message in a *channel*. A channel keeps
its order: a worker's token stream, its export stream, the ingress's calls of one actor. Which channel moves next, and
which engine steps, is the caller's choice; each call of the manager and each answer has a channel of its own, so that
they may overtake each other. Time passes when the caller says so.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import TypeAlias

from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.errors import NoWorkerError
from raydix.engine.core.ingress import instructions as ingress
from raydix.engine.core.ingress.cluster_view import ModelFacts, Timeouts
from raydix.engine.core.ingress.dispatch import Dispatch
from raydix.engine.core.ingress.generation import Generation
from raydix.engine.core.manager.block_index import Segment
from raydix.engine.core.manager.directory import Directory
from raydix.engine.core.manager.instructions import DeliverSegment, Export, HandoverLost, Instruction, Lost
from raydix.engine.core.manager.placement import CostModel
from raydix.engine.core.memory.answer_store import AnswerStore
from raydix.engine.core.settings import DraftLimits, SchedulerLimits
from raydix.engine.core.types import (
    Admission,
    AdmitRequest,
    Assignment,
    AttemptName,
    AttemptOver,
    BlockHash,
    CacheHints,
    DraftSource,
    Membership,
    Role,
    Salt,
    Sampling,
    StreamEvent,
    WorkerInfo,
)
from raydix.engine.core.worker.attempts import Attempts
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.core.worker.drafts.drafter import Drafter
from raydix.engine.model.engine import Engine
from raydix.engine.model.exchange import ExportedSegment
from tests.unit.builders import FINGERPRINT, FakeModel, chain_of, expected_answer

PING_S = 2.0
AWAIT_TIMEOUT_S = 30.0
CHECK_S = AWAIT_TIMEOUT_S / 8
"""How often the manager looks for those who do not send what others wait for."""
RETRY_S = 0.25
MAX_TURNS = 20_000
ANSWER_BYTES = 5_000
"""Of the manager, where drafts are made: less than what long tests answer."""
DRAFTS_PAY = WorkerCosts(step_s=8e-3, decode_token_s=3e-4, draft_token_s=3e-4)

Channel: TypeAlias = tuple[object, ...]
"""Who speaks to whom; the first word names the kind."""


@dataclass(frozen=True)
class Sizes:
    """Of every worker."""

    block_size: int = 4
    num_blocks: int = 64
    token_budget: int = 16
    max_requests: int = 16


@dataclass(eq=False)
class SimWorker:
    """One incarnation of a worker."""

    worker_id: str
    role: Role
    epoch: int
    engine: Engine
    is_alive: bool = True
    is_stalled: bool = False
    num_unsent: int = 0
    """Segments that it cannot send next."""
    attempts: Attempts = field(default_factory=Attempts)
    commands: list[Callable[[], object]] = field(default_factory=list)
    """What its engine's thread was asked to do while it was stalled."""

    def post(self, command: Callable[[], object]) -> None:
        """Have the engine's thread do something, when it is back."""
        if self.is_stalled:
            self.commands.append(command)
        elif self.is_alive:
            command()


@dataclass(eq=False)
class Manager:
    """One incarnation of the manager."""

    directory: Directory
    answers: AnswerStore
    unreadable: set[int] = field(default_factory=set)
    """Segments whose payload is gone."""


class Cluster:
    """Everything, and what has been counted."""

    def __init__(
        self,
        roles: Sequence[Role],
        sizes: Sizes = Sizes(),
        segment_budget_bytes: int = 1 << 20,
        *,
        sources: Sequence[DraftSource] = (),
    ) -> None:
        """`sources`: of drafts; none are made without."""
        self.sizes = sizes
        self.sources = tuple(sources)
        self.segment_budget_bytes = segment_budget_bytes
        self.now = 0.0
        self.mail: dict[Channel, deque[Callable[[], None]]] = {}
        self.manager = self._new_manager()
        self.workers: dict[str, SimWorker] = {}
        self.active: dict[str, Generation] = {}
        self.ended: dict[str, Generation] = {}
        names_answers = DraftSource.CLUSTER in sources
        facts = ModelFacts(
            FINGERPRINT.rpartition("/")[0], sizes.block_size, AWAIT_TIMEOUT_S, names_answers=names_answers
        )
        self.dispatch = Dispatch("ingress", facts, self.now, Timeouts(retry_s=RETRY_S, dispatch_s=1e9))
        self._pinged_at = 0.0
        self.muted: set[str] = set()
        """Workers whose answers and heartbeats do not arrive."""
        self.num_lost = 0
        """Calls and tokens that were lost on their way."""
        self.num_lost_attempts = 0
        """How often the ingress missed an attempt, or tokens."""
        self.num_silent = 0
        """How often the ingress took a worker for silent."""
        self.followed: dict[str, SimWorker] = {}
        """Workers whose token stream the ingress reads."""
        self.admitting: dict[str, AdmitRequest] = {}
        """Sent to the manager and not answered."""
        self._admits: list[AdmitRequest] = []
        self._settling: list[ingress.Settle] = []
        """Said to the manager and not arrived."""
        self.calls_are_prompt = False
        """Whether what the ingress says to workers is not overtaken by anything."""
        self.num_prefill_tokens = 0
        self.answered: list[str] = []
        """Requests whose answer the manager was told."""
        self.num_timeouts = 0
        """How often nothing moved until time passed."""
        self._num_calls = 0
        for index, role in enumerate(roles):
            self.start_worker(f"w{index}", role, 1)
        self.deliver_all()
        self._name_workers()

    # What a test may do

    def request(self, prompts: Mapping[str, Sequence[int]], max_tokens: int = 3) -> None:
        """New requests, which arrive in one turn of the ingress's event loop."""
        for request_id, prompt in prompts.items():
            sampling = Sampling(max_tokens)
            generation = Generation(request_id, tuple(prompt), sampling, Salt(), CacheHints())
            self.active[request_id] = generation
            self._obey_all(self.dispatch.begin(generation, self.now))
        self._flush()

    def leave(self, request_id: str) -> None:
        """The client goes away."""
        self._end(request_id)
        self._flush()

    def kill(self, worker_id: str, loses_mail: bool = False) -> None:
        """A worker dies; what it has sent arrives, unless `loses_mail`, and then its streams end."""
        worker = self.workers[worker_id]
        worker.is_alive = False
        streams = _exports(worker), _tokens(worker)
        if loses_mail:
            for stream in streams:
                self.mail.pop(stream, None)
        manager = self.manager
        self._say(_exports(worker), lambda: self._carry_out(manager.directory.remove_worker(worker_id, worker.epoch)))
        self._say(_tokens(worker), lambda: self._worker_lost(worker))

    def start_worker(self, worker_id: str, role: Role, epoch: int) -> None:
        pool = BlockPool(self.sizes.num_blocks, self.sizes.block_size)
        model = FakeModel(pool)
        limits = SchedulerLimits(self.sizes.token_budget, self.sizes.max_requests)
        drafter = Drafter(DraftLimits(sources=self.sources)) if self.sources else None
        engine = Engine(model, model, pool, limits, self.max_model_len, FINGERPRINT, drafter=drafter)
        if drafter is not None:
            engine.scheduler.learn_costs(DRAFTS_PAY)
        self.workers[worker_id] = worker = SimWorker(worker_id, role, epoch, engine)
        self._register(worker)

    def stall(self, worker_id: str) -> None:
        """A worker's engine does nothing any more, and nobody is told."""
        self.workers[worker_id].is_stalled = True

    def resume(self, worker_id: str) -> None:
        """It goes on, with what it was asked to do meanwhile."""
        worker = self.workers[worker_id]
        worker.is_stalled = False
        commands, worker.commands = worker.commands, []
        for command in commands:
            worker.post(command)

    def pass_time(self, seconds: float) -> None:
        """Time passes, and the manager looks around, before and after."""
        for passed in (0.0, seconds):
            self.now += passed
            self._carry_out(self.manager.directory.stock.supply.replace_stalled(self.now, AWAIT_TIMEOUT_S))

    def restart_manager(self) -> None:
        """The manager dies with all that was said to it and by it, and another comes up, which knows nothing."""
        for channel in [channel for channel in self.mail if channel[0] in ("exports", "to manager", "from manager")]:
            del self.mail[channel]
        self.manager = self._new_manager()
        settling, self._settling = self._settling, []
        for settle in settling:
            self.dispatch.outbox.not_settled(settle.ended)
        admitting, self.admitting = self.admitting, {}
        self._obey(self.dispatch.not_admitted(list(admitting.values()), self.now, is_silent=False))
        for worker in self.workers.values():
            if worker.is_alive:
                worker.post(worker.engine.scheduler.imports.stop_awaiting_all)
                worker.post(lambda w=worker: self._register(w))  # type: ignore[misc]

    def ping(self) -> None:
        """The ingress tells workers for whom to wait on, and hears which workers there are."""
        late_s = max(0.0, self.now - self._pinged_at - PING_S)
        self._pinged_at = self.now
        self._obey(self.dispatch.keep_alive(self.now, late_s))

    def mute(self, worker_id: str) -> None:
        """Nobody hears of a worker any more but by its tokens and exports, which it goes on sending."""
        self.muted.add(worker_id)
        directory = self.manager.directory
        if directory.fleet.keys() - self.muted:
            self._carry_out(directory.worker_silent(worker_id, self.now))

    def unmute(self, worker_id: str) -> None:
        """A worker's heartbeats and answers arrive again."""
        self.muted.discard(worker_id)
        worker = self.workers[worker_id]
        if worker.is_alive and self.manager.directory.fleet.current(worker_id, worker.epoch) is None:
            worker.post(lambda: self._register(worker))

    def deliver(self, channel: Channel) -> None:
        """The next message of a channel arrives."""
        messages = self.mail[channel]
        message = messages.popleft()
        if not messages:
            del self.mail[channel]
        message()

    def lose(self, channel: Channel) -> None:
        """The next message of a channel never arrives, and nobody is told."""
        messages = self.mail[channel]
        messages.popleft()
        if not messages:
            del self.mail[channel]
        self.num_lost += 1

    def deliver_all(self) -> None:
        while self.mail:
            self.deliver(next(iter(self.mail)))

    def step(self, worker: SimWorker) -> bool:
        """One turn of a worker's engine thread; whether anything came of it."""
        if not worker.is_alive or worker.is_stalled:
            return False
        result = worker.engine.step(self.now)
        if result is not None:
            self.num_prefill_tokens += result.shape.num_prefill_tokens
            events = [each for each in result.events if worker.attempts.reader(each.request_id, each.attempt)]
            for request in result.finished:
                worker.attempts.end(request.request_id, request.assignment.attempt)
            if events:
                self._say(_tokens(worker), lambda: self._receive(worker, events))
            for segment in result.segments:
                self._send_segment(worker, segment)
        sealed, evicted = worker.engine.pool.drain_journal()
        if sealed or evicted:
            directory = self.manager.directory
            self._say(
                _exports(worker),
                lambda: self._carry_out(directory.blocks_changed(worker.worker_id, worker.epoch, sealed, evicted)),
            )
        return bool(result or sealed or evicted)

    def turn(self, random: Random) -> bool:
        """A message arrives or an engine steps; False if nothing can happen before time passes."""
        while self.calls_are_prompt and (calls := [channel for channel in self.mail if channel[0] == "calls"]):
            self.deliver(calls[0])
        living = [worker for worker in self.workers.values() if worker.is_alive]
        if not self.mail and not living:
            return False
        choice = random.randrange(len(self.mail) + len(living))
        if choice < len(self.mail):
            self.deliver(list(self.mail)[choice])
            return True
        if self.step(living[choice - len(self.mail)]):
            return True
        return bool(self.mail) or any(self.step(worker) for worker in living)

    def drain(self, random: Random) -> None:
        """Let everything happen that can, in the order that `random` says; time passes only when nothing moves."""
        for _ in range(MAX_TURNS):
            if not self.turn(random) and not self.wait():
                break
        else:
            raise AssertionError("it does not end")
        self.check_integrity()
        assert not self.active, f"{list(self.active)} never end"
        assert self.num_lost or not self.num_lost_attempts, "nothing was lost"
        assert self.manager.directory.num_reservations == 0
        assert all(segment.leases == 0 for segment in self.manager.directory.stock.segments._segments.values())
        for worker in self.workers.values():
            if worker.is_alive:
                assert len(worker.engine.scheduler.requests) == 0
                assert worker.engine.pool.num_available == worker.engine.pool.num_blocks, "blocks are held"

    def check_integrity(self) -> None:
        self.manager.directory.check_integrity()
        self.manager.answers.check_integrity()
        assert len(set(self.answered)) == len(self.answered), "an answer counts twice"
        self.dispatch.check_integrity()
        for worker in self.workers.values():
            if worker.is_alive:
                worker.engine.scheduler.check_integrity()
        for generation in (*self.active.values(), *self.ended.values()):
            expected, _ = expected_answer(chain_of(), generation.prompt, generation.sampling, self.max_model_len)
            assert generation.tokens == expected[: len(generation.tokens)]
            assert generation.failure is None
            if generation.finished_by is not None:
                assert generation.tokens == expected

    def num_accepted(self, worker_id: str, source: DraftSource) -> int:
        """Draft tokens of a worker that became tokens of answers."""
        return self.workers[worker_id].engine.scheduler.drafting.counts[source].num_accepted

    @property
    def is_placing(self) -> bool:
        """True if some request has no worker yet."""
        return any(generation.prefill is None for generation in self.active.values())

    @property
    def max_model_len(self) -> int:
        return self.sizes.num_blocks * self.sizes.block_size

    # Messages

    def _say(self, channel: Channel, message: Callable[[], None]) -> None:
        self.mail.setdefault(channel, deque()).append(message)

    def _answer(self, kind: str, message: Callable[[], None]) -> None:
        """A message that others may overtake."""
        self._num_calls += 1
        self._say((kind, self._num_calls), message)

    def _call(self, worker_id: str, function: Callable[[SimWorker], None]) -> None:
        """The ingress calls a worker that it follows, which may be dead by then."""
        worker = self.followed[worker_id]
        self._say(_calls(worker), lambda: function(worker))

    def wait(self) -> bool:
        """Time passes, up to what somebody waits for; False if nobody does."""
        moving = [worker for worker in self.workers.values() if worker.is_alive and not worker.is_stalled]
        deadlines = [worker.engine.scheduler.imports.next_deadline() for worker in moving]
        due = min((deadline for deadline in deadlines if deadline is not None), default=None)
        if due is None and self.dispatch.retries.next_at is None and not (self.num_lost and self.active):
            return False
        self.num_timeouts += 1
        if self.dispatch.retries.next_at is not None:
            self.pass_time(RETRY_S)
            self._name_workers()
            self._obey(self.dispatch.tick(self.now))
        elif self.num_lost and self.active:
            self.pass_time(PING_S)
            self.ping()
        elif due is not None:
            self.pass_time(max(0.0, min(due - self.now, CHECK_S)))
        return True

    # The ingress

    def _obey(self, instructions: Iterable[ingress.Instruction]) -> None:
        """Carry out what `Dispatch` says, at the end of a turn of the ingress's event loop."""
        self._obey_all(instructions)
        self._flush()

    def _flush(self) -> None:
        self._obey_all(self.dispatch.flush(has_manager=True))
        requests, self._admits = self._admits, []
        if requests:
            self.admitting |= {request.request_id: request for request in requests}
            self._say(("to manager",), lambda: self._admit_all(requests))

    def _obey_all(self, instructions: Iterable[ingress.Instruction]) -> None:
        for instruction in instructions:
            self._obey_one(instruction)

    def _obey_one(self, instruction: ingress.Instruction) -> None:
        now = self.now
        match instruction:
            case ingress.Admit(request):
                self._admits.append(request)
            case ingress.Follow(worker_id, epoch):
                self._answer("found", lambda: self._look_for(worker_id, epoch))
            case ingress.Read(worker_id, _):
                self.followed[worker_id] = self.workers[worker_id]
            case ingress.Submit(worker_id, assignments):
                for assignment in assignments:
                    self._assign(self.followed[worker_id], assignment)
            case ingress.Abort(worker_id, request_id, attempt, has_ended):
                self._call(worker_id, lambda w: self._abort(w, AttemptName(request_id, attempt), has_ended=has_ended))
            case ingress.StopAwaiting(worker_id, request_id):
                self._call(worker_id, lambda w: w.post(lambda: w.engine.scheduler.imports.stop_awaiting([request_id])))
            case ingress.Ping(worker_id, taken, sent, awaiting):
                self._call(worker_id, lambda w: w.post(lambda: w.engine.scheduler.imports.keep_awaiting(awaiting, now)))
                self._call(worker_id, lambda w: self._compare(w, taken, sent))
            case ingress.AttemptLost():
                self.num_lost_attempts += 1
            case ingress.DeliverTokens(request_id, _):
                # The events of one step come in several instructions; the first may have found the last event.
                if request_id in self.active and self.active[request_id].is_over:
                    self._end(request_id)
            case ingress.Settle():
                self._settling.append(instruction)
                self._say(("to manager",), lambda: self._settle(instruction))
            case ingress.AskWorkers():
                self._name_workers()
            case ingress.WorkerLost(worker_id):
                self.followed.pop(worker_id, None)
            case ingress.WorkerSilent():
                self.num_silent += 1

    def _look_for(self, worker_id: str, epoch: int) -> None:
        worker = self.workers[worker_id]
        is_there = worker.is_alive and worker.epoch == epoch
        report = self.dispatch.found if is_there else self.dispatch.not_found
        self._obey(report(worker_id, epoch, self.now))

    def _name_workers(self) -> None:
        """The manager says which workers there are."""
        directory = self.manager.directory
        workers = tuple(WorkerInfo(each.worker_id, each.role, each.epoch) for each in directory.fleet.values())
        self._obey_all(self.dispatch.membership(Membership(workers, 0, directory.fleet.fingerprint), self.now))

    def _assign(self, worker: SimWorker, assignment: Assignment) -> None:
        self._say(_calls(worker), lambda: self._submit(worker, assignment))

    def _submit(self, worker: SimWorker, assignment: Assignment) -> None:
        now = self.now
        if worker.is_alive:
            worker.attempts.begin([assignment])
            worker.post(lambda: worker.engine.submit(assignment, now))
            taken = [AttemptName(assignment.request_id, assignment.attempt)]
            self._answer("taken", lambda: self.dispatch.submitted(worker.worker_id, taken))
        else:
            fail = lambda: self._obey(self.dispatch.not_submitted([assignment], self.now))  # noqa: E731
            self._answer("submit failed", fail)

    def _abort(self, worker: SimWorker, attempt: AttemptName, *, has_ended: bool = False) -> None:
        if worker.attempts.forget(*attempt):
            worker.post(lambda: worker.engine.abort([attempt.request_id], self.now, has_ended=has_ended))

    def _compare(self, worker: SimWorker, taken: Sequence[AttemptName], sent: Sequence[AttemptName]) -> None:
        """A ping comes to a worker."""
        if not worker.is_alive:
            return
        unknown, orphans = worker.attempts.compare("ingress", taken, sent, self.now)
        for orphan in orphans:
            self._abort(worker, orphan)
        if unknown:
            over = [AttemptOver(*name) for name in unknown]
            self._say(_tokens(worker), lambda: self._receive(worker, over))
        if worker.worker_id not in self.muted:
            self._answer("pong", lambda: self.dispatch.view.heard(worker.worker_id, self.now))

    def _receive(self, worker: SimWorker, events: Sequence[StreamEvent]) -> None:
        if self.followed.get(worker.worker_id) is worker:
            self._obey(self.dispatch.tokens(worker.worker_id, events, self.now))

    def _end(self, request_id: str) -> None:
        self.ended[request_id] = self.active.pop(request_id)
        self._obey_all(self.dispatch.end(request_id))

    def _worker_lost(self, worker: SimWorker) -> None:
        self._obey(self.dispatch.worker_lost(worker.worker_id, worker.epoch, "died", self.now, is_dead=True))

    # The manager

    def _new_manager(self) -> Manager:
        directory = Directory(CostModel(self.sizes.block_size, piggyback_tokens=0), self.segment_budget_bytes)
        return Manager(directory, AnswerStore(ANSWER_BYTES))

    def _admit_all(self, requests: Sequence[AdmitRequest]) -> None:
        answers: list[tuple[Admission | None, AdmitRequest]] = []
        for request in requests:
            try:
                admission, instructions = self.manager.directory.admit(request, self.now)
            except NoWorkerError:
                self._carry_out(self.manager.directory.end_request(request.request_id, self.now))
                answers.append((None, request))
                continue
            self._carry_out(instructions)
            continuations = self.manager.answers.continuations(request.answer_name)
            answers.append((replace(admission, continuations=continuations), request))
        self._answer("from manager", lambda: self._admitted(answers))

    def _admitted(self, answers: Sequence[tuple[Admission | None, AdmitRequest]]) -> None:
        for admission, request in answers:
            self.admitting.pop(request.request_id, None)
            self._obey_all(self.dispatch.admitted(request.request_id, request.attempt, admission, self.now))
        self._flush()

    def _settle(self, settle: ingress.Settle) -> None:
        self._settling.remove(settle)
        directory = self.manager.directory
        for first in settle.first_tokens:
            directory.first_token(first.request_id, first.attempt, first.ttft_s)
        for end in settle.ended:
            if end.answer is not None:
                self.answered.append(end.request_id)
                self.manager.answers.keep(*end.answer)
            if not directory.has_newer_attempt(end.request_id, end.attempt):
                self._carry_out(directory.end_request(end.request_id, self.now))

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case DeliverSegment(worker_id, segment):
                    self._answer("import", partial(self._import, self.workers[worker_id], segment))
                case Export(worker_id, hashes):
                    worker = self.workers[worker_id]
                    self._answer("export", partial(worker.post, partial(self._export, worker, hashes)))
                case Lost(worker_id, hashes):
                    self._answer("lost", partial(self._blocks_lost, self.workers[worker_id], hashes))
                case HandoverLost(worker_id, request_id):
                    decode = self.workers[worker_id]
                    stop = partial(decode.engine.scheduler.imports.stop_awaiting, [request_id])
                    self._answer("lost", partial(decode.post, stop))
                case _:
                    raise AssertionError(f"there is no disk for {instruction}")

    # The workers

    def _register(self, worker: SimWorker) -> None:
        worker.engine.pool.drain_journal()
        hashes, manager = worker.engine.pool.hashes(), self.manager
        attempts = worker.attempts.under_way
        self.mail.pop(_exports(worker), None)  # what waited for the last reader is dropped
        self._say(
            _exports(worker),
            lambda: self._carry_out(
                manager.directory.register(
                    worker.worker_id,
                    worker.role,
                    worker.epoch,
                    worker.engine.store.block_bytes,
                    hashes,
                    self.sizes.token_budget,
                    fingerprint=FINGERPRINT,
                    attempts=attempts,
                )
            ),
        )

    def _send_segment(self, worker: SimWorker, segment: ExportedSegment) -> None:
        directory, header = self.manager.directory, segment.header
        unsent: tuple[BlockHash, ...] = ()
        if worker.num_unsent:
            worker.num_unsent -= 1
            header, unsent = replace(header, hashes=(), num_bytes=0, states=()), header.names

        def arrive() -> None:
            speaker = worker.worker_id, worker.epoch
            if not unsent or header.handover is not None:
                self._carry_out(directory.segment_exported(*speaker, header, segment.payload, self.now))
            self._carry_out(directory.blocks_unsent(*speaker, unsent))

        self._say(_exports(worker), arrive)

    def _import(self, worker: SimWorker, segment: Segment) -> None:
        if not worker.is_alive:
            return
        manager = self.manager
        is_readable = manager.directory.stock.segments._segments.get(segment.segment_id) is not segment or (
            segment.segment_id not in manager.unreadable
        )
        payload = segment.ref if is_readable else None
        now = self.now
        worker.post(lambda: worker.engine.exchange.import_segment(segment.header, payload, now))  # type: ignore[arg-type]
        if not is_readable:
            self._answer("to manager", lambda: manager.directory.stock.segments.undelivered(segment, self.now))

    def _export(self, worker: SimWorker, hashes: Sequence[bytes]) -> None:
        segments, missing = worker.engine.exchange.export(hashes, self.now)
        for segment in segments:
            self._send_segment(worker, segment)
        if missing:
            directory = self.manager.directory
            self._say(
                _exports(worker),
                lambda: self._carry_out(directory.export_failed(worker.worker_id, worker.epoch, missing)),
            )

    def _blocks_lost(self, worker: SimWorker, hashes: Sequence[bytes]) -> None:
        now = self.now
        worker.post(lambda: worker.engine.scheduler.imports.settled(hashes, now))


def _exports(worker: SimWorker) -> Channel:
    return "exports", worker.worker_id, worker.epoch


def _calls(worker: SimWorker) -> Channel:
    return "calls", worker.worker_id, worker.epoch


def _tokens(worker: SimWorker) -> Channel:
    return "tokens", worker.worker_id, worker.epoch
