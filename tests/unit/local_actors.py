"""Actors in one process and one event loop, without Ray: the production actors, called through their own clients.

A `LocalHandle` stands for Ray's handle of an actor. A call runs as a task; after `die` each call that is under way or
comes later fails with Ray's error, as the calls of a killed process do, and nothing that the actor does is seen any
more. Workers run an engine with `builders.FakeModel`, so an answer is known from its prompt alone, and KV that is read
by a request which it does not belong to fails the test.
"""

import asyncio
import concurrent.futures
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

import actors.manager.kv_cache_manager as manager_module
import actors.rpc as rpc
import actors.worker.registering as registering_module
from actors.ingress.dispatcher import Dispatcher
from actors.ingress.manager_link import ManagerLink
from actors.logs import DEFAULTS
from actors.manager.kv_cache_manager import KVCacheManager
from actors.names import incarnation_name
from actors.rpc import Handle
from actors.worker.worker import WORKER_CLASSES, Worker
from configs.schema import LoggingSection
from engine.core.ingress.cluster_view import ModelFacts, Timeouts
from engine.core.ingress.generation import Generation
from engine.core.manager.placement import CostModel
from engine.core.settings import EngineSettings, SchedulerLimits
from engine.core.types import CacheHints, Role, Salt, SamplingParams
from engine.core.worker.replaying import pool_of
from engine.model.engine import Engine
from engine.model.swap_space import SwapSpace
from tests.unit.builders import FINGERPRINT, FakeModel

APP_NAME = "app"
BLOCK_SIZE = 4
NUM_BLOCKS = 64
MAX_MODEL_LEN = 128


class LocalReference:
    """Reference to an object of Ray's store, which stays in this process."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __await__(self) -> Generator[None, None, Any]:
        yield from ()
        return self._value

    def future(self) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_result(self._value)
        return future


class LocalHandle:
    """Handle of an actor in this process."""

    def __init__(self, actor: object) -> None:
        self.actor = actor
        self.is_dead = False
        self._is_connected = asyncio.Event()
        self._is_connected.set()
        self._died: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __getattr__(self, name: str) -> "RemoteMethod":
        return RemoteMethod(self, getattr(self.actor, name))

    def cut_off(self) -> None:
        """Let no call and no answer through, until `reconnect`."""
        self._is_connected.clear()

    def reconnect(self) -> None:
        self._is_connected.set()

    def die(self) -> None:
        """End the actor as SIGKILL would: nothing that it does by itself goes on."""
        self.is_dead = True
        self._died.set_result(None)
        self._end_duties()

    def vanish(self) -> None:
        """Let nothing through, to the actor or from it, and have nobody hear of an end: its node has lost its link."""
        self.cut_off()
        self._end_duties()

    def _end_duties(self) -> None:
        if isinstance(self.actor, (Worker, KVCacheManager)):
            for task in self.actor._background._tasks:
                task.cancel()

    async def unless_dead(self, method: Callable[..., Awaitable[Any]], *args: object, **kwargs: object) -> Any:
        """The result of a method; Ray's error if the actor dies before."""

        async def call() -> Any:
            await self._is_connected.wait()
            result = await method(*args, **kwargs)
            await self._is_connected.wait()
            return result

        task = asyncio.ensure_future(call())
        await asyncio.wait({task, self._died}, return_when=asyncio.FIRST_COMPLETED)
        if self.is_dead:
            task.cancel()
            raise ActorDiedError
        return task.result()


class RemoteMethod:
    """A method of a handle."""

    def __init__(self, handle: LocalHandle, method: Callable[..., Any]) -> None:
        self._handle = handle
        self._method = method

    def remote(self, *args: object, **kwargs: object) -> Any:
        if inspect.isasyncgenfunction(self._method):
            return self._items(self._method(*args, **kwargs))
        call = asyncio.ensure_future(self._handle.unless_dead(self._method, *args, **kwargs))
        call.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody needs to await a call
        return call

    async def _items(self, stream: AsyncIterator[Any]) -> AsyncIterator[Awaitable[Any]]:
        """References to the items of a stream, as Ray gives them."""
        while True:
            try:
                item = await self._handle.unless_dead(anext, stream)
            except StopAsyncIteration:
                return
            yield LocalReference(item)


class LocalWorkers:
    """Registry of the names, and the workers of a cluster in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.handles: dict[str, LocalHandle] = {}
        self.manager_name: str | None = None
        monkeypatch.setattr(rpc, "named_actor", self._named_actor)
        monkeypatch.setattr(rpc, "manager_name", self._manager_name)
        monkeypatch.setattr("ray.put", LocalReference)
        monkeypatch.setattr("engine.model.build.build_engine", make_engine)
        for module in (registering_module, manager_module):
            monkeypatch.setattr(module, "own_node", lambda: "node")
        monkeypatch.setattr(Worker, "_handle", lambda worker: self._handle_of(worker))
        monkeypatch.setattr(registering_module, "HEARTBEAT_S", 0.02)
        monkeypatch.setattr(manager_module, "WORKER_SILENCE_S", 0.5)

    async def start_manager(self, disk: Path | None = None, logs: LoggingSection = DEFAULTS) -> KVCacheManager:
        """Start a manager, in place of the last one; with `disk` as the folder of its files."""
        manager = self.make_manager(disk, logs)
        self.manager_name = f"manager:{len(self.handles)}"
        self.handles[self.manager_name] = LocalHandle(manager)
        await manager.start()
        return manager

    @staticmethod
    def make_manager(disk: Path | None = None, logs: LoggingSection = DEFAULTS, **options: Any) -> KVCacheManager:
        """A manager, not started."""
        return KVCacheManager(
            CostModel(BLOCK_SIZE, piggyback_tokens=0),
            segment_budget_bytes=1 << 20,
            transcript_budget_bytes=1 << 20,
            await_timeout_s=30.0,
            disk_budget_bytes=0 if disk is None else 1 << 20,
            disk_path=None if disk is None else str(disk),
            logs=logs,
            **options,
        )

    async def start_worker(
        self,
        role: Role,
        worker_id: str,
        epoch: int = 1,
        num_blocks: int = NUM_BLOCKS,
        swap_bytes: int = 0,
        logs: LoggingSection = DEFAULTS,
    ) -> Worker:
        """Start a worker; it registers by itself."""
        worker = make_worker(role, worker_id, epoch, num_blocks, swap_bytes, logs)
        self.handles[incarnation_name(worker_id, epoch)] = LocalHandle(worker)
        assert await worker.start() == worker_id
        return worker

    def kill(self, name: str) -> None:
        self.handles[name].die()

    def kill_manager(self) -> None:
        assert self.manager_name is not None
        manager = self.handles[self.manager_name].actor
        self.kill(self.manager_name)
        if isinstance(manager, KVCacheManager) and manager._disk is not None:
            manager._disk._files.close()  # the kernel gives a dead process's locks back

    def _handle_of(self, worker: Worker) -> Handle:
        [handle] = [each for each in self.handles.values() if each.actor is worker]
        return handle  # type: ignore[return-value]

    async def _named_actor(self, name: str, app_name: str) -> Handle | None:
        assert app_name == APP_NAME
        return self.handles.get(name)  # type: ignore[return-value]

    async def _manager_name(self, app_name: str) -> str | None:
        return self.manager_name


def make_worker(
    role: Role,
    worker_id: str,
    epoch: int = 1,
    num_blocks: int = NUM_BLOCKS,
    swap_bytes: int = 0,
    logs: LoggingSection = DEFAULTS,
) -> Worker:
    """A worker, not started."""
    settings = EngineSettings(
        source="",
        dtype="float32",
        device="cpu",
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        pool_gib=0.0,
        limits=SchedulerLimits(token_budget=16, max_requests=8),
        swap_bytes=swap_bytes,
    )
    return WORKER_CLASSES[role](settings, role, worker_id, epoch, APP_NAME, logs)


def make_engine(settings: EngineSettings, swap_space: SwapSpace) -> Engine:
    """An engine whose model is `FakeModel`."""
    assert settings.num_blocks is not None and settings.max_model_len is not None
    pool = pool_of(settings, settings.num_blocks)
    model = FakeModel(pool)
    return Engine(
        runner=model,
        store=model,
        pool=pool,
        limits=settings.limits,
        max_model_len=settings.max_model_len,
        fingerprint=FINGERPRINT,
        swap_space=swap_space,
        swap_bytes=settings.swap_bytes,
    )


def make_dispatcher(
    ingress_id: str = "ingress", worker_silent_s: float = 30.0, logs: LoggingSection = DEFAULTS
) -> Dispatcher:
    """The data plane of an ingress replica."""
    model = ModelFacts(FINGERPRINT.rpartition("/")[0], BLOCK_SIZE, await_timeout_s=30.0)
    timeouts = Timeouts(retry_s=0.01, dispatch_s=5.0, worker_silent_s=worker_silent_s)
    return Dispatcher(ingress_id, APP_NAME, ManagerLink(APP_NAME), model, lambda: None, timeouts, logs)


async def answer_of(dispatcher: Dispatcher, request_id: str, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    """All tokens of one request."""
    generation = Generation(request_id, prompt, SamplingParams(max_tokens), Salt(), CacheHints())
    tokens = [event.token_id async for events in dispatcher.generate(generation) for event in events]
    return [token for token in tokens if token is not None]
