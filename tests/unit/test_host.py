"""A host that starts its actor, replaces the actor, and says when it cannot. There is no Ray here."""

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError

import actors.host as host_module
from actors.host import MAX_FAILURES, ActorHost
from actors.names import MANAGER, incarnation_name
from actors.rpc import ActorClient, ManagerClient
from configs import Config
from tests.unit.local_actors import LocalHandle

WORKER_ID = "decode-r1"


class Child:
    """An actor that starts, or fails to, or hangs."""

    def __init__(self, error: Exception | None = None, hangs: bool = False) -> None:
        self._error = error
        self._hangs = hangs

    async def start(self) -> None:
        if self._error is not None:
            raise self._error

    async def check(self) -> None:
        if self._hangs:
            await asyncio.Event().wait()

    async def join(self) -> None:
        await asyncio.Event().wait()


class Scene:
    """A host whose children are those of `plan`, in this order; after them, good ones."""

    def __init__(self) -> None:
        self.plan: list[Child] = []
        self.names: list[str] = []
        self.handles: list[LocalHandle] = []
        self.announced: list[str] = []

    def create(self, name: str) -> ActorClient:
        handle = LocalHandle(self.plan.pop(0) if self.plan else Child())
        self.names.append(name)
        self.handles.append(handle)
        return ActorClient(handle)  # type: ignore[arg-type]

    async def announce(self, name: str, app_name: str) -> None:
        self.announced.append(name)

    @staticmethod
    def kill(handle: LocalHandle) -> None:
        if not handle.is_dead:
            handle.die()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    scene = Scene()
    context = SimpleNamespace(app_name="app", replica_id=SimpleNamespace(unique_id="r1"))
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: context)
    monkeypatch.setattr(host_module, "announce_manager", scene.announce)
    monkeypatch.setattr(host_module, "find_manager", lambda app_name: asyncio.sleep(0))
    for name, value in (("RETRY_S", 0.005), ("STARTING_REPORT_S", 0.01), ("CHECK_TIMEOUT_S", 0.05)):
        monkeypatch.setattr(host_module, name, value)
    monkeypatch.setattr(ray, "kill", scene.kill)
    monkeypatch.setattr(ActorHost, "_create_manager", lambda host, name: scene.create(name))
    monkeypatch.setattr(ActorHost, "_create_worker", lambda host, role, name, epoch: scene.create(name))
    yield scene


async def start(kind: str) -> ActorHost:
    host: Any = ActorHost.__new__(ActorHost)  # Serve awaits constructors; Python does not
    await host.__init__(kind, Config.model_validate({"workers": {"prefill": {}, "decode": {}}}).model_dump())
    return host  # type: ignore[no-any-return]


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


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
        scene.plan.append(Child(hangs=True))
        host = await start("decode")
        await host.check_health()
        assert scene.handles[0].is_dead
        await until(lambda: len(scene.handles) == 2)
        await host.check_health()
        assert not scene.handles[1].is_dead

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


def test_names_of_incarnations() -> None:
    assert incarnation_name(WORKER_ID, 5) == f"{WORKER_ID}:5"


class Manager(ManagerClient):
    """Answers that a worker is still needed, so many times."""

    def __init__(self, num_needed: int, is_away: bool = False) -> None:
        self.num_needed = num_needed
        self.is_away = is_away
        self.asked: list[str] = []

    async def worker_leaving(self, worker_id: str) -> bool:
        self.asked.append(worker_id)
        if self.is_away:
            raise ActorDiedError
        return len(self.asked) > self.num_needed


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


def test_a_host_waits_for_a_manager_that_is_away_only_so_long(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "LEAVE_S", 0.001)
    monkeypatch.setattr(host_module, "LEAVE_TIMEOUT_S", 0.05)
    manager = Manager(num_needed=0, is_away=True)
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
