"""Declarations of all metrics. Ray exports them under these names with the prefix `ray_`, `/metrics` without it."""

from collections import Counter as Counts
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ray.util import metrics as ray_metrics
from ray.util.metrics import Counter, Gauge, Histogram

from raydix.actors.instruments import CounterInstrument, GaugeInstrument, HistogramInstrument
from raydix.actors.watchdog import Hold
from raydix.configs.sections import MANAGER
from raydix.engine.core.costs import StepShape
from raydix.engine.core.errors import (
    AuthenticationError,
    BodyTooLargeError,
    ModelNotFoundError,
    OverloadedError,
    RaydixError,
    RequestError,
)
from raydix.engine.core.manager.explain import HITS, BlockSource
from raydix.engine.core.types import DraftSource, EvictionReason, Role
from raydix.engine.core.worker.drafts.draft import DEPTHS, DraftCounts, by_depth

if TYPE_CHECKING:
    from raydix.engine.core.manager.directory import Directory
    from raydix.engine.core.manager.explain import Decision
    from raydix.engine.core.worker.request import Request
    from raydix.engine.model.engine import Engine
    from raydix.engine.serving.accounting import FinishedRequest

OUTCOMES = ("stop", "length", "aborted", "failed")  # ways in which a request may end
# Errors whose counts begin at 0: an error's first occurrence shall enter a rate.
COMMON_REFUSALS: tuple[type[RaydixError], ...] = (
    RequestError,
    AuthenticationError,
    ModelNotFoundError,
    BodyTooLargeError,
    OverloadedError,
)
# Label of the adapters that were loaded at run time, all together: clients and administrators name no metrics.
LOADED = "loaded"
# Kinds of holds that a process's watchdog finds: a turn of the event loop, the interpreter's lock.
HOLDS = ("loop", "lock")
LOSSES = ("ended", "silent", "left")  # reasons why the manager forgets a worker
# Kinds of requests, in OpenTelemetry's words (`raydix.engine.serving.accounting.operation_of`).
OPERATIONS = ("chat", "text_completion", "embeddings")
DUTIES = (Role.PREFILL, Role.DECODE, Role.MIXED)
# Bounds of numbers of tokens.
_LENGTHS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000]
_CHOICES = [1, 2, 5, 10, 20]
# Bounds of the time between two tokens: finer where a reader notices.
_GAPS_S = [0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0]
_LATENCY_S = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0]


class WorkerMetrics:
    """Metrics of one worker. Steps are only counted; `flush` reports the counts, off the steps' critical path."""

    def __init__(self, worker_id: str, role: Role) -> None:
        tags = {"worker": worker_id, "role": str(role)}
        keys = tuple(tags)

        def counter(name: str, description: str, *more_keys: str) -> CounterInstrument:
            metric = Counter(name, description=description, tag_keys=keys + more_keys)
            metric.set_default_tags(tags)
            return CounterInstrument(metric, tags)

        def gauge(name: str, description: str, *more_keys: str) -> GaugeInstrument:
            metric = Gauge(name, description=description, tag_keys=keys + more_keys)
            metric.set_default_tags(tags)
            return GaugeInstrument(metric, tags)

        def histogram(name: str, description: str, bounds: Sequence[float] = _LATENCY_S) -> HistogramInstrument:
            metric = Histogram(name, description=description, boundaries=[*map(float, bounds)], tag_keys=keys)
            metric.set_default_tags(tags)
            return HistogramInstrument(metric, tags)

        self._prefilled = counter("raydix_prefill_tokens", "Prompt tokens computed, again after a loss too.")
        self._decoded = counter("raydix_decode_tokens", "Generated tokens computed, without drafts.")
        of_drafts = "by origin and place in the draft."
        self._drafted = counter(
            "raydix_draft_tokens", f"Draft tokens computed beside decodes, {of_drafts}", "source", "depth"
        )
        self._accepted = counter(
            "raydix_accepted_draft_tokens", f"Draft tokens that became part of answers, {of_drafts}", "source", "depth"
        )
        self._exported = counter("raydix_exported_bytes", "KV bytes sent to the object store.")
        self._imported = counter("raydix_imported_bytes", "KV bytes taken from the object store.")
        self._preempted = counter(
            "raydix_preemptions",
            "Requests that lost their blocks to make room, by the way their KV is restored.",
            "way",
        )
        self._swapped = counter(
            "raydix_swapped_bytes", "KV bytes of preempted requests copied to and from the object store.", "direction"
        )
        self._swap_s = counter("raydix_swap_seconds", "Time that steps took for copies of swapped KV.", "direction")
        self._idle_tokens = counter(
            "raydix_idle_tokens", "Prefill tokens computed at idle priority, for turns that may come."
        )
        self._idle = counter("raydix_idle_requests", "Requests at idle priority, by what became of them.", "outcome")
        self._running = gauge("raydix_running_requests", "Requests that hold blocks.")
        self._waiting = gauge("raydix_waiting_requests", "Requests that wait for blocks, imports or their turn.")
        self._blocks = gauge("raydix_blocks", "Blocks of the pool.")
        self._usage = gauge("raydix_kv_usage", "Share of the pool's blocks that requests hold, 0 to 1.")
        self._available = gauge("raydix_available_blocks", "Blocks that are free or cached by nobody's request.")
        self._cached = gauge("raydix_cached_blocks", "Blocks that nobody holds and that can still be hit.")
        self._pool = gauge(
            "raydix_pool_info", "1, with the sizes of the pool.", "block_size", "num_blocks", "block_bytes"
        )
        self._pending_grammars = gauge(
            "raydix_pending_grammars", "Grammars that requests wait for: being compiled, or to be."
        )
        self._queue_s = histogram("raydix_queue_seconds", "Submission to start.")
        self._prefill_s = histogram(
            "raydix_prefill_seconds", "Start to first token, where this worker computed the prompt."
        )
        self._running_s = histogram("raydix_running_seconds", "Start to end at this worker, or to the hand-over.")
        self._step_s = histogram("raydix_step_seconds", "Time of a step.")
        self._step_tokens = histogram("raydix_step_tokens", "Tokens computed in a step, with drafts.", _LENGTHS)
        self._import_s = histogram(
            "raydix_import_seconds", "Time of fetching a segment and copying its blocks into the pool."
        )
        self._begin_counters()

        # Grown since the last flush, except `_counts`: the engine's own counts at the last flush.
        self._num_prefilled = 0
        self._num_decoded = 0
        self._counts: dict[str, float] = {}

    def _begin_counters(self) -> None:
        for metric in (self._prefilled, self._decoded, self._exported, self._imported, self._idle_tokens):
            metric.begin()
        self._idle.begin(outcome=("computed", "found", "dropped"))
        for metric in (self._drafted, self._accepted):
            metric.begin(source=tuple(DraftSource), depth=tuple(DEPTHS))
        self._preempted.begin(way=("swap", "recompute"))
        self._swapped.begin(direction=("out", "in"))
        self._swap_s.begin(direction=("out", "in"))

    def step(self, shape: StepShape, seconds: float) -> None:
        """Count one engine step."""
        self._num_prefilled += shape.num_prefill_tokens
        self._num_decoded += shape.num_decodes
        self._step_s.observe(seconds)
        self._step_tokens.observe(shape.num_prefill_tokens + shape.num_decodes + shape.num_draft_tokens)

    def flush(self, engine: "Engine") -> None:
        """Report the steps counted since the last flush, and the engine's present state."""
        for metric, count in ((self._prefilled, self._num_prefilled), (self._decoded, self._num_decoded)):
            if count:
                metric.inc(count)
        self._num_prefilled = self._num_decoded = 0
        drafts = engine.scheduler.drafting.counts
        self._flush_counts(asdict(engine.preemptions) | asdict(engine.scheduler.idle.counts) | _named(drafts))
        self._running.set(len(engine.scheduler.running))
        self._waiting.set(engine.scheduler.num_waiting)
        self._blocks.set(engine.pool.num_blocks)
        self._usage.set(1 - engine.pool.num_available / engine.pool.num_blocks)
        self._available.set(engine.pool.num_available)
        self._cached.set(engine.pool.num_cached)
        pool = {"block_size": str(engine.pool.block_size), "num_blocks": str(engine.pool.num_blocks)}
        self._pool.set(1, {**pool, "block_bytes": str(engine.store.block_bytes)})
        self._pending_grammars.set(0 if engine.grammars is None else engine.grammars.compiler.num_pending)

    def _flush_counts(self, counts: dict[str, float]) -> None:
        """Report the growth of these counts."""
        drafts: list[tuple[str, CounterInstrument, dict[str, str]]] = [
            (_name(source, depth, outcome), metric, {"source": source, "depth": depth})
            for source in DraftSource
            for depth in DEPTHS
            for outcome, metric in (("drafted", self._drafted), ("accepted", self._accepted))
        ]
        for name, metric, tags in (
            ("num_swapped", self._preempted, {"way": "swap"}),
            ("num_recomputed", self._preempted, {"way": "recompute"}),
            ("swapped_out_bytes", self._swapped, {"direction": "out"}),
            ("swapped_in_bytes", self._swapped, {"direction": "in"}),
            ("swapped_out_s", self._swap_s, {"direction": "out"}),
            ("swapped_in_s", self._swap_s, {"direction": "in"}),
            ("num_tokens", self._idle_tokens, {}),
            ("num_computed", self._idle, {"outcome": "computed"}),
            ("num_found", self._idle, {"outcome": "found"}),
            ("num_dropped", self._idle, {"outcome": "dropped"}),
            *drafts,
        ):
            grown = counts[name] - self._counts.get(name, 0)
            if grown:
                metric.inc(grown, tags=tags)

        self._counts = counts

    def answered(self, request: "Request", at: float) -> None:
        """Count one request whose prompt was completed here, at this time."""
        if request.started_at is not None:
            self._prefill_s.observe(max(at - request.started_at, 0.0))

    def finished(self, request: "Request", at: float) -> None:
        """Count one request that ended or was handed over at this time."""
        if request.started_at is not None:
            self._queue_s.observe(max(request.started_at - request.submitted_at, 0.0))
            self._running_s.observe(max(at - request.started_at, 0.0))

    def exported_bytes(self, count: int) -> None:
        self._exported.inc(count)

    def imported(self, num_bytes: int, seconds: float) -> None:
        """Count a segment that was fetched and copied into the pool."""
        self._imported.inc(num_bytes)
        self._import_s.observe(seconds)


class ManagerMetrics:
    """Metrics of the manager's decisions."""

    def __init__(self) -> None:
        def histogram(name: str, description: str) -> HistogramInstrument:
            return HistogramInstrument(Histogram(name, description=description, boundaries=_LATENCY_S))

        self._error_s = histogram(
            "raydix_ttft_prediction_error_seconds",
            "Difference of predicted and actual time from admission to first token.",
        )
        self._regret_s = histogram(
            "raydix_placement_regret_seconds",
            "How much later the first token came than the best other candidate was predicted to give it; 0 without "
            "one.",
        )
        self._handover_s = histogram(
            "raydix_handover_seconds", "First token to the second one, where another worker computed the second one."
        )
        self._handover_error_s = histogram(
            "raydix_handover_prediction_error_seconds", "Difference of predicted and actual time of a hand-over."
        )
        elastic = Gauge(
            "raydix_elastic_workers",
            description="Elastic workers by what they mainly do now: prefill, decode, or both (mixed).",
            tag_keys=("duty",),
        )
        wanted = Gauge(
            "raydix_elastic_workers_wanted",
            description="Elastic workers that the load needs, up to the limit of their number.",
        )
        self._elastic, self._wanted = GaugeInstrument(elastic), GaugeInstrument(wanted)

        def gauge(name: str, description: str, *keys: str) -> GaugeInstrument:
            return GaugeInstrument(Gauge(name, description=description, tag_keys=keys))

        def counter(name: str, description: str, *keys: str) -> CounterInstrument:
            return CounterInstrument(Counter(name, description=description, tag_keys=keys))

        self._workers = gauge("raydix_workers", "Workers that are registered, by role.", "role")
        self._index = gauge("raydix_index_blocks", "Blocks whose places or producers are known.")
        self._segments = gauge("raydix_segment_bytes", "Exported KV in the object store and on disk.", "place")
        self._segment_budget = gauge("raydix_segment_budget_bytes", "Room for exported KV.", "place")
        self._paused = gauge("raydix_paused_sessions", "Sessions whose requests wait for their turn.")
        self._pauses = counter("raydix_pauses", "Pauses of sessions that ended with a turn.")
        self._paused_s = counter("raydix_paused_seconds", "Time of these pauses.")
        self._saved_s = counter(
            "raydix_saved_seconds", "Predicted time that computing the found tokens of prompts would have taken."
        )
        self._registered = counter("raydix_registrations", "Registrations of workers, of new ones and again.", "role")
        self._lost = counter(
            "raydix_lost_workers",
            "Workers forgotten: they ended without a word, fell silent, or left as they had said.",
            "reason",
        )
        self._hung = counter(
            "raydix_hung_actors",
            "Workers of a role, and managers, that their host killed since they answered nothing for a minute.",
            "kind",
        )
        self._hit = counter("raydix_hit_blocks", "Blocks of admitted prompts that were found, by place.", "source")
        self._missed = counter("raydix_missed_blocks", "Blocks of admitted prompts to compute, by reason.", "reason")
        self._evicted = counter("raydix_evicted_blocks", "Blocks that left a place, by reason.", "reason")
        self._hit.begin(source=sorted(map(str, HITS)))
        self._missed.begin(reason=sorted(map(str, {*BlockSource} - HITS)))
        self._evicted.begin(reason=sorted(map(str, EvictionReason)))
        for metric in (self._pauses, self._paused_s, self._saved_s):
            metric.begin()
        self._registered.begin(role=tuple(map(str, Role)))
        self._lost.begin(reason=LOSSES)
        self._hung.begin(kind=(*map(str, Role), MANAGER))
        self.duties([])
        self.wanted(0)
        self._reported: dict[str, float] = {}  # counts that were reported, by metric and value of its tag

    def look(self, directory: "Directory") -> None:
        """Report the state of the directory, and what its counts have grown by since the last look."""
        roles = Counts(worker.role for worker in directory.fleet.values())
        for role in Role:
            self._workers.set(roles[role], {"role": str(role)})
        self._index.set(len(directory.stock.blocks))
        segments = directory.stock.segments
        for place, num_bytes, budget in (
            ("store", segments.store_bytes, segments.store_budget_bytes),
            ("disk", segments.disk_bytes, segments.disk_budget_bytes),
        ):
            self._segments.set(num_bytes, {"place": place})
            self._segment_budget.set(budget, {"place": place})
        self._paused.set(directory.turns.num_paused)
        self._grow(self._pauses, directory.turns.num_pauses)
        self._grow(self._paused_s, directory.turns.paused_s)
        self._grow(self._saved_s, sum(use.saved_s for use in directory.statistics.tenants.values()))

        for source, count in directory.statistics.sources.items():
            if source in HITS:
                self._grow(self._hit, count, source=str(source))
            else:
                self._grow(self._missed, count, reason=str(source))
        for reason, count in directory.statistics.evicted_blocks.items():
            self._grow(self._evicted, count, reason=str(reason))

    def _grow(self, metric: CounterInstrument, count: float, **tags: str) -> None:
        """Report what a count of the directory has grown by."""
        name = " ".join((metric.metric.info["name"], *tags.values()))
        grown = count - self._reported.get(name, 0)
        if grown > 0:
            metric.inc(grown, tags)
            self._reported[name] = count

    def registered(self, role: Role) -> None:
        """Count a worker's registration."""
        self._registered.inc(tags={"role": str(role)})

    def lost(self, reason: str) -> None:
        """Count a worker that was forgotten, for one of `LOSSES`."""
        self._lost.inc(tags={"reason": reason})

    def hung(self, kind: str, number: int) -> None:
        """Count actors that were killed because they answered nothing; `kind` is a worker's role, or `MANAGER`."""
        self._hung.inc(number, tags={"kind": kind})

    def duties(self, duties: Sequence[Role]) -> None:
        """Report the duties of the elastic workers."""
        for duty in DUTIES:
            self._elastic.set(duties.count(duty), {"duty": str(duty)})

    def wanted(self, number: int) -> None:
        """Report the wanted number of elastic workers."""
        self._wanted.set(number, {})

    def first_token(self, decision: "Decision") -> None:
        """Compare the prediction of a first token with the measurement."""
        if decision.ttft_s is not None and decision.regret_s is not None:
            self._error_s.observe(abs(decision.ttft_s - decision.predicted_ttft_s))
            self._regret_s.observe(decision.regret_s)

    def ended(self, decision: "Decision") -> None:
        """Compare the prediction of a hand-over with the measurement, if there was one."""
        if decision.handover_s is None:
            return
        self._handover_s.observe(decision.handover_s)
        if decision.predicted_handover_s is not None:
            self._handover_error_s.observe(abs(decision.handover_s - decision.predicted_handover_s))


@dataclass(frozen=True, slots=True)
class ReplicaQueues:
    """What waits and runs at one ingress replica."""

    states: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(("waiting", "prefilling", "decoding"), 0))
    """Requests under way, by state."""
    limit: int = 0
    num_waiting_to_read: int = 0
    """Long requests that wait for a process."""
    num_reading: int = 0
    waiting_bytes: int = 0


class IngressMetrics:
    """Metrics of one ingress replica, reported once per request, and the gaps between its deliveries as these come."""

    def __init__(
        self,
        tenants: Iterable[str],
        replica: str = "",
        routes: Iterable[str] = (),
        kinds: Any = ray_metrics,
        adapters: Iterable[str] = (),
    ) -> None:
        """`tenants` are the names of all tenants that may send requests. `replica` names this replica at `/metrics`,
        as Serve does elsewhere. `routes` are those whose refusals are counted from 0 on. `kinds` has the classes of
        metrics: in a replica of Serve's `ray.serve.metrics`, which names the replica. `adapters` are the names in the
        configuration."""
        tags = {"replica": replica}
        self._adapters = frozenset(adapters)

        def counter(name: str, description: str, *keys: str) -> CounterInstrument:
            metric = kinds.Counter(name, description=description, tag_keys=_keys(*keys))
            return CounterInstrument(metric, tags)

        def histogram(
            name: str, description: str, bounds: Sequence[float] = _LATENCY_S, **values: Sequence[str]
        ) -> HistogramInstrument:
            boundaries = [*map(float, bounds)]
            metric = kinds.Histogram(name, description=description, boundaries=boundaries, tag_keys=_keys(*values))
            return HistogramInstrument(metric, tags, **values)

        def gauge(name: str, description: str, *keys: str) -> GaugeInstrument:
            return GaugeInstrument(kinds.Gauge(name, description=description, tag_keys=_keys(*keys)), tags)

        self._requests = counter("raydix_requests", "Requests by how they ended.", "tenant", "outcome")
        self._prompt = counter("raydix_prompt_tokens", "Prompt tokens received.", "tenant")
        self._generated = counter("raydix_generation_tokens", "Tokens generated.", "tenant")
        self._hits = counter(
            "raydix_cache_hit_tokens",
            "Prompt tokens found in a cache, by where the request's worker found them.",
            "tenant",
            "source",
        )
        self._computed = counter("raydix_uncached_tokens", "Prompt tokens found in no cache.", "tenant")
        whose = "by adapter; those loaded at run time are one."
        self._adapter_requests = counter(
            "raydix_adapter_requests", f"Requests of adapters by how they ended, {whose}", "adapter", "outcome"
        )
        self._adapter_prompt = counter("raydix_adapter_prompt_tokens", f"Prompt tokens received, {whose}", "adapter")
        self._adapter_generated = counter("raydix_adapter_generation_tokens", f"Tokens generated, {whose}", "adapter")
        self._ttft_s = histogram("raydix_ttft_seconds", "Arrival to first token.", operation=OPERATIONS)
        self._tpot_s = histogram("raydix_tpot_seconds", "Mean time per token after the first.", operation=OPERATIONS)
        self._gap_s = histogram(
            "raydix_inter_token_seconds", "Time between two deliveries of a choice's tokens, each of a step.", _GAPS_S
        )
        self._duration_s = histogram(
            "raydix_request_seconds", "Arrival to end, of requests that did not fail.", operation=OPERATIONS
        )
        self._decode_s = histogram("raydix_decode_seconds", "First token to end, of requests that did not fail.")
        self._prompt_lengths = histogram("raydix_request_prompt_tokens", "Prompt tokens of a request.", _LENGTHS)
        self._answer_lengths = histogram(
            "raydix_request_generation_tokens", "Tokens generated for a request, of all its choices.", _LENGTHS
        )
        self._longest = histogram("raydix_longest_answer_tokens", "Tokens of a request's longest choice.", _LENGTHS)
        self._uncached_lengths = histogram(
            "raydix_request_uncached_tokens", "Prompt tokens of a request that were found in no cache.", _LENGTHS
        )
        self._max_tokens = histogram(
            "raydix_request_max_tokens", "Limit of tokens of a request's choices, as asked or by default.", _LENGTHS
        )
        self._choices = histogram("raydix_request_choices", "Choices generated for a request.", _CHOICES)
        self._under_way = gauge("raydix_requests_under_way", "Requests that have not ended, by state.", "state")
        self._limit = gauge("raydix_request_limit", "Answers under way above which requests are refused.")
        self._readers = gauge("raydix_reader_requests", "Long requests before the processes that read them.", "state")
        self._reader_bytes = gauge("raydix_reader_waiting_bytes", "Bytes of long requests that wait to be read.")
        self._lookups = counter(
            "raydix_transcript_lookups",
            "Answers that chats went on from by reference, by whether their token ids were known.",
            "result",
        )
        self._failovers = counter("raydix_failovers", "Requests that went on at another worker.")
        self._refusals = counter(
            "raydix_refusals",
            "Requests refused or failed, by route, and the status and code of the error; `/health` is left out.",
            "route",
            "status",
            "code",
        )

        self.know(tenants)
        names = (*sorted(self._adapters), LOADED)
        self._adapter_requests.begin(adapter=names, outcome=OUTCOMES)
        self._adapter_prompt.begin(adapter=names)
        self._adapter_generated.begin(adapter=names)
        self._lookups.begin(result=("hit", "miss"))
        self._failovers.begin()
        self.look(ReplicaQueues())
        for error in COMMON_REFUSALS:
            self._refusals.begin(route=tuple(routes), status=(str(error.status),), code=(error.code,))

    def know(self, tenants: Iterable[str]) -> None:
        """Begin the counts of these tenants that have none yet."""
        names = tuple(tenants)
        self._requests.begin(tenant=names, outcome=OUTCOMES)
        self._prompt.begin(tenant=names)
        self._generated.begin(tenant=names)
        self._hits.begin(tenant=names, source=("local", "imported"))
        self._computed.begin(tenant=names)

    def look(self, queues: "ReplicaQueues") -> None:
        """Report the queues of now."""
        for state, count in queues.states.items():
            self._under_way.set(count, {"state": state})
        self._limit.set(queues.limit)
        self._readers.set(queues.num_waiting_to_read, {"state": "waiting"})
        self._readers.set(queues.num_reading, {"state": "reading"})
        self._reader_bytes.set(queues.waiting_bytes)

    def token_gap(self, seconds: float) -> None:
        """Count the time between two deliveries of tokens."""
        self._gap_s.observe(seconds)

    def finished(self, request: "FinishedRequest") -> None:
        """Count one request at its end."""
        tenant = request.tenant
        self._requests.inc(tags={"tenant": tenant, "outcome": request.outcome})
        self._prompt.inc(request.num_prompt, tags={"tenant": tenant})

        if request.num_generated:
            self._generated.inc(request.num_generated, tags={"tenant": tenant})
        for source, count in request.hits.items():
            if count:
                self._hits.inc(count, tags={"tenant": tenant, "source": source})

        if request.num_computed:
            self._computed.inc(request.num_computed, tags={"tenant": tenant})

        if request.adapter is not None:
            adapter = request.adapter if request.adapter in self._adapters else LOADED
            self._adapter_requests.inc(tags={"adapter": adapter, "outcome": request.outcome})
            self._adapter_prompt.inc(request.num_prompt, tags={"adapter": adapter})
            if request.num_generated:
                self._adapter_generated.inc(request.num_generated, tags={"adapter": adapter})

        self._prompt_lengths.observe(request.num_prompt)
        self._answer_lengths.observe(request.num_generated)
        self._longest.observe(request.num_longest)
        self._uncached_lengths.observe(request.num_computed)
        self._max_tokens.observe(request.max_tokens)
        self._choices.observe(request.num_choices)
        # What failed has no duration that a client could have hoped for.
        if request.outcome != "failed":
            self._duration_s.observe(request.duration_s, operation=request.operation)
            if request.decode_s is not None:
                self._decode_s.observe(request.decode_s)
        if request.ttft_s is not None:
            self._ttft_s.observe(request.ttft_s, operation=request.operation)
        if request.tpot_s is not None:
            self._tpot_s.observe(request.tpot_s, operation=request.operation)

    def refused(self, route: str, status: int, code: str) -> None:
        """Count one error that a client got."""
        self._refusals.inc(tags={"route": route, "status": str(status), "code": code})

    def looked_up(self, hit: bool) -> None:
        self._lookups.inc(tags={"result": "hit" if hit else "miss"})

    def failed_over(self) -> None:
        self._failovers.inc()


class HoldMetrics:
    """Work that kept one process to itself, as its watchdog finds it (`raydix.actors.watchdog`)."""

    def __init__(self, process: str) -> None:
        """`process` is a worker's id, a replica's, or the manager's."""
        tags = {"process": process}

        def counted(metric: Any) -> Any:
            metric.set_default_tags(tags)
            return metric

        what = "of the event loop or hold of the interpreter's lock"
        count = Counter(
            "raydix_holds",
            description=f"Times that one turn {what} took more than 50 ms of processor time.",
            tag_keys=("process", "of"),
        )
        longest = Gauge(
            "raydix_longest_hold_seconds",
            description=f"Longest turn {what} above 50 ms since the process started, in processor time; 0 without one.",
            tag_keys=("process", "of"),
        )
        self._holds = CounterInstrument(counted(count), tags)
        self._longest_s = GaugeInstrument(counted(longest), tags)
        self._longest = dict.fromkeys(HOLDS, 0.0)

    def begin(self) -> None:
        """The process is watched from now on."""
        self._holds.begin(of=HOLDS)
        for of in HOLDS:
            self._longest_s.set(0.0, {"of": of})

    def held(self, hold: Hold) -> None:
        """Count one; called in the watchdog's thread."""
        self._holds.inc(tags={"of": hold.of})
        if hold.seconds > self._longest[hold.of]:
            self._longest[hold.of] = hold.seconds
            self._longest_s.set(hold.seconds, {"of": hold.of})


def _named(drafts: Mapping[DraftSource, DraftCounts]) -> dict[str, float]:
    """The counts of drafts by names of their own."""
    return {
        _name(source, depth, outcome): count
        for source, counts in drafts.items()
        for outcome, tokens in (("drafted", counts.lengths), ("accepted", counts.survivals))
        for depth, count in by_depth(tokens).items()
    }


def _name(source: DraftSource, depth: str, outcome: str) -> str:
    return f"{source} {depth} {outcome}"


def _keys(*names: str) -> Any:
    """Tag keys; Serve's annotation allows no more than one."""
    return names
