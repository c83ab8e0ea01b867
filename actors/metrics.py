"""Every metric that raydix reports, in one place. Prometheus names are `ray_` plus these (Ray adds the prefix)."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ray.serve import metrics as serve_metrics
from ray.util.metrics import Counter, Gauge, Histogram

from engine.core.costs import StepShape
from engine.core.types import Role

if TYPE_CHECKING:
    from engine.core.explain import Decision
    from engine.core.request import Request
    from engine.model.engine import Engine

_LATENCY_S = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0]


class WorkerMetrics:
    """What one worker reports. Steps are only counted; `flush` reports them, off the steps' critical path."""

    def __init__(self, worker_id: str, role: Role) -> None:
        tags = {"worker": worker_id, "role": str(role)}
        keys = tuple(tags)

        def counter(name: str, description: str, *more_keys: str) -> Counter:
            metric = Counter(name, description=description, tag_keys=keys + more_keys)
            metric.set_default_tags(tags)
            return metric

        def gauge(name: str, description: str) -> Gauge:
            metric = Gauge(name, description=description, tag_keys=keys)
            metric.set_default_tags(tags)
            return metric

        self._prefilled = counter("raydix_prefill_tokens", "Prompt tokens computed, again after a loss too.")
        self._decoded = counter("raydix_decode_tokens", "Generated tokens computed.")
        self._exported = counter("raydix_exported_bytes", "KV bytes sent to the object store.")
        self._imported = counter("raydix_imported_bytes", "KV bytes taken from the object store.")
        self._preempted = counter(
            "raydix_preemptions", "Requests that lost their blocks to make room, by what became of their KV.", "way"
        )
        self._swapped = counter("raydix_swapped_bytes", "KV bytes of preempted requests, by where to.", "direction")
        self._swap_s = counter("raydix_swap_seconds", "Time that steps took for these copies.", "direction")
        self._running = gauge("raydix_running_requests", "Requests that hold blocks.")
        self._waiting = gauge("raydix_waiting_requests", "Requests that wait for blocks, imports or their turn.")
        self._available = gauge("raydix_available_blocks", "Blocks that are free or cached by nobody's request.")
        self._cached = gauge("raydix_cached_blocks", "Blocks that nobody holds and that can still be hit.")
        self._queue_s = Histogram(
            "raydix_queue_seconds", description="Submission to start.", boundaries=_LATENCY_S, tag_keys=keys
        )
        self._queue_s.set_default_tags(tags)
        self._num_prefilled = 0
        self._num_decoded = 0
        self._preemptions: dict[str, float] = {}

    def step(self, shape: StepShape) -> None:
        """Count one engine step."""
        self._num_prefilled += shape.num_prefill_tokens
        self._num_decoded += shape.num_decodes

    def flush(self, engine: "Engine") -> None:
        """Report the steps counted since the last time, and how the engine is now."""
        for metric, count in ((self._prefilled, self._num_prefilled), (self._decoded, self._num_decoded)):
            if count:
                metric.inc(count)
        self._num_prefilled = self._num_decoded = 0
        self._flush_preemptions(asdict(engine.preemptions))
        self._running.set(len(engine.scheduler.running))
        self._waiting.set(engine.scheduler.num_waiting)
        self._available.set(engine.pool.num_available)
        self._cached.set(engine.pool.num_cached)

    def _flush_preemptions(self, counts: dict[str, float]) -> None:
        """Report what these counts have grown by."""
        for name, metric, tags in (
            ("num_swapped", self._preempted, {"way": "swap"}),
            ("num_recomputed", self._preempted, {"way": "recompute"}),
            ("swapped_out_bytes", self._swapped, {"direction": "out"}),
            ("swapped_in_bytes", self._swapped, {"direction": "in"}),
            ("swapped_out_s", self._swap_s, {"direction": "out"}),
            ("swapped_in_s", self._swap_s, {"direction": "in"}),
        ):
            grown = counts[name] - self._preemptions.get(name, 0)
            if grown:
                metric.inc(grown, tags=tags)
        self._preemptions = counts

    def finished(self, request: "Request") -> None:
        """Count one request that ended or was handed over."""
        if request.started_at is not None:
            self._queue_s.observe(max(request.started_at - request.submitted_at, 0.0))

    def exported_bytes(self, count: int) -> None:
        self._exported.inc(count)

    def imported_bytes(self, count: int) -> None:
        self._imported.inc(count)


class ManagerMetrics:
    """What the manager reports of its decisions."""

    def __init__(self) -> None:
        self._error_s = Histogram(
            "raydix_ttft_prediction_error_seconds",
            description="Difference of predicted and actual time from admission to first token.",
            boundaries=_LATENCY_S,
        )
        self._regret_s = Histogram(
            "raydix_placement_regret_seconds",
            description="How much later the first token came than the best other candidate was predicted to give it.",
            boundaries=_LATENCY_S,
        )

    def first_token(self, decision: "Decision") -> None:
        """Compare what was predicted with what happened."""
        if decision.ttft_s is not None and decision.regret_s is not None:
            self._error_s.observe(abs(decision.ttft_s - decision.predicted_ttft_s))
            self._regret_s.observe(decision.regret_s)


class IngressMetrics:
    """What one ingress replica reports, once per request."""

    def __init__(self) -> None:
        self._requests = serve_metrics.Counter(
            "raydix_requests", description="Requests by how they ended.", tag_keys=_keys("tenant", "outcome")
        )
        self._prompt = serve_metrics.Counter(
            "raydix_prompt_tokens", description="Prompt tokens received.", tag_keys=_keys("tenant")
        )
        self._generated = serve_metrics.Counter(
            "raydix_generation_tokens", description="Tokens generated.", tag_keys=_keys("tenant")
        )
        self._hits = serve_metrics.Counter(
            "raydix_cache_hit_tokens",
            description="Prompt tokens found in a cache, by where the request's worker found them.",
            tag_keys=_keys("tenant", "source"),
        )
        self._ttft_s = serve_metrics.Histogram(
            "raydix_ttft_seconds", description="Arrival to first token.", boundaries=_LATENCY_S
        )
        self._tpot_s = serve_metrics.Histogram(
            "raydix_tpot_seconds", description="Mean time per token after the first.", boundaries=_LATENCY_S
        )
        self._lookups = serve_metrics.Counter(
            "raydix_transcript_lookups",
            description="Chats with earlier answers, by whether their token ids were known.",
            tag_keys=("result",),
        )
        self._failovers = serve_metrics.Counter(
            "raydix_failovers", description="Requests that went on at another worker."
        )

    def finished(
        self,
        tenant: str,
        outcome: str,
        num_prompt: int,
        num_generated: int,
        hits: dict[str, int],
        ttft_s: float | None,
        tpot_s: float | None,
    ) -> None:
        """Count one request at its end. `tenant` is a configured name, so there are few."""
        self._requests.inc(tags={"tenant": tenant, "outcome": outcome})
        self._prompt.inc(num_prompt, tags={"tenant": tenant})
        if num_generated:
            self._generated.inc(num_generated, tags={"tenant": tenant})
        for source, count in hits.items():
            if count:
                self._hits.inc(count, tags={"tenant": tenant, "source": source})
        if ttft_s is not None:
            self._ttft_s.observe(ttft_s)
        if tpot_s is not None:
            self._tpot_s.observe(tpot_s)

    def looked_up(self, hit: bool) -> None:
        self._lookups.inc(tags={"result": "hit" if hit else "miss"})

    def failed_over(self) -> None:
        self._failovers.inc()


def _keys(*names: str) -> Any:
    """Tag keys; Serve's annotation allows no more than one."""
    return names
