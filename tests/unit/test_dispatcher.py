"""The dispatcher with workers and a manager that come, die and fall silent."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from ray.exceptions import ActorDiedError

from raydix.actors.ingress import dispatcher
from raydix.actors.ingress.dispatcher import Delivery, Dispatcher, _Inbox
from raydix.actors.ingress.manager_link import Call, ManagerLink
from raydix.actors.local import LocalRuntime
from raydix.actors.rpc import ManagerClient, WorkerClient
from raydix.engine.core.errors import NoWorkerError, ServiceError
from raydix.engine.core.ingress.cluster_view import ModelFacts, Timeouts
from raydix.engine.core.ingress.dispatch import Dispatch
from raydix.engine.core.ingress.generation import Generation
from raydix.engine.core.ingress.instructions import DeliverTokens, Instruction
from raydix.engine.core.objectives import Late
from raydix.engine.core.types import (
    AdapterReport,
    Admission,
    AdmitRequest,
    Assignment,
    AttemptName,
    CacheHints,
    FinishReason,
    Membership,
    Paused,
    ProcessName,
    Role,
    Salt,
    Sampling,
    TokenEvent,
    WorkerInfo,
)
from tests.unit.builders import FINGERPRINT
from tests.unit.waits import WAIT_S, until

T = TypeVar("T")

PATIENT = Timeouts(retry_s=0.001, dispatch_s=WAIT_S)
HASTY = replace(PATIENT, dispatch_s=0.1)
"""For tests of requests that give up, or that would if nobody were starting."""


class FakeWorker(WorkerClient):
    """Answers every request with its position numbers, or dies when it is asked to."""

    def __init__(self) -> None:
        self.taken: list[Assignment] = []
        self.aborted: list[tuple[str, int]] = []
        self.num_pings = 0
        self._events: asyncio.Queue[list[TokenEvent] | ActorDiedError | None] = asyncio.Queue()

    async def submit(self, assignments: Sequence[Assignment]) -> None:
        self.taken += assignments

    async def abort(self, request_id: str, attempt: int, *, has_ended: bool = False) -> None:
        self.aborted.append((request_id, attempt))

    async def ping(
        self,
        ingress_id: str,
        taken: Sequence[AttemptName],
        sent: Sequence[AttemptName],
        awaiting: Sequence[str],
        process: ProcessName,
    ) -> None:
        self.num_pings += 1

    async def stop_awaiting(self, request_ids: Sequence[str]) -> None:
        pass

    async def token_stream(self, ingress_id: str) -> AsyncGenerator[Any]:
        while (events := await self._events.get()) is not None:
            if isinstance(events, ActorDiedError):
                raise events
            item: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            item.set_result(events)
            yield item

    def answer(self, count: int, *, ends: bool) -> None:
        """Send the next `count` tokens of the last request that was taken."""
        last = self.taken[-1]
        first = len(last.token_ids) - last.num_prompt_tokens
        for position in range(first, first + count):
            finish = FinishReason.LENGTH if ends and position == first + count - 1 else None
            event = TokenEvent(last.request_id, last.attempt, position, 100 + position, finish, None, 0)
            self._events.put_nowait([event])

    def die(self) -> None:
        self._events.put_nowait(ActorDiedError())

    def end_stream(self) -> None:
        """As a worker does that has not heard of this ingress replica for too long."""
        self._events.put_nowait(None)


class FakeManager(ManagerClient):
    """Places everything on its first worker, or is out of reach."""

    def __init__(self) -> None:
        self.registered: list[WorkerInfo] = []
        self.num_starting = 0
        self.starts_on_demand = False
        self.fingerprint = f"{FINGERPRINT}/cpu"
        self.num_asked = 0
        """Calls about workers."""
        self.num_admits = 0
        self.is_away = False

    async def workers(
        self, ingress_id: str, active: Sequence[str], process: ProcessName, adapters: AdapterReport
    ) -> Membership:
        self.num_asked += 1
        return Membership(
            tuple(self.registered),
            self.num_starting,
            self.fingerprint if self.registered else None,
            starts_on_demand=self.starts_on_demand,
        )

    async def admit(self, requests: Sequence[AdmitRequest]) -> list[Admission | Late | Paused | None]:
        self.num_admits += 1
        return [self._admission(request) for request in requests]

    def _admission(self, request: AdmitRequest) -> Admission | None:
        if not self.registered:
            return None
        worker = self.registered[0]
        return Admission(
            request.request_id,
            request.attempt,
            prefill=worker.worker_id,
            decode=worker.worker_id,
            prefill_epoch=worker.epoch,
            decode_epoch=worker.epoch,
            prefill_awaited=(),
            decode_awaited=(),
        )


class FakeLink(ManagerLink):
    """A way to a fake manager, which does not hear what is settled."""

    def __init__(self, manager: FakeManager) -> None:
        super().__init__(LocalRuntime())
        self.answered_at = -1e9
        self._manager = manager

    async def ask(self, call: Call[T], *, timeout_s: float = 0, is_prompt: bool = False) -> T:
        if self._manager.is_away:
            raise ServiceError("away")
        return await call(self._manager)

    probe = ask


class Workers(LocalRuntime):
    """Finds the workers of a test."""

    def __init__(self, actors: dict[tuple[str, int], FakeWorker]) -> None:
        super().__init__()
        self._actors = actors

    async def find_worker(self, worker_id: str, epoch: int) -> Any:
        return self._actors.get((worker_id, epoch))


class Cluster:
    """A dispatcher among fakes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, timeouts: Timeouts = PATIENT) -> None:
        self.manager = FakeManager()
        self.actors: dict[tuple[str, int], FakeWorker] = {}
        self.num_failovers = 0
        monkeypatch.setattr(dispatcher, "PING_S", 0.01)
        self.runtime = Workers(self.actors)
        link, model = FakeLink(self.manager), ModelFacts(FINGERPRINT, 4, 30.0)
        self.dispatcher = Dispatcher("i", self.runtime, link, model, self._failed_over, timeouts)

    def add(self, worker_id: str, epoch: int) -> FakeWorker:
        worker = self.actors[worker_id, epoch] = FakeWorker()
        self.manager.registered = [w for w in self.manager.registered if w.worker_id != worker_id]
        self.manager.registered.append(WorkerInfo(worker_id, Role.MIXED, epoch))
        return worker

    async def ask(self, name: str = "r") -> list[int | None]:
        """All tokens of one request."""
        generation = Generation(name, (1, 2, 3), Sampling(8), Salt(), CacheHints())
        return [event.token_id async for events in self.dispatcher.generate(generation) for event in events]

    def _failed_over(self) -> None:
        self.num_failovers += 1


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch, HASTY)


def test_a_request_waits_for_a_worker_that_is_starting(hasty: Cluster) -> None:
    async def run() -> None:
        hasty.manager.num_starting = 1
        hasty.dispatcher.start()
        answer = asyncio.create_task(hasty.ask())
        await until(lambda: hasty.manager.num_asked * HASTY.retry_s > 3 * HASTY.dispatch_s)
        assert not answer.done()
        worker = hasty.add("w", 1)
        await until(lambda: worker.taken)
        worker.answer(2, ends=True)
        assert await answer == [100, 101]

    asyncio.run(run())


def test_the_first_worker_is_asked_for_until_it_comes(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve refuses once, and then takes its time; it gets no second call meanwhile."""
    calls: list[str] = []
    starts = asyncio.Event()

    async def start_first_worker() -> None:
        calls.append("start")
        if len(calls) == 1:
            raise RuntimeError("no such deployment")
        await starts.wait()

    monkeypatch.setattr(cluster.runtime, "start_first_worker", start_first_worker)
    cluster.manager.starts_on_demand = True

    async def run() -> None:
        cluster.dispatcher.start()
        assert await cluster.dispatcher.can_serve()
        answer = asyncio.create_task(cluster.ask())
        await until(lambda: len(calls) == 2)
        asked = cluster.manager.num_asked
        await until(lambda: cluster.manager.num_asked > asked + 3)
        assert calls == ["start", "start"]
        worker = cluster.add("w", 1)
        starts.set()
        await until(lambda: worker.taken)
        worker.answer(1, ends=True)
        assert await answer == [100]

    asyncio.run(run())


def test_silent_workers_are_looked_for_between_pings(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    leave_silent = Dispatch.leave_silent

    def noted(dispatch: Dispatch, now: float, late_s: float) -> list[Instruction]:
        looks.append(now)
        return leave_silent(dispatch, now, late_s)

    monkeypatch.setattr(Dispatch, "leave_silent", noted)

    async def run() -> None:
        worker = cluster.add("w", 1)
        cluster.dispatcher.start()
        answer = asyncio.create_task(cluster.ask())
        await until(lambda: worker.taken)
        begun, num_pings = len(looks), worker.num_pings
        await until(lambda: worker.num_pings == num_pings + 3)
        assert len(looks) - begun >= 3 * dispatcher.LOOKS_PER_PING - 1
        answer.cancel()
        await until(lambda: worker.aborted == [("r", 0)])

    asyncio.run(run())


def test_tokens_that_come_together_are_one_delivery(cluster: Cluster) -> None:
    """A step that accepted a draft has two tokens of one request."""

    async def run() -> list[Delivery]:
        told: list[Delivery] = []
        dispatcher = cluster.dispatcher
        dispatcher._on_delivery = told.append
        dispatcher._deliveries |= {"a": _Inbox(), "b": _Inbox()}
        events = [TokenEvent(name, 0, position, 7, None, None, 0) for name, position in (("a", 3), ("b", 0), ("a", 4))]
        dispatcher._carry_out(DeliverTokens(event.request_id, [event]) for event in events)
        dispatcher._carry_out([DeliverTokens("a", [TokenEvent("a", 0, 5, 7, None, None, 0)])])
        return told

    first, other, second = asyncio.run(run())
    assert (first.request_id, first.position, first.num_tokens) == ("a", 3, 2)
    assert (other.request_id, other.num_tokens) == ("b", 1)
    assert (second.position, second.num_tokens, second.since) == (5, 1, first.at)


def test_a_request_ends_when_nobody_is_coming(hasty: Cluster) -> None:
    async def run() -> None:
        hasty.dispatcher.start()
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(NoWorkerError):
                await hasty.ask()

    asyncio.run(run())


def test_a_dead_incarnation_that_the_manager_still_knows_costs_no_attempts(cluster: Cluster) -> None:
    async def run() -> None:
        first = cluster.add("w", 1)
        answer = asyncio.create_task(cluster.ask())
        await until(lambda: first.taken)
        first.answer(2, ends=False)
        first.die()
        await until(lambda: cluster.num_failovers)
        tried = cluster.manager.num_admits
        await until(lambda: cluster.manager.num_admits > tried + 20)  # It is placed on the dead incarnation each time.
        second = cluster.add("w", 2)
        await until(lambda: second.taken)
        assert second.taken[0].attempt == 1
        assert second.taken[0].token_ids == (1, 2, 3, 100, 101)
        second.answer(1, ends=True)
        assert await answer == [100, 101, 102]
        assert cluster.num_failovers == 1

    asyncio.run(run())


def test_a_worker_that_ends_a_stream_and_lives_is_followed_again(cluster: Cluster) -> None:
    async def run() -> None:
        worker = cluster.add("w", 1)
        answer = asyncio.create_task(cluster.ask())
        await until(lambda: worker.taken)
        worker.answer(1, ends=False)
        worker.end_stream()
        await until(lambda: len(worker.taken) == 2)
        assert worker.taken[1].attempt == 1
        worker.answer(1, ends=True)
        assert await answer == [100, 101]

    asyncio.run(run())


def test_a_newer_incarnation_ends_the_older_ones_requests_there(cluster: Cluster) -> None:
    """The admission of another request may tell of a death before the token stream does."""

    async def run() -> None:
        first = cluster.add("w", 1)
        old = asyncio.create_task(cluster.ask("old"))
        await until(lambda: first.taken)
        second = cluster.add("w", 2)
        new = asyncio.create_task(cluster.ask("new"))
        await until(lambda: len(second.taken) == 2)
        assert {each.request_id: each.attempt for each in second.taken} == {"old": 1, "new": 0}
        for taken in list(second.taken):
            second.taken.append(taken)
            second.answer(1, ends=True)
        assert await old == await new == [100]

    asyncio.run(run())


def test_without_the_manager_requests_go_to_the_workers_that_it_knew(cluster: Cluster) -> None:
    async def run() -> None:
        worker = cluster.add("w", 1)
        assert await cluster.dispatcher.can_serve()
        cluster.manager.is_away = True
        assert await cluster.dispatcher.can_serve()
        answer = asyncio.create_task(cluster.ask())
        await until(lambda: worker.taken)
        worker.answer(1, ends=True)
        assert await answer == [100]

    asyncio.run(run())


def test_a_new_manager_that_knows_no_worker_yet_does_not_make_the_server_unhealthy(cluster: Cluster) -> None:
    async def run() -> None:
        worker = cluster.add("w", 1)
        assert await cluster.dispatcher.can_serve()
        answer = asyncio.create_task(cluster.ask())
        await until(lambda: worker.taken)
        cluster.manager.registered = []
        assert await cluster.dispatcher.can_serve()
        worker.die()
        await until(lambda: cluster.num_failovers)
        assert not await cluster.dispatcher.can_serve()
        answer.cancel()

    asyncio.run(run())


def test_workers_of_another_model_serve_nobody(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        cluster.add("w", 1)
        cluster.manager.fingerprint = "another model/cpu"
        assert not await cluster.dispatcher.can_serve()
        assert not await cluster.dispatcher.can_serve()
        cluster.manager.fingerprint = f"{FINGERPRINT}/cpu"
        assert await cluster.dispatcher.can_serve()

    asyncio.run(run())
    [record] = caplog.records
    assert "another model/cpu" in record.getMessage()
    assert FINGERPRINT in record.getMessage()
