"""The actor that owns one engine: prefill, decode or mixed.

Three streams leave a worker. Each ingress replica reads one *token stream*: a list of token events per engine step,
whatever the number of requests. The manager reads the one *export stream*: changes of the pool, and segments, each a
header followed by its payload. What the export stream yields belongs to its reader, so exported KV outlives the worker
(and would die with the manager, whose index would be gone anyway). And a heartbeat keeps the worker registered.

The engine runs in a thread; this class only moves messages between that thread and Ray.
"""

import asyncio
import concurrent.futures
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from actors.calls import Background, answer
from actors.messages import INGRESS_SILENCE_S, ExportItem, Imported, Registration, WorkerState
from actors.metrics import WorkerMetrics
from actors.names import MANAGER, find_actor
from actors.swap_space import ObjectStoreSwap
from engine.core.costs import CostFit, WorkerCosts
from engine.core.settings import EngineSettings
from engine.core.types import Assignment, BlockHash, PromptEvent, Role, SegmentHeader, TokenEvent

if TYPE_CHECKING:
    from engine.model.engine import Engine, ExportedSegment, StepResult
    from engine.model.loop import LoopOutput

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
REPORT_S = 0.5
FETCH_TIMEOUT_S = 20.0
MAX_QUEUED_EXPORT_BYTES = 512 << 20


@dataclass(slots=True)
class _Outbox:
    """What waits to be read by one ingress replica."""

    events: list[PromptEvent | TokenEvent] = field(default_factory=list)
    filled: asyncio.Event = field(default_factory=asyncio.Event)
    seen_at: float = field(default_factory=time.monotonic)
    reader: int = 0


class Worker:
    """One engine and its streams. `epoch` tells this incarnation from earlier ones of the same id."""

    def __init__(self, settings: EngineSettings, role: Role, worker_id: str, app_name: str) -> None:
        self._role = role
        self._worker_id = worker_id
        self._app_name = app_name
        self._epoch = time.time_ns()
        self._metrics = WorkerMetrics(worker_id, role)
        # torch is imported here, in the worker's own process, and not in that of the host that starts it.
        from engine.model.build import build_engine
        from engine.model.loop import EngineLoop

        self._engine = build_engine(settings, ObjectStoreSwap())
        self._loop_thread = EngineLoop(self._engine, self._publish)
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._outboxes: dict[str, _Outbox] = {}
        self._reply_to: dict[str, tuple[int, str]] = {}
        """Attempt and ingress of each request that is here."""
        self._exports: asyncio.Queue[ExportItem | ExportedSegment] = asyncio.Queue()
        self._queued_export_bytes = 0
        self._background = Background()
        self._costs = CostFit(WorkerCosts())
        self._has_measured = False
        self._num_prefill_tokens = 0

    async def start(self) -> str:
        """Start the engine and register with the manager; returns the worker's id. Called once by the host."""
        if self._event_loop is None:
            self._event_loop = asyncio.get_running_loop()
            self._loop_thread.start()
            for duty in (self._stay_registered(), self._watch_ingresses(), self._report()):
                self._background.start(duty)
        return self._worker_id

    async def check(self) -> None:
        """Answers when the engine has finished its step: the sign that it does not hang."""
        await self._ask(lambda engine: None)

    async def join(self) -> None:
        """Never returns: a caller learns of the worker's end by the error that this call then raises."""
        await asyncio.Event().wait()

    # Requests

    async def submit(self, assignments: Sequence[Assignment]) -> None:
        """Take requests on. Their events appear on the token stream of the ingress they name."""
        for assignment in assignments:
            self._reply_to[assignment.request_id] = (assignment.attempt, assignment.reply_to)
            self._outbox(assignment.reply_to).seen_at = time.monotonic()
        now = time.monotonic()
        self._loop_thread.post(lambda engine: self._take_on(engine, assignments, now))

    async def abort(self, request_ids: Sequence[str], has_ended: bool = False) -> None:
        """Forget requests; unknown ones have ended already. `has_ended`: they have got all they wanted."""
        for request_id in request_ids:
            self._reply_to.pop(request_id, None)
        self._loop_thread.post(lambda engine: engine.abort(request_ids, has_ended=has_ended))

    async def stop_awaiting(self, request_ids: Sequence[str]) -> None:
        """The prefill worker of these requests is gone: compute what has not arrived."""
        self._loop_thread.post(lambda engine: engine.scheduler.stop_awaiting(request_ids))

    async def ping(self, ingress_id: str, awaiting: Sequence[str]) -> None:
        """An ingress replica says that it is alive, and which of its requests do well to go on awaiting their KV."""
        now = time.monotonic()
        self._outbox(ingress_id).seen_at = now
        if awaiting:
            self._loop_thread.post(lambda engine: engine.scheduler.keep_awaiting(awaiting, now))

    async def token_stream(self, ingress_id: str) -> AsyncIterator[list[PromptEvent | TokenEvent]]:
        """Events for one ingress replica, a list per engine step; a later call takes over from an earlier one."""
        outbox = self._outbox(ingress_id)
        outbox.reader += 1
        reader = outbox.reader
        while outbox.reader == reader:
            await outbox.filled.wait()
            if outbox.reader == reader:
                events, outbox.events = outbox.events, []
                outbox.filled.clear()
                yield events

    # Blocks

    async def export_stream(self) -> AsyncIterator[Any]:
        """Changes of the pool and exported segments, for the manager that registered this worker last."""
        exports = self._exports
        while exports is self._exports:
            item = await exports.get()
            if exports is not self._exports:
                return
            if isinstance(item, ExportItem):
                yield item
                continue
            self._queued_export_bytes -= item.header.num_bytes
            try:
                segment = item if item.arriving is None else await asyncio.to_thread(item.arrived)
            except Exception:  # who waits for these blocks must hear that they do not come
                logger.exception("%d blocks not exported", len(item.header.hashes))
                yield _without_blocks(item.header)
                continue
            yield ExportItem(header=segment.header)
            if segment.header.num_bytes:
                self._metrics.exported_bytes(segment.header.num_bytes)
                yield segment.payload

    async def import_segment(self, header: SegmentHeader, payload: list[ray.ObjectRef[Any]]) -> Imported:
        """Fetch a segment and take its blocks into the pool. `payload` holds one reference, or none for no bytes."""
        content = None
        started = time.monotonic()
        try:
            if payload:
                content = await answer(payload[0], FETCH_TIMEOUT_S)
                self._metrics.imported_bytes(header.num_bytes)
        except (RayError, TimeoutError) as error:
            logger.warning("segment of %d blocks not fetched: %s", len(header.hashes), type(error).__name__)
        fetched = time.monotonic()

        def take(engine: "Engine") -> tuple[bool, float]:
            began = time.monotonic()
            return engine.import_segment(header, content, fetched), time.monotonic() - began

        intact, take_s = await self._ask(take)
        if payload and content is None:
            return Imported.NOT_FETCHED
        if not intact:
            return Imported.DAMAGED
        if content is not None:
            self._costs.imported(header.num_bytes, fetched - started + take_s)
        return Imported.TAKEN

    async def export_blocks(self, hashes: Sequence[BlockHash]) -> None:
        """Export blocks of the pool; of the others the manager hears whether they are missing or could not be sent."""

        def export(engine: "Engine") -> None:
            try:
                segments, missing = engine.export(hashes)
            except Exception:  # who waits for these blocks must hear that they do not come
                logger.exception("%d blocks not exported", len(hashes))
                self._in_event_loop(self._exports_put, ExportItem(unsent=tuple(hashes)))
                return
            for segment in segments:
                self._in_event_loop(self._exports_put, segment)
            if missing:
                self._in_event_loop(self._exports_put, ExportItem(missing=missing))

        self._loop_thread.post(export)

    async def blocks_lost(self, hashes: Sequence[BlockHash]) -> None:
        """Promised blocks will not come."""
        now = time.monotonic()
        self._loop_thread.post(lambda engine: engine.scheduler.blocks_settled(hashes, now))

    async def reset_cache(self) -> int:
        """Forget every block that no request holds, and the scores of prompts; returns how many blocks."""

        def reset(engine: "Engine") -> int:
            engine.scheduler.scores.clear()
            return engine.pool.reset()

        return int(await self._ask(reset))

    async def statistics(self) -> dict[str, Any]:
        """Counts of requests and blocks, for health checks and tests; checks the engine's integrity on the way."""

        def collect(engine: "Engine") -> dict[str, Any]:
            engine.scheduler.check_integrity()
            return {
                "worker_id": self._worker_id,
                "role": str(self._role),
                "epoch": self._epoch,
                "num_blocks": engine.pool.num_blocks,
                "num_available_blocks": engine.pool.num_available,
                "num_cached_blocks": engine.pool.num_cached,
                "num_running": len(engine.scheduler.running),
                "num_waiting": engine.scheduler.num_waiting,
                "num_swapped": engine.scheduler.num_swapped,
                "preemptions": asdict(engine.preemptions),
                "num_prefill_tokens": self._num_prefill_tokens,
            }

        result: dict[str, Any] = await self._ask(collect)
        return result

    # Inside

    async def _ask(self, question: Any) -> Any:
        """Run `question(engine)` in the engine's thread and return its answer."""
        reply: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def command(engine: "Engine") -> None:
            try:
                reply.set_result(question(engine))
            except Exception as error:  # the engine's thread must survive; the caller gets the error
                reply.set_exception(error)

        self._loop_thread.post(command)
        return await asyncio.shield(asyncio.wrap_future(reply))

    def _take_on(self, engine: "Engine", assignments: Sequence[Assignment], now: float) -> None:
        """Called in the engine's thread."""
        from engine.model.engine import error_event
        from engine.model.loop import LoopOutput

        for assignment in assignments:
            try:
                engine.submit(assignment, now)
                if assignment.promised_to not in (0, self._epoch):  # what was sent went to an earlier incarnation
                    engine.scheduler.stop_awaiting([assignment.request_id])
            except Exception as error:  # its ingress must hear that nothing will come
                logger.exception("%s not taken on", assignment.request_id)
                position = len(assignment.token_ids) - assignment.num_prompt_tokens
                event = error_event(assignment, position, f"{type(error).__name__}: {error}")
                self._publish(LoopOutput(None, (), (), (event,)))

    def _in_event_loop(self, function: Any, *args: Any) -> None:
        assert self._event_loop is not None
        self._event_loop.call_soon_threadsafe(function, *args)

    def _publish(self, output: "LoopOutput") -> None:
        """Called in the engine's thread after each step."""
        self._in_event_loop(self._hand_out, output)

    def _hand_out(self, output: "LoopOutput") -> None:
        """Wake up who reads tokens first, then the manager's stream; the bookkeeping waits for the next turn."""
        step = output.step
        events: Sequence[PromptEvent | TokenEvent] = output.failures
        if step is not None:
            events = (*step.scores, *step.events, *output.failures)
        for event in events:
            attempt, ingress_id = self._reply_to.get(event.request_id, (None, ""))
            if attempt == event.attempt:
                outbox = self._outbox(ingress_id)
                outbox.events.append(event)
                outbox.filled.set()
        ended = [(event.request_id, event.attempt) for event in output.failures]
        if step is not None:
            for segment in step.segments:
                self._exports_put(segment)
            ended += [(request.request_id, request.assignment.attempt) for request in step.finished]
            asyncio.get_running_loop().call_soon(self._measure, step, output.step_s)
        if output.sealed or output.evicted:
            self._exports_put(ExportItem(sealed=output.sealed, evicted=output.evicted))
        for request_id, attempt in ended:
            if self._reply_to.get(request_id, (None, ""))[0] == attempt:
                del self._reply_to[request_id]

    def _measure(self, step: "StepResult", step_s: float) -> None:
        """Count the step, and learn what steps cost."""
        for request in step.finished:
            self._metrics.finished(request)
        self._metrics.step(step.shape)
        self._costs.step(step.shape, step_s)
        self._has_measured = True
        self._num_prefill_tokens += step.shape.num_prefill_tokens

    def _state(self) -> WorkerState:
        return WorkerState(self._costs.costs() if self._has_measured else None, self._engine.pool.num_available)

    def _exports_put(self, item: "ExportItem | ExportedSegment") -> None:
        """Queue an item for the manager. While nobody reads, only so many payloads are kept: the pool has the rest."""
        if not isinstance(item, ExportItem):
            if self._queued_export_bytes + item.header.num_bytes > MAX_QUEUED_EXPORT_BYTES:
                item = _without_blocks(item.header)
            else:
                self._queued_export_bytes += item.header.num_bytes
        self._exports.put_nowait(item)

    def _outbox(self, ingress_id: str) -> _Outbox:
        return self._outboxes.setdefault(ingress_id, _Outbox())

    async def _stay_registered(self) -> None:
        """Register with the manager, and again with every new one: it knows us only while it lives."""
        while True:
            try:
                manager = await find_actor(MANAGER, self._app_name)
                if manager is not None:
                    await manager.register.remote(await self._introduce(), [ray.get_runtime_context().current_actor])
                    while await manager.heartbeat.remote(self._worker_id, self._epoch, self._state()):
                        await asyncio.sleep(HEARTBEAT_S)
            except RayError as error:
                logger.info("manager out of reach: %s", type(error).__name__)
            except Exception:  # whatever it was: a worker that is not registered gets no work
                logger.exception("registration failed")
            # Nobody remembers what this worker was promised.
            self._loop_thread.post(lambda engine: engine.scheduler.stop_awaiting_all())
            await asyncio.sleep(HEARTBEAT_S / 2)

    async def _introduce(self) -> Registration:
        """What the pool holds now; the export stream starts over from exactly there."""

        def snapshot(engine: "Engine") -> None:
            engine.pool.drain_journal()
            self._in_event_loop(restart, tuple(engine.pool.hashes()))

        def restart(hashes: tuple[BlockHash, ...]) -> None:
            old, self._exports = self._exports, asyncio.Queue()
            self._queued_export_bytes = 0
            old.put_nowait(ExportItem())  # wakes the reader of the old stream, which then ends
            taken.set_result(hashes)

        taken: asyncio.Future[tuple[BlockHash, ...]] = asyncio.get_running_loop().create_future()
        self._loop_thread.post(snapshot)
        return Registration(
            self._worker_id,
            self._epoch,
            self._role,
            self._engine.store.block_bytes,
            self._engine.scheduler.limits.token_budget,
            await taken,
        )

    async def _report(self) -> None:
        """Keep the metrics up to date, when nothing happens too, and the engine informed of its costs."""
        while True:
            self._metrics.flush(self._engine)
            self._costs.fade_imports()
            if self._has_measured:
                costs = self._costs.costs()
                self._loop_thread.post(lambda engine, now=costs: setattr(engine.scheduler.swapping, "costs", now))  # type: ignore[misc]
            await asyncio.sleep(REPORT_S)

    async def _watch_ingresses(self) -> None:
        """Abort what belongs to ingress replicas that are gone."""
        while True:
            await asyncio.sleep(INGRESS_SILENCE_S / 4)
            deadline = time.monotonic() - INGRESS_SILENCE_S
            for ingress_id in [ingress for ingress, outbox in self._outboxes.items() if outbox.seen_at < deadline]:
                orphans = [request for request, (_, ingress) in self._reply_to.items() if ingress == ingress_id]
                await self.abort(orphans)
                outbox = self._outboxes.pop(ingress_id)
                outbox.reader += 1
                outbox.filled.set()
                if orphans:
                    logger.warning("ingress %s is gone: %d requests aborted", ingress_id, len(orphans))


def _without_blocks(header: SegmentHeader) -> ExportItem:
    """What is sent of a segment whose blocks are not: that they stay behind, and the handover."""
    bare = replace(header, hashes=(), num_bytes=0) if header.handover is not None else None
    return ExportItem(header=bare, unsent=header.full_hashes)


class PrefillWorker(Worker):
    """Computes prompts in chunks and exports their KV."""


class DecodeWorker(Worker):
    """Imports KV and generates; prefills a short suffix, or what was lost, by itself."""


class MixedWorker(Worker):
    """Does both, without hand-over."""


WORKER_CLASSES: dict[Role, type[Worker]] = {
    Role.PREFILL: PrefillWorker,
    Role.DECODE: DecodeWorker,
    Role.MIXED: MixedWorker,
}
