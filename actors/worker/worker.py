"""The actor that owns one engine: prefill, decode, mixed or elastic.

Three streams leave a worker. Each ingress replica reads one *token stream*: a list of token events per engine step, for
any number of requests. The manager reads the one *export stream*: changes of the pool, and segments, each a header
followed by its payload. Objects of the export stream belong to the reader, so exported KV outlives the worker (and
would die with the manager, whose index would be gone anyway). The third is a heartbeat, which keeps the worker
registered.

The engine runs in a thread (`EngineThread`); this class only moves messages between the thread and Ray. `Registrar`
keeps the worker registered, `Measurements` counts and fits what the engine does.
"""

import asyncio
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import ray

from raydix.actors.instruments import families_of
from raydix.actors.logs import DEFAULTS, log_to_ray, set_level
from raydix.actors.messages import ExportItem, Imported, ImportReport
from raydix.actors.metric_values import MetricFamily
from raydix.actors.metrics import HoldMetrics
from raydix.actors.names import incarnation_name
from raydix.actors.runtime import Runtime, Words
from raydix.actors.tracing import Recorded, Recorder
from raydix.actors.worker.engine_thread import EngineThread
from raydix.actors.worker.export_stream import ExportStream
from raydix.actors.worker.held_adapters import HeldAdapters
from raydix.actors.worker.measurements import Measurements, engine_statistics
from raydix.actors.worker.registrar import Incarnation, Registrar
from raydix.actors.worker.segment_import import import_segment
from raydix.actors.worker.step_spans import span_of_import, spans_of_step
from raydix.actors.worker.token_streams import TokenStreams
from raydix.configs.schema import LoggingSection
from raydix.engine.background import Background
from raydix.engine.core.log_fields import about
from raydix.engine.core.settings import EngineSettings, SchedulerLimits
from raydix.engine.core.tenants import Tenant
from raydix.engine.core.types import (
    Adapter,
    Assignment,
    AttemptName,
    BlockHash,
    ProcessName,
    Role,
    SegmentHeader,
    StreamEvent,
)

if TYPE_CHECKING:
    from raydix.engine.model.engine import Engine, StepResult

logger = logging.getLogger(__name__)


class ObjectStoreSwap:
    """KV of preempted requests in the object store of the worker's own node
    (`raydix.engine.model.swap_space.SwapSpace`); it dies with the worker, as do the requests.

    Called from the engine's thread, which waits: there is nothing else to do before the next step.
    """

    TAKE_TIMEOUT_S = 2.0
    """Limit of reading KV back, from a disk after spilling, say; after it the KV is recomputed."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._refs: dict[str, Any] = {}

    def put(self, request_id: str, payload: Any) -> None:
        self._refs[request_id] = self._runtime.put(payload)

    def take(self, request_id: str) -> Any:
        """Return a read-only, zero-copy view of the object, which lives as long as the view.

        Raises:
            RayError, TimeoutError: the object is lost, or does not come in time.
        """
        ref: Any = self._refs.pop(request_id)  # ray.get would warn of an event loop that it does not block
        return ref.future().result(self.TAKE_TIMEOUT_S)

    def drop(self, request_id: str) -> None:
        self._refs.pop(request_id, None)


def compute_with(num_threads: int) -> None:
    """Set the number of threads that this process computes with, which Ray has set to one; before torch is imported, or
    after a template of workers has imported torch (`raydix.cli.worker_template`).

    The threads of torch's own operations sleep between them, because workers on one machine share its cores; the
    kernels have threads of their own. Ray's `runtime_env` would say the same to a process that is started for it, while
    Ray has processes at hand that wait for work.
    """
    os.environ.update(OMP_WAIT_POLICY="passive", OMP_NUM_THREADS=str(num_threads))
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(num_threads)


class Worker:
    """Actor of one engine and its streams. `epoch` tells this incarnation from earlier ones of the same id."""

    def __init__(
        self,
        settings: EngineSettings,
        role: Role,
        worker_id: str,
        epoch: int,
        runtime: Runtime,
        logs: LoggingSection = DEFAULTS,
        *,
        num_threads: int | None = None,
        on_tensor: Callable[[], None] = lambda: None,
    ) -> None:
        """`num_threads` is the number of threads that this process computes with; None leaves the process as it is.
        `on_tensor` is called before each tensor of the model, and may raise an error to end the loading."""
        log_to_ray(role, logs, worker=worker_id)
        if num_threads is not None:
            compute_with(num_threads)
        self._own = Incarnation(worker_id, role, epoch, settings.device)
        self._runtime = runtime
        self._holds = HoldMetrics(worker_id)
        self._process = runtime.process_metrics(worker_id)
        self._recorder = Recorder(worker_id, str(role))

        # torch is imported here, in the worker's own process, and not in that of the host that starts it.
        from raydix.engine.model.build import build_engine

        self._engine = build_engine(settings, ObjectStoreSwap(runtime), on_tensor)
        self._measurements = Measurements(worker_id, role, self._engine.first_costs)
        self._words: Words | None = None
        self._thread = EngineThread(self._engine, self._hand_out, self._end_process, role)
        self._tokens = TokenStreams()
        self._exports = ExportStream(self._measurements.exported, self._recorder)
        self._background = Background()
        self._adapters = HeldAdapters(self._engine, self._thread)
        self.registrar = Registrar(
            incarnation=self._own,
            engine=self._engine,
            thread=self._thread,
            tokens=self._tokens,
            exports=self._exports,
            adapters=self._adapters,
            runtime=runtime,
            own_handle=lambda: runtime.handle_of(self),
            state=lambda: self._measurements.state(self._engine),
        )

    async def start(self) -> str:
        """Start the engine and register with the manager; returns the worker's id. Called once by the host."""
        if not self._thread.is_started:
            self._thread.connect()
            self._runtime.watch_process(self._holds)
            self._words = self._runtime.begin_words(incarnation_name(self._own.worker_id, self._own.epoch))
            if self._words is not None:
                self._engine.tell_work(self._words.note)
            self._thread.start()
            duties = (
                self.registrar.run(),
                self._tokens.watch(self._runtime.own_node(), self.abort),
                self._measurements.report(self._engine, self._thread),
            )
            for duty in duties:
                self._background.start(duty)
            num_blocks = self._engine.pool.num_blocks
            num_tokens = num_blocks * self._engine.pool.block_size
            logger.info(
                "worker started with %d blocks for the KV of %d tokens",
                num_blocks,
                num_tokens,
                extra=about("started", blocks=num_blocks, tokens=num_tokens),
            )
        return self._own.worker_id

    async def check(self) -> None:
        """Return after the engine's current step, unless the engine hangs."""
        await self._thread.ask(lambda engine: None)

    async def join(self) -> None:
        """Never return: a caller learns of the worker's end by the error of this call."""
        await asyncio.Event().wait()

    def stop_engine(self) -> None:
        """End the engine's thread after the step under way. Nothing is computed any more."""
        self._thread.stop()

    async def reconfigure(self, limits: SchedulerLimits, tenants: Sequence[Tenant], level: str) -> None:
        """Take other bounds of a step, tenants' shares of the pool, and log level; returns when the next step has
        them."""
        set_level(level)
        await self._thread.ask(lambda engine: engine.change_limits(limits, tenants))
        budget, most = limits.token_budget, limits.max_requests
        logger.info(
            "steps have up to %d tokens of %d requests",
            budget,
            most,
            extra=about("reconfigured", token_budget=budget, max_requests=most, level=level),
        )

    # Requests

    async def submit(self, assignments: Sequence[Assignment]) -> None:
        """Take requests on. Their events appear on the token stream of the ingress named by each assignment."""
        # Readers are known before the engine is told: its first events may come before the next line of this loop.
        self._tokens.begin(assignments)
        self._thread.take_on(assignments, self._own.epoch)
        if logger.isEnabledFor(logging.DEBUG):
            for each in assignments:
                extra = about("taken_on", request=each.request_id, attempt=each.attempt, stage=each.stage)
                logger.debug("%s taken on", each.request_id, extra=extra)

    async def abort(self, request_id: str, attempt: int, has_ended: bool = False) -> None:
        """Forget a request, unless a later attempt of it has come: Ray may change the order of calls. An unknown
        request has ended, or its submission is late, and then it runs for nobody. `has_ended`: the request is complete,
        not cut short."""
        is_under_way = self._tokens.attempts.reader(request_id, attempt) is not None
        if self._tokens.attempts.forget(request_id, attempt):
            # A prefill worker is told to forget each request that ends, long after its own part of it.
            if is_under_way:
                subject = {"request": request_id, "attempt": attempt}
                # A request whose answer was complete before, by a stop string, was not cut short.
                extra = about("stopped", **subject) if has_ended else about("aborted", **subject)
                logger.info("%s %s", request_id, "stopped" if has_ended else "aborted", extra=extra)
            now = time.monotonic()
            self._thread.post(lambda engine: engine.abort([request_id], now, has_ended=has_ended))

    async def stop_awaiting(self, request_ids: Sequence[str]) -> None:
        """Recompute the missing blocks of these requests, whose prefill worker is gone."""
        self._thread.post(lambda engine: engine.scheduler.imports.stop_awaiting(request_ids))

    async def ping(
        self,
        ingress_id: str,
        taken: Sequence[AttemptName],
        sent: Sequence[AttemptName],
        awaiting: Sequence[str],
        process: ProcessName | None = None,
    ) -> None:
        """Note that an ingress replica is alive, and compare its attempts with those here (`TokenStreams.compare`).
        Requests in `awaiting` wait as long again: their senders live."""
        now = time.monotonic()
        # With the process's name the worker can tell a replica that computes from one that is gone.
        self._tokens.processes[ingress_id] = process
        orphans = self._tokens.compare(ingress_id, taken, sent, now)
        if awaiting:
            self._thread.post(lambda engine: engine.scheduler.imports.keep_awaiting(awaiting, now))
        for orphan in orphans:
            extra = about("orphan_aborted", request=orphan.request_id, attempt=orphan.number, ingress=ingress_id)
            logger.info("%s runs for nobody: aborted", orphan.request_id, extra=extra)
            await self.abort(*orphan)

    async def token_stream(self, ingress_id: str) -> AsyncIterator[list[StreamEvent]]:
        """Events for one ingress replica, a list per engine step; a later call takes over from an earlier one."""
        async for events in self._tokens.read(ingress_id):
            yield events

    # Blocks

    async def export_stream(self) -> AsyncIterator[Any]:
        """Yield changes of the pool and exported segments, to the manager that registered this worker last."""
        async for item in self._exports.read():
            yield item

    async def import_segment(
        self, header: SegmentHeader, payload: "Sequence[ray.ObjectRef[Any]]", patience_s: float | None
    ) -> ImportReport:
        """Fetch a segment and take its blocks into the pool (`segment_import.import_segment`)."""
        started_at = time.monotonic()
        report = await import_segment(self._thread.ask, header, payload, patience_s)
        if self._recorder.is_on:
            self._recorder.add([span_of_import(header, report, started_at, time.monotonic() - started_at)])
        if report.fate is Imported.TAKEN and report.seconds is not None:
            self._measurements.imported(header.num_bytes, report.seconds)
        return report

    async def export_blocks(self, hashes: Sequence[BlockHash]) -> None:
        """Export blocks of the pool, and recurrent states; tells the manager of those that are missing or could not be
        sent."""

        now = time.monotonic()

        def export(engine: "Engine", names: Sequence[BlockHash]) -> None:
            names, others = engine.scheduler.transfers.first_part(names)
            if others:  # steps go on between the parts
                self._thread.post(partial(export, names=others))
            try:
                segments, missing = engine.exchange.export(names, now)
            except Exception:  # workers that wait for these blocks must hear that none will come
                logger.exception("%d blocks not exported", len(names))
                self._thread.in_event_loop(self._exports.put, ExportItem(unsent=tuple(names)))
                return
            for segment in segments:
                self._thread.in_event_loop(self._exports.put, segment)
            if missing:
                self._thread.in_event_loop(self._exports.put, ExportItem(missing=missing))

        self._thread.post(partial(export, names=hashes))

    async def blocks_lost(self, hashes: Sequence[BlockHash]) -> None:
        """Stop awaiting promised blocks that will not come."""
        now = time.monotonic()
        self._thread.post(lambda engine: engine.scheduler.imports.settled(hashes, now))

    async def register_again(self) -> None:
        """Look for the manager now: another one has taken over."""
        self.registrar.register_again()

    async def reset_cache(self, number: int) -> int:
        """Forget what no request holds (`Engine.reset_cache`); returns the number of blocks. The export stream tells,
        with the `number` of this reset, when the exports of these blocks are over."""
        # In the engine's thread, so that no step has blocks in its hands meanwhile.
        num_blocks = await self._thread.ask(lambda engine: engine.reset_cache())
        self._exports.put(ExportItem(reset=number))
        return num_blocks

    # Adapters

    async def load_adapter(self, adapter: Adapter) -> str | None:
        """Have an adapter in memory, while steps go on; returns the reason if this worker cannot."""
        return await self._adapters.load(adapter)

    async def unload_adapter(self, adapter: Adapter) -> bool:
        """Free an adapter's memory; False while a request of this worker needs it."""
        return await self._adapters.unload(adapter)

    async def statistics(self) -> dict[str, Any]:
        """Process id, sizes and counts of the worker, after a check of its scheduler's integrity."""
        own = {"worker_id": self._own.worker_id, "role": str(self._own.role), "epoch": self._own.epoch}
        counts = await self._thread.ask(engine_statistics)
        return {**own, "pid": os.getpid(), **counts, "num_prefill_tokens": self._measurements.num_prefill_tokens}

    async def metrics(self) -> tuple[MetricFamily, ...]:
        """The worker's metrics, as of the last report; answered while the engine computes or hangs, too."""
        process = () if self._process is None else self._process.families()
        return (*self._measurements.families(), *families_of(self._holds), *process)

    async def trace(self, seconds: float) -> Recorded:
        """Record steps, requests' parts of them and transfers for so long."""
        return await self._recorder.record(seconds)

    # Inside

    def _hand_out(self, result: "StepResult") -> None:
        """Wake up readers of tokens first, then the manager's stream; the bookkeeping waits for the next turn."""
        self._tokens.put((*result.scores, *result.events, *result.failures))
        for segment in result.segments:
            self._exports.put(segment)
        if result.sealed or result.evicted:
            self._exports.put(ExportItem(sealed=result.sealed, evicted=result.evicted))
        if self._recorder.has_room:
            self._recorder.add(spans_of_step(result))
        elif self._recorder.is_on:
            self._recorder.lost(1 + len(result.chunks))
        if result.has_computed:
            asyncio.get_running_loop().call_soon(self._measurements.step, result)

        for event in result.failures:
            extra = about("not_computed", request=event.request_id, attempt=event.attempt)
            logger.info("%s cannot be computed here", event.request_id, extra=extra)
            self._tokens.attempts.end(event.request_id, event.attempt)
        for request in result.finished:
            self._tokens.attempts.end(request.request_id, request.assignment.attempt)

    def _end_process(self, reason: str) -> None:
        """End this process at once: its host starts another, and its streams fail over. A broken device may not let the
        interpreter end in its usual way."""
        logger.critical("the model computes nothing any more (%s), this worker ends", reason)
        if self._words is not None:
            self._words.end("the model computes nothing any more")
        logging.shutdown()
        os._exit(1)


class PrefillWorker(Worker):
    """Computes prompts in chunks and exports their KV."""


class DecodeWorker(Worker):
    """Imports KV and generates; computes a short suffix, or lost blocks, by itself."""


class MixedWorker(Worker):
    """Prefills and decodes, without hand-over."""


class ElasticWorker(Worker):
    """Prefills, decodes, or does both, as each request asks."""


WORKER_CLASSES: dict[Role, type[Worker]] = {
    Role.PREFILL: PrefillWorker,
    Role.DECODE: DecodeWorker,
    Role.MIXED: MixedWorker,
    Role.ELASTIC: ElasticWorker,
}
