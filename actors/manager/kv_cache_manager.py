"""The central actor: admits requests, follows every worker's blocks, owns the exported KV and sends it to workers.

A thin shell around `raydix.engine.core.manager.directory.Directory`, which decides:

| messages of | come by | and what follows is done by |
|---|---|---|
| workers | `WorkerWatch` | `Executor`: calls of workers, files |
| ingress replicas | `IngressWatch`; their answers for later requests: `ClientMemory` | the same |
| other managers | `Succession` | the same |
"""

import asyncio
import gc
import logging
import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from raydix.actors.instruments import families_of
from raydix.actors.logs import DEFAULTS, log_to_ray, set_level
from raydix.actors.manager.client_memory import ClientMemory
from raydix.actors.manager.decision_spans import note_admission, note_refusal
from raydix.actors.manager.disk_tier import DiskTier
from raydix.actors.manager.executor import Executor
from raydix.actors.manager.ingress_watch import IngressWatch
from raydix.actors.manager.load_watch import LoadWatch
from raydix.actors.manager.loaded_adapters import LoadedAdapters
from raydix.actors.manager.pool_resets import UNDER_WAY_S, PoolResets
from raydix.actors.manager.succession import Succession
from raydix.actors.manager.worker_watch import WorkerWatch
from raydix.actors.messages import Registration, WorkerState
from raydix.actors.metric_values import MetricFamily
from raydix.actors.metrics import HoldMetrics, ManagerMetrics
from raydix.actors.processes import ProcessWatch
from raydix.actors.rpc import Handle
from raydix.actors.runtime import Runtime
from raydix.actors.tracing import Recorded, Recorder
from raydix.configs.schema import LoggingSection
from raydix.configs.sections import MANAGER
from raydix.engine.background import Background
from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.doctor import Miss
from raydix.engine.core.errors import LateError, NoWorkerError
from raydix.engine.core.log_fields import about
from raydix.engine.core.manager.block_index import GC_THRESHOLDS, CacheUpdate
from raydix.engine.core.manager.cache_report import cache_report
from raydix.engine.core.manager.directory import Directory, explained
from raydix.engine.core.manager.elastic import ONE_WORKER, PoolLimits, Wanted
from raydix.engine.core.manager.placement import CostModel
from raydix.engine.core.manager.turns import NO_TURNS, PausedError, TurnLimits
from raydix.engine.core.objectives import NO_OBJECTIVES, Late, Objectives
from raydix.engine.core.shares import weights_of
from raydix.engine.core.tenants import Tenant
from raydix.engine.core.types import (
    Adapter,
    AdapterReport,
    Admission,
    AdmitRequest,
    Ended,
    FirstToken,
    Membership,
    Paused,
    ProcessName,
)

logger = logging.getLogger(__name__)


def log_placed(admission: Admission, request: AdmitRequest) -> None:
    """Log the workers of a request, under the id that it has in every process."""
    workers = admission.prefill if admission.prefill == admission.decode else f"{admission.prefill}, {admission.decode}"
    logger.info(
        "%s placed at %s",
        request.request_id,
        workers,
        extra=about(
            "placed",
            request=request.request_id,
            attempt=request.attempt,
            prefill=admission.prefill,
            decode=admission.decode,
            tokens=request.num_tokens,
            awaited_blocks=len(admission.prefill_awaited),
        ),
    )


class KVCacheManager:
    """Index of the cluster's prefixes and owner of its exported KV: the methods that others call."""

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
        turns: TurnLimits = NO_TURNS,
        *,
        runtime: Runtime,
    ) -> None:
        """After `await_timeout_s` without a block its producer is stalled, and another worker takes over. `disk_path`
        is the folder of segments on disk, if `disk_budget_bytes` is not 0. `tenants` have shares of the object store's
        and the disk's budgets, and of the memory for transcripts and responses. Without `prefix_caching` segments are
        for hand-overs only. Stored responses that nobody used for `response_ttl_s` are forgotten. With 0
        `answer_budget_bytes` no answers are kept for drafts. `objectives` are those of requests without their own,
        `elastic` the limits of the number of elastic workers,
        `turns` the times of the turns of sessions."""
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
            turns=turns,
        )
        self._memory = ClientMemory(transcript_budget_bytes, response_budget_bytes, response_ttl_s, answer_budget_bytes)
        self._memory.share(weights_of(tenants))
        self._runtime = runtime
        self._disk = DiskTier(disk_path, runtime) if disk_budget_bytes else None
        self._await_timeout_s = await_timeout_s
        self._background = Background()
        self._metrics = ManagerMetrics()
        self._holds = HoldMetrics(MANAGER)
        self._process = runtime.process_metrics(MANAGER)

        processes = ProcessWatch(runtime.own_node())
        self._resets = PoolResets()
        self._recorder = Recorder(MANAGER, "manager")
        self._executor = Executor(self._directory, self._disk, self._background, self._recorder)
        self._workers = WorkerWatch(
            directory=self._directory,
            executor=self._executor,
            resets=self._resets,
            processes=processes,
            metrics=self._metrics,
            is_retired=lambda: self.succession.is_retired,
        )
        self._ingresses = IngressWatch(self._directory, self._executor, processes)
        self._adapters = LoadedAdapters(self._executor, self._background, self._ingresses.adapter_reports)
        self._load = LoadWatch(self._directory, self._metrics, elastic)
        self.succession = Succession(
            directory=self._directory,
            memory=self._memory,
            executor=self._executor,
            disk=self._disk,
            background=self._background,
        )
        self._is_started = False

    async def start(self) -> None:
        """Start the manager; returns after the segments and stored responses on disk are known."""
        if not self._is_started:
            # Before the first await: a second call finds it set and starts nothing twice.
            self._is_started = True
            self._runtime.watch_process(self._holds)
            self._background.start(self._ingresses.run())
            self._background.start(self._executor.replace_stalled(self._await_timeout_s))
            self._background.start(self._workers.run())
            self._background.start(self._load.run())
            if self._disk is not None:
                files = await self._disk.open()
                self._executor.carry_out(self._directory.stock.segments.files_found(files, time.time()))
                self._background.start(self._executor.save_blocks())
                responses = await self._memory.keep_on_disk(self._disk.folder)
                self._background.start(responses.run())
                self._background.start(self._memory.watch_expiry())
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
        turns: TurnLimits = NO_TURNS,
    ) -> None:
        """Place by other first values and objectives, give tenants other shares of the segments' budgets, want elastic
        workers within other limits, give sessions turns of other times, and log at another level, all from now on."""
        set_level(level)
        self._load.limits = elastic
        self._directory.change_limits(piggyback_tokens, prior, tenants, objectives, turns)
        self._memory.share(weights_of(tenants))
        extra = about("reconfigured", piggyback_tokens=piggyback_tokens, tenants=len(tenants), level=level)
        logger.info("other limits for placement and %d tenants' shares", len(tenants), extra=extra)

    # Workers

    async def register(self, registration: Registration, worker: list[Handle]) -> str | None:
        """Register a worker and begin to read its export stream; returns the reason of a refusal, or None."""
        if self.succession.is_retired:
            return "another manager has taken over"
        refusal = self._adapters.refusal(registration) or self._workers.register(registration, worker[0])
        if refusal is None:
            self._adapters.joined(registration)
        return refusal

    async def heartbeat(self, worker_id: str, epoch: int, state: WorkerState) -> bool:
        """Record a worker's costs and room; returns False if the worker is not registered."""
        return not self.succession.is_retired and self._workers.heartbeat(worker_id, epoch, state)

    async def worker_leaving(self, worker_id: str) -> bool | None:
        """Have a worker's requests and blocks go elsewhere, since its host is about to stop; returns whether nothing is
        left there, None for an unknown worker. To be called again until then."""
        return self._workers.leaving(worker_id)

    async def worker_starting(self, worker_id: str) -> None:
        """Note that a host is starting this worker."""
        self._workers.starting(worker_id)

    async def children_hung(self, kind: str, number: int) -> None:
        """Count workers of a role, or managers, that their host killed because they answered nothing."""
        self._metrics.hung(kind, number)

    async def wanted_workers(self) -> Wanted | None:
        """The number of elastic workers for the present load; None before the first look at the load."""
        self.succession.check_not_retired()
        return self._load.wanted()

    async def workers(
        self,
        ingress_id: str | None = None,
        active: Sequence[str] = (),
        process: ProcessName | None = None,
        adapters: AdapterReport | None = None,
    ) -> Membership:
        """List the registered workers, the loaded adapters, and count the starting workers. The calls of an ingress
        replica show that the replica is alive, and `active` its living requests; any other request of the replica has
        ended unreported. `adapters`: what the replica knows of adapters."""
        self.succession.check_not_retired()
        if ingress_id is not None:
            self._ingresses.heard(ingress_id, active, process, adapters)
        members = self._workers.members(starts_on_demand=self._load.limits.least == 0)
        return replace(members, adapters=self._adapters.listed())

    # Adapters

    async def adapters(self) -> tuple[Adapter, ...] | None:
        """The adapters that were loaded at run time; None while this manager may not have learnt of them yet."""
        return self._adapters.listed()

    async def load_adapter(self, adapter: Adapter, limit: int, in_place: bool) -> str | None:
        """Load an adapter into every worker, and tell every ingress replica (`LoadedAdapters.load`); returns the reason
        if that cannot be."""
        self.succession.check_not_retired()
        return await self._adapters.load(adapter, limit, in_place=in_place)

    async def unload_adapter(self, name: str) -> bool:
        """Unload an adapter (`LoadedAdapters.unload`); returns when its requests have ended, False for an unknown
        name."""
        self.succession.check_not_retired()
        return await self._adapters.unload(name)

    # Requests

    async def admit(self, requests: Sequence[AdmitRequest]) -> list[Admission | Late | Paused | None]:
        """Place requests, each in one atomic step; `Late` for a request that is refused, `Paused` for one whose session
        waits for its turn, None for one that no worker could take."""
        self.succession.check_not_retired()
        # An ingress replica does not reach these workers, so less silence than usual is enough to forget them.
        doubted = {worker_id for request in requests for worker_id in request.avoided}
        if doubted:
            self._workers.doubt(doubted)
        admissions: list[Admission | Late | Paused | None] = []
        for request in requests:
            began_at = time.monotonic()
            try:
                admission, instructions = self._directory.admit(request, time.time())
            # An earlier attempt's leases end here: nobody else would tell of it.
            except NoWorkerError:
                self._executor.carry_out(self._directory.end_request(request.request_id, time.time()))
                self._note_refusal(request, "no worker", began_at)
                admissions.append(None)
                continue
            except LateError as error:
                self._note_refusal(request, "late", began_at)
                admissions.append(error.late)
                continue
            except PausedError as error:
                self._note_refusal(request, "paused", began_at)
                admissions.append(error.paused)
                continue
            if self._recorder.is_on:
                note_admission(self._recorder, request, admission, began_at, time.monotonic())
            self._executor.carry_out(instructions)
            log_placed(admission, request)
            # From here on the request ends with its ingress replica, if that dies.
            self._ingresses.admitted(request.ingress_id, request.request_id)
            admissions.append(self._memory.with_continuations(admission, request))
        return admissions

    def _note_refusal(self, request: AdmitRequest, why: str, began_at: float) -> None:
        if self._recorder.is_on:
            note_refusal(self._recorder, request, why, began_at, time.monotonic())

    async def ask_again(self, request_ids: Sequence[str]) -> list[Paused | None]:
        """Ask for the turns of paused requests' sessions; None: the request is to be admitted (`admit`)."""
        self.succession.check_not_retired()
        return self._directory.ask_again(request_ids, time.time())

    async def settle(self, ingress_id: str, first_tokens: Sequence[FirstToken], ended: Sequence[Ended]) -> None:
        """Record first tokens of attempts and ends of requests, all of one ingress replica."""
        self.succession.check_not_retired()
        for first in first_tokens:
            decision = self._directory.first_token(first.request_id, first.attempt, first.ttft_s)
            if decision is not None:
                self._metrics.first_token(decision)
        for end in ended:
            decision = self._directory.decisions.ended(end)
            if decision is not None:
                self._metrics.ended(decision)
            self._directory.sessions.stopped(end.request_id, end.stop)
        self._memory.keep_answers(ended)
        # An end that was reported late must not end the attempt that has begun since.
        over = [end.request_id for end in ended if not self._directory.has_newer_attempt(end.request_id, end.attempt)]
        self._ingresses.release(ingress_id, over)

    # Calls passed on to parts of the manager

    async def of_answers(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the memory of answers, by its name in `AnswerKeeper`."""
        # A predecessor's answers may be on their way: without them the caller would be told that there are none.
        await self.succession.memory_is_ready()
        return getattr(self._memory, method)(*args, **kwargs)

    async def of_succession(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of `Succession`, by its name: the hand-over from one manager to the next."""
        return await getattr(self.succession, method)(*args, **kwargs)

    async def copies(self, segment_ids: Sequence[int]) -> AsyncIterator[object]:
        """Yield a copy of each segment's payload, which the caller owns; None for a segment that is gone."""
        async for payload in self.succession.copies(segment_ids):
            yield payload

    # What operators and clients may see and do

    async def explain(self, name: str, tenant: str | None) -> list[dict[str, object]]:
        """Decisions behind each choice of a request, by the request's name at its client (`Decisions.of`)."""
        return explained(self._directory, name, tenant, time.time())

    async def misses(self, tenant: str, period_s: float) -> list[Miss]:
        """The hits and the first miss of each of a tenant's prompts of the last `period_s` (`Decisions.misses`)."""
        return self._directory.decisions.misses(tenant, time.time() - period_s)

    async def cache_report(self, tenant: str, is_admin: bool) -> dict[str, object]:
        """Sizes, hits and evictions of the cache; use of all tenants only for an administrator, of this tenant
        otherwise. The tenant's own hottest prefixes come with their first token ids."""
        return cache_report(self._directory, tenant, is_admin)

    async def events_since(self, sequence: int | None) -> CacheUpdate:
        """Events of stored and removed blocks (`BlockIndex.events_since`)."""
        return self._directory.stock.blocks.events_since(sequence)

    async def reset_cache(self) -> dict[str, int]:
        """Forget the token ids of answers, and everywhere all KV that is neither held by nor promised to a request;
        returns the counts."""
        self._memory.forget_answers()
        pool_blocks = await self._resets.reset(self._executor.clients)
        # Pools first: a pool that still has blocks would export them into a store that was emptied before.
        store_blocks, erased = self._directory.stock.segments.reset()
        self._executor.carry_out(erased)

        # A segment that arrived meanwhile may have been delivered to a pool behind the pool's reset.
        await self._executor.deliveries_ended(UNDER_WAY_S)
        pool_blocks += await self._resets.reset(self._executor.clients)
        self._memory.forget_answers()  # of requests that had ended, and were reported meanwhile

        counts = {"store_blocks": store_blocks, "pool_blocks": pool_blocks}
        logger.info("cache reset", extra=about("cache_reset", **counts))
        return counts

    async def statistics(self) -> dict[str, int]:
        """Process id and sizes of the index and the memory, after a check of their integrity."""
        return {"pid": os.getpid(), **self._directory.sizes(), **self._memory.statistics()}

    async def trace(self, seconds: float) -> Recorded:
        """Record admissions and what moves KV for so long."""
        return await self._recorder.record(seconds)

    async def metrics(self) -> tuple[MetricFamily, ...]:
        self._metrics.look(self._directory)
        process = () if self._process is None else self._process.families()
        return (*families_of(self._metrics), *families_of(self._holds), *process)
