"""The central actor: admits requests, follows every worker's blocks, owns the exported KV and sends it to workers.

A thin shell around `raydix.engine.core.manager.directory.Directory`: messages become events, instructions become calls.
"""

import asyncio
import gc
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from raydix.actors.calls import sleep
from raydix.actors.instruments import families_of
from raydix.actors.logs import DEFAULTS, log_to_ray, set_level
from raydix.actors.manager.directory_reports import DirectoryReports
from raydix.actors.manager.disk_tier import DiskTier
from raydix.actors.manager.load_watch import LoadWatch
from raydix.actors.manager.pool_resets import UNDER_WAY_S, PoolResets
from raydix.actors.manager.succession import Succession
from raydix.actors.messages import (
    DOUBTED_SILENCE_S,
    INGRESS_SILENCE_S,
    STARTING_SILENCE_S,
    WORKER_SILENCE_S,
    ExportItem,
    Registration,
    WorkerState,
)
from raydix.actors.metric_values import Family
from raydix.actors.metrics import HoldMetrics, ManagerMetrics
from raydix.actors.processes import ProcessWatch
from raydix.actors.rpc import Handle, WorkerClient
from raydix.actors.runtime import Runtime
from raydix.configs.schema import LoggingSection
from raydix.configs.sections import MANAGER
from raydix.engine.background import Background
from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.errors import LateError, NoWorkerError
from raydix.engine.core.log_fields import about
from raydix.engine.core.manager.block_index import GC_THRESHOLDS
from raydix.engine.core.manager.directory import Directory
from raydix.engine.core.manager.elastic import ONE_WORKER, PoolLimits
from raydix.engine.core.manager.placement import CostModel
from raydix.engine.core.objectives import NO_OBJECTIVES, Late, Objectives
from raydix.engine.core.shares import weights_of
from raydix.engine.core.signs_of_life import SignsOfLife
from raydix.engine.core.tenants import Tenant
from raydix.engine.core.types import Admission, AdmitRequest, Ended, FirstToken, Membership, ProcessName, WorkerInfo

logger = logging.getLogger(__name__)

NUM_STALL_CHECKS = 8
"""Checks for stalled producers in each `await_timeout_s`."""


@dataclass(slots=True)
class _Ingress:
    """An ingress replica and its admitted requests."""

    requests: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    """Requests that the last message did not name; requests missing from two messages in a row are over."""
    process: ProcessName | None = None


class KVCacheManager(Succession, DirectoryReports, LoadWatch):
    """Index of the cluster's prefixes and owner of its exported KV."""

    def __init__(
        self,
        costs: CostModel,
        segment_budget_bytes: int,
        transcript_budget_bytes: int,
        await_timeout_s: float,
        disk_budget_bytes: int = 0,
        disk_path: str | None = None,
        tenants: Sequence[Tenant] = (),
        logs: LoggingSection = DEFAULTS,
        prefix_caching: bool = True,
        response_budget_bytes: int = 0,
        response_ttl_s: float = 0.0,
        answer_budget_bytes: int = 0,
        objectives: Objectives = NO_OBJECTIVES,
        elastic: PoolLimits = ONE_WORKER,
        *,
        runtime: Runtime,
    ) -> None:
        """After `await_timeout_s` without a block its producer is stalled, and another worker takes over. `disk_path`
        is the folder of segments on disk, if `disk_budget_bytes` is not 0. `tenants` have shares of the object store's
        and the disk's budgets, and of the memory for transcripts and responses. Without `prefix_caching` segments are
        for hand-overs only. Stored responses that nobody used for `response_ttl_s` are forgotten. With 0
        `answer_budget_bytes` no answers are kept for drafts. `objectives` are those of requests without their own,
        `elastic` the limits of the number of elastic workers."""
        super().__init__(transcript_budget_bytes, response_budget_bytes, response_ttl_s, answer_budget_bytes)
        self.share_memory(weights_of(tenants))
        log_to_ray(MANAGER, logs)
        gc.set_threshold(*GC_THRESHOLDS)

        self._directory = Directory(
            costs,
            segment_budget_bytes,
            disk_budget_bytes,
            tenants,
            keeps_segments=prefix_caching,
            objectives=objectives,
            node=runtime.own_node(),
        )
        self._runtime = runtime
        self._disk = DiskTier(disk_path, runtime) if disk_budget_bytes else None
        self._await_timeout_s = await_timeout_s
        self._elastic = elastic

        self._clients: dict[str, WorkerClient] = {}
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._resets = PoolResets()
        self._worker_signs = SignsOfLife()
        self._ingresses: dict[str, _Ingress] = {}
        self._ingress_signs = SignsOfLife()
        self._processes: dict[str, ProcessName | None] = {}
        """Of each worker that registered, by its last registration."""
        self._watch = ProcessWatch(runtime.own_node())
        self._starting: dict[str, float] = {}
        """Time of the last report that a host is starting this worker, for each worker that is not registered yet."""
        self._background = Background()
        self._deliveries = Background()
        self._metrics = ManagerMetrics()
        self._holds = HoldMetrics(MANAGER)
        self._is_started = False

    async def start(self) -> None:
        """Start the manager; returns after the segments and stored responses on disk are known."""
        if not self._is_started:
            self._is_started = True
            self._runtime.watch_process(self._holds)
            self._background.start(self._watch_ingresses())
            self._background.start(self._watch_senders())
            self._background.start(self._watch_workers())
            self._background.start(self._watch_load())
            if self._disk is not None:
                files = await self._disk.open()
                self._carry_out(self._directory.files_found(files, time.time()))
                self._background.start(self._save_blocks())
                responses = await self._keep_responses_on_disk(self._disk.folder)
                self._background.start(responses.run())
                self._background.start(self._watch_expiry())
                logger.info("%d segments found on disk", len(files), extra=about("disk_found", segments=len(files)))
            logger.info("manager started", extra=about("started"))

    async def check(self) -> None:
        """Return at once, unless the manager hangs."""

    async def join(self) -> None:
        """Never return: a caller learns of the manager's end by the error of this call."""
        await asyncio.Event().wait()

    async def reconfigure(
        self,
        piggyback_tokens: int,
        prior: WorkerCosts,
        tenants: Sequence[Tenant],
        objectives: Objectives,
        level: str,
        elastic: PoolLimits = ONE_WORKER,
    ) -> None:
        """Place by other first values and objectives, give tenants other shares of the segments' budgets, want elastic
        workers within other limits, and log at another level, all from now on."""
        set_level(level)
        self._elastic = elastic
        self._directory.change_limits(piggyback_tokens, prior, tenants, objectives)
        self.share_memory(weights_of(tenants))
        extra = about("reconfigured", piggyback_tokens=piggyback_tokens, tenants=len(tenants), level=level)
        logger.info("other limits for placement and %d tenants' shares", len(tenants), extra=extra)

    # Workers

    async def register(self, registration: Registration, worker: list[Handle]) -> str | None:
        """Register a worker and begin to read its export stream; returns the reason of a refusal, or None."""
        if self.is_retired:
            return "another manager has taken over"
        worker_id, epoch = registration.worker_id, registration.epoch
        current = self._directory.workers.get(worker_id)
        if current is not None and current.epoch > epoch:
            return "a newer incarnation is registered"

        refusal = self._directory.workers.refusal(worker_id, registration.fingerprint)
        if refusal is not None:
            return refusal

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
        )
        self._processes[worker_id] = registration.process
        client = self._clients[worker_id] = WorkerClient(worker[0])
        self._carry_out(instructions)
        self._followers[worker_id] = asyncio.create_task(self._follow(worker_id, epoch, client))
        self._worker_signs.heard(worker_id, time.monotonic())
        num_blocks = len(registration.hashes)
        extra = about("registered", worker=worker_id, role=registration.role, epoch=epoch, blocks=num_blocks)
        logger.info("%s registered with %d blocks", worker_id, num_blocks, extra=extra)
        return None

    async def heartbeat(self, worker_id: str, epoch: int, state: WorkerState) -> bool:
        """Record a worker's costs and room; returns False if the worker is not registered."""
        if self.is_retired:
            return False
        if self._directory.is_current(worker_id, epoch):
            self._worker_signs.heard(worker_id, time.monotonic())
        self._directory.worker_measured(
            worker_id,
            epoch,
            state.costs,
            state.num_free_blocks,
            state.num_empty_blocks,
            num_steps=state.num_steps,
            token_budget=state.token_budget,
        )
        return self._directory.is_current(worker_id, epoch)

    async def worker_leaving(self, worker_id: str) -> bool | None:
        """Have a worker's requests and blocks go elsewhere, since its host is about to stop; returns whether nothing is
        left there, None for an unknown worker. To be called again until then."""
        if worker_id not in self._directory.workers:
            return None
        if worker_id not in self._directory.workers.leaving:
            logger.info("%s is leaving", worker_id, extra=about("worker_leaving", worker=worker_id))
        self._carry_out(self._directory.leave(worker_id))
        return self._directory.has_left(worker_id)

    async def worker_starting(self, worker_id: str) -> None:
        """Note that a host is starting this worker."""
        self._starting[worker_id] = time.monotonic()

    async def workers(
        self, ingress_id: str | None = None, active: Sequence[str] = (), process: ProcessName | None = None
    ) -> Membership:
        """List the registered workers, and count the starting ones. The calls of an ingress replica show that the
        replica is alive, and `active` its living requests; any other request of the replica has ended unreported."""
        self.check_not_retired()
        if ingress_id is not None:
            ingress = self._ingress(ingress_id)
            ingress.process = process
            self._ingress_signs.heard(ingress_id, time.monotonic())
            missing = ingress.requests.difference(active)
            self._release(ingress, missing & ingress.missing)
            ingress.missing = missing & ingress.requests
        registered = tuple(
            WorkerInfo(w.worker_id, w.role, w.epoch, self._processes.get(w.worker_id))
            for w in self._directory.workers.values()
        )
        deadline = time.monotonic() - STARTING_SILENCE_S
        self._starting = {worker_id: said_at for worker_id, said_at in self._starting.items() if said_at > deadline}
        return Membership(
            registered,
            len(self._starting),
            self._directory.workers.fingerprint,
            leaving=self._directory.workers.leaving,
            starts_on_demand=self._elastic.least == 0,
        )

    # Requests

    async def admit(self, requests: Sequence[AdmitRequest]) -> list[Admission | Late | None]:
        """Place requests, each in one atomic step; `Late` for a request that is refused, None for one that no
        worker could take."""
        self.check_not_retired()
        doubted = {worker_id for request in requests for worker_id in request.avoided}
        if doubted:
            self._forget_silent(DOUBTED_SILENCE_S, doubted)
        admissions: list[Admission | Late | None] = []
        for request in requests:
            try:
                admission, instructions = self._directory.admit(request, time.time())
            except NoWorkerError:
                self._carry_out(self._directory.end_request(request.request_id, time.time()))
                admissions.append(None)
                continue
            except LateError as error:
                admissions.append(error.late)
                continue
            self._carry_out(instructions)
            self._ingress(request.ingress_id).requests.add(request.request_id)
            admissions.append(self.with_continuations(admission, request))
        return admissions

    async def settle(self, ingress_id: str, first_tokens: Sequence[FirstToken], ended: Sequence[Ended]) -> None:
        """Record first tokens of attempts and ends of requests, all of one ingress replica."""
        self.check_not_retired()
        for first in first_tokens:
            decision = self._directory.first_token(first.request_id, first.attempt, first.ttft_s)
            if decision is not None:
                self._metrics.first_token(decision)
        for end in ended:
            self._directory.decisions.ended(end)
        self.keep_answers(ended)
        over = [end.request_id for end in ended if not self._directory.has_newer_attempt(end.request_id, end.attempt)]
        self._release(self._ingress(ingress_id), over)

    # What others may see and do

    async def reset_cache(self) -> dict[str, int]:
        """Forget the token ids of answers, and everywhere all KV that is neither held by nor promised to a request;
        returns the counts."""
        self.forget_answers()
        pool_blocks = await self._resets.reset(self._clients)
        store_blocks, erased = self._directory.reset_segments()
        self._carry_out(erased)

        # A segment that arrived meanwhile may have been delivered to a pool behind the pool's reset.
        await self._deliveries.ended(UNDER_WAY_S)
        pool_blocks += await self._resets.reset(self._clients)
        self.forget_answers()  # of requests that had ended, and were reported meanwhile

        counts = {"store_blocks": store_blocks, "pool_blocks": pool_blocks}
        logger.info("cache reset", extra=about("cache_reset", **counts))
        return counts

    async def statistics(self) -> dict[str, int]:
        """Process id and sizes of the index and the memory, after a check of their integrity."""
        return {"pid": os.getpid(), **self.directory_statistics(), **self.memory_statistics()}

    async def metrics(self) -> tuple[Family, ...]:
        """The manager's metrics."""
        return (*families_of(self._metrics), *families_of(self._holds))

    # Inside

    def _ingress(self, ingress_id: str) -> "_Ingress":
        if ingress_id not in self._ingresses:
            self._ingresses[ingress_id] = _Ingress()
            self._ingress_signs.heard(ingress_id, time.monotonic())
        return self._ingresses[ingress_id]

    def _release(self, ingress: _Ingress, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            ingress.requests.discard(request_id)
            self._carry_out(self._directory.end_request(request_id, time.time()))

    def _look_at_quiet(self, signs: SignsOfLife, processes: Mapping[str, ProcessName | None], silence_s: float) -> None:
        """Tell processes that have sent nothing for so long and compute from those that may be dead."""
        now = time.monotonic()
        for name in signs.quiet(now, silence_s):
            if self._watch.computes(processes.get(name), now):
                signs.computes(name, now)

    async def _watch_ingresses(self) -> None:
        """Release the requests of ingress replicas that are gone."""
        while True:
            self._ingress_signs.stood_still(await sleep(INGRESS_SILENCE_S / 4))
            processes = {ingress_id: ingress.process for ingress_id, ingress in self._ingresses.items()}
            self._look_at_quiet(self._ingress_signs, processes, INGRESS_SILENCE_S / 4)
            for ingress_id in self._ingress_signs.silent(time.monotonic(), INGRESS_SILENCE_S):
                self._ingress_signs.forget(ingress_id)
                ingress = self._ingresses.pop(ingress_id)
                logger.log(
                    logging.WARNING if ingress.requests else logging.INFO,
                    "ingress %s is silent for %d s: %d requests released",
                    ingress_id,
                    INGRESS_SILENCE_S,
                    len(ingress.requests),
                    extra=about("ingress_lost", ingress=ingress_id, requests=len(ingress.requests)),
                )
                self._release(ingress, list(ingress.requests))

    async def _watch_workers(self) -> None:
        """Forget workers that are silent, as long as others are there: nobody is to wait for their blocks."""
        while True:
            self._worker_signs.stood_still(await sleep(WORKER_SILENCE_S / 4))
            self._forget_silent(WORKER_SILENCE_S, set(self._worker_signs))

    def _forget_silent(self, silence_s: float, among: set[str]) -> None:
        """Forget the workers of `among` that are silent for so long, and what only their nodes have."""
        self._look_at_quiet(self._worker_signs, self._processes, WORKER_SILENCE_S / 4)
        silent = self._worker_signs.silent(time.monotonic(), silence_s)
        for worker_id in among.intersection(silent) if set(self._worker_signs) - set(silent) else ():
            logger.warning(
                "no heartbeat of %s for %g s: forgotten until it registers again",
                worker_id,
                silence_s,
                extra=about("worker_silent", worker=worker_id),
            )
            self._followers.pop(worker_id).cancel()
            self._forget(worker_id, is_silent=True)

    def _forget(self, worker_id: str, *, is_silent: bool = False) -> None:
        """Forget a worker whose export stream is read no more. `is_silent`: with its node out of reach, perhaps."""
        self._resets.stream_over(worker_id)
        directory = self._directory
        now = time.time()
        self._carry_out(directory.worker_silent(worker_id, now) if is_silent else directory.remove_worker(worker_id))
        del self._clients[worker_id]
        self._watch.forget(self._processes.pop(worker_id, None))
        self._worker_signs.forget(worker_id)

    async def _watch_senders(self) -> None:
        """Replace stalled producers of awaited blocks."""
        while True:
            await asyncio.sleep(self._await_timeout_s / NUM_STALL_CHECKS)
            instructions = list(self._directory.replace_stalled(time.monotonic(), self._await_timeout_s))
            if instructions:
                logger.warning(
                    "blocks did not come in %g s; %d instructions to compute them elsewhere",
                    self._await_timeout_s,
                    len(instructions),
                    extra=about("stalled", instructions=len(instructions)),
                )
            self._carry_out(instructions)

    async def _follow(self, worker_id: str, epoch: int, client: WorkerClient) -> None:
        """Read one worker's export stream until the worker is gone."""
        try:
            stream = aiter(client.export_stream())
            async for ref in stream:
                item: ExportItem = await ref
                payload = await anext(stream) if item.header is not None and item.header.num_bytes else None
                self._take(worker_id, epoch, item, payload)
        except Exception as error:  # of any kind: this worker's stream is not read any more
            reason = type(error).__name__
            extra = about("worker_lost", worker=worker_id, epoch=epoch, reason=reason)
            level = logging.INFO if worker_id in self._directory.workers.leaving else logging.WARNING
            logger.log(level, "lost %s (%s)", worker_id, reason, extra=extra)

        if self._followers.get(worker_id) is asyncio.current_task():
            del self._followers[worker_id]
            self._forget(worker_id)

    def _take(self, worker_id: str, epoch: int, item: ExportItem, payload: object) -> None:
        """Index what one message of an export stream tells."""
        if item.header is not None:
            self._carry_out(self._directory.segment_exported(worker_id, epoch, item.header, payload, time.time()))
        if item.sealed or item.evicted:
            self._carry_out(self._directory.blocks_changed(worker_id, epoch, item.sealed, item.evicted))
        if item.missing:
            self._carry_out(self._directory.export_failed(worker_id, epoch, item.missing))
        if item.unsent:
            self._carry_out(self._directory.blocks_unsent(worker_id, epoch, item.unsent))
        if item.reset is not None:
            self._resets.exports_over(worker_id, item.reset)
