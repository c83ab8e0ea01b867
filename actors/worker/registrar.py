"""Keeps a worker registered: registration, heartbeats, and the same again with every new manager."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray.exceptions import RayError

from raydix.actors.calls import answer
from raydix.actors.messages import Registration, WorkerState
from raydix.actors.processes import own_process
from raydix.actors.rpc import Handle, ManagerClient
from raydix.actors.runtime import Runtime
from raydix.actors.worker.engine_thread import EngineThread
from raydix.actors.worker.export_stream import ExportStream
from raydix.actors.worker.held_adapters import HeldAdapters
from raydix.actors.worker.token_streams import TokenStreams
from raydix.engine.core.log_fields import about
from raydix.engine.core.types import AttemptName, BlockHash, Role

if TYPE_CHECKING:
    from raydix.engine.model.engine import Engine

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.5  # interval between two heartbeats
HEARTBEAT_TIMEOUT_S = 2.0  # time after which a manager that does not answer a heartbeat counts as silent


@dataclass(frozen=True, slots=True)
class Incarnation:
    """Identity of one life of a worker. `epoch` tells this incarnation from earlier ones of the same id."""

    worker_id: str
    role: Role
    epoch: int
    device: str


class Registrar:
    """Registers one worker, and restarts its export stream from the pool's contents at each registration."""

    def __init__(
        self,
        incarnation: Incarnation,
        engine: "Engine",
        thread: EngineThread,
        tokens: TokenStreams,
        exports: ExportStream,
        adapters: HeldAdapters,
        *,
        runtime: Runtime,
        own_handle: Callable[[], Handle],
        state: Callable[[], WorkerState],
    ) -> None:
        """`own_handle` returns the handle by which the manager calls this worker; `state` what a heartbeat tells."""
        self._incarnation = incarnation
        self._engine = engine
        self._thread = thread
        self._tokens = tokens
        self._exports = exports
        self._adapters = adapters
        self._runtime = runtime
        self._own_handle = own_handle
        self._state = state
        self._is_asked_for = asyncio.Event()  # set when a manager that has taken over asks for this worker
        self.refused_for: str | None = None
        """Last reason of the manager's for not registering this worker."""

    def register_again(self) -> None:
        """Look for the manager now: another one has taken over."""
        self._is_asked_for.set()

    async def run(self) -> None:
        """Register with the manager, and again with every new manager, which knows no worker at first."""
        is_lost = False
        while True:
            try:
                self._is_asked_for.clear()
                manager = await self._runtime.find_manager()
                if manager is not None:
                    is_registered = await self._register(manager)
                    is_lost = False
                    while is_registered and not self._is_asked_for.is_set():
                        await self._pause(HEARTBEAT_S)
                        is_registered = await self._is_registered(manager)
            except RayError as error:
                reason, level = type(error).__name__, logging.DEBUG if is_lost else logging.WARNING
                logger.log(level, "lost the manager (%s)", reason, extra=about("manager_lost", reason=reason))
                is_lost = True
            except Exception:  # of any kind: an unregistered worker gets no work
                logger.exception("registration failed")

            # A new manager knows nothing of the blocks promised to this worker.
            self._thread.post(lambda engine: engine.scheduler.imports.stop_awaiting_all())
            await self._pause(HEARTBEAT_S / 2)

    async def _pause(self, seconds: float) -> None:
        """Wait for so long, or until another manager asks for this worker's registration."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_asked_for.wait(), seconds)

    async def _register(self, manager: ManagerClient) -> bool:
        """Introduce this worker to a manager, which may refuse it; the reason is logged once."""
        # Before the introduction: a worker is given requests of every adapter from its registration on.
        refusal = await self._adapters.catch_up(await manager.loaded_adapters.adapters() or ())
        if refusal is None:
            refusal = await manager.register(await self._introduce(), self._own_handle())
        if refusal is not None and refusal != self.refused_for:
            logger.warning("the manager refuses this worker: %s", refusal, extra=about("refused", reason=refusal))
        self.refused_for = refusal
        return refusal is None

    async def _is_registered(self, manager: ManagerClient) -> bool:
        """Send a heartbeat; False if the manager does not know this worker. While the manager is silent, the worker
        computes the blocks promised to it and goes on asking."""
        own = self._incarnation
        while True:
            try:
                heartbeat = manager.heartbeat(own.worker_id, own.epoch, self._state())
                return await answer(heartbeat, HEARTBEAT_TIMEOUT_S)
            except TimeoutError:
                extra = about("manager_lost", reason="TimeoutError")
                logger.warning("the manager does not answer a heartbeat", extra=extra)
                self._thread.post(lambda engine: engine.scheduler.imports.stop_awaiting_all())

    async def _introduce(self) -> Registration:
        """Describe the pool's present contents; the export stream starts over from exactly there."""

        def snapshot(engine: "Engine") -> None:
            # The journal's changes are in the snapshot. What is sealed after it comes behind `restart` in the stream.
            engine.pool.drain_journal()
            self._thread.in_event_loop(restart, tuple(engine.pool.hashes()))

        def restart(hashes: tuple[BlockHash, ...]) -> None:
            self._exports.restart()
            taken.set_result((hashes, self._tokens.attempts.under_way))

        taken: asyncio.Future[tuple[tuple[BlockHash, ...], frozenset[AttemptName]]] = (
            asyncio.get_running_loop().create_future()
        )
        self._thread.post(snapshot)
        hashes, attempts = await taken
        own = self._incarnation
        return Registration(
            worker_id=own.worker_id,
            epoch=own.epoch,
            role=own.role,
            block_bytes=self._engine.store.block_bytes,
            token_budget=self._engine.scheduler.limits.token_budget,
            device=own.device,
            fingerprint=self._engine.fingerprint,
            hashes=hashes,
            node=self._runtime.own_node(),
            attempts=attempts,
            process=own_process(self._runtime.own_node()),
            adapters=self._adapters.all,
            num_blocks=self._engine.pool.num_blocks,
            state_bytes=self._engine.exchange.state_bytes,
        )
