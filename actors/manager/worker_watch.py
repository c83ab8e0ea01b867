"""The workers, as the manager hears of them: registrations, export streams, heartbeats."""

import asyncio
import logging
import time
from collections.abc import Callable

from raydix.actors.calls import sleep
from raydix.actors.manager.executor import Executor
from raydix.actors.manager.pool_resets import PoolResets
from raydix.actors.messages import (
    DOUBTED_SILENCE_S,
    STARTING_SILENCE_S,
    WORKER_SILENCE_S,
    ExportItem,
    Registration,
    WorkerState,
)
from raydix.actors.metrics import ManagerMetrics
from raydix.actors.processes import ProcessWatch
from raydix.actors.rpc import Handle, WorkerClient
from raydix.engine.core.log_fields import about
from raydix.engine.core.manager.directory import Directory
from raydix.engine.core.signs_of_life import SignsOfLife
from raydix.engine.core.types import Membership, ProcessName, WorkerInfo

logger = logging.getLogger(__name__)


class WorkerWatch:
    """Tells a directory of workers that come and go, and of what their export streams say."""

    def __init__(
        self,
        directory: Directory,
        executor: Executor,
        resets: PoolResets,
        processes: ProcessWatch,
        metrics: ManagerMetrics,
        is_retired: Callable[[], bool],
    ) -> None:
        """`is_retired` says whether another manager has taken over, where the workers register again."""
        self._metrics = metrics
        self._is_retired = is_retired
        self._directory = directory
        self._executor = executor
        self._resets = resets
        self._watch = processes
        self._followers: dict[str, asyncio.Task[None]] = {}  # the reader of each registered worker's export stream
        self._signs = SignsOfLife()  # signs of the registered workers
        # The process of each registered worker, by its last registration.
        self._processes: dict[str, ProcessName | None] = {}
        # Time of the last report that a host is starting this worker, for each worker that is not registered yet.
        self._starting: dict[str, float] = {}

    def register(self, registration: Registration, handle: Handle) -> str | None:
        """Register a worker and begin to read its export stream; returns the reason of a refusal, or None."""
        worker_id, epoch = registration.worker_id, registration.epoch
        current = self._directory.fleet.get(worker_id)
        if current is not None and current.epoch > epoch:
            return "a newer incarnation is registered"

        refusal = self._directory.fleet.refusal(worker_id, registration.fingerprint)
        if refusal is not None:
            return refusal

        # The reader of an older stream ends before the directory takes the pool's contents anew.
        known = self._followers.pop(worker_id, None)
        if known is not None:
            known.cancel()

        self._starting.pop(worker_id, None)
        instructions = self._directory.register(
            worker_id,
            registration.role,
            epoch,
            registration.block_bytes,
            registration.hashes,
            registration.token_budget,
            registration.device,
            registration.fingerprint,
            registration.node,
            registration.attempts,
            num_blocks=registration.num_blocks,
            state_bytes=registration.state_bytes,
        )
        self._processes[worker_id] = registration.process
        client = WorkerClient(handle)
        self._executor.worker_joined(worker_id, client)
        self._executor.carry_out(instructions)
        # Behind the registration: the stream tells changes of the pool since the hashes that came with it.
        self._followers[worker_id] = asyncio.create_task(self._follow(worker_id, epoch, client))
        self._signs.heard(worker_id, time.monotonic())
        self._metrics.registered(registration.role)
        num_blocks = len(registration.hashes)
        extra = about("registered", worker=worker_id, role=registration.role, epoch=epoch, blocks=num_blocks)
        logger.info("%s registered with %d blocks", worker_id, num_blocks, extra=extra)
        return None

    def heartbeat(self, worker_id: str, epoch: int, state: WorkerState) -> bool:
        """Record a worker's costs and room; returns False if the worker is not registered."""
        if self._directory.fleet.current(worker_id, epoch) is not None:
            self._signs.heard(worker_id, time.monotonic())
        self._directory.fleet.measured(
            worker_id,
            epoch,
            state.costs,
            state.num_free_blocks,
            state.num_empty_blocks,
            num_steps=state.num_steps,
            token_budget=state.token_budget,
            num_blocks=state.num_blocks,
        )
        return self._directory.fleet.current(worker_id, epoch) is not None

    def leaving(self, worker_id: str) -> bool | None:
        """Have a worker's requests and blocks go elsewhere, since its host is about to stop; returns whether nothing is
        left there, None for an unknown worker. To be called again until then."""
        if worker_id not in self._directory.fleet:
            return None
        if worker_id not in self._directory.fleet.leaving:
            logger.info("%s is leaving", worker_id, extra=about("worker_leaving", worker=worker_id))
        self._executor.carry_out(self._directory.leave(worker_id))
        return self._directory.has_left(worker_id)

    def starting(self, worker_id: str) -> None:
        """Note that a host is starting this worker."""
        self._starting[worker_id] = time.monotonic()

    def members(self, *, starts_on_demand: bool) -> Membership:
        """List the registered workers, and count the starting ones."""
        workers = self._directory.fleet
        registered = tuple(
            WorkerInfo(w.worker_id, w.role, w.epoch, self._processes.get(w.worker_id)) for w in workers.values()
        )

        # A host that died while it started a worker says so to nobody: its reports grow old.
        deadline = time.monotonic() - STARTING_SILENCE_S
        self._starting = {worker_id: said_at for worker_id, said_at in self._starting.items() if said_at > deadline}
        return Membership(
            registered,
            len(self._starting),
            workers.fingerprint,
            leaving=workers.leaving,
            starts_on_demand=starts_on_demand,
        )

    def doubt(self, worker_ids: set[str]) -> None:
        """Forget those of some workers that are silent: an ingress replica does not reach them, so less silence is
        enough."""
        self._forget_silent(DOUBTED_SILENCE_S, worker_ids)

    async def run(self) -> None:
        """Forget silent workers, as long as others are there, again and again: nobody is to wait for their blocks."""
        while True:
            # A stopped process hears nobody, so the time that the sleep took longer counts for no one's silence.
            self._signs.stood_still(await sleep(WORKER_SILENCE_S / 4))
            self._forget_silent(WORKER_SILENCE_S, set(self._signs))

    def _forget_silent(self, silence_s: float, among: set[str]) -> None:
        """Forget the workers of `among` that are silent for so long, and what only their nodes have."""
        self._watch.look_at_quiet(self._signs, self._processes, WORKER_SILENCE_S / 4)
        silent = self._signs.silent(time.monotonic(), silence_s)

        # Where all are silent it is the manager that hears nothing, and forgetting them would help nobody.
        for worker_id in among.intersection(silent) if set(self._signs) - set(silent) else ():
            logger.warning(
                "no heartbeat of %s for %g s: forgotten until it registers again",
                worker_id,
                silence_s,
                extra=about("worker_silent", worker=worker_id),
            )
            # Before it is forgotten, so that the end of its reader does not forget it a second time.
            self._followers.pop(worker_id).cancel()
            self._forget(worker_id, is_silent=True)

    def _forget(self, worker_id: str, *, is_silent: bool = False) -> None:
        """Forget a worker whose export stream is read no more. `is_silent`: with its node out of reach, perhaps."""
        self._resets.stream_over(worker_id)
        directory = self._directory
        is_left = worker_id in directory.fleet.leaving
        if not self._is_retired():
            self._metrics.lost("silent" if is_silent else "left" if is_left else "ended")
        now = time.time()
        instructions = directory.worker_silent(worker_id, now) if is_silent else directory.remove_worker(worker_id)
        self._executor.carry_out(instructions)
        self._executor.worker_left(worker_id)
        self._watch.forget(self._processes.pop(worker_id, None))
        self._signs.forget(worker_id)

    async def _follow(self, worker_id: str, epoch: int, client: WorkerClient) -> None:
        """Read one worker's export stream until the worker is gone."""
        try:
            stream = aiter(client.export_stream())
            async for ref in stream:
                item: ExportItem = await ref
                # The payload is an object of its own, which stays a reference: its bytes never pass through the
                # manager.
                payload = await anext(stream) if item.header is not None and item.header.num_bytes else None
                self._take(worker_id, epoch, item, payload)
        except Exception as error:  # of any kind: this worker's stream is not read any more
            reason = type(error).__name__
            extra = about("worker_lost", worker=worker_id, epoch=epoch, reason=reason)
            level = logging.INFO if worker_id in self._directory.fleet.leaving else logging.WARNING
            logger.log(level, "lost %s (%s)", worker_id, reason, extra=extra)

        # A later registration has a reader of its own, and the worker is not to be forgotten.
        if self._followers.get(worker_id) is asyncio.current_task():
            del self._followers[worker_id]
            self._forget(worker_id)

    def _take(self, worker_id: str, epoch: int, item: ExportItem, payload: object) -> None:
        """Index what one message of an export stream tells."""
        directory, carry_out = self._directory, self._executor.carry_out
        if item.header is not None:
            carry_out(directory.segment_exported(worker_id, epoch, item.header, payload, time.time()))
        if item.sealed or item.evicted:
            carry_out(directory.blocks_changed(worker_id, epoch, item.sealed, item.evicted))
        if item.missing:
            carry_out(directory.export_failed(worker_id, epoch, item.missing))
        if item.unsent:
            carry_out(directory.blocks_unsent(worker_id, epoch, item.unsent))
        if item.reset is not None:
            self._resets.exports_over(worker_id, item.reset)
