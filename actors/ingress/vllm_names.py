"""vLLM's names of metrics whose meaning is the same here, so that its dashboards and alerts show a raydix server.

Aliases stand at `/metrics` alone, with the label `model_name` that vLLM's dashboards select by, and with the labels
that the metric has here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from raydix.actors.metric_values import Distribution, Labels, MetricFamily, labels_of

NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "raydix_running_requests": ("vllm:num_requests_running",),
        "raydix_waiting_requests": ("vllm:num_requests_waiting",),
        "raydix_kv_usage": ("vllm:kv_cache_usage_perc",),
        "raydix_preemptions": ("vllm:num_preemptions",),
        "raydix_queue_seconds": ("vllm:request_queue_time_seconds",),
        # Each token of a prompt is looked for in the cache.
        "raydix_prompt_tokens": ("vllm:prompt_tokens", "vllm:prefix_cache_queries"),
        "raydix_cache_hit_tokens": ("vllm:prefix_cache_hits",),
        "raydix_generation_tokens": ("vllm:generation_tokens",),
        "raydix_requests": ("vllm:request_success",),
        "raydix_ttft_seconds": ("vllm:time_to_first_token_seconds",),
        "raydix_tpot_seconds": ("vllm:request_time_per_output_token_seconds",),
        "raydix_request_seconds": ("vllm:e2e_request_latency_seconds",),
        "raydix_decode_seconds": ("vllm:request_decode_time_seconds",),
        "raydix_request_prompt_tokens": ("vllm:request_prompt_tokens",),
        "raydix_request_generation_tokens": ("vllm:request_generation_tokens",),
    }
)
"""vLLM's names by the names here, of counters without `_total`."""
FINISHED_REASONS: Mapping[str, str] = MappingProxyType({"stop": "stop", "length": "length", "aborted": "abort"})
"""vLLM's names of outcomes. It counts no failures."""


def aliases(families: Iterable[MetricFamily], model: str) -> list[MetricFamily]:
    """The families under vLLM's names too, for a model of this name."""
    return [
        replace(family, name=name, values=_values(family, model))
        for family in families
        for name in NAMES.get(family.name, ())
    ]


def _values(family: MetricFamily, model: str) -> Mapping[Labels, float | Distribution]:
    values: dict[Labels, float | Distribution] = {}
    for labels, value in family.values.items():
        tags = dict(labels)
        if family.name == "raydix_requests":
            reason = FINISHED_REASONS.get(tags.pop("outcome", ""))
            if reason is None:
                continue
            tags["finished_reason"] = reason
        values[labels_of({**tags, "model_name": model})] = value
    return values
