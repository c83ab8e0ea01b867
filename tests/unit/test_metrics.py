"""What the production actors report while they serve, and the page of the documentation that lists it."""

import re
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from docs.generate import metrics_page
from raydix.actors.ingress.cluster_metrics import ClusterMetrics, ReplicaMetrics
from raydix.actors.ingress.dispatcher import Deliveries, Dispatcher
from raydix.actors.ingress.manager_link import ManagerLink
from raydix.actors.ingress.queue_watch import QueueWatch
from raydix.actors.instruments import families_of
from raydix.actors.manager.kv_cache_manager import KVCacheManager
from raydix.actors.metric_values import MetricFamily
from raydix.actors.metrics import HoldMetrics, IngressMetrics
from raydix.actors.process_metrics import ProcessMetrics
from raydix.actors.tracing import Recorder
from raydix.engine.core.ingress.room import Room
from raydix.engine.serving.request_table import RequestTable
from tests.unit.builders import FINGERPRINT
from tests.unit.ingress import FakeReader, LetterTokenizer, Replica
from tests.unit.local_actors import answer_of
from tests.unit.test_cluster_metrics import values
from tests.unit.test_data_plane import NUM_TOKENS, Scene, expected, prompt_of
from tests.unit.waits import until


class MeasuredScene(Scene):
    """A cluster whose ingress replica has metrics."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.ingress = IngressMetrics(["anonymous"], "r", routes=["/v1/completions"])
        self.holds = HoldMetrics("r")
        self.holds.begin()
        self.requests = RequestTable()
        self.room = Room(20)

    async def start(self, worker_silent_s: float = 30.0) -> tuple[KVCacheManager, Dispatcher]:
        manager, dispatcher = await super().start(worker_silent_s)
        dispatcher._on_delivery = Deliveries(self.ingress, Recorder("r", "ingress")).took
        queues = QueueWatch(self.ingress, self.requests, self.room, FakeReader(LetterTokenizer()))
        process = ProcessMetrics("r")

        def families() -> tuple[MetricFamily, ...]:
            queues.look()
            return (*families_of(self.ingress), *families_of(self.holds), *process.families())

        self.metrics = ClusterMetrics(
            ReplicaMetrics("r", families, "small", {"fingerprint": FINGERPRINT}),
            ManagerLink(self.local),
            lambda: dispatcher.workers,
            self.local.find_worker,
        )
        return manager, dispatcher

    async def has(self, name: str, label: str, least: dict[str, float]) -> dict[str, float]:
        """The values of a metric by a label, once they are at least these: each process reports in its own time."""
        while True:
            found = values(await self.metrics.text(), name, label)
            if all(found.get(key, -1.0) >= value for key, value in least.items()):
                return found


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> MeasuredScene:
    return MeasuredScene(monkeypatch)


def test_a_request_of_two_workers_is_measured_at_each_of_them(measured: MeasuredScene) -> None:
    async def play() -> None:
        manager, dispatcher = await measured.start()
        assert await answer_of(dispatcher, "first", prompt_of(1), NUM_TOKENS) == expected(prompt_of(1))
        await until(lambda: manager._directory.num_reservations == 0)
        [decision] = manager._directory.decisions.of("first")["first"]
        prefill, decode = decision.prefill, decision.decode
        assert prefill[0] == "p" and decode[0] == "d"

        others = dict.fromkeys(("p0", "p1", "d0", "d1"), 0.0)
        both = {prefill: 1.0, decode: 1.0}
        running = await measured.has("raydix_running_seconds_count", "worker", both)
        assert running == others | both, "each of them is a part of the time"
        prefills = await measured.has("raydix_prefill_seconds_count", "worker", {prefill: 1.0})
        assert prefills == others | {prefill: 1.0}, "its prompt was computed once"
        imports = await measured.has("raydix_import_seconds_count", "worker", {decode: 1.0})
        assert imports[prefill] == 0
        steps = await measured.has("raydix_step_seconds_count", "worker", both)
        tokens = await measured.has("raydix_step_tokens_sum", "worker", {decode: NUM_TOKENS - 1.0})
        assert tokens[prefill] == len(prompt_of(1)) and steps[decode] >= tokens[decode] > 0
        text = await measured.metrics.text()
        assert "raydix_handover_seconds_count 1\n" in text
        assert "raydix_handover_prediction_error_seconds_count 1\n" in text
        [gaps] = values(text, "raydix_inter_token_seconds_count", "replica").values()
        assert 1 <= gaps < NUM_TOKENS, "the first token ends no gap"

    measured.run(play())


def test_a_worker_that_dies_is_counted_as_lost(measured: MeasuredScene) -> None:
    async def play() -> None:
        manager, dispatcher = await measured.start()
        crowd = await measured.begin(dispatcher, ["d0"])
        measured.local.kill("d0:1")
        measured.hold.end()
        await crowd.check()
        await until(lambda: measured.num_registered(manager) == 3)
        lost = await measured.has("raydix_lost_workers_total", "reason", {"ended": 1.0})
        assert lost == {"ended": 1, "silent": 0, "left": 0}
        registered = values(await measured.metrics.text(), "raydix_registrations_total", "role")
        assert registered == {"prefill": 2, "decode": 2, "mixed": 0, "elastic": 0}

    measured.run(play())


def test_a_child_that_hung_is_counted_once_its_host_says_so(measured: MeasuredScene) -> None:
    async def play() -> None:
        manager, _ = await measured.start()
        kinds = {"prefill": 0, "decode": 0, "mixed": 0, "elastic": 0, "kv_cache_manager": 0}
        assert await measured.has("raydix_hung_actors_total", "kind", {}) == kinds
        await manager.children_hung("decode", 2)
        hung = values(await measured.metrics.text(), "raydix_hung_actors_total", "kind")
        assert hung == kinds | {"decode": 2}

    measured.run(play())


def test_the_page_of_metrics_has_every_family(measured: MeasuredScene) -> None:
    """And `/metrics` has each that the page names."""
    rows = [line for line in metrics_page().splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"`((?:raydix_|vllm:|gen_ai_|process_)\w+)`", row)}

    async def play() -> None:
        await measured.start()
        await measured.has("raydix_blocks", "worker", dict.fromkeys(("p0", "p1", "d0", "d1"), 1.0))
        text = await measured.metrics.text()
        shown = {
            # Prometheus' parser leaves the ending of a counter out, also where the metric is a histogram of that name.
            "vllm:iteration_tokens_total" if metric.name == "vllm:iteration_tokens" else metric.name
            for metric in text_string_to_metric_families(text)
        }
        assert shown == listed
        bare = re.findall(r"^(\w+_total)\{[^}]*\} (?!0$)", text, re.M)
        assert {*bare} <= {"raydix_registrations_total", "process_cpu_seconds_total"}, "others have not happened yet"

    measured.run(play())


def test_queues_are_those_of_the_replica() -> None:
    replica = Replica(max_requests=7)
    replica.frontend._queues.look()
    assert replica.ledger.queues.states == {"waiting": 0, "prefilling": 0, "decoding": 0}
    assert replica.ledger.queues.limit == 7


def test_a_process_is_measured_under_its_name() -> None:
    found = {family.name: family for family in ProcessMetrics("w").families()}
    assert {family.kind for family in found.values()} == {"counter", "gauge"}
    [(labels, value)] = found["process_open_fds"].values.items()
    assert labels == (("process", "w"),) and value == pytest.approx(len([*Path("/proc/self/fd").iterdir()]), abs=20)
    [resident] = found["process_resident_memory_bytes"].values.values()
    assert resident == pytest.approx(psutil.Process().memory_info().rss, rel=0.5)
