"""Declarations of all metrics. Ray exports them under these names with the prefix `ray_`, `/metrics` without it."""

from collections import Counter as Counts
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ray.util import metrics as ray_metrics
from ray.util.metrics import Counter, Gauge, Histogram

from raydix.actors.instruments import CounterInstrument, GaugeInstrument, HistogramInstrument
from raydix.actors.watchdog import Hold
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

OUTCOMES = ("stop", "length", "aborted", "failed")
"""Ways in which a request may end."""
COMMON_REFUSALS: tuple[type[RaydixError], ...] = (
    RequestError,
    AuthenticationError,
    ModelNotFoundError,
    BodyTooLargeError,
    OverloadedError,
)
"""Errors whose counts begin at 0: an error's first occurrence shall enter a rate."""
LOADED = "loaded"
"""Label of the adapters that were loaded at run time, all together: clients and administrators name no metrics."""
HOLDS = ("loop", "lock")
"""Kinds of holds that a process's watchdog finds: a turn of the event loop, the interpreter's lock."""
DUTIES = (Role.PREFILL, Role.DECODE, Role.MIXED)
_LENGTHS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000]
"""Bounds of numbers of tokens."""
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

        def gauge(name: str, description: str) -> GaugeInstrument:
            metric = Gauge(name, description=description, tag_keys=keys)
            metric.set_default_tags(tags)
            return GaugeInstrument(metric, tags)

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
        queue_s = Histogram(
            "raydix_queue_seconds", description="Submission to start.", boundaries=_LATENCY_S, tag_keys=keys
        )
        queue_s.set_default_tags(tags)
        self._queue_s = HistogramInstrument(queue_s, tags)
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

    def step(self, shape: StepShape) -> None:
        """Count one engine step."""
        self._num_prefilled += shape.num_prefill_tokens
        self._num_decoded += shape.num_decodes

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

    def finished(self, request: "Request") -> None:
        """Count one request that ended or was handed over."""
        if request.started_at is not None:
            self._queue_s.observe(max(request.started_at - request.submitted_at, 0.0))

    def exported_bytes(self, count: int) -> None:
        self._exported.inc(count)

    def imported_bytes(self, count: int) -> None:
        self._imported.inc(count)


class ManagerMetrics:
    """Metrics of the manager's decisions."""

    def __init__(self) -> None:
        self._has_elastic = False
        error_s = Histogram(
            "raydix_ttft_prediction_error_seconds",
            description="Difference of predicted and actual time from admission to first token.",
            boundaries=_LATENCY_S,
        )
        regret_s = Histogram(
            "raydix_placement_regret_seconds",
            description="How much later the first token came than the best other candidate was predicted to give "
            "it; 0 without one.",
            boundaries=_LATENCY_S,
        )
        self._error_s, self._regret_s = HistogramInstrument(error_s), HistogramInstrument(regret_s)
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

        def counter(name: str, description: str, key: str) -> CounterInstrument:
            return CounterInstrument(Counter(name, description=description, tag_keys=(key,)))

        self._workers = gauge("raydix_workers", "Workers that are registered, by role.", "role")
        self._index = gauge("raydix_index_blocks", "Blocks whose places or producers are known.")
        self._segments = gauge("raydix_segment_bytes", "Exported KV in the object store and on disk.", "place")
        self._segment_budget = gauge("raydix_segment_budget_bytes", "Room for exported KV.", "place")
        self._paused = gauge("raydix_paused_sessions", "Sessions whose requests wait for their turn.")
        self._hit = counter("raydix_hit_blocks", "Blocks of admitted prompts that were found, by place.", "source")
        self._missed = counter("raydix_missed_blocks", "Blocks of admitted prompts to compute, by reason.", "reason")
        self._evicted = counter("raydix_evicted_blocks", "Blocks that left a place, by reason.", "reason")
        self._hit.begin(source=sorted(map(str, HITS)))
        self._missed.begin(reason=sorted(map(str, {*BlockSource} - HITS)))
        self._evicted.begin(reason=sorted(map(str, EvictionReason)))
        self._reported: Counts[str] = Counts()
        """Counts that were reported, by metric and value of its tag."""

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

        for source, count in directory.statistics.sources.items():
            if source in HITS:
                self._grow(self._hit, "source", str(source), count)
            else:
                self._grow(self._missed, "reason", str(source), count)
        for reason, count in directory.statistics.evicted_blocks.items():
            self._grow(self._evicted, "reason", str(reason), count)

    def _grow(self, metric: CounterInstrument, key: str, value: str, count: int) -> None:
        name = f"{metric.metric.info['name']} {value}"
        if count > self._reported[name]:
            metric.inc(count - self._reported[name], {key: value})
            self._reported[name] = count

    def duties(self, duties: Sequence[Role]) -> None:
        """Report the duties of the elastic workers, once there have been such workers."""
        self._has_elastic = self._has_elastic or bool(duties)
        for duty in DUTIES if self._has_elastic else ():
            self._elastic.set(duties.count(duty), {"duty": str(duty)})

    def wanted(self, number: int) -> None:
        """Report the wanted number of elastic workers."""
        self._wanted.set(number, {})

    def first_token(self, decision: "Decision") -> None:
        """Compare the prediction of a first token with the measurement."""
        if decision.ttft_s is not None and decision.regret_s is not None:
            self._error_s.observe(abs(decision.ttft_s - decision.predicted_ttft_s))
            self._regret_s.observe(decision.regret_s)


class IngressMetrics:
    """Metrics of one ingress replica, reported once per request."""

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

        def histogram(name: str, description: str, bounds: Sequence[float] = _LATENCY_S) -> HistogramInstrument:
            metric = kinds.Histogram(name, description=description, boundaries=[*map(float, bounds)])
            return HistogramInstrument(metric, tags)

        self._requests = counter("raydix_requests", "Requests by how they ended.", "tenant", "outcome")
        self._prompt = counter("raydix_prompt_tokens", "Prompt tokens received.", "tenant")
        self._generated = counter("raydix_generation_tokens", "Tokens generated.", "tenant")
        self._hits = counter(
            "raydix_cache_hit_tokens",
            "Prompt tokens found in a cache, by where the request's worker found them.",
            "tenant",
            "source",
        )
        whose = "by adapter; those loaded at run time are one."
        self._adapter_requests = counter(
            "raydix_adapter_requests", f"Requests of adapters by how they ended, {whose}", "adapter", "outcome"
        )
        self._adapter_prompt = counter("raydix_adapter_prompt_tokens", f"Prompt tokens received, {whose}", "adapter")
        self._adapter_generated = counter("raydix_adapter_generation_tokens", f"Tokens generated, {whose}", "adapter")
        self._ttft_s = histogram("raydix_ttft_seconds", "Arrival to first token.")
        self._tpot_s = histogram("raydix_tpot_seconds", "Mean time per token after the first.")
        self._duration_s = histogram("raydix_request_seconds", "Arrival to end, of requests that did not fail.")
        self._decode_s = histogram("raydix_decode_seconds", "First token to end, of requests that did not fail.")
        self._prompt_lengths = histogram("raydix_request_prompt_tokens", "Prompt tokens of a request.", _LENGTHS)
        self._answer_lengths = histogram(
            "raydix_request_generation_tokens", "Tokens generated for a request, of all its choices.", _LENGTHS
        )
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
        for error in COMMON_REFUSALS:
            self._refusals.begin(route=tuple(routes), status=(str(error.status),), code=(error.code,))

    def know(self, tenants: Iterable[str]) -> None:
        """Begin the counts of these tenants that have none yet."""
        names = tuple(tenants)
        self._requests.begin(tenant=names, outcome=OUTCOMES)
        self._prompt.begin(tenant=names)
        self._generated.begin(tenant=names)
        self._hits.begin(tenant=names, source=("local", "imported"))

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

        if request.adapter is not None:
            adapter = request.adapter if request.adapter in self._adapters else LOADED
            self._adapter_requests.inc(tags={"adapter": adapter, "outcome": request.outcome})
            self._adapter_prompt.inc(request.num_prompt, tags={"adapter": adapter})
            if request.num_generated:
                self._adapter_generated.inc(request.num_generated, tags={"adapter": adapter})

        self._prompt_lengths.observe(request.num_prompt)
        self._answer_lengths.observe(request.num_generated)
        # What failed has no duration that a client could have hoped for.
        if request.outcome != "failed":
            self._duration_s.observe(request.duration_s)
            if request.decode_s is not None:
                self._decode_s.observe(request.decode_s)
        if request.ttft_s is not None:
            self._ttft_s.observe(request.ttft_s)
        if request.tpot_s is not None:
            self._tpot_s.observe(request.tpot_s)

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
