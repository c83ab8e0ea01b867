"""Adapters that are loaded and unloaded while the server runs: the production actors in one process, without Ray."""

import asyncio
import json
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

import raydix.actors.ingress.dispatcher as dispatcher_module
import raydix.actors.manager.loaded_adapters as loaded_module
from raydix.actors.ingress.adapters import AdapterLimits
from raydix.actors.ingress.dispatcher import Dispatcher
from raydix.actors.ingress.manager_link import ManagerLink
from raydix.actors.manager.kv_cache_manager import KVCacheManager
from raydix.actors.names import incarnation_name
from raydix.actors.worker.worker import Worker
from raydix.engine.api.adapters import LoadAdapterRequest
from raydix.engine.core.errors import RequestError, StartupError
from raydix.engine.core.ingress.generation import Generation
from raydix.engine.core.tenants import Tenant, Tenants, key_hash
from raydix.engine.core.types import Adapter, AdapterReport, CacheHints, Role, Salt, Sampling
from raydix.engine.model.engine import Engine
from tests.unit.ingress import MODEL, Replica, Reply, Served, body_of, call
from tests.unit.local_actors import LocalWorkers, MortalHandle, make_dispatcher, make_worker
from tests.unit.served_app import app
from tests.unit.test_data_plane import Hold
from tests.unit.waits import until

KEYS = {"boss": "b", "other": "k"}
BOSS = Tenant("boss", is_admin=True)
SQL = b"sql".ljust(16)
"""Digest of the weights `sql`."""


class Weights:
    """Stands in for the weights of one worker's engine: those in its memory, and a folder that it cannot read."""

    def __init__(self, engine: Engine, unreadable: str | None) -> None:
        self._engine = engine
        self.held: set[bytes] = set()
        self.unreadable = unreadable
        self.needed: list[str] = []
        """Requests whose weights were dropped under them."""

    def add(self, adapter: Adapter) -> None:
        if adapter.folder == self.unreadable:
            raise StartupError(f"adapter {adapter.name}: {adapter.folder} is not an adapter's folder")
        self.held.add(adapter.digest)

    def drop(self, digest: bytes) -> None:
        requests = [each.assignment for each in self._engine.scheduler.requests.values()]
        self.needed += [each.request_id for each in requests if each.adapter and each.adapter.digest == digest]
        self.held.discard(digest)

    def require(self, adapter: Adapter) -> None:
        if adapter.digest not in self.held:
            raise LookupError(adapter.name)


class Scene:
    """A manager, workers, and ingress replicas with their tables of adapters."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, num_replicas: int = 2) -> None:
        monkeypatch.setattr(dispatcher_module, "PING_S", 0.04)
        monkeypatch.setattr(loaded_module, "LOOK_S", 0.005)
        self.local = LocalWorkers(monkeypatch)
        self.folder = folder / "adapters"
        self.workers: dict[str, Worker] = {}
        self.dispatchers: list[Dispatcher] = []
        self.manager: KVCacheManager
        tenants = Tenants(
            [Tenant("boss", is_admin=True), Tenant("other")], {key_hash(key): name for name, key in KEYS.items()}
        )
        limits = AdapterLimits((str(self.folder),), 2)
        self.replicas = [
            Replica(tenants=tenants, adapter_limits=limits, manager=ManagerLink(self.local))
            for _ in range(num_replicas)
        ]

    async def start(self, *workers: str) -> None:
        self.manager = await self.local.start_manager()
        for name in workers or ("w1", "w2"):
            await self.start_worker(name)
            await self.registered(name)
        for number, replica in enumerate(self.replicas):
            dispatcher = make_dispatcher(self.local, f"i{number}", adapters=replica.models)
            dispatcher.start()
            self.dispatchers.append(dispatcher)

    async def start_worker(self, name: str, epoch: int = 1, unreadable: str | None = None) -> Worker:
        """Start a worker, which cannot read the folder `unreadable`."""
        worker = self.workers[name] = make_worker(Role.MIXED, name, self.local, epoch)
        worker._engine.adapters = cast(Any, Weights(worker._engine, unreadable))
        self.local.handles[incarnation_name(name, epoch)] = MortalHandle(worker)
        await worker.start()
        return worker

    async def registered(self, name: str) -> None:
        await until(lambda: name in self.manager._directory.fleet)

    def held(self) -> dict[str, set[bytes]]:
        """The digests in the memory of each worker."""
        return {name: set(cast(Any, worker._engine.adapters).held) for name, worker in self.workers.items()}

    def write(self, name: str, weights: str = "") -> str:
        """A folder of an adapter with these weights, by default its name."""
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_model.safetensors").write_text(weights or name)
        return str(folder)

    def names(self) -> list[set[str]]:
        """The names that each replica knows beside the model's."""
        return [{each.name for each in replica.models.adapters(BOSS)} for replica in self.replicas]

    async def load(self, name: str, folder: str, *, in_place: bool = False) -> None:
        request = LoadAdapterRequest(lora_name=name, lora_path=folder, load_inplace=in_place)
        await self.replicas[0].frontend.adapters.load(request)

    def check(self) -> None:
        """Nobody holds what nobody may name: weights at workers, and requests at replicas."""
        listed = {adapter.digest for adapter in self.manager._adapters.listed() or ()}
        assert all(held == listed for held in self.held().values())
        assert not any(cast(Any, worker._engine.adapters).needed for worker in self.workers.values())
        assert all(not replica.models.report().in_use for replica in self.replicas)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Scene:
    return Scene(monkeypatch, tmp_path)


def ask(path: str, key: str = "b", **fields: Any) -> Awaitable[Reply]:
    """A request of the tenant with this key."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    return call(app, "POST", path, json.dumps(fields).encode(), headers=headers)


def completion(model: str) -> Awaitable[Reply]:
    headers = {"content-type": "application/json", "authorization": "Bearer b"}
    return call(app, "POST", "/v1/completions", body_of("completion", model=model), headers=headers)


def test_all_workers_and_replicas_have_an_adapter_before_the_answer(served: Served, scene: Scene) -> None:
    folder = scene.write("sql")

    async def play() -> None:
        await scene.start()
        assert (await completion("team/sql")).status == 404
        reply = await ask("/v1/load_lora_adapter", lora_name="team/sql", lora_path=folder)
        assert (reply.status, reply.body) == (200, b"Success: LoRA adapter 'team/sql' added successfully.")
        assert scene.held() == {"w1": {SQL}, "w2": {SQL}}
        assert scene.names() == [{"team/sql"}] * 2
        answer = await completion("team/sql")
        assert (answer.status, answer.json["model"]) == (200, "team/sql")
        [begun] = scene.replicas[0].dispatcher.begun
        assert begun.adapter == Adapter("team/sql", folder, SQL) and begun.salt.adapter == SQL

        reply = await ask("/v1/unload_lora_adapter", lora_name="team/sql")
        assert (reply.status, reply.body) == (200, b"Success: LoRA adapter 'team/sql' removed successfully.")
        assert scene.held() == {"w1": set(), "w2": set()} and scene.names() == [set()] * 2
        assert (await completion("team/sql")).status == 404
        again = await ask("/v1/unload_lora_adapter", lora_name="team/sql")
        assert (again.status, again.json["error"]["param"]) == (404, "lora_name")
        scene.check()

    served(scene.replicas[0], play)


def test_what_is_not_loaded(served: Served, scene: Scene, tmp_path: Path) -> None:
    """Each refusal names what is wrong, and leaves nothing behind."""
    inside, second, third = (scene.write(name) for name in ("sql", "rivers", "third"))
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "adapter_model.safetensors").write_text("secret")
    (scene.folder / "link").symlink_to(outside)
    linked = Path(scene.write("linked"))
    (linked / "adapter_model.safetensors").unlink()
    (linked / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")

    async def play() -> None:
        await scene.start()

        async def refusal(**fields: Any) -> tuple[int, str | None, str]:
            reply = await ask("/v1/load_lora_adapter", **{"lora_name": "a", "lora_path": inside, **fields})
            error = reply.json["error"]
            return reply.status, error["param"], error["message"]

        for path in (outside, scene.folder / "link", linked, scene.folder / ".." / "outside", scene.folder):
            status, param, message = await refusal(lora_path=str(path))
            assert (status, param) == (400, "lora_path") and "not below a folder of model.adapter_folders" in message
        assert await refusal(lora_path="sql") == (400, "lora_path", "sql is not an absolute path")
        circle = scene.folder / "circle"
        circle.symlink_to(circle)
        for place in ("\0", "\ud800", "a" * 5000, "circle"):
            assert (await refusal(lora_path=f"{scene.folder}/{place}"))[0] == 400
        missing = await refusal(lora_path=str(scene.folder / "missing"))
        assert missing[:2] == (400, "lora_path") and "is not an adapter's folder" in missing[2]
        assert (await refusal(lora_name=MODEL))[:2] == (400, "lora_name")
        assert (await refusal(lora_name="../x"))[:2] == (400, "lora_name")
        assert (await refusal(lora_name=None))[:2] == (400, "lora_name")
        assert (await ask("/v1/load_lora_adapter", "k", lora_name="a", lora_path=inside)).status == 403
        assert (await ask("/v1/unload_lora_adapter", "k", lora_name="a")).status == 403
        assert (await ask("/v1/unload_lora_adapter", lora_name=MODEL)).status == 400
        assert scene.held() == {"w1": set(), "w2": set()} and scene.names() == [set()] * 2

        await scene.load("a", inside)
        assert "already been loaded" in (await refusal(lora_path=second))[2]
        await scene.load("b", second)
        assert "2 adapters are loaded, which is the limit" in (await refusal(lora_name="c", lora_path=third))[2]
        scene.check()

    served(scene.replicas[0], play)


def test_a_server_without_folders_loads_none(served: Served) -> None:
    replica = Replica()
    reply = served(replica, lambda: ask("/v1/load_lora_adapter", lora_name="a", lora_path="/adapters/a"))
    assert reply.status == 403 and "'model.adapter_folders' names no folder" in reply.json["error"]["message"]


def test_an_adapter_that_one_worker_cannot_load_is_loaded_nowhere(scene: Scene) -> None:
    folder = scene.write("sql")

    async def play() -> None:
        await scene.start()
        await scene.start_worker("w3", unreadable=folder)
        await scene.registered("w3")
        with pytest.raises(RequestError, match=r"^w3: adapter sql: .* is not an adapter's folder$"):
            await scene.load("sql", folder)
        assert scene.held() == {"w1": set(), "w2": set(), "w3": set()} and scene.names() == [set()] * 2
        scene.check()

    asyncio.run(play())


def test_a_worker_that_joins_later_has_what_is_loaded(scene: Scene) -> None:
    folder = scene.write("sql")

    async def play() -> None:
        await scene.start("w1")
        await scene.load("sql", folder)
        await scene.start_worker("w2")
        await scene.registered("w2")
        assert scene.held() == {"w1": {SQL}, "w2": {SQL}}

        # One that cannot load it gets no requests, and joins as soon as it can.
        lame = await scene.start_worker("w3", unreadable=folder)
        await until(lambda: lame.registrar.refused_for is not None)
        assert "w3" not in scene.manager._directory.fleet and folder in str(lame.registrar.refused_for)
        cast(Any, lame._engine.adapters).unreadable = None
        await scene.registered("w3")

        # Nor does one that asked for the list just before an adapter was loaded.
        late = replace(await lame.registrar._introduce(), epoch=2, adapters=())
        assert await scene.manager.register(late, [cast(Any, scene.local.handles[incarnation_name("w3", 1)])]) == (
            "it lacks the adapters sql"
        )
        scene.check()

    asyncio.run(play())


def test_unloading_waits_for_requests_under_way(served: Served, scene: Scene) -> None:
    folder = scene.write("sql")

    async def play() -> None:
        await scene.start()
        await scene.load("sql", folder)
        job = await scene.replicas[1].job("completion", model="sql")
        unloading = asyncio.create_task(scene.replicas[0].frontend.adapters.unload("sql"))
        await until(lambda: scene.names() == [set()] * 2)
        assert (await completion("sql")).status == 404, "the name is gone"
        # A whole life of another adapter passes meanwhile, so the unloading has had its time.
        await scene.load("other", scene.write("other"))
        await scene.replicas[0].frontend.adapters.unload("other")
        assert [report.in_use for report in reports(scene)] == [frozenset(), {SQL}]
        assert not unloading.done() and scene.held() == {"w1": {SQL}, "w2": {SQL}}
        job.close()
        job.close()
        await unloading
        scene.check()

    served(scene.replicas[0], play)


def test_a_worker_that_was_away_does_not_bring_an_unloaded_adapter_back(scene: Scene) -> None:
    folder = scene.write("sql")

    async def play() -> None:
        await scene.start()
        await scene.load("sql", folder)
        await scene.replicas[0].frontend.adapters.unload("sql")
        # As if the word of the unloading had not reached the worker.
        assert await scene.workers["w1"].load_adapter(Adapter("sql", folder, SQL)) is None
        await scene.workers["w1"].register_again()
        await until(lambda: not scene.held()["w1"])
        await scene.load("other", scene.write("other"))
        assert scene.names() == [{"other"}] * 2
        scene.check()

    asyncio.run(play())


def reports(scene: Scene) -> list[AdapterReport]:
    found = scene.manager._ingresses.adapter_reports()
    return [report for _, report in sorted(found.items()) if report is not None]


def test_a_worker_frees_nothing_that_it_computes_with(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that no replica reports any more, as after the death of one, may still run."""
    folder, hold = scene.write("sql"), Hold(monkeypatch)

    async def play() -> None:
        await scene.start("w1")
        await scene.load("sql", folder)
        worker = scene.workers["w1"]
        hold.after(worker, 2)
        salt = Salt(adapter=SQL)
        generation = Generation("r", (1, 2, 3), Sampling(6), salt, CacheHints(), adapter=Adapter("sql", folder, SQL))
        answering = asyncio.create_task(collected(scene.dispatchers[0], generation))
        await until(lambda: hold.is_held(worker))
        unloading = asyncio.create_task(scene.replicas[0].frontend.adapters.unload("sql"))
        # The engine has been asked to free the weights, and looks at the question after the step that stands still.
        await until(lambda: worker._adapters._changes.locked())
        hold.end()
        assert len(await answering) == 6, "it ends as if nothing had happened"
        await unloading
        scene.check()

    try:
        asyncio.run(play())
    finally:
        hold.end()


async def collected(dispatcher: Dispatcher, generation: Generation) -> list[object]:
    return [event.token_id async for events in dispatcher.generate(generation) for event in events]


def test_other_weights_take_the_place_of_a_name(scene: Scene) -> None:
    """Requests under way keep theirs, and later ones have the new ones."""
    first, second = scene.write("v1"), scene.write("v2")
    digests = {name: name.encode().ljust(16) for name in ("v1", "v2")}

    async def play() -> None:
        await scene.start()
        await scene.load("sql", first)
        job = await scene.replicas[1].job("completion", model="sql")
        await scene.load("sql", second, in_place=True)
        later = await scene.replicas[1].job("completion", model="sql")
        used = [each.answers[0].generation.adapter.digest for each in (job, later)]
        assert used == [digests["v1"], digests["v2"]]
        assert scene.held() == {name: set(digests.values()) for name in ("w1", "w2")}
        job.close()
        await until(lambda: scene.held() == {name: {digests["v2"]} for name in ("w1", "w2")})
        later.close()
        scene.check()

    asyncio.run(play())


def test_weights_with_two_names_stay_for_the_other_one(scene: Scene) -> None:
    folder = scene.write("sql")

    async def play() -> None:
        await scene.start()
        await scene.load("a", folder)
        await scene.load("b", folder)
        job = await scene.replicas[0].job("completion", model="b")
        await scene.replicas[0].frontend.adapters.unload("a")
        assert scene.held() == {"w1": {SQL}, "w2": {SQL}} and scene.names() == [{"b"}] * 2
        job.close()
        await scene.replicas[0].frontend.adapters.unload("b")
        scene.check()

    asyncio.run(play())


def test_the_next_manager_learns_the_names_from_the_workers(scene: Scene) -> None:
    folder, gone = scene.write("sql"), scene.write("gone")

    async def play() -> None:
        await scene.start()
        await scene.load("sql", folder)
        await scene.load("gone", gone)
        await scene.replicas[0].frontend.adapters.unload("gone")
        scene.local.kill_manager()
        lost: list[set[str]] = []

        def has_learnt() -> bool:
            lost.extend(names for names in scene.names() if names != {"sql"})
            return bool(scene.manager._adapters.listed()) and len(scene.manager._directory.fleet) == 2

        scene.manager = await scene.local.start_manager()
        await until(has_learnt)
        assert not lost, "the name was known all the time"
        assert [each.name for each in scene.manager._adapters.listed() or ()] == ["sql"]
        await scene.replicas[0].frontend.adapters.unload("sql")
        scene.check()

    asyncio.run(play())
