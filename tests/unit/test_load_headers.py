"""The load of the workers in a response's header (ORCA), for clients that ask for it."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from raydix.actors.ingress.cluster_load import FRESH_S, ClusterLoad
from raydix.actors.instruments import families_of
from raydix.actors.metric_values import MetricFamily
from raydix.actors.metrics import WorkerMetrics
from raydix.engine.core.tenants import Tenant, Tenants, key_hash
from raydix.engine.core.types import Role
from raydix.engine.model.engine import Engine
from tests.unit.builders import make_assignment
from tests.unit.ingress import Replica, Served, body_of, call
from tests.unit.served_app import app
from tests.unit.test_cluster_metrics import Cluster, answers, dies, never
from tests.unit.test_drafts import drafting_engine

CHAT = "/v1/chat/completions"
ASKED, ANSWERED = "endpoint-load-metrics-format", "endpoint-load-metrics"


def working(num_blocks: int, num_running: int, num_waiting: int) -> Engine:
    """An engine whose running requests hold 8 tokens, 2 blocks, each, and whose others have not been looked at."""
    engine = drafting_engine(num_blocks=num_blocks)
    for number in range(num_running):
        engine.submit(make_assignment(f"r{number}", range(number, number + 8)), 0.0)
    engine.step(0.0)
    for number in range(num_waiting):
        engine.submit(make_assignment(f"w{number}", range(8)), 0.0)
    return engine


def reporting(worker_id: str, engine: Engine) -> Callable[[], Awaitable[tuple[MetricFamily, ...]]]:
    async def answer() -> tuple[MetricFamily, ...]:
        metrics = WorkerMetrics(worker_id, Role.MIXED)
        metrics.flush(engine)
        return families_of(metrics)

    return answer


class Loaded:
    """A replica whose workers report as real ones do; `now` is the clock of the figures' age."""

    def __init__(self, replica: Replica, **workers: Callable[[], Awaitable[tuple[MetricFamily, ...]]]) -> None:
        self.cluster = Cluster(**workers)
        self.now = 0.0
        self.num_asked = 0
        replica.frontend.cluster_load = ClusterLoad(self._ask, lambda: self.now)

    async def _ask(self, timeout_s: float) -> Any:
        self.num_asked += 1
        return await self.cluster.metrics.of_workers(timeout_s)


def named(value: str) -> dict[str, float]:
    """The figures of a header in either form."""
    form, _, report = value.partition(" ")
    if form == "JSON":
        found = json.loads(report)
        assert found.keys() == {"named_metrics"}
        return dict(found["named_metrics"])
    assert form == "TEXT"
    pairs = (each.split("=") for each in report.split(", "))
    return {name.removeprefix("named_metrics."): float(figure) for name, figure in pairs}


@pytest.mark.parametrize("form", ["TEXT", "JSON", "text", "json"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_figures_are_of_all_workers_together(served: Served, form: str, stream: bool) -> None:
    replica = Replica()
    a, b = working(16, num_running=3, num_waiting=1), working(48, num_running=1, num_waiting=2)
    held = sum(engine.pool.num_blocks - engine.pool.num_available for engine in (a, b))

    async def run() -> None:
        Loaded(replica, a=reporting("a", a), b=reporting("b", b), silent=never, dead=dies)
        for path, kind in ((CHAT, "chat"), ("/v1/completions", "completion"), ("/v1/messages", "messages")):
            reply = await call(app, "POST", path, body_of(kind, stream=stream), headers={ASKED: form})
            assert reply.status == 200 and reply.headers[ANSWERED].startswith(form.upper() + " ")
            assert named(reply.headers[ANSWERED]) == {"kv_cache_usage_perc": held / 64, "num_requests_waiting": 3}

    assert held > 0
    served(replica, run)


def test_nobody_is_asked_for_a_request_that_does_not_ask(served: Served) -> None:
    replica = Replica()

    async def run() -> None:
        loaded = Loaded(replica, w=lambda: answers("w"))
        for headers in ({}, {ASKED: "BIN"}, {ASKED: ""}):
            reply = await call(app, "POST", CHAT, body_of("chat"), headers=headers)
            assert reply.status == 200 and ANSWERED not in reply.headers
        reply = await call(app, "GET", "/v1/models", headers={ASKED: "TEXT"})
        assert reply.status == 200 and ANSWERED not in reply.headers, "no request of the model"
        assert loaded.num_asked == 0

    served(replica, run)


def test_workers_are_asked_once_for_requests_close_together(served: Served) -> None:
    replica = Replica()

    async def run() -> None:
        loaded = Loaded(replica, w=reporting("w", working(16, 1, 0)))
        for now, num_asked in ((0.0, 1), (FRESH_S / 2, 1), (FRESH_S, 2)):
            loaded.now = now
            reply = await call(app, "POST", CHAT, body_of("chat"), headers={ASKED: "TEXT"})
            assert (ANSWERED in reply.headers, loaded.num_asked) == (True, num_asked)

    served(replica, run)


def test_without_a_worker_that_answers_there_is_no_header(served: Served) -> None:
    replica = Replica()

    async def run() -> None:
        Loaded(replica, silent=never)
        reply = await call(app, "POST", CHAT, body_of("chat"), headers={ASKED: "JSON"})
        assert reply.status == 200 and ANSWERED not in reply.headers

    served(replica, run)


def test_errors_have_the_header_and_strangers_do_not(served: Served) -> None:
    tenants = Tenants([Tenant("a")], {key_hash("k"): "a"})
    replica = Replica(tenants=tenants)

    async def run() -> None:
        Loaded(replica, w=reporting("w", working(16, 1, 0)))
        key = {"authorization": "Bearer k", ASKED: "TEXT"}
        reply = await call(app, "POST", CHAT, body_of("chat", temperature=-1), headers=key)
        assert reply.status == 400 and ANSWERED in reply.headers
        reply = await call(app, "POST", CHAT, body_of("chat"), headers={ASKED: "TEXT"})
        assert reply.status == 401 and ANSWERED not in reply.headers

    served(replica, run)
