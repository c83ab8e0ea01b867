"""A manager is replaced while it lives: two of its hosts, the workers and an ingress replica, without Ray."""

import asyncio
from array import array
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

import raydix.actors.host as host_module
import raydix.actors.manager.succession as succession_module
from raydix.actors.host import ActorHost
from raydix.actors.hosted import HostedManager
from raydix.actors.ingress.dispatcher import Dispatcher
from raydix.actors.ingress.manager_link import ManagerLink
from raydix.actors.local import LocalRuntime
from raydix.actors.manager.kv_cache_manager import KVCacheManager
from raydix.actors.manager.succession import Succession
from raydix.actors.messages import RetiredError
from raydix.actors.rpc import ManagerClient
from raydix.actors.worker.worker import Worker
from raydix.configs import Config
from raydix.configs.sections import MANAGER, parts
from raydix.engine.core.errors import ServiceError
from raydix.engine.core.types import Role
from tests.unit.local_actors import APP_NAME, LocalWorkers, MortalHandle, answer_of, make_dispatcher
from tests.unit.test_data_plane import expected, prompt_of
from tests.unit.waits import WAIT_S, until

LONG = tuple(range(90))
NUM_TOKENS = 60


class OutOfReach:
    """Reference to an object that never comes."""

    def __await__(self) -> Generator[Any, None, None]:
        return asyncio.sleep(60).__await__()


class Scene:
    """A cluster whose managers are started by hosts; a worker of each role."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.local = LocalWorkers(monkeypatch)
        self.disk: Path | None = None
        self.options: dict[str, Any] = {}
        self.workers: list[Worker] = []
        context = SimpleNamespace(app_name=APP_NAME, replica_id=SimpleNamespace(unique_id="r1"))
        monkeypatch.setattr("ray.serve.get_replica_context", lambda: context)
        monkeypatch.setattr(host_module, "announce_manager", self._announce)
        monkeypatch.setattr(host_module, "find_manager", lambda app_name: self.local.find_manager())
        monkeypatch.setattr(HostedManager, "create", lambda hosted, name, epoch: self._create(name))
        monkeypatch.setattr(ray, "kill", lambda handle: handle.is_dead or handle.die())

    async def start_host(self) -> ActorHost:
        """A host of the manager, as Serve starts it: another one takes over from the manager that is announced."""
        part = parts(Config.model_validate({"workers": {"prefill": {}, "decode": {}}}))[MANAGER]
        host = ActorHost(MANAGER, part.arguments)
        await host.reconfigure(part.live)
        return host

    async def start(self) -> tuple[ActorHost, Dispatcher]:
        host = await self.start_host()
        for worker_id, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
            self.workers.append(await self.local.start_worker(role, worker_id))
        await until(lambda: len(self.manager._directory.fleet) == 2)
        dispatcher = make_dispatcher(self.local)
        dispatcher.start()
        return host, dispatcher

    async def end(self, host: ActorHost) -> None:
        """End a host and its manager, as Serve does when the next host has started."""
        child = host._child
        assert child is not None
        host._watch.cancel()
        if not child.handle.is_dead:
            child.handle.die()

    @property
    def manager(self) -> KVCacheManager:
        """The manager that was announced last."""
        assert self.local.manager_name is not None
        manager = self.local.handles[self.local.manager_name].actor
        assert isinstance(manager, KVCacheManager)
        return manager

    def run(self, play: Callable[[], Any]) -> None:
        try:
            asyncio.run(asyncio.wait_for(play(), 2 * WAIT_S))
        finally:
            for worker in self.workers:
                worker._thread.stop()

    async def _announce(self, name: str, app_name: str) -> None:
        self.local.manager_name = name

    def _create(self, name: str) -> ManagerClient:
        handle = MortalHandle(self.local.make_manager(self.disk, **self.options))
        self.local.handles[name] = handle
        return ManagerClient(handle)  # type: ignore[arg-type]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


async def only_in_the_store(scene: Scene, dispatcher: Dispatcher) -> None:
    """Have a long prompt's KV in segments and in no pool."""
    assert await answer_of(dispatcher, "first", LONG, 3) == expected(LONG, 3)
    await until(lambda: scene.manager._directory.num_reservations == 0)
    await scene.manager._resets.reset(scene.manager._executor.clients)
    await until(lambda: not any(pool.blocks for pool in scene.manager._directory.stock.pools.values()))
    assert scene.manager._directory.stock.segments.store_bytes > 0


async def all_heard(manager: KVCacheManager) -> None:
    """Return when each worker has sent a heartbeat that began after this call: the manager knows it for good."""
    heard_at = manager._workers._signs._heard_at
    for _ in range(2):  # the first one may have been on its way
        before = dict(heard_at)
        await until(lambda: all(heard_at[worker_id] > at for worker_id, at in before.items()))  # noqa: B023


def num_computed(scene: Scene) -> int:
    return sum(worker._measurements.num_prefill_tokens for worker in scene.workers)


@pytest.mark.parametrize("has_disk", [False, True])
def test_requests_go_on_and_nothing_is_lost(scene: Scene, tmp_path: Path, has_disk: bool) -> None:
    scene.disk = tmp_path if has_disk else None
    scene.options = {"response_budget_bytes": 1 << 20, "response_ttl_s": 60.0, "answer_budget_bytes": 1 << 20}

    async def play() -> None:
        first, dispatcher = await scene.start()
        await only_in_the_store(scene, dispatcher)
        old = scene.manager
        assert await old.of_answers("remember", [(b"t", array("i", [1, 2]), "t")]) == [True]
        assert await old.of_answers("keep_response", b"a", None, b"1") and await old.of_answers(
            "keep_response", b"b", b"a", b"2"
        )

        prompts = {f"r{number}": prompt_of(number) for number in range(6)}
        answers = [asyncio.create_task(answer_of(dispatcher, *each, NUM_TOKENS)) for each in prompts.items()]
        await until(lambda: any(worker._engine.scheduler.running for worker in scene.workers))
        second = await scene.start_host()
        assert scene.manager is not old and old.succession.is_retired
        assert await asyncio.gather(*answers) == [expected(prompt, NUM_TOKENS) for prompt in prompts.values()]
        await scene.end(first)

        successor = scene.manager
        await until(lambda: len(successor._directory.fleet) == 2)
        [ids] = await successor.of_answers("recall", [b"t"])
        assert ids == array("i", [1, 2])
        assert await successor.of_answers("find_response", b"b", True) == [b"1", b"2"]
        await until(lambda: successor._directory.num_reservations == 0)
        await all_heard(successor)  # a worker that is asked to register twice gives up the blocks that it waits for
        before = num_computed(scene)
        assert await answer_of(dispatcher, "again", LONG, 3) == expected(LONG, 3)
        await until(lambda: num_computed(scene) > before)
        assert num_computed(scene) - before <= len(LONG) - 80, "the blocks came from the segments"
        successor._directory.check_integrity()
        old._directory.check_integrity()
        [lost] = [each for each in await old.metrics() if each.name == "raydix_lost_workers"]
        assert set(lost.values.values()) == {0.0}, "workers that have gone over to the successor are not lost"
        assert has_disk or old._directory.stock.segments.store_bytes == 0, "no payload is held twice"
        await scene.end(second)

    scene.run(play)


def test_a_predecessor_that_dies_in_the_middle_leaves_what_has_come(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raydix.engine.core.manager.succession.MAX_BATCH_BYTES", 1)

    async def play() -> None:
        first, dispatcher = await scene.start()
        await only_in_the_store(scene, dispatcher)
        old, handle = scene.manager, scene.local.handles[scene.local.manager_name or ""]
        num_segments = len(old._directory.stock.segments)
        assert num_segments > 2
        moved = old._directory.stock.segments.moved_away
        count = 0

        def moved_away(segment_id: int) -> None:
            nonlocal count
            count += 1
            moved(segment_id)
            if count == 2:
                first._watch.cancel()
                handle.die()

        monkeypatch.setattr(old._directory.stock.segments, "moved_away", moved_away)
        await scene.start_host()
        successor = scene.manager
        assert successor is not old and handle.is_dead
        assert 2 <= len(successor._directory.stock.segments) < num_segments
        await until(lambda: len(successor._directory.fleet) == 2)
        assert await answer_of(dispatcher, "again", LONG, 3) == expected(LONG, 3)
        successor._directory.check_integrity()

    scene.run(play)


def test_a_predecessor_of_another_form_hands_nothing_over(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def play() -> None:
        _, dispatcher = await scene.start()
        await only_in_the_store(scene, dispatcher)
        await scene.manager.of_answers("remember", [(b"t", array("i", [1, 2]), "t")])
        monkeypatch.setattr(Succession, "_terms", lambda succession: {"schema": id(succession)})
        await scene.start_host()
        assert len(scene.manager._directory.stock.segments) == 0
        assert await scene.manager.of_answers("recall", [b"t"]) == [None]
        assert "nothing is taken over: schema is" in caplog.text
        assert await answer_of(dispatcher, "again", LONG, 3) == expected(LONG, 3)

    scene.run(play)


def test_a_predecessor_goes_on_when_its_successor_dies(scene: Scene, tmp_path: Path) -> None:
    scene.disk = tmp_path

    async def play() -> None:
        first, dispatcher = await scene.start()
        old, old_name = scene.manager, scene.local.manager_name
        second = await scene.start_host()
        assert old.succession.is_retired
        second._watch.cancel()  # Serve gives the new host up.
        scene.local.kill_manager()
        await until(lambda: not old.succession.is_retired)
        await first.check_health()
        assert scene.local.manager_name == old_name
        await until(lambda: len(old._directory.fleet) == 2)
        assert await answer_of(dispatcher, "again", LONG, 3) == expected(LONG, 3)

    scene.run(play)


def test_a_host_whose_manager_has_a_successor_starts_no_other(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", host_module.__name__)

    async def play() -> None:
        first, _ = await scene.start()
        old, count = first._child, len(scene.local.handles)
        second = await scene.start_host()
        assert old is not None
        old.handle.die()
        await first.check_health()
        await until(lambda: "another manager has taken over" in caplog.messages)
        assert len(scene.local.handles) == count + 1 and first._child is old
        second._watch.cancel()
        scene.local.kill_manager()
        await until(lambda: first._child is not old)

    scene.run(play)


def test_segments_that_cannot_be_copied_are_left_out(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(succession_module, "COPY_S", 0.01)

    async def play() -> None:
        _, dispatcher = await scene.start()
        await only_in_the_store(scene, dispatcher)
        old = scene.manager
        [(first, _), *others] = old._directory.stock.segments.by_worth(0.0)
        first.ref = OutOfReach()
        assert [item async for item in old.copies([first.segment_id, 77])] == [None, None]
        await scene.start_host()
        assert len(scene.manager._directory.stock.segments) == len(others)

    scene.run(play)


def test_the_ingress_asks_the_successor_of_a_retired_manager_at_once() -> None:
    found: list[Any] = []

    class Asked:
        def __init__(self, is_retired: bool) -> None:
            self.is_retired = is_retired

        async def recall(self) -> str:
            if self.is_retired:
                raise RetiredError
            return "ids"

    managers = [Asked(True), Asked(False), Asked(True), Asked(True)]

    class Runtime(LocalRuntime):
        async def find_manager(self) -> Any:
            found.append(managers.pop(0))
            return found[-1]

    async def play() -> None:
        link: Any = ManagerLink(Runtime())
        assert await link.ask(lambda manager: manager.recall()) == "ids"
        assert len(found) == 2
        link.client = None
        with pytest.raises(ServiceError):
            await link.ask(lambda manager: manager.recall())
        assert link.client is None

    asyncio.run(play())
