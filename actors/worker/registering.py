"""A worker's ties to the manager: registration, heartbeats, and the same again with every new manager."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVarTuple

from ray.exceptions import RayError

from raydix.actors.calls import answer
from raydix.actors.messages import Registration, WorkerState
from raydix.actors.processes import own_process
from raydix.actors.rpc import ManagerClient
from raydix.actors.runtime import Runtime
from raydix.actors.worker.export_stream import ExportStream
from raydix.actors.worker.token_streams import TokenStreams
from raydix.engine.core.log_fields import about
from raydix.engine.core.types import Attempt, BlockHash, Role

if TYPE_CHECKING:
    from raydix.engine.model.engine import Engine
    from raydix.engine.model.loop import EngineLoop

logger = logging.getLogger(__name__)

Ts = TypeVarTuple("Ts")

HEARTBEAT_S = 0.5
HEARTBEAT_TIMEOUT_S = 2.0


class Registering:
    """The methods of `Worker` that keep a worker registered; the attributes are the worker's."""

    _role: Role
    _worker_id: str
    _runtime: Runtime
    _epoch: int
    _device: str
    _engine: "Engine"
    _loop_thread: "EngineLoop"
    _tokens: TokenStreams
    _exports: ExportStream
    _is_asked_for: asyncio.Event
    """Set when a manager that has taken over asks for this worker."""
    refused_for: str | None
    """Last reason of the manager's for not registering this worker."""
    _state: Callable[[], WorkerState]
    _in_event_loop: Callable[..., None]

    async def register_again(self) -> None:
        """Look for the manager now: another one has taken over."""
        self._is_asked_for.set()

    async def _stay_registered(self) -> None:
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
            self._loop_thread.post(lambda engine: engine.scheduler.stop_awaiting_all())
            await self._pause(HEARTBEAT_S / 2)

    async def _pause(self, seconds: float) -> None:
        """Wait for so long, or until another manager asks for this worker's registration."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_asked_for.wait(), seconds)

    async def _register(self, manager: ManagerClient) -> bool:
        """Introduce this worker to a manager, which may refuse it; the reason is logged once."""
        refusal = await manager.register(await self._introduce(), self._runtime.handle_of(self))
        if refusal is not None and refusal != self.refused_for:
            logger.warning("the manager refuses this worker: %s", refusal, extra=about("refused", reason=refusal))
        self.refused_for = refusal
        return refusal is None

    async def _is_registered(self, manager: ManagerClient) -> bool:
        """Send a heartbeat; False if the manager does not know this worker. While the manager is silent, the worker
        computes the blocks promised to it and goes on asking."""
        while True:
            try:
                return await answer(manager.heartbeat(self._worker_id, self._epoch, self._state()), HEARTBEAT_TIMEOUT_S)
            except TimeoutError:
                extra = about("manager_lost", reason="TimeoutError")
                logger.warning("the manager does not answer a heartbeat", extra=extra)
                self._loop_thread.post(lambda engine: engine.scheduler.stop_awaiting_all())

    async def _introduce(self) -> Registration:
        """Describe the pool's present contents; the export stream starts over from exactly there."""

        def snapshot(engine: "Engine") -> None:
            engine.pool.drain_journal()
            self._in_event_loop(restart, tuple(engine.pool.hashes()))

        def restart(hashes: tuple[BlockHash, ...]) -> None:
            self._exports.restart()
            taken.set_result((hashes, self._tokens.attempts.under_way))

        taken: asyncio.Future[tuple[tuple[BlockHash, ...], frozenset[Attempt]]] = (
            asyncio.get_running_loop().create_future()
        )
        self._loop_thread.post(snapshot)
        hashes, attempts = await taken
        return Registration(
            worker_id=self._worker_id,
            epoch=self._epoch,
            role=self._role,
            block_bytes=self._engine.store.block_bytes,
            token_budget=self._engine.scheduler.limits.token_budget,
            device=self._device,
            fingerprint=self._engine.fingerprint,
            hashes=hashes,
            node=self._runtime.own_node(),
            attempts=attempts,
            process=own_process(self._runtime.own_node()),
        )
