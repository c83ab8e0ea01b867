"""The decisions of one ingress replica's data plane: events and the time in, instructions out.

A request is admitted by the manager, its workers are followed (their token streams are read), it is submitted to them,
and their tokens are delivered. What goes wrong on the way:

* a request's session is to wait for its turn: ask again every `pause_s`, by its id alone until its turn has come;
* no worker can take a request: ask again every `retry_s`, as long as a worker may come;
* the manager is out of reach or silent: the request goes whole to the worker that its session prefers;
* an admitted worker is not there: forget the worker, release the admission, ask again;
* a decode worker dies, or a prefill worker before the first token: fail over, which is to admit again with the tokens
  generated so far as part of the prompt;
* a prefill worker dies after the first token: the decode worker computes what did not arrive;
* a worker ends the stream and lives: fail over; the worker is avoided for a while;
* a worker is silent: fail over to others, until the worker answers again;
* a worker's last words name a request: the request begins alone at the next worker, and if that worker's last words
  name this request and no other, no third worker gets it;
* a worker lives and has ended an attempt, or never had it, but events are missing: fail over;
* a worker is about to stop: its requests move to others, as at a failover, with the KV that the worker still holds;
* the workers have another model than this replica: no request is admitted.

`raydix.actors.ingress.dispatcher` carries the instructions out and reports the results; here is no Ray and no clock.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from raydix.engine.core.answers.continuations import BegunAnswer
from raydix.engine.core.errors import LateError, NoWorkerError, RaydixError, ServiceError, StopsWorkersError
from raydix.engine.core.ingress.cluster_view import ClusterView, ModelFacts, Timeouts
from raydix.engine.core.ingress.generation import Generation
from raydix.engine.core.ingress.instructions import (
    Abort,
    Admit,
    AskAgain,
    AskWorkers,
    AttemptLost,
    DeliverTokens,
    FailedOver,
    Follow,
    Instruction,
    ModelDiffers,
    MovedOn,
    NamedByLastWords,
    Ping,
    Read,
    Settle,
    StartWorker,
    StopAwaiting,
    Submit,
    WorkerLost,
    WorkerSilent,
)
from raydix.engine.core.objectives import Late
from raydix.engine.core.types import (
    Admission,
    AdmitRequest,
    Assignment,
    AttemptName,
    AttemptOver,
    Ended,
    FirstToken,
    Membership,
    Outcome,
    Paused,
    PromptEvent,
    StreamEvent,
)

UNTAKEN_S = 5.0  # a submission that is not answered after so long counts as answered: either side may have lost it


@dataclass(slots=True)
class Outbox:
    """Messages of the data plane to be sent together, one call for each receiver: assignments for workers, and reports
    for the manager."""

    assignments: dict[str, list[Assignment]] = field(default_factory=dict)
    """Assignments by worker."""
    first_tokens: list[FirstToken] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.assignments or self.first_tokens or self.ended)

    def submit(self, worker_id: str, assignment: Assignment) -> None:
        self.assignments.setdefault(worker_id, []).append(assignment)

    def release(self, generation: Generation, answer: BegunAnswer | None = None) -> None:
        """Report the end of an admission, and how the request has ended. `answer`: with a request's last end."""
        how = Outcome.ABORTED
        if generation.has_ended:
            how = Outcome.FINISHED
        elif generation.failure is not None:
            how = Outcome.FAILED
        self.ended.append(
            Ended(
                generation.request_id,
                generation.attempt,
                how,
                num_preemptions=generation.num_preemptions,
                drafts=tuple(generation.drafts.values()),
                answer=answer,
                handover_s=generation.handover_s,
                stop=generation.stop,
            )
        )

    def not_settled(self, ended: Iterable[Ended]) -> None:
        """Report ends again that the manager has not confirmed. Answers are left out: an answer that the manager did
        hear would be counted twice."""
        self.ended += [replace(each, answer=None) if each.answer is not None else each for each in ended]

    def take_submits(self, followed: Container[str], is_current: Callable[[Assignment], bool]) -> list[Instruction]:
        """The assignments for `followed` workers, without attempts known to be over; none are left.

        A finished attempt has been aborted already, and the submission must not overtake the abort.
        """
        instructions: list[Instruction] = []
        assignments, self.assignments = self.assignments, {}
        for worker_id, batch in assignments.items():
            current = [each for each in batch if is_current(each)]
            # A worker that is followed no more has been left by these requests already.
            if current and worker_id in followed:
                instructions.append(Submit(worker_id, current))
        return instructions

    def take_reports(self) -> list[Instruction]:
        """The reports for the manager; none are left."""
        if not (self.first_tokens or self.ended):
            return []
        reports = Settle(self.first_tokens, self.ended)
        self.first_tokens, self.ended = [], []
        return [reports]


@dataclass(slots=True, eq=False)
class Entry:
    """A request under way. It is being admitted, or `admission` waits for workers to be followed, or the request waits
    for another admission (`Dispatch.retries`), or it has been submitted."""

    generation: Generation
    waiting_since: float
    admission: Admission | None = None
    avoided: tuple[str, ...] = ()
    """Workers that were silent or doubted when the request was last sent to the manager."""
    num_moves: int = 0
    """Attempts that ended because their worker was about to stop."""

    def awaits(self, worker_id: str, epoch: int) -> bool:
        """True if the admission names this incarnation."""
        admission = self.admission
        return admission is not None and (worker_id, epoch) in (
            (admission.prefill, admission.prefill_epoch),
            (admission.decode, admission.decode_epoch),
        )


class Entries(dict[str, Entry]):
    """The requests under way, by id."""

    def current(self, request_id: str, attempt: int) -> Entry | None:
        """The request, if this is its present attempt."""
        entry = self.get(request_id)
        return entry if entry is not None and entry.generation.attempt == attempt else None

    def affected_by(self, worker_id: str) -> list[Entry]:
        """Requests that cannot go on as they are without a worker."""
        return [
            entry
            for entry in self.values()
            if entry.generation.dies_with(worker_id) or entry.generation.loses_kv_with(worker_id)
        ]

    def awaiting(self, worker_id: str, epoch: int) -> list[Entry]:
        """Requests whose admission waits for this incarnation, in the order of `priority`."""
        awaiting = [entry for entry in self.values() if entry.awaits(worker_id, epoch)]
        return sorted(awaiting, key=lambda entry: entry.generation.priority)

    def pings(self, followed: Iterable[str], now: float) -> list[Ping]:
        """A ping for each followed worker, with the attempts of both kinds. Only prefill workers among the followed are
        awaited."""
        pings = {worker_id: Ping(worker_id, [], [], []) for worker_id in followed}
        for generation in (entry.generation for entry in self.values()):
            is_overdue = now - generation.placed_at >= UNTAKEN_S
            # Both workers of a split request, or the one that has it whole, as far as they are followed.
            for worker_id in {generation.prefill or "", generation.decode or ""} & pings.keys():
                if not generation.may_be_at(worker_id):
                    continue
                is_taken = is_overdue or worker_id in generation.taken_by
                named = pings[worker_id].taken if is_taken else pings[worker_id].sent
                named.append(generation.attempt_name)
                # The prefill worker lives, so the decode worker may go on waiting for its KV.
                if worker_id == generation.decode and generation.awaits_prefill and generation.prefill in pings:
                    pings[worker_id].awaiting.append(generation.request_id)
        return [*pings.values()]


class _Retry(NamedTuple):
    priority: int
    at: float


@dataclass(slots=True)
class Retries:
    """Times at which requests are admitted again, the longest waiting first. No request waits while a request with a
    higher `priority` number is admitted."""

    _retries: dict[str, _Retry] = field(default_factory=dict)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._retries

    @property
    def names(self) -> list[str]:
        """The waiting requests."""
        return list(self._retries)

    @property
    def next_at(self) -> float | None:
        """When the next is due; None if there is none."""
        return min([retry.at for retry in self._retries.values()], default=None)

    def add(self, request_id: str, priority: int, at: float) -> None:
        """Have a request wait until a time."""
        self._retries[request_id] = _Retry(priority, at)

    def drop(self, request_id: str) -> None:
        """Forget a request, if it waits."""
        self._retries.pop(request_id, None)

    def due(self, now: float) -> list[str]:
        """Return the requests whose time has come, and all that go before one of these, in their order."""
        last = max([retry.priority for retry in self._retries.values() if retry.at <= now], default=None)
        if last is None:
            return []
        due = [name for name, retry in self._retries.items() if retry.at <= now or retry.priority < last]
        return sorted(due, key=lambda name: self._retries[name].priority)


MAX_ATTEMPTS = 10
MAX_STOPPED = 2  # workers that one request may stop


class Dispatch:
    """Runs the requests of one ingress replica over workers that come and go."""

    def __init__(self, ingress_id: str, model: ModelFacts, now: float, timeouts: Timeouts | None = None) -> None:
        self._ingress_id = ingress_id
        self._model = model
        self._timeouts = Timeouts() if timeouts is None else timeouts
        self.entries = Entries()
        """The requests under way."""
        self.retries = Retries()
        """The requests that wait to be admitted again: `tick` is due when the first one is."""
        self.view = ClusterView(model.fingerprint, now, self._timeouts)
        """Workers and manager as this replica knows them; told directly what changes no request."""
        self.outbox = Outbox()
        """Messages that `flush` sends."""

    # Requests

    def begin(self, generation: Generation, now: float) -> list[Instruction]:
        entry = self.entries[generation.request_id] = Entry(generation, now)
        generation.begun_at = now
        return self._admit(entry, now)

    def end(self, request_id: str) -> list[Instruction]:
        """The reader of a request has its last token, or has left: free what the request holds."""
        generation = self.entries.pop(request_id).generation
        self.retries.drop(request_id)
        self.outbox.release(generation, generation.answer())
        return [
            Abort(worker_id, request_id, generation.attempt, generation.has_ended)
            for worker_id in sorted(generation.workers_to_abort())
            if worker_id in self.view.followed
        ]

    def stopped(self, request_id: str) -> None:
        """A stop string has ended a running request: later tokens from its workers are not needed."""
        self.entries[request_id].generation.is_stopped = True

    def prepare(self, generation: Generation, token_ids: Sequence[int]) -> list[Instruction]:
        """Have the full blocks of `token_ids` computed at idle priority by the worker of an ended generation's last
        token, whose pool has the blocks of the common beginning. Changes no state here."""
        num_full = len(token_ids) // self._model.block_size * self._model.block_size
        assignment = generation.idle_assignment(token_ids[:num_full], self._ingress_id)
        worker_id = generation.finished_by or generation.decode
        if assignment is None or worker_id is None or worker_id not in self.view.followed:
            return []
        return [Submit(worker_id, [assignment])]

    def tick(self, now: float) -> list[Instruction]:
        """Admit again the requests that are due, and fail the requests that have waited for too long."""
        instructions: list[Instruction] = []
        last_sign_at = self.view.last_sign_at(now)
        for entry in map(self.entries.__getitem__, self.retries.due(now)):
            if now >= max(entry.waiting_since, last_sign_at) + self._timeouts.dispatch_s:
                error = NoWorkerError("no worker is ready to take the request", retry_after_s=5)
                instructions += self._fail(entry, error)
            elif entry.generation.paused is not None:
                self.retries.drop(entry.generation.request_id)
                instructions.append(AskAgain(entry.generation.request_id))
            else:
                instructions += self._admit(entry, now)
        return instructions

    # The manager's answers

    def admitted(
        self, request_id: str, attempt: int, admission: Admission | Late | Paused | None, now: float
    ) -> list[Instruction]:
        """The manager has placed an attempt, has it wait for its session's turn, has no worker for it, or refuses
        it."""
        self.view.manager_answered(now)
        entry = self.entries.current(request_id, attempt)
        if entry is None:  # Its end may have been settled before it was admitted.
            self.outbox.ended.append(Ended(request_id, attempt))
            return []
        if isinstance(admission, Late):
            return self._fail(entry, LateError(admission))
        if isinstance(admission, Paused):
            self._pause(entry, admission, now)
            return []
        return self._place(entry, admission, now)

    def asked_again(self, answers: Mapping[str, Paused | None], now: float) -> list[Instruction]:
        """The manager has told paused requests whether they pause still; None: they are to be admitted, which holds for
        all where the manager has not answered."""
        instructions: list[Instruction] = []
        for request_id, paused in answers.items():
            entry = self.entries.get(request_id)
            if entry is None:  # Its end has been reported, behind the question.
                continue
            if paused is not None:
                self.view.manager_answered(now)
                self._pause(entry, paused, now)
            else:
                instructions += self._admit(entry, now)
        return instructions

    def not_admitted(self, requests: Iterable[AdmitRequest], now: float, *, is_silent: bool) -> list[Instruction]:
        """The manager is out of reach or silent, so the requests are placed without it. A silent manager may admit the
        requests later: it is told that these attempts have ended."""
        instructions: list[Instruction] = []
        for request in requests:
            # The manager may yet admit the attempt, and hears behind that that it is over.
            if is_silent:
                self.outbox.ended.append(Ended(request.request_id, request.attempt))
            entry = self.entries.current(request.request_id, request.attempt)
            if entry is not None:
                instructions += self._place(entry, self.view.alone(request), now)
        return instructions

    def membership(self, membership: Membership, now: float) -> list[Instruction]:
        """The manager has named the registered workers."""
        refused_before = self.view.refused_fingerprint
        self.view.update(membership, now)
        refused = self.view.refused_fingerprint
        differs = [] if refused in (None, refused_before) else [ModelDiffers(refused, self._model.fingerprint)]
        demand = [StartWorker()] if self.entries and self.view.lacks_first else []
        return [*differs, *demand, *self._move_on(now)]

    # Workers

    def found(self, worker_id: str, epoch: int, now: float) -> list[Instruction]:
        """A worker incarnation that was looked for is there."""
        instructions: list[Instruction] = []
        # An incarnation that was found late may be older than the one that is followed by now.
        if self.view.found(worker_id, epoch):
            instructions += self.worker_lost(worker_id, epoch - 1, "a newer one is there", now, is_dead=True)
            self.view.follow(worker_id, epoch, now)
            instructions.append(Read(worker_id, epoch))
        for entry in self.entries.awaiting(worker_id, epoch):
            instructions += self._send(entry, now)
        return instructions

    def not_found(self, worker_id: str, epoch: int, now: float) -> list[Instruction]:
        """A worker incarnation that was looked for is not there."""
        self.view.not_found(worker_id, epoch)
        for entry in self.entries.awaiting(worker_id, epoch):
            self._give_up_admission(entry, worker_id, epoch, now)
        return []

    def worker_lost(self, worker_id: str, epoch: int, reason: str, now: float, *, is_dead: bool) -> list[Instruction]:
        """The token stream of an incarnation up to `epoch` has ended: its requests go on elsewhere. A worker that lives
        ends the stream of a replica that it takes for gone, and may be followed again."""
        followed = self.view.followed.get(worker_id)
        if followed is None or followed.epoch > epoch:
            return []
        named = followed.named if is_dead else frozenset[str]()
        self.view.leave(worker_id, now, is_dead=is_dead)

        affected = self.entries.affected_by(worker_id)
        lost = WorkerLost(
            worker_id=worker_id,
            epoch=followed.epoch,
            reason=reason,
            num_requests=len(affected),
            was_leaving=self.view.is_leaving(worker_id),
        )
        incidents = self._count_incidents(worker_id, followed.epoch, named)
        return [lost, *incidents, *self._do_without(worker_id, affected, now)]

    def tokens(self, worker_id: str, events: Iterable[StreamEvent], now: float) -> list[Instruction]:
        """Events of a worker's token stream."""
        self.view.heard(worker_id, now)
        instructions: list[Instruction] = []
        for event in events:
            entry = self.entries.get(event.request_id)
            if entry is None:
                continue
            generation = entry.generation
            # Behind all events of the attempt: if the request still waits for this worker, its last events were lost.
            if isinstance(event, AttemptOver):
                if event == generation.attempt_name and generation.dies_with(worker_id):
                    instructions += self._attempt_lost(entry, worker_id, now)
                continue
            # A gap cannot be filled: another attempt goes on behind the last token delivered.
            if generation.lacks_before(event):
                instructions += self._attempt_lost(entry, worker_id, now)
                continue
            if isinstance(event, PromptEvent):
                generation.take_scores(event)
                continue
            was_answered = generation.is_answered
            due = generation.take(event, worker_id)
            if due or generation.failure is not None:
                instructions.append(DeliverTokens(event.request_id, due))
            if due:
                generation.delivered(len(due), now, is_first=not was_answered)
            # The manager takes the prefill off its worker's queue, and compares the time with its prediction.
            if due and not was_answered:
                ttft_s = now - generation.placed_at
                self.outbox.first_tokens.append(FirstToken(generation.request_id, generation.attempt, ttft_s))
        return instructions

    def submitted(self, worker_id: str, attempts: Iterable[AttemptName]) -> None:
        """A worker has taken attempts on."""
        for attempt in attempts:
            entry = self.entries.current(*attempt)
            if entry is not None:
                entry.generation.taken_by.add(worker_id)

    def not_submitted(self, assignments: Iterable[Assignment], now: float) -> list[Instruction]:
        """A worker did not take assignments."""
        instructions: list[Instruction] = []
        for assignment in assignments:
            entry = self.entries.current(assignment.request_id, assignment.attempt)
            if entry is not None:
                instructions += self._fail_over(entry, now)
        return instructions

    # Sending

    def flush(self, *, has_manager: bool) -> list[Instruction]:
        """Send what has gathered since the last time: one call for each receiver."""
        submits = self.outbox.take_submits(
            self.view.followed, lambda each: self.entries.current(each.request_id, each.attempt) is not None
        )
        return submits + (self.outbox.take_reports() if has_manager else [])

    # Signs of life

    def keep_alive(self, now: float, late_s: float) -> list[Instruction]:
        """Tell workers and the manager that this replica is alive, and leave silent workers (`leave_silent`)."""
        instructions = self.leave_silent(now, late_s)
        return [*instructions, *self.entries.pings(self.view.followed, now), AskWorkers(is_probe=True)]

    def leave_silent(self, now: float, late_s: float) -> list[Instruction]:
        """Have the requests of silent workers go on elsewhere. `late_s`: how much later than planned this call comes,
        because this process stood still."""
        self.view.stood_still(late_s)
        instructions: list[Instruction] = []
        for worker_id in sorted(self.view.newly_silent(now)):
            affected = self.entries.affected_by(worker_id)
            instructions.append(WorkerSilent(worker_id, len(affected)))
            worker = self.view.followed[worker_id]
            instructions += self._count_incidents(worker_id, worker.epoch, worker.named)
            instructions += self._do_without(worker_id, affected, now)
        return instructions

    # Inside

    def _admit(self, entry: Entry, now: float) -> list[Instruction]:
        """Ask for workers. Blocks have no names before a worker's fingerprint is known."""
        # Nobody could say what is cached without names of blocks, so the request waits for the first worker.
        if self.view.root is None:
            self._retry(entry, now)
            return [AskWorkers()]
        self.retries.drop(entry.generation.request_id)
        entry.avoided = tuple(sorted(self.view.avoided))
        request = entry.generation.admit_request(self.view.root, self._model, self._ingress_id, entry.avoided)
        return [Admit(request)]

    def _pause(self, entry: Entry, paused: Paused, now: float) -> None:
        """Ask again later for a request that no failure makes wait."""
        generation = entry.generation
        generation.paused, entry.waiting_since = paused, now
        # Those far behind ask seldom: a manager with hundreds of them has other things to do.
        pause_s = min(self._timeouts.longest_pause_s, self._timeouts.pause_s * (1 + paused.num_ahead))
        self.retries.add(generation.request_id, generation.priority, now + pause_s)

    def _place(self, entry: Entry, admission: Admission | None, now: float) -> list[Instruction]:
        entry.generation.paused = None
        if admission is None:
            self._retry(entry, now)
            return []
        entry.admission = admission
        return self._send(entry, now)

    def _send(self, entry: Entry, now: float) -> list[Instruction]:
        """Submit to the admitted workers once all of them are followed. A worker that has become silent or
        doubted since the manager was asked is avoided: nothing would move the request away from it later."""
        admission = entry.admission
        assert admission is not None
        # Workers that were avoided when the manager was asked were chosen all the same: there are no better ones.
        if {admission.prefill, admission.decode} & (self.view.avoided - {*entry.avoided}):
            entry.admission = None
            return self._admit(entry, now)

        absent = self.view.absent(admission)
        for worker_id, epoch in absent.items():
            if self.view.is_gone(worker_id, epoch):
                self._give_up_admission(entry, worker_id, epoch, now)
                return []
        # The request is sent when the last of its workers is found (`found`), or given up if one is not (`not_found`).
        if absent:
            return [Follow(worker_id, epoch) for worker_id, epoch in self.view.search(absent.items())]

        entry.admission = None
        generation = entry.generation
        if generation.stopped:
            admission = admission.whole()  # one worker, and not two, may be stopped by it
        generation.place(admission, self._model.block_size, now)
        timeout_s = self._model.await_timeout_s
        for worker_id, assignment in generation.assignments(admission, self._ingress_id, timeout_s):
            self.outbox.submit(worker_id, assignment)
        return []

    def _give_up_admission(self, entry: Entry, worker_id: str, epoch: int, now: float) -> None:
        """An admitted worker is not there: the admission is of no use."""
        entry.admission = None
        self.view.forget(worker_id, epoch)
        self.outbox.release(entry.generation)
        self._retry(entry, now)

    def _retry(self, entry: Entry, now: float) -> None:
        self.retries.add(entry.generation.request_id, entry.generation.priority, now + self._timeouts.retry_s)

    def _do_without(self, worker_id: str, affected: Iterable[Entry], now: float) -> list[Instruction]:
        """Have requests go on without a worker that was to compute for them, or to send KV."""
        instructions: list[Instruction] = []
        for entry in affected:
            generation = entry.generation
            if generation.dies_with(worker_id):
                instructions += self._fail_over(entry, now)
            elif generation.is_over:
                continue
            elif generation.decode is not None and generation.decode in self.view.followed:
                instructions.append(StopAwaiting(generation.decode, generation.request_id))
        return instructions

    def _count_incidents(self, worker_id: str, epoch: int, named: Set[str]) -> list[Instruction]:
        """Note, for the requests of a worker's last words, that they may have stopped it. A request noted before began
        alone at this worker, so what names nobody beside it is its own doing: it is refused."""
        instructions: list[Instruction] = []
        for request_id in sorted(named & self.entries.keys()):
            entry = self.entries[request_id]
            generation = entry.generation
            if generation.is_over:
                continue
            # By incarnation: a worker that dies and comes back counts again, and one that is named twice does not.
            generation.stopped.add((worker_id, epoch))
            number = len(generation.stopped)
            is_refused = number >= MAX_STOPPED and len(named) == 1
            instructions.append(
                NamedByLastWords(
                    worker_id=worker_id,
                    request_id=request_id,
                    num_named=len(named),
                    num_stopped=number,
                    is_refused=is_refused,
                )
            )
            if is_refused:
                error = StopsWorkersError(
                    f"{number} workers died or stood still while they computed this request, the last one for nothing "
                    "else, so no other worker gets it"
                )
                instructions += self._fail(entry, error)
        return instructions

    def _attempt_lost(self, entry: Entry, worker_id: str, now: float) -> list[Instruction]:
        """Events of an attempt were lost on their way from a worker that lives: go on elsewhere."""
        return [AttemptLost(worker_id, *entry.generation.attempt_name), *self._fail_over(entry, now)]

    def _move_on(self, now: float) -> list[Instruction]:
        """Have the requests of workers that are about to stop go on elsewhere."""
        instructions: list[Instruction] = []
        for worker_id in self.view.to_be_left:
            for entry in self.entries.affected_by(worker_id):
                generation = entry.generation
                if generation.dies_with(worker_id):
                    left, aborts = self._start_over(entry, now, has_moved=True)
                    moved = MovedOn(generation.request_id, generation.attempt, left, len(generation.tokens))
                    entry.num_moves += 1
                    entry.waiting_since = now
                    instructions += [*aborts, moved, *self._admit(entry, now)]
        return instructions

    def _start_over(self, entry: Entry, now: float, *, has_moved: bool = False) -> tuple[list[str], list[Instruction]]:
        """Begin another attempt; returns the workers of the last one, and what ends the attempt there."""
        request_id, attempt = entry.generation.request_id, entry.generation.attempt
        left = sorted(entry.generation.start_over(now, has_moved=has_moved))
        entry.admission = None
        return left, [Abort(worker_id, request_id, attempt) for worker_id in left if worker_id in self.view.followed]

    def _fail_over(self, entry: Entry, now: float) -> list[Instruction]:
        """Go on elsewhere from the last token delivered."""
        generation = entry.generation
        if generation.is_over:
            return []
        left, instructions = self._start_over(entry, now)
        instructions.append(FailedOver(generation.request_id, generation.attempt, left, len(generation.tokens)))

        if generation.attempt - entry.num_moves >= MAX_ATTEMPTS:
            error = ServiceError(
                f"the request failed: {MAX_ATTEMPTS} times its worker died, fell silent or lost tokens"
            )
            return instructions + self._fail(entry, error)
        entry.waiting_since = now
        return instructions + self._admit(entry, now)

    def _fail(self, entry: Entry, error: RaydixError) -> list[Instruction]:
        self.retries.drop(entry.generation.request_id)
        entry.generation.failure = error
        return [DeliverTokens(entry.generation.request_id, [])]

    def check_integrity(self) -> None:
        """Raises AssertionError if a request is in two states, or waits for nothing."""
        assert self.entries.keys() >= set(self.retries.names)
        for request_id, entry in self.entries.items():
            assert entry.generation.request_id == request_id
            assert entry.admission is None or request_id not in self.retries
            if entry.admission is not None:
                absent = self.view.absent(entry.admission).items()
                assert any(self.view.is_searched(*each) for each in absent), f"{request_id} waits for nobody"
