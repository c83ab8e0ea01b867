"""Metrics under the names that vLLM and OpenTelemetry give them, where the meaning is the same.

So dashboards and alerts made for a vLLM server show a raydix server. Aliases stand at `/metrics` alone. Beside the
labels that a metric has here they have the model's, by which such dashboards select.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from raydix.actors.metric_values import Labels, MetricFamily, labels_of, merged


@dataclass(frozen=True, slots=True, eq=False)
class Alias:
    """Another name of a metric; both names are those of counters without `_total`."""

    ours: str
    theirs: str
    labels: Mapping[str, str] = field(default_factory=dict)
    """Names of labels there by the names here; others stay as they are."""
    values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Values there by the values here, of labels by their name here; samples with other values have no alias."""
    left_out: frozenset[str] = frozenset()
    """Labels that are not there."""
    more: Mapping[str, str] = field(default_factory=dict)
    """Further labels."""


# vLLM's names.
VLLM = (
    Alias("raydix_running_requests", "vllm:num_requests_running"),
    Alias("raydix_waiting_requests", "vllm:num_requests_waiting"),
    Alias("raydix_kv_usage", "vllm:kv_cache_usage_perc"),
    Alias("raydix_pool_info", "vllm:cache_config_info", labels={"num_blocks": "num_gpu_blocks"}),
    Alias("raydix_preemptions", "vllm:num_preemptions"),
    Alias("raydix_prompt_tokens", "vllm:prompt_tokens"),
    # Each token of a prompt is looked for in the cache.
    Alias("raydix_prompt_tokens", "vllm:prefix_cache_queries"),
    Alias("raydix_cache_hit_tokens", "vllm:prefix_cache_hits"),
    Alias("raydix_cache_hit_tokens", "vllm:prompt_tokens_cached"),
    Alias(
        "raydix_cache_hit_tokens",
        "vllm:prompt_tokens_by_source",
        values={"source": {"local": "local_cache_hit", "imported": "external_kv_transfer"}},
    ),
    Alias("raydix_uncached_tokens", "vllm:prompt_tokens_by_source", more={"source": "local_compute"}),
    Alias("raydix_generation_tokens", "vllm:generation_tokens"),
    Alias(
        "raydix_requests",
        "vllm:request_success",
        labels={"outcome": "finished_reason"},
        # It counts no failures.
        values={"outcome": {"stop": "stop", "length": "length", "aborted": "abort"}},
    ),
    Alias("raydix_ttft_seconds", "vllm:time_to_first_token_seconds"),
    Alias("raydix_inter_token_seconds", "vllm:inter_token_latency_seconds"),
    Alias("raydix_tpot_seconds", "vllm:request_time_per_output_token_seconds"),
    Alias("raydix_request_seconds", "vllm:e2e_request_latency_seconds"),
    Alias("raydix_queue_seconds", "vllm:request_queue_time_seconds"),
    Alias("raydix_prefill_seconds", "vllm:request_prefill_time_seconds"),
    Alias("raydix_decode_seconds", "vllm:request_decode_time_seconds"),
    Alias("raydix_running_seconds", "vllm:request_inference_time_seconds"),
    Alias("raydix_request_prompt_tokens", "vllm:request_prompt_tokens"),
    Alias("raydix_request_generation_tokens", "vllm:request_generation_tokens"),
    Alias("raydix_longest_answer_tokens", "vllm:request_max_num_generation_tokens"),
    Alias("raydix_request_uncached_tokens", "vllm:request_prefill_kv_computed_tokens"),
    Alias("raydix_request_max_tokens", "vllm:request_params_max_tokens"),
    Alias("raydix_request_choices", "vllm:request_params_n"),
    # A histogram, in spite of its name.
    Alias("raydix_step_tokens", "vllm:iteration_tokens_total"),
    # Each draft has one first token.
    Alias(
        "raydix_draft_tokens",
        "vllm:spec_decode_num_drafts",
        values={"depth": {"1": "1"}},
        left_out=frozenset(("depth",)),
    ),
    Alias("raydix_draft_tokens", "vllm:spec_decode_num_draft_tokens"),
    Alias("raydix_accepted_draft_tokens", "vllm:spec_decode_num_accepted_tokens"),
)
_OPERATION = {"operation": "gen_ai_operation_name"}
_PROVIDER = {"gen_ai_provider_name": "raydix"}
# OpenTelemetry's `gen_ai.server.*`, as Prometheus writes its names.
OPEN_TELEMETRY = (
    Alias("raydix_ttft_seconds", "gen_ai_server_time_to_first_token_seconds", _OPERATION, more=_PROVIDER),
    Alias("raydix_tpot_seconds", "gen_ai_server_time_per_output_token_seconds", _OPERATION, more=_PROVIDER),
    Alias("raydix_request_seconds", "gen_ai_server_request_duration_seconds", _OPERATION, more=_PROVIDER),
)


MAX_KEPT = 1 << 14  # labels of aliases that are kept between scrapes


def aliases(families: Iterable[MetricFamily], model: str) -> list[MetricFamily]:
    """The families under their other names, for a model of this name."""
    found = {family.name: family for family in families}
    named = [(alias, ("model_name", model)) for alias in VLLM]
    named += [(alias, ("gen_ai_request_model", model)) for alias in OPEN_TELEMETRY]
    return merged(_alias(found[alias.ours], alias, more) for alias, more in named if alias.ours in found)


def _alias(family: MetricFamily, alias: Alias, more: tuple[str, str]) -> MetricFamily:
    named = ((_labels(alias, labels, more), value) for labels, value in family.values.items())
    values = {labels: value for labels, value in named if labels is not None}
    return MetricFamily(
        alias.theirs, kind=family.kind, description=family.description, values=values, bounds=family.bounds
    )


@lru_cache(MAX_KEPT)
def _labels(alias: Alias, labels: Labels, more: tuple[str, str]) -> Labels | None:
    """The labels of a sample under its other name; None if the sample has none."""
    tags = {**alias.more, more[0]: more[1]}
    for key, own in labels:
        known = alias.values.get(key)
        if known is not None and own not in known:
            return None
        if key not in alias.left_out:
            tags[alias.labels.get(key, key)] = own if known is None else known[own]
    return labels_of(tags)
