"""A host that starts its actor, replaces the actor, and says when it cannot. There is no Ray here."""

import asyncio
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Iterator
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import ray
from ray.exceptions import ActorDiedError, RayTaskError

import raydix.actors.host as host_module
from raydix.actors.host import MAX_FAILURES, ActorHost
from raydix.actors.hosted import HostedManager, HostedWorker
from raydix.actors.names import incarnation_name
from raydix.actors.rpc import ActorClient, ManagerClient
from raydix.actors.scaling import MAY_SHRINK, WANTED
from raydix.configs import Config
from raydix.configs.sections import MANAGER, DeploymentPart, parts
from raydix.engine.core.errors import StartupError
from raydix.engine.core.manager.elastic import PoolLimits, Wanted
from raydix.engine.core.manager.turns import NO_TURNS
from raydix.engine.core.objectives import Objectives, WhenLate
from raydix.engine.core.settings import SchedulerLimits
from tests.unit.local_actors import MortalHandle
from tests.unit.waits import until

TASK_ERROR: Any = RayTaskError
WORKER_ID = "decode-r1"
T = TypeVar("T")


class Child:
    """An actor that starts, or fails to, or hangs, which it tells by an event."""

    def __init__(
        self, error: Exception | None = None, hangs: asyncio.Event | None = None, refuses: bool = False
    ) -> None:
        self._error = error
        self._hangs = hangs
        self._refuses = refuses
        self.told: list[tuple[Any, ...]] = []
        self.may_start = asyncio.Event()
        self.may_start.set()

    async def start(self) -> None:
        await self.may_start.wait()
        if self._error is not None:
            raise self._error

    async def check(self) -> None:
        await self._hang()

    async def _hang(self) -> None:
        if self._hangs is not None:
            self._hangs.set()
            await asyncio.Event().wait()

    async def join(self) -> None:
        await asyncio.Event().wait()

    async def reconfigure(self, *values: Any) -> None:
        await self._hang()
        if self._refuses:
            raise TASK_ERROR("reconfigure", "no such tenant", ValueError())
        self.told.append(values)


class OlderManager:
    """A manager of older code, which counts nothing."""

    async def check(self) -> None:
        """It does not hang."""

    async def worker_starting(self, worker_id: str) -> None:
        """It is told so by the host of a child whose start takes a while, as it may on any machine."""


class CountingManager(OlderManager):
    """A manager that counts the children that hung."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    async def children_hung(self, kind: str, number: int) -> None:
        self.told.append((kind, number))


class Scene:
    """A host whose children are those of `plan`, in this order; after them, good ones."""

    def __init__(self) -> None:
        self.plan: list[Child] = []
        self.names: list[str] = []
        self.handles: list[MortalHandle] = []
        self.announced: list[str] = []
        self.hangs = asyncio.Event()

    async def answer(self, call: Awaitable[T], timeout_s: float | None = None) -> T:
        """The result of a call. Its time is up once a child hangs, and never by a clock: the machine may be busy."""
        answered, hangs = asyncio.ensure_future(call), asyncio.ensure_future(self.hangs.wait())
        try:
            await asyncio.wait({answered, hangs}, return_when=asyncio.FIRST_COMPLETED)
            if answered.done():
                return answered.result()
            assert timeout_s is not None
            self.hangs.clear()
            raise TimeoutError
        finally:
            answered.cancel()
            hangs.cancel()

    def create(self, name: str) -> ActorClient:
        handle = MortalHandle(self.plan.pop(0) if self.plan else Child())
        self.names.append(name)
        self.handles.append(handle)
        return ActorClient(handle)  # type: ignore[arg-type]

    async def announce(self, name: str, app_name: str) -> None:
        self.announced.append(name)

    @staticmethod
    def kill(handle: MortalHandle) -> None:
        if not handle.is_dead:
            handle.die()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    scene = Scene()
    context = SimpleNamespace(app_name="app", replica_id=SimpleNamespace(unique_id="r1"))
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: context)
    monkeypatch.setattr(host_module, "announce_manager", scene.announce)
    monkeypatch.setattr(host_module, "find_manager", lambda app_name: asyncio.sleep(0))
    monkeypatch.setattr(host_module, "answer", scene.answer)
    for name, value in (("RETRY_S", 0.005), ("STARTING_REPORT_S", 0.01), ("STANDBY_AFTER_S", 0.0)):
        monkeypatch.setattr(host_module, name, value)
    monkeypatch.setattr(ray, "kill", scene.kill)
    for kind in (HostedManager, HostedWorker):
        monkeypatch.setattr(kind, "create", lambda hosted, name, epoch: scene.create(name))
    yield scene


async def start(kind: str) -> ActorHost:
    part = part_of(kind)
    host = ActorHost(kind, part.arguments)
    await host.reconfigure(part.live)
    return host


def part_of(kind: str, **sections: Any) -> DeploymentPart:
    """The part of the host's deployment of a configuration."""
    return parts(Config.model_validate({"workers": {"prefill": {}, "decode": {}, "elastic": {}}, **sections}))[kind]


@pytest.mark.parametrize("step_s", [3600, -3600])
def test_epochs_rise_also_when_the_clock_jumps(scene: Scene, monkeypatch: pytest.MonkeyPatch, step_s: int) -> None:
    now_ns = itertools.count(time.time_ns(), step_s * 1_000_000_000)
    monkeypatch.setattr(time, "time_ns", now_ns.__next__)

    async def play() -> None:
        await start("decode")
        for count in (2, 3):
            scene.handles[-1].die()
            await until(lambda: len(scene.names) == count)  # noqa: B023
        epochs = [int(name.rpartition(":")[2]) for name in scene.names]
        assert epochs == sorted(set(epochs))

    asyncio.run(play())


def test_each_incarnation_has_a_name_of_its_own(scene: Scene) -> None:
    async def play() -> None:
        await start("decode")
        for count in (2, 3):
            scene.handles[-1].die()
            await until(lambda: len(scene.names) == count)  # noqa: B023
        assert len(set(scene.names)) == 3
        assert all(name.startswith(f"{WORKER_ID}:") for name in scene.names)
        epochs = [int(name.rpartition(":")[2]) for name in scene.names]
        assert epochs == sorted(epochs)

    asyncio.run(play())


def test_the_manager_is_announced_when_it_is_ready(scene: Scene) -> None:
    async def play() -> None:
        await start(MANAGER)
        scene.handles[-1].die()
        await until(lambda: len(scene.announced) == 2)
        assert scene.announced == scene.names

    asyncio.run(play())


def test_the_manager_has_a_standby_which_is_started_when_it_dies(scene: Scene) -> None:
    async def play() -> None:
        host = await start(MANAGER)
        assert len(scene.names) == 1
        await host.check_health()
        first, standby = scene.names
        await host.check_health()
        assert len(scene.names) == 2 and scene.announced == [first]
        await host.reconfigure(part_of(MANAGER, slo={"ttft_ms": 700}).live)
        assert not scene.handles[1].actor.told, "it gets the values when it is started"  # type: ignore[attr-defined]

        scene.handles[0].die()
        await until(lambda: len(scene.announced) == 2)
        assert scene.announced == [first, standby] == scene.names
        assert scene.handles[1].actor.told  # type: ignore[attr-defined]
        await until(lambda: host._child is not None and host._child.handle is scene.handles[1])
        await host.check_health()
        assert len(scene.names) == 3 and scene.announced == [first, standby]

    asyncio.run(play())


def test_a_standby_that_is_dead_is_created_anew(scene: Scene) -> None:
    async def play() -> None:
        host = await start(MANAGER)
        await host.check_health()
        scene.handles[1].die()
        for _ in range(2):
            await host.check_health()
        assert len(scene.names) == 3
        scene.handles[2].die()
        scene.handles[0].die()
        await until(lambda: len(scene.announced) == 2)
        assert scene.announced == [scene.names[0], scene.names[3]], "started after the dead one could not be"

    asyncio.run(play())


def test_a_standby_that_hangs_is_killed_and_created_anew(scene: Scene) -> None:
    async def play() -> None:
        host = await start(MANAGER)
        scene.plan.append(Child(hangs=scene.hangs))
        for _ in range(3):
            await host.check_health()
        assert [handle.is_dead for handle in scene.handles] == [False, True, False]
        assert host._standby is not None and host._standby.child.handle is scene.handles[2]

    asyncio.run(play())


def test_workers_have_no_standby(scene: Scene) -> None:
    async def play() -> None:
        host = await start("decode")
        await host.check_health()
        assert len(scene.names) == 1

    asyncio.run(play())


def test_a_host_is_unhealthy_while_its_child_cannot_be_started(scene: Scene) -> None:
    async def play() -> None:
        host = await start("decode")
        scene.plan += [Child(RuntimeError("no memory"))] * (MAX_FAILURES + 1)
        scene.handles[-1].die()
        await until(lambda: host._num_failures == MAX_FAILURES)
        with pytest.raises(RuntimeError, match=r"decode-r1 does not start again: .*no memory"):
            await host.check_health()
        await until(lambda: host._num_failures == 0)
        await host.check_health()

    asyncio.run(play())


def test_a_child_that_hangs_is_killed_and_replaced(scene: Scene) -> None:
    async def play() -> None:
        scene.plan.append(Child(hangs=scene.hangs))
        host = await start("decode")
        await host.check_health()
        assert scene.handles[0].is_dead
        await until(lambda: len(scene.handles) == 2)
        await host.check_health()
        assert not scene.handles[1].is_dead

    asyncio.run(play())


@pytest.mark.parametrize("kind", ["decode", MANAGER])
def test_a_child_that_hung_is_counted_by_the_manager_once_one_answers(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    counting = CountingManager()
    found: list[Any] = [None]
    monkeypatch.setattr(host_module, "find_manager", lambda app_name: asyncio.sleep(0, found[0]))

    async def play() -> None:
        scene.plan.append(Child(hangs=scene.hangs))
        host = await start(kind)
        await host.check_health()
        await until(lambda: len(scene.handles) == 2)
        await host.check_health()
        assert counting.told == [], "no manager is there"

        away = MortalHandle(CountingManager())
        away.die()
        for handle in (away, MortalHandle(OlderManager()), MortalHandle(counting), MortalHandle(counting)):
            found[0] = ManagerClient(handle)  # type: ignore[arg-type]
            await host.check_health()
        assert counting.told == [(kind, 1)], "a dead manager and one of older code count nothing, another one once"

    asyncio.run(play())


def test_a_child_that_hangs_while_another_is_counted_is_counted_later(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SlowManager(CountingManager):
        async def children_hung(self, kind: str, number: int) -> None:
            await super().children_hung(kind, number)
            begun.set()
            await goes_on.wait()

    counting, begun, goes_on = SlowManager(), asyncio.Event(), asyncio.Event()

    async def play() -> None:
        client: Any = ManagerClient(MortalHandle(counting))  # type: ignore[arg-type]
        monkeypatch.setattr(host_module, "find_manager", lambda app_name: asyncio.sleep(0, client))
        scene.plan += [Child(hangs=scene.hangs), Child(hangs=scene.hangs)]
        host = await start("decode")
        await host.check_health()
        await until(lambda: len(scene.handles) == 2)
        # Without the call's own limit, which ends with the next hang.
        monkeypatch.setattr(host_module, "answer", lambda call, timeout_s: call)
        checked = asyncio.create_task(host.check_health())
        await begun.wait()
        monkeypatch.setattr(host_module, "answer", scene.answer)
        await host.reconfigure(live_of("decode", 100))
        assert scene.handles[1].is_dead
        goes_on.set()
        await checked
        await host.check_health()
        assert counting.told == [("decode", 1), ("decode", 1)]

    asyncio.run(play())


def test_a_child_that_dies_did_not_hang(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = CountingManager()

    async def play() -> None:
        client: Any = ManagerClient(MortalHandle(counting))  # type: ignore[arg-type]
        monkeypatch.setattr(host_module, "find_manager", lambda app_name: asyncio.sleep(0, client))
        host = await start("decode")
        scene.handles[0].die()
        await until(lambda: len(scene.handles) == 2)
        for _ in range(2):
            await host.check_health()
        assert counting.told == []

    asyncio.run(play())


def test_the_first_child_s_own_error_is_told_and_a_kill_is_not_its_own(scene: Scene) -> None:
    async def play() -> None:
        scene.plan.append(Child(ActorDiedError()))
        await start("decode")
        assert len(scene.names) == 2

        scene.plan.append(Child(ValueError("not a model")))
        with pytest.raises(ValueError, match="not a model"):
            await start("decode")
        assert scene.handles[-1].is_dead, "what could not start does not stay"

        scene.plan += [Child(ActorDiedError())] * MAX_FAILURES
        with pytest.raises(ActorDiedError):
            await start("decode")

    asyncio.run(play())


def live_of(kind: str, token_budget: int) -> dict[str, Any]:
    """Other values that change in place."""
    workers = {"prefill": {}, "decode": {"token_budget": token_budget}}
    return part_of(kind, workers=workers, placement={"piggyback_tokens": token_budget}).live


def test_a_change_is_handed_on_to_the_child(scene: Scene) -> None:
    async def play() -> None:
        host = await start("decode")
        await host.reconfigure(live_of("decode", 100))
        assert [handle.actor.told for handle in scene.handles] == [[(SchedulerLimits(100, 64), (), "INFO")]]  # type: ignore[attr-defined]

        manager = await start(MANAGER)
        await manager.reconfigure(live_of(MANAGER, 100))
        [told] = scene.handles[-1].actor.told  # type: ignore[attr-defined]
        assert told == (100, told[1], (), Objectives(when_late=WhenLate.WAIT), "INFO", PoolLimits(1, 60.0), NO_TURNS)

    asyncio.run(play())


def test_a_host_tells_serve_how_many_workers_the_manager_wants(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    class Manager:
        wanted: Wanted | None = Wanted(3, may_shrink=False)

        async def wanted_workers(self) -> Wanted | None:
            return self.wanted

    async def play() -> None:
        host = await start("elastic")
        assert await host.record_autoscaling_stats() == {}, "there is no manager yet"
        manager = Manager()
        handle = MortalHandle(manager)
        client: Any = ManagerClient(handle)  # type: ignore[arg-type]
        monkeypatch.setattr(host_module, "find_manager", lambda app_name: asyncio.sleep(0, client))
        assert await host.record_autoscaling_stats() == {WANTED: 3, MAY_SHRINK: 0.0}
        manager.wanted = Wanted(1, may_shrink=True)
        assert await host.record_autoscaling_stats() == {WANTED: 1, MAY_SHRINK: 1.0}
        manager.wanted = None
        assert await host.record_autoscaling_stats() == {}, "the manager has not looked yet"
        handle.die()
        assert await host.record_autoscaling_stats() == {}

    asyncio.run(play())


def test_the_next_incarnation_has_the_changed_values(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    async def play() -> None:
        host = await start("decode")
        create = HostedWorker.create

        def create_and_look(hosted: HostedWorker, name: str, epoch: int) -> Any:
            made.append(hosted._live)
            return create(hosted, name, epoch)

        monkeypatch.setattr(HostedWorker, "create", create_and_look)
        await host.reconfigure(live_of("decode", 100))
        scene.handles[-1].die()
        await until(lambda: made)
        assert made[0].token_budget == 100

    asyncio.run(play())


def test_a_change_reaches_a_child_that_is_starting(scene: Scene) -> None:
    """Its values were those before the change."""

    async def play() -> None:
        host = await start("decode")
        late = Child()
        late.may_start.clear()
        scene.plan.append(late)
        scene.handles[-1].die()
        await until(lambda: len(scene.handles) == 2)
        await host.reconfigure(live_of("decode", 100))
        assert late.told == []
        late.may_start.set()
        await until(lambda: late.told)
        assert late.told == [(SchedulerLimits(100, 64), (), "INFO")]

    asyncio.run(play())


def test_an_invalid_change_changes_nothing(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        host = await start("decode")
        live = live_of("decode", 100)
        wrongs = ({**live, "token_budget": 3}, {**live, "more": 1}, {"token_budget": 100})
        for wrong in wrongs:
            await host.reconfigure(wrong)
        assert [record.about["event"] for record in caplog.records][1:] == ["change_refused"] * 3  # type: ignore[attr-defined]
        assert scene.handles[0].actor.told == []  # type: ignore[attr-defined]
        assert host._hosted.logs.level == "INFO" and host._num_changes == 1
        await host.check_health()

    asyncio.run(play())


def test_a_child_that_refuses_a_change_is_told_of_and_one_that_hangs_is_replaced(scene: Scene) -> None:
    async def play() -> None:
        scene.plan.append(Child(refuses=True))
        host = await start("decode")
        with pytest.raises(RayTaskError):
            await host.reconfigure(live_of("decode", 100))

        scene.plan.append(Child(hangs=scene.hangs))
        host = await start("decode")
        await host.reconfigure(live_of("decode", 100))
        assert scene.handles[1].is_dead
        await until(lambda: len(scene.handles) == 3)
        await host.check_health()

    asyncio.run(play())


def test_a_host_without_values_is_not_healthy(scene: Scene) -> None:
    async def play() -> None:
        host = ActorHost("decode", part_of("decode").arguments)
        with pytest.raises(RuntimeError, match="no user_config"):
            await host.check_health()
        with pytest.raises(StartupError, match="unknown key 'worker"):
            ActorHost("decode", {**part_of("decode").arguments, "workers": {}})

    asyncio.run(play())


def test_names_of_incarnations() -> None:
    assert incarnation_name(WORKER_ID, 5) == f"{WORKER_ID}:5"


class Manager(ManagerClient):
    """Answers that a worker is still needed, so many times."""

    def __init__(self, num_needed: int, is_away: bool = False, knows: bool = True) -> None:
        self.num_needed = num_needed
        self.is_away = is_away
        self.knows = knows
        self.asked: list[str] = []

    async def worker_starting(self, worker_id: str) -> None:
        """A host says this now and then while its worker has not registered."""

    async def worker_leaving(self, worker_id: str) -> bool | None:
        self.asked.append(worker_id)
        if self.is_away:
            raise ActorDiedError
        return len(self.asked) > self.num_needed if self.knows else None


def test_a_host_that_is_stopped_ends_when_its_worker_is_not_needed_any_more(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "LEAVE_S", 0.001)
    manager = Manager(num_needed=3)
    monkeypatch.setattr(host_module, "find_manager", lambda app_name: asyncio.sleep(0, manager))

    async def play() -> None:
        host = await start("decode")
        leaving = host.__del__()
        assert leaving is not None
        await leaving
        assert manager.asked == [WORKER_ID] * 4
        assert host.__del__() is None, "once"

    asyncio.run(play())


@pytest.mark.parametrize("manager", [Manager(0, is_away=True), Manager(0, knows=False)], ids=["away", "knows nothing"])
def test_a_host_waits_for_a_manager_that_knows_its_worker_only_so_long(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, manager: Manager
) -> None:
    monkeypatch.setattr(host_module, "LEAVE_S", 0.001)
    monkeypatch.setattr(host_module, "UNKNOWN_S", 0.05)
    monkeypatch.setattr(host_module, "find_manager", lambda app_name: asyncio.sleep(0, manager))

    async def play() -> None:
        host = await start("decode")
        leaving = host.__del__()
        assert leaving is not None
        await leaving
        assert len(manager.asked) > 1
        assert host.__del__() is None, "once"

    asyncio.run(play())


def test_the_managers_host_ends_at_once(scene: Scene) -> None:
    async def play() -> None:
        assert (await start(MANAGER)).__del__() is None

    asyncio.run(play())


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_worker_computes_with_its_own_number_of_threads(num_threads: int) -> None:
    """In a process that Ray has started before it knew of the worker, and in which Ray has set another number."""
    program = f"from raydix.actors.worker.worker import compute_with; compute_with({num_threads}); import torch; "
    done = subprocess.run(
        [sys.executable, "-c", program + "print(torch.get_num_threads())"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "3"},
        check=True,
    )
    assert done.stdout.split() == [str(num_threads)]
