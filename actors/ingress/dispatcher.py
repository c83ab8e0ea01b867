"""Carries out for one ingress replica what `raydix.engine.core.ingress.dispatch.Dispatch` decides, and tells it what
happens.

Calls that gather in one turn of the event loop go out as one call for each receiver.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from raydix.actors.calls import quietly, sleep
from raydix.actors.ingress.manager_link import ManagerLink
from raydix.actors.metrics import IngressMetrics
from raydix.actors.names import incarnation_name
from raydix.actors.processes import ProcessWatch, own_process
from raydix.actors.rpc import WorkerClient
from raydix.actors.runtime import Runtime
from raydix.actors.tracing import Recorder, Span
from raydix.engine.background import Background, run_detached
from raydix.engine.core.errors import ServiceError
from raydix.engine.core.ingress.cluster_view import ModelFacts, Timeouts
from raydix.engine.core.ingress.dispatch import Dispatch
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
from raydix.engine.core.log_fields import about
from raydix.engine.core.types import (
    Adapter,
    AdapterReport,
    AdmitRequest,
    AttemptName,
    BlockHash,
    Paused,
    TokenEvent,
    WorkerInfo,
)

logger = logging.getLogger(__name__)

PING_S = 1.0
LOOKS_PER_PING = 4  # looks for silent workers in `PING_S`
STOPPED_S = 0.25  # a later look means a stopped process; a busy machine delays looks by less
ADMIT_TIMEOUT_S = 2.0  # a manager that has not placed a request after so long is silent
SUBMIT_LOST_S = 2.0  # longest wait for the end of the token stream of a worker that did not take requests and is dead
MEMBERSHIP_TIMEOUT_S = 2.0  # a manager that has not listed its workers after so long is silent


class Delivery(NamedTuple):
    """Tokens that came together. Times are of the monotonic clock."""

    request_id: str
    position: int
    """Position of the first of them."""
    num_tokens: int
    since: float
    """Time of the delivery before; of the first one the time of the request's beginning."""
    at: float

    @property
    def is_first(self) -> bool:
        return self.position == 0


class Deliveries:
    """Takes note of each delivery."""

    def __init__(self, metrics: IngressMetrics, recorder: Recorder) -> None:
        self._metrics = metrics
        self._recorder = recorder

    def took(self, delivery: Delivery) -> None:
        """Note a delivery."""
        seconds = delivery.at - delivery.since
        if not delivery.is_first:
            self._metrics.token_gap(seconds)
        if self._recorder.is_on:
            count = "" if delivery.num_tokens == 1 else f" and {delivery.num_tokens - 1} more"
            name = f"token {delivery.position + 1}{count}"
            about = {"position": delivery.position, "tokens": delivery.num_tokens}
            self._recorder.add(
                [Span(delivery.request_id, name, started_at=delivery.since, seconds=seconds, about=about)]
            )


class AdapterTable(Protocol):
    """The adapters that a replica's requests may name (`raydix.engine.serving.served_model.ServedModels`)."""

    def take(self, loaded: Iterable[Adapter]) -> bool: ...

    def report(self) -> AdapterReport: ...


class NoAdapters:
    """The table of a replica whose requests name no adapter, which takes note of what is loaded."""

    def __init__(self) -> None:
        self._known: tuple[Adapter, ...] = ()

    def take(self, loaded: Iterable[Adapter]) -> bool:
        before, self._known = self._known, tuple(loaded)
        return before != self._known

    def report(self) -> AdapterReport:
        return AdapterReport(self._known)


@dataclass(slots=True, eq=False)
class _Inbox:
    """Tokens of a request that its reader has not taken yet."""

    tokens: list[TokenEvent] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    last_at: float = field(default_factory=time.monotonic)
    """Monotonic time at which the last tokens came, or the request began."""


class _Alarm:
    """A timer for the earliest of the times at which `ring` is due; one at a time."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None

    def set(self, due: float | None) -> None:
        """Ring at a time of the monotonic clock, unless the alarm is set already; None: at none."""
        # An alarm that is set rings no later than this: whoever is called looks for the next time then.
        if self._timer is None and due is not None:
            delay_s = max(0.0, due - time.monotonic())
            self._timer = run_detached(asyncio.get_running_loop().call_later, delay_s, self._rings)

    def _rings(self) -> None:
        self._timer = None  # first: the call may set the next one
        self._ring()


class _QuietWorkers:
    """Looks for reasons of the silence of workers: work, or a request that may have stopped them."""

    def __init__(self, dispatch: Dispatch, runtime: Runtime, background: Background) -> None:
        self._dispatch = dispatch
        self._runtime = runtime
        self._background = background
        self._watch = ProcessWatch(runtime.own_node())
        self.nodes: Mapping[str, str] = {}
        """The node of each worker, as far as the manager has named it."""
        self._asked: set[str] = set()  # quiet workers of other nodes whose last words are being read

    def look(self, now: float) -> None:
        """Tell workers that answer nothing and compute from those that may be dead."""
        for worker in self._dispatch.view.quiet(now, PING_S):
            if self._watch.computes(worker.process, now):
                self._dispatch.view.computes(worker.worker_id, now)
            # Words of another node are read by a call there, so once at a time for each worker.
            if worker.worker_id not in self._asked:
                self._asked.add(worker.worker_id)
                self._background.start(self.hear_words(worker.worker_id, worker.epoch))

    async def hear_words(self, worker_id: str, epoch: int, *, is_dead: bool = False) -> None:
        """Read the last words of a worker that has died, or answers nothing: the requests that may have stopped it."""
        try:
            name, node = incarnation_name(worker_id, epoch), self.nodes.get(worker_id, self._runtime.own_node())
            self._dispatch.view.last_words(worker_id, await self._runtime.named_requests(name, node, is_dead=is_dead))
        except Exception:  # of any kind: without them requests go on as if nobody were to blame
            logger.exception("the last words of %s not read", worker_id)
        finally:
            self._asked.discard(worker_id)


class Dispatcher:
    """The data plane of one ingress replica."""

    def __init__(
        self,
        ingress_id: str,
        runtime: Runtime,
        manager: ManagerLink,
        model: ModelFacts,
        on_failover: Callable[[], None],
        timeouts: Timeouts | None = None,
        adapters: AdapterTable | None = None,
        on_delivery: Callable[[Delivery], None] = lambda delivery: None,
    ) -> None:
        """`on_failover` is told of each failover, `on_delivery` of all tokens."""
        self._on_delivery = on_delivery
        # Tokens that the instructions being carried out have delivered, by request.
        self._delivered: dict[str, list[TokenEvent]] = {}
        self._adapters = adapters or NoAdapters()
        self._ingress_id = ingress_id
        self._runtime = runtime
        self._manager = manager
        self._on_failover = on_failover
        self._dispatch = Dispatch(ingress_id, model, time.monotonic(), timeouts)
        self._deliveries: dict[str, _Inbox] = {}
        # Worker incarnations that were found and of which `Dispatch` is being told.
        self._found: dict[tuple[str, int], WorkerClient] = {}
        self._followed: dict[str, WorkerClient] = {}
        self._reading: dict[str, asyncio.Task[object]] = {}  # the task that reads each followed worker's token stream
        # The kinds of questions about workers that the manager has not answered yet: True for probes.
        self._asking: set[bool] = set()
        self._admits: list[AdmitRequest] = []
        self._again: list[str] = []  # paused requests that are to ask again
        self._is_flush_due = False
        self._is_starting_worker = False
        self._retry = _Alarm(lambda: self._carry_out(self._dispatch.tick(time.monotonic())))
        self._background = Background()
        self._process = own_process(runtime.own_node())
        self._quiet = _QuietWorkers(self._dispatch, runtime, self._background)

    def start(self) -> None:
        """Begin to tell workers that this ingress is alive. Needs a running event loop."""
        self._background.start(self._keep_alive())

    @property
    def root(self) -> BlockHash | None:
        """Hash under which the model's first blocks are chained (`ClusterView.root`)."""
        return self._dispatch.view.root

    async def generate(self, generation: Generation) -> AsyncGenerator[list[TokenEvent]]:
        """Run a request; yields the tokens in order, each once, as many at a time as have arrived.

        Raises:
            ServiceError: no worker could take the request, or every attempt failed.
        """
        delivery = self._deliveries[generation.request_id] = _Inbox()
        try:
            # From here on the request is known to `Dispatch`, which must hear of its end whatever happens: the reader
            # may be cancelled at every await below.
            self._carry_out(self._dispatch.begin(generation, time.monotonic()))
            while True:
                await delivery.arrived.wait()
                # Cleared before the tokens are taken: tokens that come in between set it again.
                delivery.arrived.clear()
                if generation.failure is not None:
                    raise generation.failure
                # All that has come is one piece: a slow reader gets fewer and longer ones, and nothing queues up.
                events, delivery.tokens = delivery.tokens, []
                if events:
                    yield events
                    if events[-1].finish is not None:
                        return
        finally:
            del self._deliveries[generation.request_id]
            self._carry_out(self._dispatch.end(generation.request_id))

    def stopped(self, generation: Generation) -> None:
        """A stop string has ended a request whose reader is still there."""
        self._dispatch.stopped(generation.request_id)

    def prepare(self, generation: Generation, token_ids: Sequence[int]) -> None:
        """Have the full blocks of `token_ids` computed at idle priority (`Dispatch.prepare`)."""
        self._carry_out(self._dispatch.prepare(generation, token_ids))

    @property
    def workers(self) -> Sequence[WorkerInfo]:
        """Workers expected to live, as known to this replica."""
        return self._dispatch.view.registered

    async def can_serve(self) -> bool:
        """True if some worker could take a request now, with the manager or without."""
        await self._ask_workers()
        return self._dispatch.view.can_serve

    # Instructions

    def _carry_out(self, instructions: Iterable[Instruction]) -> None:
        """Send what `Dispatch` decided, and see to what waits for the end of the turn or for a time."""
        for instruction in instructions:
            self._carry_out_one(instruction)
        if self._delivered:
            self._tell_deliveries()
        # What one turn of the event loop gathers goes out as one call for each receiver.
        if self._admits or self._again or not self._dispatch.outbox.is_empty:
            self._flush_soon()
        self._retry.set(self._dispatch.retries.next_at)

    def _tell_deliveries(self) -> None:
        """Tell of what came together as of one delivery for each request: a step that accepted drafts has several
        tokens of one, and so has a stream that was read late."""
        now = time.monotonic()
        for request_id, events in self._delivered.items():
            if (delivery := self._deliveries.get(request_id)) is not None:
                since, delivery.last_at = delivery.last_at, now
                position = events[0].position
                told = Delivery(request_id=request_id, position=position, num_tokens=len(events), since=since, at=now)
                self._on_delivery(told)
        self._delivered.clear()

    def _carry_out_one(self, instruction: Instruction) -> None:
        match instruction:
            case DeliverTokens(request_id, events):
                delivery = self._deliveries[request_id]
                delivery.tokens += events
                delivery.arrived.set()
                if events:
                    self._delivered.setdefault(request_id, []).extend(events)
            case Admit(request):
                self._admits.append(request)
            case AskAgain(request_id):
                self._again.append(request_id)
            case Follow(worker_id, epoch):
                self._background.start(self._find(worker_id, epoch))
            case Read(worker_id, epoch):
                # The client of exactly this incarnation: an earlier one may still be read to its end.
                client = self._followed[worker_id] = self._found[worker_id, epoch]
                self._reading[worker_id] = self._background.start(self._read(worker_id, epoch, client))
            case AskWorkers(is_probe):
                # One question of each kind at a time: a manager that is slow shall not be asked by everybody.
                if is_probe not in self._asking:
                    self._asking.add(is_probe)
                    self._background.start(self._ask_workers(is_probe=is_probe))
            case StartWorker():
                self._background.start(self._start_worker())
            case Settle():
                self._background.start(self._settle(instruction))
            case (
                WorkerLost()
                | WorkerSilent()
                | AttemptLost()
                | NamedByLastWords()
                | FailedOver()
                | MovedOn()
                | ModelDiffers()
            ):
                log_incident(instruction)
                if isinstance(instruction, FailedOver):
                    self._on_failover()
                elif isinstance(instruction, WorkerLost):
                    self._followed.pop(instruction.worker_id, None)
            case _:
                self._call(instruction)

    def _call(self, instruction: Submit | Abort | StopAwaiting | Ping) -> None:
        """Call a worker without waiting. Only a submission's failure matters: of a death the token stream tells."""
        # A worker that is followed no longer has ended its attempts with its stream.
        client = self._followed.get(instruction.worker_id)
        if client is None:
            return
        match instruction:
            case Submit(_, assignments):
                call = run_detached(client.submit, assignments)
                self._background.start(self._submitted(call, instruction))
                return
            case Abort(_, request_id, attempt, has_ended):
                send = partial(client.abort, request_id, attempt, has_ended=has_ended)
            case StopAwaiting(_, request_id):
                send = partial(client.stop_awaiting, [request_id])
            case Ping():
                self._background.start(self._ping(instruction, client))
                return
        self._background.start(quietly(run_detached(send)))

    # The turn of the event loop

    def _flush_soon(self) -> None:
        if not self._is_flush_due:
            self._is_flush_due = True
            run_detached(asyncio.get_running_loop().call_soon, self._flush)

    def _flush(self) -> None:
        """Send what has gathered in this turn of the event loop."""
        self._is_flush_due = False
        for instruction in self._dispatch.flush(has_manager=self._manager.client is not None):
            self._carry_out_one(instruction)
        if self._admits:
            requests, self._admits = self._admits, []
            self._background.start(self._admit(requests))
        if self._again:
            names, self._again = self._again, []
            self._background.start(self._ask_again(names))

    # The manager

    async def _admit(self, requests: list[AdmitRequest]) -> None:
        try:
            admissions = await self._manager.ask(
                lambda manager: manager.admit(requests), timeout_s=ADMIT_TIMEOUT_S, is_prompt=True
            )
        except ServiceError:
            # With a client the manager is only slow, and may admit these attempts later; without one nobody has heard
            # of them.
            is_silent = self._manager.client is not None
            self._carry_out(self._dispatch.not_admitted(requests, time.monotonic(), is_silent=is_silent))
            return
        for request, admission in zip(requests, admissions, strict=True):
            now = time.monotonic()
            self._carry_out(self._dispatch.admitted(request.request_id, request.attempt, admission, now))

    async def _ask_again(self, request_ids: list[str]) -> None:
        answers: Sequence[Paused | None]
        try:
            answers = await self._manager.ask(
                lambda manager: manager.ask_again(request_ids), timeout_s=ADMIT_TIMEOUT_S, is_prompt=True
            )
        except ServiceError:
            answers = [None] * len(request_ids)
        self._carry_out(self._dispatch.asked_again(dict(zip(request_ids, answers, strict=True)), time.monotonic()))

    async def _ask_workers(self, *, is_probe: bool = False) -> None:
        """Ask the manager for the workers; a silent manager only if `is_probe`."""
        ask = self._manager.probe if is_probe else self._manager.ask
        active, adapters, is_news = list(self._dispatch.entries), self._adapters.report(), False
        try:
            membership = await ask(
                lambda manager: manager.workers(self._ingress_id, active, self._process, adapters),
                timeout_s=MEMBERSHIP_TIMEOUT_S,
                is_prompt=True,
            )
        except ServiceError:
            self._dispatch.view.no_update()
        else:
            nodes = {each.worker_id: each.process.node for each in membership.workers if each.process is not None}
            # A worker that the manager has dropped keeps its node while its stream is read: its last words lie there.
            self._quiet.nodes = {
                each: node for each, node in self._quiet.nodes.items() if each in self._followed
            } | nodes
            self._carry_out(self._dispatch.membership(membership, time.monotonic()))
            is_news = membership.adapters is not None and self._adapters.take(membership.adapters)
        finally:
            self._asking.discard(is_probe)
        if is_news:
            # Told at once: whoever loads or unloads an adapter waits for the word of every replica.
            await self._ask_workers(is_probe=is_probe)

    async def _start_worker(self) -> None:
        # A start takes long, and each request that waits asks again.
        if self._is_starting_worker:
            return
        self._is_starting_worker = True
        try:
            await self._runtime.start_first_worker()
        except Exception as error:  # asked again with the manager's next list
            logger.warning("no worker was started: %s", type(error).__name__)
        finally:
            self._is_starting_worker = False

    async def _settle(self, settle: Settle) -> None:
        manager = self._manager.client
        if manager is None:
            self._dispatch.outbox.not_settled(settle.ended)
            return
        try:
            await manager.settle(self._ingress_id, settle.first_tokens, settle.ended)
        except RayError:
            self._dispatch.outbox.not_settled(settle.ended)

    async def _keep_alive(self) -> None:
        """Ping the workers and look for silent ones at a steady pace: nothing here waits for the manager, whose silence
        is not theirs."""
        late_s = 0.0
        for number in itertools.count():
            is_ping = number % LOOKS_PER_PING == 0
            look = self._dispatch.keep_alive if is_ping else self._dispatch.leave_silent
            try:
                now = time.monotonic()
                self._quiet.look(now)
                self._carry_out(look(now, late_s))
            except Exception:  # Without pings workers would give up all requests of this replica.
                logger.exception("workers not told that this replica is alive")
            if is_ping:
                self._flush_soon()  # what could not be told while the manager was away
            late_s = await sleep(PING_S / LOOKS_PER_PING)
            # Deadlines move only for a process that was stopped: small delays are what a busy machine has always.
            late_s = late_s if late_s > STOPPED_S else 0.0

    # Workers

    async def _find(self, worker_id: str, epoch: int) -> None:
        """Look for a worker incarnation, for the admissions that name it."""
        try:
            client = await self._runtime.find_worker(worker_id, epoch)
        except Exception as error:  # The admissions must not wait for ever; they are made again.
            logger.debug("%s not looked for: %s", worker_id, type(error).__name__)
            client = None
        if client is None:
            self._carry_out(self._dispatch.not_found(worker_id, epoch, time.monotonic()))
            return
        self._found[worker_id, epoch] = client
        self._carry_out(self._dispatch.found(worker_id, epoch, time.monotonic()))
        del self._found[worker_id, epoch]

    async def _read(self, worker_id: str, epoch: int, client: WorkerClient) -> None:
        """Read a worker's token stream to its end."""
        reason, is_dead = "the stream ended", False
        try:
            async for events in client.token_stream(self._ingress_id):
                self._carry_out(self._dispatch.tokens(worker_id, await events, time.monotonic()))
        except Exception as error:  # Whatever it was, this worker's requests must not stand still.
            reason, is_dead = type(error).__name__, _is_death(error)
        if is_dead:
            await self._quiet.hear_words(worker_id, epoch, is_dead=True)
        self._carry_out(self._dispatch.worker_lost(worker_id, epoch, reason, time.monotonic(), is_dead=is_dead))

    async def _ping(self, ping: Ping, client: WorkerClient) -> None:
        try:
            await run_detached(client.ping, self._ingress_id, ping.taken, ping.sent, ping.awaiting, self._process)
        except RayError as error:  # of a death the token stream tells
            logger.debug("ping not answered: %s", type(error).__name__)
        else:
            self._dispatch.view.heard(ping.worker_id, time.monotonic())

    async def _submitted(self, call: Awaitable[None], submit: Submit) -> None:
        try:
            await call
        except RayError as error:
            logger.warning(
                "%s did not take %d requests: %s",
                submit.worker_id,
                len(submit.assignments),
                type(error).__name__,
                extra=about(
                    "submit_failed",
                    worker=submit.worker_id,
                    requests=[assignment.request_id for assignment in submit.assignments],
                ),
            )
            if _is_death(error):  # the end of the stream tells more: who may have stopped the worker
                await asyncio.wait({self._reading[submit.worker_id]}, timeout=SUBMIT_LOST_S)
            self._carry_out(self._dispatch.not_submitted(submit.assignments, time.monotonic()))
        else:
            self._dispatch.submitted(
                submit.worker_id, [AttemptName(a.request_id, a.attempt) for a in submit.assignments]
            )


def _is_death(error: Exception) -> bool:
    """True if the actor that raised this is gone for good, and not only out of reach."""
    return isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError)


Incident: TypeAlias = WorkerLost | WorkerSilent | AttemptLost | NamedByLastWords | FailedOver | MovedOn | ModelDiffers


def log_incident(incident: Incident) -> None:
    """Write an incident to the log, with its facts as fields."""
    match incident:
        case WorkerLost(worker_id, epoch, reason, num_requests, was_leaving):
            extra = about("worker_lost", worker=worker_id, epoch=epoch, reason=reason, requests=num_requests)
            level = logging.INFO if was_leaving and not num_requests else logging.WARNING
            logger.log(level, "lost %s (%s) with %d requests", worker_id, reason, num_requests, extra=extra)
        case WorkerSilent(worker_id, num_requests):
            extra = about("worker_silent", worker=worker_id, requests=num_requests)
            logger.warning("%s answers nothing: %d requests go on elsewhere", worker_id, num_requests, extra=extra)
        case AttemptLost(worker_id, request_id, attempt):
            extra = about("attempt_lost", worker=worker_id, request=request_id, attempt=attempt)
            logger.warning("events of %s were lost on their way from %s", request_id, worker_id, extra=extra)
        case NamedByLastWords(worker_id, request_id, num_named, num_stopped, is_refused):
            extra = about(
                "request_named",
                request=request_id,
                worker=worker_id,
                named=num_named,
                stopped=num_stopped,
                refused=is_refused,
            )
            text = "%s is refused: %s died or fell silent by it, the %d. worker"
            if not is_refused:
                text = "%s begins alone: %s died or fell silent perhaps by it, the %d. worker"
            logger.warning(text, request_id, worker_id, num_stopped, extra=extra)
        case FailedOver(request_id, attempt, left, num_tokens):
            extra = about("failover", request=request_id, attempt=attempt, left=left, tokens=num_tokens)
            logger.info("%s goes on elsewhere after %d tokens", request_id, num_tokens, extra=extra)
        case MovedOn(request_id, attempt, left, num_tokens):
            extra = about("moved", request=request_id, attempt=attempt, left=left, tokens=num_tokens)
            logger.info("%s moves to another worker after %d tokens", request_id, num_tokens, extra=extra)
        case ModelDiffers(theirs, ours):
            extra = about("model_differs", theirs=theirs, ours=ours)
            text = "the workers' model (fingerprint %s) is not this replica's (%s): no request can be served"
            logger.error(text, theirs, ours, extra=extra)
