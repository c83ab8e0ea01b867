"""The metrics of `actors/metrics.py` reach the node's Prometheus port, with the values that requests gave them."""

import json
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import ray
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from raydix.engine.core.manager.explain import HITS, BlockSource
from raydix.engine.core.types import DraftSource, EvictionReason
from tests.integration.cluster import paced
from tests.integration.conftest import MODEL, NUM_BLOCKS, WAIT_S, Server, eventually, random_prompt
from tests.integration.thin_model import NUM_LAYERS

PROMPT_TOKENS = 500
HIT_TOKENS = PROMPT_TOKENS // 16 * 16
ANSWER_TOKENS = 20
PAUSE_S = 0.5
"""Between two scrapes, each of which is some work. Ray gathers metrics every four seconds (`cluster.METRICS_MS`)."""

PACE_S = 0.1
"""Least time of a step: the stream outlasts some gatherings of metrics."""


@dataclass(frozen=True)
class Scrape:
    """What Prometheus would see now."""

    metrics: tuple[Metric, ...]

    @classmethod
    def now(cls) -> "Scrape":
        [node] = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with urllib.request.urlopen(url, timeout=WAIT_S) as response:
            return cls(tuple(text_string_to_metric_families(response.read().decode())))

    def value(self, name: str, **labels: str) -> float | None:
        """The sum of the samples with these labels; None if there are none."""
        values = [
            sample.value
            for metric in self.metrics
            for sample in metric.samples
            if sample.name == f"ray_raydix_{name}" and labels.items() <= sample.labels.items()
        ]
        return sum(values) if values else None

    def grown(self, since: "Scrape", name: str, **labels: str) -> float:
        return (self.value(name, **labels) or 0) - (since.value(name, **labels) or 0)


COUNTERS: dict[str, dict[str, tuple[str, ...]]] = {
    "prefill_tokens": {},
    "decode_tokens": {},
    "draft_tokens": {"source": tuple(DraftSource)},
    "accepted_draft_tokens": {"source": tuple(DraftSource)},
    "exported_bytes": {},
    "imported_bytes": {},
    "preemptions": {"way": ("swap", "recompute")},
    "swapped_bytes": {"direction": ("out", "in")},
    "swap_seconds": {"direction": ("out", "in")},
    "requests": {"tenant": ("anonymous",), "outcome": ("stop", "length", "aborted", "failed")},
    "prompt_tokens": {"tenant": ("anonymous",)},
    "generation_tokens": {"tenant": ("anonymous",)},
    "cache_hit_tokens": {"tenant": ("anonymous",), "source": ("local", "imported")},
    "transcript_lookups": {"result": ("hit", "miss")},
    "failovers": {},
    "refusals": {
        "route": ("/v1/completions", "/v1/chat/completions"),
        "status": ("400",),
        "code": ("invalid_request",),
    },
    "hit_blocks": {"source": tuple(HITS)},
    "missed_blocks": {"reason": tuple({*BlockSource} - HITS)},
    "evicted_blocks": {"reason": tuple(EvictionReason)},
    "idle_tokens": {},
    "idle_requests": {"outcome": ("computed", "found", "dropped")},
}


@pytest.mark.slow
def test_counters_are_there_before_their_first_event(server: Server) -> None:
    """With every value that their tags can have. Which of them have counted by now depends on the tests before."""

    def missing(scrape: Scrape) -> list[tuple[str, dict[str, str]]]:
        return [
            (name, labels)
            for name, values in COUNTERS.items()
            for labels in (dict(zip(values, each, strict=True)) for each in product(*values.values()))
            if scrape.value(f"{name}_total", **labels) is None
        ]

    seen(lambda: scrape if not missing(scrape := Scrape.now()) else None, "all counters")


@pytest.mark.slow
def test_requests_are_measured(server: Server, tmp_path: Path) -> None:
    """Beside a stream that goes on until its client leaves."""
    with paced(server, tmp_path / "gate", PACE_S):
        check_measures(server)


def check_measures(server: Server) -> None:
    prefill, decode = (server.workers()[role]["worker_id"] for role in ("prefill", "decode"))
    before, since = seen(Scrape.now, "the port is open"), time.monotonic()
    running = server.stream(random_prompt(80, 300), max_tokens=3000, speculation=False)
    next(running)
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 2,
        "temperature": 0,
        "messages": [{"role": "user", "content": "Hi."}],
    }
    for _ in range(2):
        answer = json.loads(server.request("POST", "/v1/chat/completions", body | {"store": True})[2])
        body["messages"] += [answer["choices"][0]["message"], {"role": "user", "content": "And?"}]
    for _ in range(2):
        server.complete(random_prompt(81, PROMPT_TOKENS), max_tokens=ANSWER_TOKENS)

    during = seen(lambda: measured(before, decode), "two requests and a stream")
    assert during.grown(before, "prompt_tokens_total", tenant="anonymous") >= 2 * PROMPT_TOKENS
    assert during.grown(before, "generation_tokens_total") >= 2 * ANSWER_TOKENS
    assert during.grown(before, "transcript_lookups_total", result="hit") >= 1
    assert during.grown(before, "ttft_seconds_count") >= 2
    assert during.grown(before, "ttft_seconds_sum") > 0
    assert during.grown(before, "tpot_seconds_count") >= 2
    num_answers, passed_s = during.grown(before, "tpot_seconds_count"), time.monotonic() - since
    assert 0 < during.grown(before, "tpot_seconds_sum") < num_answers * passed_s, "seconds of a token"
    assert during.grown(before, "queue_seconds_count", worker=prefill) >= 1
    assert during.grown(before, "prefill_tokens_total", worker=prefill) >= PROMPT_TOKENS
    assert during.grown(before, "decode_tokens_total", worker=decode) >= 2 * (ANSWER_TOKENS - 1)
    exported = during.grown(before, "exported_bytes_total", worker=prefill)
    assert exported >= HIT_TOKENS * kv_bytes_per_token()
    assert during.grown(before, "imported_bytes_total", worker=decode) >= HIT_TOKENS * kv_bytes_per_token()
    assert 0 < (during.value("available_blocks", worker=decode) or 0) < NUM_BLOCKS

    def has_prefilled() -> Scrape | None:
        """Each process reports at times of its own, so the prefill worker's values may be older than the others'."""
        scrape = Scrape.now()
        num_running = scrape.value("running_requests", worker=prefill)
        num_waiting = scrape.value("waiting_requests", worker=decode)
        return scrape if num_running == num_waiting == 0 else None

    seen(has_prefilled, "nothing prefills or waits")

    running.close()
    after = seen(lambda: at_rest(before, decode), "the stream has gone")
    assert after.value("available_blocks", worker=decode) == NUM_BLOCKS
    assert 0 < (after.value("cached_blocks", worker=decode) or 0) <= NUM_BLOCKS
    assert after.grown(before, "requests_total", outcome="length") >= 2
    assert after.grown(before, "requests_total", outcome="aborted") >= 1


def seen(condition: Callable[[], Scrape | None], what: str) -> Scrape:
    """The first scrape that `condition` returns."""
    scrape: Scrape = eventually(condition, what, PAUSE_S)
    return scrape


def measured(before: Scrape, decode: str) -> Scrape | None:
    """What is seen once it covers two finished requests and one that runs: each process reports at its own time, and
    `before` may lack what earlier tests have left to be reported."""
    scrape = Scrape.now()
    complete = (
        scrape.grown(before, "prompt_tokens_total") >= 2 * PROMPT_TOKENS
        and scrape.grown(before, "cache_hit_tokens_total", tenant="anonymous") >= HIT_TOKENS
        and scrape.grown(before, "prefill_tokens_total", role="prefill") >= PROMPT_TOKENS + 300
        and scrape.grown(before, "decode_tokens_total", worker=decode) >= 2 * (ANSWER_TOKENS - 1)
        and scrape.value("running_requests", worker=decode) == 1
    )
    return scrape if complete else None


def at_rest(before: Scrape, decode: str) -> Scrape | None:
    scrape = Scrape.now()
    gone = scrape.grown(before, "requests_total", outcome="aborted") >= 1
    return scrape if gone and scrape.value("running_requests", worker=decode) == 0 else None


def kv_bytes_per_token() -> int:
    """In bfloat16: keys and values of all layers with 3 heads of 64."""
    return 2 * NUM_LAYERS * 3 * 64 * 2
