"""Actors in one process and one event loop, without Ray: the production actors, called through their own clients.

After `MortalHandle.die` each call that is under way or comes later fails with Ray's error, as the calls of a killed
process do, and nothing that the actor does is seen any more. Workers run an engine with `builders.FakeModel`, so an
answer is known from its prompt alone, and KV that is read by a request which it does not belong to fails the test.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

import raydix.actors.manager.worker_watch as worker_watch
import raydix.actors.worker.registrar as registrar_module
from raydix.actors.ingress.dispatcher import AdapterTable, Dispatcher
from raydix.actors.ingress.manager_link import ManagerLink
from raydix.actors.local import LocalHandle, LocalRuntime
from raydix.actors.manager.kv_cache_manager import KVCacheManager
from raydix.actors.names import incarnation_name
from raydix.actors.runtime import Runtime
from raydix.actors.worker.worker import WORKER_CLASSES, Worker
from raydix.engine.core.ingress.cluster_view import ModelFacts, Timeouts
from raydix.engine.core.ingress.generation import Generation
from raydix.engine.core.manager.placement import CostModel
from raydix.engine.core.settings import EngineSettings, SchedulerLimits
from raydix.engine.core.types import CacheHints, Role, Salt, Sampling
from raydix.engine.core.worker.block_pool import pool_of
from raydix.engine.core.worker.states import States
from raydix.engine.model.engine import Engine
from raydix.engine.model.swap_space import SwapSpace
from tests.unit.builders import FINGERPRINT, FakeModel
from tests.unit.waits import WAIT_S

AWAIT_TIMEOUT_S = 5 * WAIT_S
"""So a test that waits for KV which never comes fails, and nobody computes it in the end."""
APP_NAME = "app"
BLOCK_SIZE = 4
NUM_BLOCKS = 64
MAX_MODEL_LEN = 128


class MortalHandle(LocalHandle):
    """Handle of an actor that may die, or lose its link."""

    def __init__(self, actor: object) -> None:
        super().__init__(actor)
        self.is_dead = False
        self._is_connected = asyncio.Event()
        self._is_connected.set()
        self._died: asyncio.Future[None] = asyncio.get_running_loop().create_future()

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

    async def call(self, method: Callable[..., Awaitable[Any]], *args: object, **kwargs: object) -> Any:
        """The result of a method; Ray's error if the actor dies before."""

        async def through_link() -> Any:
            await self._is_connected.wait()
            result = await method(*args, **kwargs)
            await self._is_connected.wait()
            return result

        task = asyncio.ensure_future(through_link())
        await asyncio.wait({task, self._died}, return_when=asyncio.FIRST_COMPLETED)
        if self.is_dead:
            task.cancel()
            raise ActorDiedError
        return task.result()


class LocalWords:
    """The last words of a worker in this process."""

    def __init__(self) -> None:
        self.noted: tuple[str, ...] = ()

    def note(self, request_ids: Sequence[str]) -> None:
        self.noted = tuple(request_ids)

    def end(self, reason: str) -> None:
        """Nothing is written."""


class LocalWorkers(LocalRuntime):
    """The workers of a cluster in this process, with handles that may die."""

    handles: dict[str, MortalHandle]  # type: ignore[assignment]

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.words: dict[str, LocalWords] = {}
        """By the name of the incarnation."""
        self._named: dict[str, tuple[str, ...]] = {}
        """The requests that stopped workers, by the name of the incarnation."""
        monkeypatch.setattr("raydix.engine.model.build.build_engine", make_engine)
        monkeypatch.setattr(registrar_module, "HEARTBEAT_S", 0.02)
        monkeypatch.setattr(worker_watch, "WORKER_SILENCE_S", 0.5)

    async def start_manager(self, disk: Path | None = None) -> KVCacheManager:
        """Start a manager, in place of the last one; with `disk` as the folder of its files."""
        manager = self.make_manager(disk)
        self.manager_name = f"manager:{len(self.handles)}"
        self.handles[self.manager_name] = MortalHandle(manager)
        await manager.start()
        return manager

    def make_manager(self, disk: Path | None = None, **options: Any) -> KVCacheManager:
        """A manager, not started."""
        return KVCacheManager(
            CostModel(BLOCK_SIZE, piggyback_tokens=0),
            segment_budget_bytes=1 << 20,
            transcript_budget_bytes=1 << 20,
            await_timeout_s=AWAIT_TIMEOUT_S,
            disk_budget_bytes=0 if disk is None else 1 << 20,
            disk_path=None if disk is None else str(disk),
            runtime=self,
            **options,
        )

    async def start_worker(
        self,
        role: Role,
        worker_id: str,
        epoch: int = 1,
        num_blocks: int = NUM_BLOCKS,
        swap_bytes: int = 0,
    ) -> Worker:
        """Start a worker; it registers by itself."""
        worker = make_worker(role, worker_id, self, epoch, num_blocks, swap_bytes)
        self.handles[incarnation_name(worker_id, epoch)] = MortalHandle(worker)
        assert await worker.start() == worker_id
        return worker

    def kill(self, name: str) -> None:
        self.handles[name].die()

    def begin_words(self, name: str) -> LocalWords:
        return self.words.setdefault(name, LocalWords())

    async def named_requests(self, name: str, node: str, *, is_dead: bool) -> tuple[str, ...]:
        return self._named.get(name, ())

    def stop_by_itself(self, name: str, *, is_dead: bool) -> None:
        """End a worker as a fatal signal in its engine's thread would, or have it answer nothing while the thread
        computes for ever."""
        self._named[name] = self.words[name].noted
        if is_dead:
            self.kill(name)
        else:
            self.handles[name].cut_off()

    def kill_manager(self) -> None:
        assert self.manager_name is not None
        manager = self.handles[self.manager_name].actor
        self.kill(self.manager_name)
        if isinstance(manager, KVCacheManager) and manager._disk is not None:
            manager._disk._files.close()  # the kernel gives a dead process's locks back


def make_worker(
    role: Role,
    worker_id: str,
    runtime: Runtime,
    epoch: int = 1,
    num_blocks: int = NUM_BLOCKS,
    swap_bytes: int = 0,
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
    return WORKER_CLASSES[role](settings, role, worker_id, epoch, runtime)


def make_engine(settings: EngineSettings, swap_space: SwapSpace, on_tensor: Callable[[], None]) -> Engine:
    """An engine whose model is `FakeModel`."""
    return engine_of(settings, swap_space, None)


def make_recurrent_engine(settings: EngineSettings, swap_space: SwapSpace, on_tensor: Callable[[], None]) -> Engine:
    """An engine whose model is `FakeModel` with recurrent states."""
    return engine_of(settings, swap_space, States(4 * settings.limits.max_requests))


def engine_of(settings: EngineSettings, swap_space: SwapSpace, states: States | None) -> Engine:
    assert settings.num_blocks is not None and settings.max_model_len is not None
    pool = pool_of(settings, settings.num_blocks, states)
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
        states=None if states is None else model,
    )


def make_dispatcher(
    runtime: Runtime,
    ingress_id: str = "ingress",
    worker_silent_s: float = 30.0,
    on_failover: Callable[[], None] = lambda: None,
    adapters: AdapterTable | None = None,
) -> Dispatcher:
    """The data plane of an ingress replica; each failover is told to `on_failover`."""
    model = ModelFacts(FINGERPRINT.rpartition("/")[0], BLOCK_SIZE, await_timeout_s=AWAIT_TIMEOUT_S)
    timeouts = Timeouts(retry_s=0.01, dispatch_s=5.0, worker_silent_s=worker_silent_s)
    return Dispatcher(ingress_id, runtime, ManagerLink(runtime), model, on_failover, timeouts, adapters)


async def answer_of(dispatcher: Dispatcher, request_id: str, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    """All tokens of one request."""
    generation = Generation(request_id, prompt, Sampling(max_tokens), Salt(), CacheHints())
    tokens = [event.token_id async for events in dispatcher.generate(generation) for event in events]
    return [token for token in tokens if token is not None]
