"""A whole cluster in one thread, without Ray: a directory, engines with fake models, and an ingress.

The directory, the engines and the generations are the real ones. The parties here stand in for the actors and follow
their rules: `actors/dispatcher.py`, `actors/kv_cache_manager.py`, `actors/worker.py`. What one says to another is a
message in a *channel*. A channel keeps its order: a worker's token stream, its export stream, the ingress's calls of
one actor. Which channel moves next, and which engine steps, is the caller's choice; each call of the manager and each
answer has a channel of its own, so that they may overtake each other. Time passes when the caller says so.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import TypeAlias

from builders import FINGERPRINT, FakeModel, chain_of, expected_answer

from engine.core.block_index import Segment
from engine.core.block_pool import BlockPool
from engine.core.directory import Directory
from engine.core.errors import NoWorkerError
from engine.core.generation import Generation
from engine.core.instructions import Deliver, Export, Instruction, Lost
from engine.core.placement import CostModel, preferred
from engine.core.scheduler import SchedulerLimits
from engine.core.types import Admission, AdmitRequest, Assignment, CacheWish, Role, Salt, SamplingParams, TokenEvent
from engine.model.engine import Engine, ExportedSegment

AWAIT_TIMEOUT_S = 30.0
CHECK_S = AWAIT_TIMEOUT_S / 8
"""How often the manager looks for those who do not send what others wait for."""
RETRY_S = 0.25
MAX_TURNS = 20_000

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
    unreadable: set[int] = field(default_factory=set)
    """Segments whose payload is gone."""


class Cluster:
    """Everything, and what has been counted."""

    def __init__(self, roles: Sequence[Role], sizes: Sizes = Sizes(), segment_budget_bytes: int = 1 << 20) -> None:
        self.sizes = sizes
        self.segment_budget_bytes = segment_budget_bytes
        self.now = 0.0
        self.mail: dict[Channel, deque[Callable[[], None]]] = {}
        self.manager = self._new_manager()
        self.workers: dict[str, SimWorker] = {}
        self.active: dict[str, Generation] = {}
        self.ended: dict[str, Generation] = {}
        self.followed: dict[str, SimWorker] = {}
        """Workers whose token stream the ingress reads."""
        self.known: dict[str, Role] = {}
        self.admitting: dict[str, AdmitRequest] = {}
        """Sent to the manager and not answered."""
        self.retries: list[Generation] = []
        self.calls_are_prompt = False
        """Whether what the ingress says to workers is not overtaken by anything."""
        self.num_prefill_tokens = 0
        self.num_timeouts = 0
        """How often nothing moved until time passed."""
        self._num_calls = 0
        for index, role in enumerate(roles):
            self.start_worker(f"w{index}", role, 1)
        self.deliver_all()
        self.known = {worker.worker_id: worker.role for worker in self.workers.values()}

    # What a test may do

    def request(self, prompts: dict[str, Sequence[int]], max_tokens: int = 3) -> None:
        """New requests, which arrive in one turn of the ingress's event loop."""
        for request_id, prompt in prompts.items():
            sampling = SamplingParams(max_tokens)
            self.active[request_id] = Generation(request_id, tuple(prompt), sampling, Salt(), CacheWish())
        self._dispatch([self.active[request_id] for request_id in prompts])

    def leave(self, request_id: str) -> None:
        """The client goes away."""
        self._end(self.active[request_id])

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
        engine = Engine(model, model, pool, limits, self.max_model_len, FINGERPRINT)
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
            self._carry_out(self.manager.directory.supply.replace_stalled(self.now, AWAIT_TIMEOUT_S))

    def restart_manager(self) -> None:
        """The manager dies with all that was said to it and by it, and another comes up, which knows nothing."""
        for channel in [channel for channel in self.mail if channel[0] in ("exports", "to manager", "from manager")]:
            del self.mail[channel]
        self.manager = self._new_manager()
        admitting, self.admitting = self.admitting, {}
        for request in admitting.values():
            self._admitted(self._place_alone(request), request)
        for worker in self.workers.values():
            if worker.is_alive:
                worker.post(worker.engine.scheduler.stop_awaiting_all)
                worker.post(lambda w=worker: self._register(w))  # type: ignore[misc]

    def ping(self) -> None:
        """The ingress tells workers for whom to wait on."""
        now = self.now
        for worker in self.followed.values():
            awaiting = [
                generation.request_id
                for generation in self.active.values()
                if generation.decode == worker.worker_id
                and generation.awaits_prefill
                and generation.prefill in self.followed
            ]
            self._call(worker, lambda w, ids=awaiting: w.engine.scheduler.keep_awaiting(ids, now))

    def deliver(self, channel: Channel) -> None:
        """The next message of a channel arrives."""
        messages = self.mail[channel]
        message = messages.popleft()
        if not messages:
            del self.mail[channel]
        message()

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
            if result.events:
                self._say(_tokens(worker), lambda: self._receive(worker, result.events))
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
        assert self.manager.directory.num_reservations == 0
        assert all(segment.leases == 0 for segment in self.manager.directory.segments._segments.values())
        for worker in self.workers.values():
            if worker.is_alive:
                assert worker.engine.scheduler.num_requests == 0
                assert worker.engine.pool.num_available == worker.engine.pool.num_blocks, "blocks are held"

    def check_integrity(self) -> None:
        self.manager.directory.check_integrity()
        for worker in self.workers.values():
            if worker.is_alive:
                worker.engine.scheduler.check_integrity()
        for generation in (*self.active.values(), *self.ended.values()):
            expected, _ = expected_answer(chain_of(), generation.prompt, generation.sampling, self.max_model_len)
            assert generation.tokens == expected[: len(generation.tokens)]
            assert generation.failure is None
            if generation.finished_by is not None:
                assert generation.tokens == expected

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

    def _call(self, worker: SimWorker, function: Callable[[SimWorker], object]) -> None:
        """The ingress calls a worker, which may be dead by then."""
        self._say(("calls", worker.worker_id, worker.epoch), lambda: worker.post(lambda: function(worker)))

    def wait(self) -> bool:
        """Time passes, up to what somebody waits for; False if nobody does."""
        moving = [worker for worker in self.workers.values() if worker.is_alive and not worker.is_stalled]
        deadlines = [worker.engine.scheduler.next_deadline() for worker in moving]
        due = min((deadline for deadline in deadlines if deadline is not None), default=None)
        if due is None and not self.retries:
            return False
        self.num_timeouts += 1
        if self.retries:
            self.pass_time(RETRY_S)
            retries, self.retries = self.retries, []
            self._dispatch([generation for generation in retries if generation.request_id in self.active])
        elif due is not None:
            self.pass_time(max(0.0, min(due - self.now, CHECK_S)))
        return True

    # The ingress

    def _dispatch(self, generations: Sequence[Generation]) -> None:
        requests = []
        for generation in generations:
            chain = chain_of(block_size=self.sizes.block_size)
            hashes = tuple(chain.hashes(generation.token_ids))
            requests.append(AdmitRequest(generation.request_id, generation.attempt, hashes, len(generation.token_ids)))
        self.admitting |= {request.request_id: request for request in requests}
        self._say(("to manager",), lambda: self._admit_all(requests))

    def _admitted(self, admission: Admission | None, request: AdmitRequest) -> None:
        self.admitting.pop(request.request_id, None)
        generation = self.active.get(request.request_id)
        if generation is None:
            self._release(request.request_id)
            return
        assert generation.attempt == request.attempt
        if admission is not None:
            for worker_id in (admission.prefill, admission.decode):
                if worker_id not in self.followed and self.workers[worker_id].is_alive:
                    self.followed[worker_id] = self.workers[worker_id]
        if admission is None or not self.followed.keys() >= {admission.prefill, admission.decode}:
            self._release(request.request_id)
            self.retries.append(generation)
            return
        generation.place(admission, self.sizes.block_size, self.now)
        for worker_id, assignment in generation.assignments(admission, "ingress", AWAIT_TIMEOUT_S):
            self._assign(self.followed[worker_id], assignment)

    def _assign(self, worker: SimWorker, assignment: Assignment) -> None:
        self._say(("calls", worker.worker_id, worker.epoch), lambda: self._submit(worker, assignment))

    def _submit(self, worker: SimWorker, assignment: Assignment) -> None:
        now = self.now
        if worker.is_alive:
            worker.post(lambda: worker.engine.submit(assignment, now))
        else:
            self._answer("submit failed", lambda: self._not_submitted(assignment))

    def _not_submitted(self, assignment: Assignment) -> None:
        generation = self.active.get(assignment.request_id)
        if generation is not None and generation.attempt == assignment.attempt:
            self._fail_over(generation)

    def _receive(self, worker: SimWorker, events: Sequence[TokenEvent]) -> None:
        for event in events:
            generation = self.active.get(event.request_id)
            if generation is None:
                continue
            was_answered = generation.is_answered
            due = generation.take(event, worker.worker_id)
            if due and not was_answered:
                self._first_token(generation.request_id, generation.attempt)
            if generation.is_over:
                self._end(generation)

    def _first_token(self, request_id: str, attempt: int) -> None:
        directory = self.manager.directory
        self._say(("to manager",), lambda: directory.first_token(request_id, attempt, 0.1))

    def _end(self, generation: Generation) -> None:
        del self.active[generation.request_id]
        self.ended[generation.request_id] = generation
        self._abort(generation, generation.workers_to_abort())
        self._release(generation.request_id)

    def _release(self, request_id: str) -> None:
        manager = self.manager
        self._say(("to manager",), lambda: self._carry_out(manager.directory.release(request_id)))

    def _abort(self, generation: Generation, workers: set[str]) -> None:
        for worker_id in sorted(workers & self.followed.keys()):
            self._call(self.followed[worker_id], lambda w: w.engine.abort([generation.request_id]))

    def _worker_lost(self, worker: SimWorker) -> None:
        if self.followed.get(worker.worker_id) is not worker:
            return
        del self.followed[worker.worker_id]
        for generation in list(self.active.values()):
            if generation.dies_with(worker.worker_id):
                self._fail_over(generation)
            elif generation.loses_kv_with(worker.worker_id) and generation.decode in self.followed:
                ids = [generation.request_id]
                self._call(self.followed[generation.decode], lambda w, ids=ids: w.engine.scheduler.stop_awaiting(ids))

    def _fail_over(self, generation: Generation) -> None:
        if not generation.is_over:
            self._abort(generation, generation.start_over())
            self._dispatch([generation])

    def _place_alone(self, request: AdmitRequest) -> Admission | None:
        able = [worker for worker, role in self.known.items() if role is not Role.PREFILL] or [*self.known]
        worker_id = preferred(request.request_id, able)
        return Admission(request.request_id, request.attempt, worker_id, worker_id, 0, 0, (), ())

    # The manager

    def _new_manager(self) -> Manager:
        return Manager(Directory(CostModel(self.sizes.block_size, piggyback_tokens=0), self.segment_budget_bytes))

    def _admit_all(self, requests: Sequence[AdmitRequest]) -> None:
        answers: list[tuple[Admission | None, AdmitRequest]] = []
        for request in requests:
            try:
                admission, instructions = self.manager.directory.admit(request)
            except NoWorkerError:
                self._carry_out(self.manager.directory.release(request.request_id))
                answers.append((None, request))
                continue
            self._carry_out(instructions)
            answers.append((admission, request))
        self._answer("from manager", lambda: [self._admitted(*answer) for answer in answers] and None)

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            worker = self.workers[instruction.worker_id]
            match instruction:
                case Deliver(segment=segment):
                    self._answer("import", lambda w=worker, s=segment: self._import(w, s))
                case Export(hashes=hashes):
                    self._answer("export", lambda w=worker, h=hashes: w.post(lambda: self._export(w, h)))
                case Lost(hashes=hashes):
                    self._answer("lost", lambda w=worker, h=hashes: self._blocks_lost(w, h))

    # The workers

    def _register(self, worker: SimWorker) -> None:
        worker.engine.pool.drain_journal()
        hashes, manager = worker.engine.pool.hashes(), self.manager
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
                )
            ),
        )

    def _send_segment(self, worker: SimWorker, segment: ExportedSegment) -> None:
        directory, header, unsent = self.manager.directory, segment.header, ()
        if worker.num_unsent:
            worker.num_unsent -= 1
            header, unsent = replace(header, hashes=(), num_bytes=0), header.full_hashes

        def arrive() -> None:
            speaker = worker.worker_id, worker.epoch
            if not unsent or header.handover is not None:
                self._carry_out(directory.segment_exported(*speaker, header, segment.payload))
            self._carry_out(directory.blocks_unsent(*speaker, unsent))

        self._say(_exports(worker), arrive)

    def _import(self, worker: SimWorker, segment: Segment) -> None:
        if not worker.is_alive:
            return
        manager = self.manager
        is_readable = manager.directory.segments._segments.get(segment.segment_id) is not segment or (
            segment.segment_id not in manager.unreadable
        )
        payload = segment.ref if is_readable else None
        now = self.now
        worker.post(lambda: worker.engine.import_segment(segment.header, payload, now))  # type: ignore[arg-type]
        if not is_readable:
            self._answer("to manager", lambda: manager.directory.segments.undelivered(segment))

    def _export(self, worker: SimWorker, hashes: Sequence[bytes]) -> None:
        segments, missing = worker.engine.export(hashes)
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
        worker.post(lambda: worker.engine.scheduler.blocks_settled(hashes, now))


def _exports(worker: SimWorker) -> Channel:
    return "exports", worker.worker_id, worker.epoch


def _tokens(worker: SimWorker) -> Channel:
    return "tokens", worker.worker_id, worker.epoch
