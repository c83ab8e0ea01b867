"""`/metrics`: values of every process in one text, in a bounded time, with a mark for those that do not answer."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families
from ray.exceptions import ActorDiedError

from raydix.actors.ingress.cluster_metrics import ClusterMetrics, ReplicaMetrics
from raydix.actors.ingress.exposition import CONTENT_TYPE
from raydix.actors.ingress.metric_aliases import OPEN_TELEMETRY, VLLM
from raydix.actors.instruments import families_of
from raydix.actors.metric_values import MetricFamily
from raydix.actors.metrics import HoldMetrics, IngressMetrics, ManagerMetrics, WorkerMetrics
from raydix.actors.rpc import WorkerClient
from raydix.actors.watchdog import Hold
from raydix.engine.core.manager.directory import Directory
from raydix.engine.core.tenants import Tenant, Tenants, key_hash
from raydix.engine.core.types import AdmitRequest, DraftSource, EvictionReason, Role, WorkerInfo
from raydix.engine.serving.accounting import FinishedRequest
from tests.unit.ingress import FakeLink, Memory, Replica, Served, call
from tests.unit.served_app import app
from tests.unit.test_drafts import drafting_engine
from tests.unit.waits import WAIT_S


class FakeWorker(WorkerClient):
    """Answers `metrics` as the test says."""

    def __init__(self, answer: Callable[[], Awaitable[tuple[MetricFamily, ...]]]) -> None:
        self._answer = answer

    def metrics(self) -> Awaitable[tuple[MetricFamily, ...]]:
        return self._answer()


class Cluster:
    """An ingress replica's view of workers, each with an answer of its own."""

    def __init__(self, **workers: Callable[[], Awaitable[tuple[MetricFamily, ...]]]) -> None:
        self.ingress = IngressMetrics(["a"], "r")
        self.manager = FakeLink()
        self.workers = workers
        self.num_searches = 0
        self.metrics = ClusterMetrics(
            ReplicaMetrics("r", lambda: families_of(self.ingress), "small"),
            self.manager,
            lambda: [WorkerInfo(worker_id, Role.MIXED, 1) for worker_id in self.workers],
            self.find,
            timeout_s=0.2,
        )

    async def find(self, worker_id: str, epoch: int) -> WorkerClient | None:
        self.num_searches += 1
        return FakeWorker(self.workers[worker_id])


async def answers(worker_id: str) -> tuple[MetricFamily, ...]:
    return families_of(WorkerMetrics(worker_id, Role.MIXED))


async def never() -> tuple[MetricFamily, ...]:
    await asyncio.Event().wait()
    raise AssertionError


async def dies() -> tuple[MetricFamily, ...]:
    raise ActorDiedError


def values(text: str, name: str, label: str, **others: str) -> dict[str, float]:
    """Values of the samples of one name, by one of their labels; of those that have `others` among their labels."""
    found = (sample for metric in text_string_to_metric_families(text) for sample in metric.samples)
    named = (sample for sample in found if sample.name == name and others.items() <= sample.labels.items())
    return {sample.labels[label]: sample.value for sample in named}


def test_counters_are_there_at_0_and_grow() -> None:
    async def scrape() -> tuple[str, str]:
        cluster = Cluster(w=lambda: answers("w"))
        before = await cluster.metrics.text()
        cluster.ingress.finished(FinishedRequest("a", "stop", 7, 3, {"local": 2, "imported": 0}, 0.02, None))
        cluster.ingress.failed_over()
        return before, await cluster.metrics.text()

    before, after = asyncio.run(scrape())
    assert values(before, "raydix_requests_total", "outcome") == {
        "stop": 0,
        "length": 0,
        "aborted": 0,
        "failed": 0,
    }
    assert values(before, "raydix_preemptions_total", "way") == {"swap": 0, "recompute": 0}
    assert values(before, "raydix_prefill_tokens_total", "worker") == {"w": 0}
    assert values(after, "raydix_requests_total", "outcome")["stop"] == 1
    assert values(after, "raydix_prompt_tokens_total", "tenant") == {"a": 7}
    assert values(after, "raydix_cache_hit_tokens_total", "source") == {"local": 2, "imported": 0}
    assert values(after, "raydix_failovers_total", "replica") == {"r": 1}
    nothing = dict.fromkeys(("chat", "text_completion", "embeddings"), 0.0)
    assert values(before, "raydix_ttft_seconds_count", "operation") == nothing
    assert values(after, "raydix_ttft_seconds_sum", "operation") == nothing | {"chat": 0.02}
    buckets = {each: values(after, "raydix_ttft_seconds_bucket", "le", operation=each) for each in nothing}
    assert [buckets["chat"][bound] for bound in ("0.01", "0.025", "+Inf")] == [0, 1, 1]
    assert set(buckets["embeddings"].values()) == {0}


def test_lengths_and_times_of_requests_are_measured() -> None:
    async def scrape() -> str:
        cluster = Cluster(w=lambda: answers("w"))
        stopped = FinishedRequest(
            *("a", "stop", 7, 300, {}, 0.5, 0.01),
            duration_s=2.0,
            decode_s=1.5,
            operation="text_completion",
            num_computed=6,
            num_longest=150,
            num_choices=2,
            max_tokens=400,
        )
        cluster.ingress.finished(stopped)
        cluster.ingress.finished(FinishedRequest("a", "aborted", 9, 0, {}, None, None, duration_s=4.0))
        cluster.ingress.finished(replace(stopped, outcome="failed", num_prompt=11, num_generated=1, tpot_s=None))
        return await cluster.metrics.text()

    text = asyncio.run(scrape())
    expected = {
        "raydix_decode_seconds": (1, 1.5),
        "raydix_request_prompt_tokens": (3, 27),
        "raydix_request_generation_tokens": (3, 301),
        "raydix_request_uncached_tokens": (3, 12),
        "raydix_longest_answer_tokens": (3, 300),
        "raydix_request_max_tokens": (3, 800),
        "raydix_request_choices": (3, 5),
    }
    sums = {
        name: (values(text, f"{name}_count", "replica")["r"], values(text, f"{name}_sum", "replica")["r"])
        for name in expected
    }
    assert sums == expected
    assert values(text, "raydix_uncached_tokens_total", "tenant") == {"a": 12}
    durations = values(text, "raydix_request_seconds_sum", "operation")
    assert durations == {"chat": 4.0, "text_completion": 2.0, "embeddings": 0.0}
    assert values(text, "raydix_request_generation_tokens_bucket", "le")["500"] == 3
    assert values(text, "raydix_build_info", "model") == {"small": 1}


def test_metrics_stand_under_vllm_s_names_too() -> None:
    class Manager(Memory):
        async def metrics(self) -> tuple[MetricFamily, ...]:
            return families_of(ManagerMetrics())

    metrics, engine = WorkerMetrics("w", Role.MIXED), drafting_engine()
    metrics.flush(engine)

    async def answer() -> tuple[MetricFamily, ...]:
        return families_of(metrics)

    async def scrape() -> str:
        cluster = Cluster(w=answer)
        cluster.manager.memory = Manager
        ended = FinishedRequest("a", "aborted", 7, 3, {"local": 2}, 0.02, 0.01, duration_s=2.0, num_computed=5)
        cluster.ingress.finished(ended)
        cluster.ingress.token_gap(0.04)
        cluster.ingress.finished(FinishedRequest("a", "failed", 1, 0, {}, None, None))
        return await cluster.metrics.text()

    text = asyncio.run(scrape())
    assert values(text, "vllm:request_success_total", "finished_reason") == {"stop": 0, "length": 0, "abort": 1}
    assert values(text, "vllm:prompt_tokens_total", "model_name") == {"small": 8}
    assert values(text, "vllm:prefix_cache_queries_total", "model_name") == {"small": 8}
    assert values(text, "vllm:prefix_cache_hits_total", "source") == {"local": 2, "imported": 0}
    sources = {"local_compute": 5, "local_cache_hit": 2, "external_kv_transfer": 0}
    assert values(text, "vllm:prompt_tokens_by_source_total", "source") == sources
    chats = {"operation": "chat"}
    assert values(text, "vllm:e2e_request_latency_seconds_sum", "model_name", **chats) == {"small": 2}
    assert values(text, "vllm:inter_token_latency_seconds_sum", "model_name") == {"small": 0.04}
    assert values(text, "vllm:kv_cache_usage_perc", "worker") == values(text, "raydix_kv_usage", "worker")
    drafts = values(text, "vllm:spec_decode_num_drafts_total", "source")
    assert drafts == values(text, "raydix_draft_tokens_total", "source", depth="1"), "a draft has one first token"
    blocks = values(text, "vllm:cache_config_info", "num_gpu_blocks")
    assert blocks == {str(int(number)): 1 for number in values(text, "raydix_blocks", "worker").values()}

    duration = "gen_ai_server_request_duration_seconds_sum"
    assert values(text, duration, "gen_ai_operation_name") == {"chat": 2, "text_completion": 0, "embeddings": 0}
    assert values(text, duration, "gen_ai_request_model").keys() == {"small"}

    shown = {metric.name for metric in text_string_to_metric_families(text)}
    assert {alias.theirs for alias in (*VLLM, *OPEN_TELEMETRY)} <= shown, "each name is of a metric that exists"


def test_every_panel_of_vllm_s_own_dashboard_has_data() -> None:
    """The names in the queries of its stock Grafana dashboard, each of which asks for the label `model_name`."""
    histograms = (
        "e2e_request_latency_seconds",
        "inter_token_latency_seconds",
        "time_to_first_token_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_max_num_generation_tokens",
    )
    asked = {f"vllm:{name}_{part}" for name in histograms for part in ("bucket", "sum", "count")}
    asked |= {f"vllm:{name}_total" for name in ("prompt_tokens", "generation_tokens", "request_success")}
    asked |= {f"vllm:{name}" for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")}
    worker = WorkerMetrics("w", Role.MIXED)
    worker.flush(drafting_engine())

    async def answer() -> tuple[MetricFamily, ...]:
        return families_of(worker)

    text = asyncio.run(Cluster(w=answer).metrics.text())
    samples = [sample for metric in text_string_to_metric_families(text) for sample in metric.samples]
    assert asked <= {sample.name for sample in samples if sample.labels.get("model_name") == "small"}


def test_the_manager_reports_what_the_directory_counts(make_directory: Callable[..., Directory]) -> None:
    directory, metrics = make_directory(), ManagerMetrics()
    directory.register("p", Role.PREFILL, 1, 10, ())
    directory.register("d", Role.DECODE, 1, 10, ())

    def shown(name: str, key: str) -> dict[str, object]:
        metrics.look(directory)
        [family] = [each for each in families_of(metrics) if each.name == name]
        return {dict(labels).get(key, ""): value for labels, value in family.values.items()}

    assert shown("raydix_workers", "role") == {"prefill": 1, "decode": 1, "mixed": 0, "elastic": 0}
    assert set(shown("raydix_evicted_blocks", "reason")) == {*map(str, EvictionReason)}
    assert set(shown("raydix_missed_blocks", "reason").values()) == {0}, "each reason is there from the start"
    blocks = (b"a", b"b", b"c")
    directory.admit(AdmitRequest("new", 0, blocks, 14), 0.0)
    directory.end_request("new", 0.0)
    directory.blocks_changed("p", 1, blocks, ())
    directory.blocks_changed("p", 1, (), [(b"c", EvictionReason.FULL)])
    assert shown("raydix_missed_blocks", "reason")["never_seen"] == 3
    assert shown("raydix_missed_blocks", "reason")["never_seen"] == 3, "only the growth is added"
    assert shown("raydix_evicted_blocks", "reason")["pool full"] == 1
    assert shown("raydix_index_blocks", "") == {"": len(directory.stock.blocks)}
    directory.admit(AdmitRequest("hit", 0, blocks, 14), 0.0)
    assert shown("raydix_hit_blocks", "source")["local"] == 2
    assert shown("raydix_segment_bytes", "place") == {"store": 0, "disk": 0}
    assert shown("raydix_paused_sessions", "") == shown("raydix_pauses", "") == {"": 0}
    assert shown("raydix_saved_seconds", "")[""] == sum(each.saved_s for each in directory.statistics.tenants.values())


def test_adapters_of_the_configuration_are_counted_by_name_and_others_together() -> None:
    """Names that clients, or administrators at run time, give make no series of their own."""

    async def scrape() -> str:
        cluster = Cluster(w=lambda: answers("w"))
        cluster.ingress = IngressMetrics(["a"], "r", adapters=["sql", "org/rivers"])
        for adapter in (None, "sql", "sql", "tuned-1", "tuned-2"):
            ended = FinishedRequest("a", "stop", 7, 3, {"local": 0, "imported": 0}, 0.02, None, adapter)
            cluster.ingress.finished(ended)
        return await cluster.metrics.text()

    text = asyncio.run(scrape())
    found = (sample for metric in text_string_to_metric_families(text) for sample in metric.samples)
    requests = {
        sample.labels["adapter"]: sample.value
        for sample in found
        if sample.name == "raydix_adapter_requests_total" and sample.labels["outcome"] == "stop"
    }
    assert requests == {"sql": 2, "org/rivers": 0, "loaded": 2}
    assert values(text, "raydix_adapter_prompt_tokens_total", "adapter") == {"sql": 14, "org/rivers": 0, "loaded": 14}
    assert values(text, "raydix_adapter_generation_tokens_total", "adapter")["sql"] == 6


def test_draft_tokens_are_counted_by_source_and_place() -> None:
    metrics, engine = WorkerMetrics("w", Role.MIXED), drafting_engine()
    counts = engine.scheduler.drafting.counts
    counts[DraftSource.PAST].add(12, 3)
    counts[DraftSource.PAST].add(1, 0)
    metrics.flush(engine)
    counts[DraftSource.PAST].add(4, 4)
    counts[DraftSource.GRAMMAR].add(5, 5)
    metrics.flush(engine)

    async def answer() -> tuple[MetricFamily, ...]:
        return families_of(metrics)

    text = asyncio.run(Cluster(w=answer).metrics.text())
    drafted, accepted = ("raydix_draft_tokens_total", "raydix_accepted_draft_tokens_total")
    assert depths(text, drafted, "past") == {"1": 3, "2": 2, "3-4": 4, "5-8": 4, "9+": 4}
    assert depths(text, accepted, "past") == {"1": 2, "2": 2, "3-4": 3, "5-8": 0, "9+": 0}
    assert depths(text, drafted, "grammar") == {"1": 1, "2": 1, "3-4": 2, "5-8": 1, "9+": 0}
    for source in ("request", "prediction", "cluster"):
        assert depths(text, drafted, source) == dict.fromkeys(("1", "2", "3-4", "5-8", "9+"), 0)


def depths(text: str, name: str, source: str) -> dict[str, float]:
    """Values of a counter of drafts of one source, by depth."""
    found = (sample for metric in text_string_to_metric_families(text) for sample in metric.samples)
    of_source = [each for each in found if each.name == name and each.labels["source"] == source]
    return {sample.labels["depth"]: sample.value for sample in of_source}


def test_a_process_that_does_not_answer_in_time_is_marked() -> None:
    async def scrape() -> str:
        cluster = Cluster(good=lambda: answers("good"), silent=never, dead=dies)
        cluster.manager.is_away = True
        async with asyncio.timeout(WAIT_S):
            return await cluster.metrics.text()

    text = asyncio.run(scrape())
    up = values(text, "raydix_process_up", "process")
    assert up == {"r": 1, "good": 1, "silent": 0, "dead": 0, "kv_cache_manager": 0}
    assert values(text, "raydix_decode_tokens_total", "worker") == {"good": 0}


def test_scrapes_at_the_same_time_share_an_answer_and_workers_are_found_once() -> None:
    async def scrape() -> tuple[int, int, int]:
        cluster = Cluster(w=lambda: answers("w"))
        texts = await asyncio.gather(*(cluster.metrics.text() for _ in range(5)))
        first = cluster.num_searches
        await cluster.metrics.text()
        cluster.workers = {"x": lambda: answers("x")}
        assert values(await cluster.metrics.text(), "raydix_decode_tokens_total", "worker") == {"x": 0}
        return len(set(texts)), first, cluster.num_searches

    assert asyncio.run(scrape()) == (1, 1, 2)


def test_a_client_that_leaves_takes_no_other_s_answer_along() -> None:
    async def scrape() -> str:
        cluster = Cluster(w=lambda: answers("w"))
        leaver, stayer = (asyncio.ensure_future(cluster.metrics.text()) for _ in range(2))
        await asyncio.sleep(0)
        leaver.cancel()
        return await stayer

    assert "raydix_decode_tokens_total" in asyncio.run(scrape())


def test_the_manager_s_metrics_are_there() -> None:
    class Manager(Memory):
        async def metrics(self) -> tuple[MetricFamily, ...]:
            return families_of(ManagerMetrics())

    async def scrape() -> str:
        cluster = Cluster()
        cluster.manager.memory = Manager
        return await cluster.metrics.text()

    text = asyncio.run(scrape())
    assert "raydix_placement_regret_seconds_count 0" in text
    assert values(text, "raydix_process_up", "process")["kv_cache_manager"] == 1


def test_duties_of_elastic_workers_are_counted() -> None:
    metrics = ManagerMetrics()

    def shown() -> dict[str, object]:
        [family] = [each for each in families_of(metrics) if each.name == "raydix_elastic_workers"]
        return {dict(labels)["duty"]: value for labels, value in family.values.items()}

    metrics.duties([])
    assert shown() == {"prefill": 0, "decode": 0, "mixed": 0}
    metrics.duties([Role.PREFILL, Role.PREFILL, Role.DECODE])
    assert shown() == {"prefill": 2, "decode": 1, "mixed": 0}
    metrics.duties([])
    assert set(shown().values()) == {0}


def test_holds_are_counted_where_a_process_is_watched() -> None:
    metrics = HoldMetrics("w")

    def shown(name: str) -> dict[str, object]:
        [family] = [each for each in families_of(metrics) if each.name == name]
        return {dict(labels)["of"]: value for labels, value in family.values.items()}

    assert shown("raydix_holds") == {}
    metrics.begin()
    assert shown("raydix_holds") == shown("raydix_longest_hold_seconds") == {"loop": 0, "lock": 0}
    for hold in (Hold("lock", 0.3, 1), Hold("lock", 0.2, 1), Hold("loop", 0.1, 2)):
        metrics.held(hold)
    assert shown("raydix_holds") == {"loop": 1, "lock": 2}
    assert shown("raydix_longest_hold_seconds") == {"loop": 0.1, "lock": 0.3}


def test_the_route_is_for_administrators(served: Served) -> None:
    reply = served(Replica(), lambda: call(app, "GET", "/metrics"))
    assert (reply.status, reply.headers["content-type"]) == (200, CONTENT_TYPE)
    assert values(reply.body.decode(), "raydix_requests_total", "tenant") == {"a": 3}

    tenants = Tenants([Tenant("a"), Tenant("boss", is_admin=True)], {key_hash("k"): "a", key_hash("b"): "boss"})

    def status(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        reply = served(Replica(tenants=tenants), lambda: call(app, "GET", "/metrics", headers=headers))
        return int(reply.status)

    assert [status(key) for key in ("", "k", "b")] == [401, 403, 200]


@pytest.mark.parametrize("value", [0, -1])
def test_a_counter_grows_by_more_than_0(value: float) -> None:
    with pytest.raises(ValueError, match="must be >0"):
        IngressMetrics(["a"])._failovers.inc(value)
