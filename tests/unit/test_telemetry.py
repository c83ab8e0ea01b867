"""Spans of requests for OpenTelemetry: their tree, their attributes, and that nothing is done without a collector."""

import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import SpanKind, StatusCode
from ray.serve._private.http_util import ASGIAppReplicaWrapper

from raydix.actors.ingress import span_maker
from raydix.actors.ingress.telemetry import PROTOCOLS, Telemetry, telemetry_of
from raydix.configs.schema import ObservabilitySection
from raydix.engine.api.trace_context import TraceContext
from raydix.engine.core.errors import StartupError
from raydix.engine.serving.life import MOST_CHOICES, LifeSpan
from raydix.engine.serving.output import OutputProcessor
from tests.skips import NO_OTLP, lacks
from tests.unit.ingress import ANSWER, MODEL, Replica, Served, body_of, call
from tests.unit.served_app import CURRENT, app
from tests.unit.test_data_plane import NUM_TOKENS, Scene, prompt_of, scene
from tests.unit.waits import until

__all__ = ["scene"]

TRACE, PARENT = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
TRACEPARENT = f"00-{TRACE:032x}-{PARENT:016x}-01"
PATH = "/v1/completions"


class Collector(InMemorySpanExporter):
    """Takes spans; gives them by name, and checks that they are one tree within each trace."""

    def named(self, name: str) -> list[Any]:
        return [span for span in self.all() if span.name == name]

    def all(self) -> list[Any]:
        return [*self.get_finished_spans()]

    def only(self, name: str) -> Any:
        [span] = self.named(name)
        return span


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Collector:
    for name in ("OTEL_TRACES_SAMPLER", "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    return Collector()


def telemetry(collector: Collector, **options: Any) -> Telemetry:
    return Telemetry(collector, "replica", processor=SimpleSpanProcessor, **options)


def replica_with(collector: Collector, **options: Any) -> Replica:
    replica = Replica(**options)
    replica.frontend.telemetry = telemetry(collector, clock=replica.clock)
    return replica


def ask(served: Served, replica: Replica, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    return served(replica, lambda: call(app, "POST", PATH, body_of("completion", **fields), headers=headers))


def test_a_request_continues_its_client_s_trace(served: Served, collector: Collector) -> None:
    reply = ask(served, replica_with(collector), {"traceparent": TRACEPARENT, "tracestate": "a=b"}, temperature=0)
    server, request = collector.only(f"POST {PATH}"), collector.only(f"text_completion {MODEL}")
    assert server.kind is SpanKind.SERVER and request.kind is SpanKind.INTERNAL
    assert (server.parent.trace_id, server.parent.span_id, server.parent.is_remote) == (TRACE, PARENT, True)
    assert request.parent.span_id == server.context.span_id
    assert {span.context.trace_id for span in collector.all()} == {TRACE}
    assert server.context.trace_state.to_header() == "a=b"
    assert reply.headers["traceparent"] == f"00-{TRACE:032x}-{server.context.span_id:016x}-01"
    assert server.attributes == {
        "http.request.method": "POST",
        "http.route": PATH,
        "http.response.status_code": 200,
    }
    assert server.resource.attributes["service.name"] == "raydix"
    assert server.resource.attributes["service.instance.id"] == "replica"


def test_a_request_has_the_attributes_of_the_conventions(served: Served, collector: Collector) -> None:
    ask(served, replica_with(collector), max_tokens=4, temperature=0.5, top_p=0.9, seed=3, stream=True)
    span = collector.only(f"text_completion {MODEL}")
    found = dict(span.attributes)
    assert found["gen_ai.response.id"].startswith("cmpl-") and found["gen_ai.response.time_to_first_chunk"] > 0
    known = {value for name, value in vars(gen_ai_attributes).items() if name.isupper()}
    assert {name for name in found if name.startswith("gen_ai.")} <= known
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "raydix",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 3,
        "gen_ai.request.stream": True,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "raydix.outcome": "length",
    }
    assert {name: found[name] for name in expected} == expected


def test_no_text_is_in_a_span(served: Served, collector: Collector) -> None:
    secret = "zebra crossing"
    headers = {"x-session-id": secret, "authorization": f"Bearer {secret}", "traceparent": TRACEPARENT}
    ask(served, replica_with(collector), headers, prompt=secret, stop=[secret], user=secret)
    written = " ".join(span.to_json() for span in collector.all())
    assert "gen_ai.usage.input_tokens" in written
    assert secret not in written and ANSWER not in written


def test_a_refused_request_has_a_span_and_one_that_fails_an_error(served: Served, collector: Collector) -> None:
    replica = replica_with(collector)
    reply = ask(served, replica, max_tokens=-1)
    [server] = collector.all()
    assert reply.status == 400 and reply.headers["traceparent"].startswith(f"00-{server.context.trace_id:032x}-")
    assert server.attributes["http.response.status_code"] == 400 and server.status.status_code is StatusCode.UNSET

    collector.clear()
    replica.dispatcher.fails_after = 2
    assert ask(served, replica).status == 503
    server, request = collector.only(f"POST {PATH}"), collector.only(f"text_completion {MODEL}")
    assert {server.status.status_code, request.status.status_code} == {StatusCode.ERROR}
    assert request.attributes["error.type"] == "service_unavailable"
    assert request.attributes["raydix.outcome"] == "failed"


def test_a_trace_that_its_client_does_not_record_has_no_spans(served: Served, collector: Collector) -> None:
    replica = replica_with(collector)
    assert ask(served, replica, {"traceparent": f"{TRACEPARENT[:-2]}00"}).status == 200
    assert collector.all() == []
    # Another route than one that the model answers is no request.
    served(replica, lambda: call(app, "POST", "/tokenize", body_of("completion"), headers={"traceparent": TRACEPARENT}))
    assert collector.all() == []


def test_the_environment_chooses_what_is_recorded(
    served: Served, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    reply = ask(served, replica_with(collector))
    assert reply.status == 200 and collector.all() == []
    assert reply.headers["traceparent"].endswith("-00"), "whom the client calls next records nothing either"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    ask(served, replica_with(collector))
    assert {span.resource.attributes["service.name"] for span in collector.all()} == {"mine"}


@pytest.mark.parametrize(
    "given",
    [
        None,
        "",
        "nonsense",
        TRACEPARENT.upper(),
        f"ff{TRACEPARENT[2:]}",
        f"{TRACEPARENT}-more",
        f"00-{0:032x}-{PARENT:016x}-01",
        f"00-{TRACE:032x}-{0:016x}-01",
    ],
)
def test_an_invalid_place_begins_a_new_trace(given: str | None) -> None:
    assert TraceContext.read(given) is None


def test_a_place_is_read_as_the_recommendation_says() -> None:
    assert TraceContext.read(f" {TRACEPARENT} ", "a=b") == TraceContext(TRACE, PARENT, True, "a=b")
    later = TraceContext.read(f"01{TRACEPARENT[2:-2]}02-more")
    assert later == TraceContext(TRACE, PARENT, False) and later.header == f"{TRACEPARENT[:-2]}00"


def test_a_request_with_many_choices_has_spans_of_some(collector: Collector) -> None:
    async def play() -> None:
        replica = replica_with(collector, max_requests=100)
        job = await replica.job(prompt=["a"] * (MOST_CHOICES + 3))
        for answer in job.answers:
            answer.generation.begun_at = replica.clock()
        with replica.frontend.accounted(job):
            pass

    asyncio.run(play())
    assert len(collector.named("admit")) == MOST_CHOICES
    assert collector.only(f"text_completion {MODEL}").attributes["raydix.outcome"] == "aborted"


def tree(collector: Collector) -> Iterator[tuple[str, str, int]]:
    """Name, process and attempt of the parts of a request, in the order of their beginnings."""
    for span in sorted(collector.all(), key=lambda span: (span.start_time, span.end_time)):
        about = span.attributes
        if about.get("raydix.process", "ingress") != "ingress":
            yield span.name, about["raydix.process"], about.get("raydix.attempt", 0)


def test_spans_tell_the_life_of_a_request_in_each_process(scene: Scene, collector: Collector) -> None:
    async def play() -> None:
        manager, dispatcher = await scene.start()
        replica, spans = Replica(), telemetry(collector)
        output = OutputProcessor(dispatcher.generate, dispatcher.stopped, replica.chats)
        job = await replica.job(prompt=[*prompt_of(1)], max_tokens=NUM_TOKENS, ignore_eos=True)
        with spans.request(job):
            await output.collect(job)
        [[decision]] = manager._directory.decisions.of(job.request_id).values()

        prefill, decode = decision.prefill, decision.decode
        found = list(tree(collector))
        assert sorted(found) == sorted(
            [
                ("admit", "manager", 0),
                ("queue", prefill, 0),
                ("prefill", prefill, 0),
                ("queue", decode, 0),
                ("hand over", decode, 0),
                ("decode", decode, 0),
            ]
        )
        request = collector.only(f"text_completion {MODEL}")
        for span in collector.all():
            assert span is request or span.parent == request.context
            assert request.start_time <= span.start_time <= span.end_time
        admit = collector.only("admit").attributes
        assert (admit["raydix.worker.prefill"], admit["raydix.worker.decode"]) == (prefill, decode)
        assert admit["raydix.blocks.never_seen"] == len(prompt_of(1)) // 4
        assert admit["raydix.expected_ttft_s"] == pytest.approx(decision.predicted_ttft_s, abs=1e-6)
        # 23 tokens in steps of 16.
        assert collector.only("prefill").attributes["raydix.chunks"] == 2
        assert collector.only("decode").attributes["raydix.tokens"] == NUM_TOKENS
        order = [collector.only(name).start_time for name in ("admit", "prefill", "hand over", "decode")]
        assert order == sorted(order)

    scene.run(play())


def test_a_killed_worker_is_an_event_of_its_request(scene: Scene, collector: Collector) -> None:
    async def play() -> None:
        _, dispatcher = await scene.start()
        for worker_id in ("d0", "d1"):
            scene.hold.after(scene.workers[worker_id], 1)
        replica, spans = Replica(), telemetry(collector)
        output = OutputProcessor(dispatcher.generate, dispatcher.stopped, replica.chats)
        job = await replica.job(prompt=[*prompt_of(1)], max_tokens=NUM_TOKENS, ignore_eos=True)
        generation = job.answers[0].generation

        async def run() -> None:
            with spans.request(job):
                await output.collect(job)

        running = asyncio.create_task(run())
        await until(lambda: any(scene.hold.is_held(scene.workers[name]) for name in ("d0", "d1")))
        victim, was_prefill = generation.decode, generation.prefill
        scene.local.kill(f"{victim}:1")
        scene.hold.end()
        await running

        request = collector.only(f"text_completion {MODEL}")
        [event] = request.events
        assert event.name == "failover" and request.attributes["raydix.attempts"] == 2
        assert event.attributes["raydix.attempt"] == 0
        assert event.attributes["raydix.workers"] == tuple(sorted((str(victim), str(was_prefill))))
        assert 1 <= event.attributes["raydix.tokens"] < NUM_TOKENS
        found = list(tree(collector))
        assert ("admit", "manager", 0) in found and ("admit", "manager", 1) in found
        [decode] = [process for name, process, attempt in found if (name, attempt) == ("decode", 1)]
        assert decode == generation.decode != victim
        [first] = [span for span in collector.named("admit") if span.attributes.get("raydix.attempt") == 1]
        assert first.start_time == event.timestamp, "the next attempt begins where the last one ends"

    scene.run(play())


def test_a_replica_that_serve_stops_sends_its_last_spans(served: Served, collector: Collector) -> None:
    """By what Serve calls around the life of an application, and a processor that would send in an hour."""
    replica = Replica()
    in_an_hour = partial(BatchSpanProcessor, schedule_delay_millis=3_600_000)
    replica.frontend.telemetry = Telemetry(collector, "replica", processor=in_an_hour)

    async def live() -> None:
        wrapper: Any = ASGIAppReplicaWrapper
        at_serve = SimpleNamespace()  # Python itself would end an instance of the class, a second time
        wrapper._set_asgi_app(at_serve, CURRENT.get())
        await wrapper._run_asgi_lifespan_startup(at_serve)
        await call(app, "POST", PATH, body_of("completion"))
        assert collector.all() == []
        await wrapper.__del__(at_serve)

    served(replica, live)
    assert {span.name for span in collector.all()} >= {f"POST {PATH}", f"text_completion {MODEL}"}


@pytest.mark.parametrize("takes", [True, False])
def test_the_spans_of_a_batch_may_be_several_messages(takes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_maker, "MOST_SPANS", 2)
    taken: list[Any] = []

    def export(spans: list[Any]) -> SpanExportResult:
        taken.append(spans)
        return SpanExportResult.SUCCESS if takes or len(taken) > 1 else SpanExportResult.FAILURE

    exporter: Any = SimpleNamespace(export=export)
    maker = span_maker.SpanMaker(Resource({}), InstrumentationScope("raydix"), iter(range(1, 9)).__next__)
    spans = [LifeSpan(name, 0.0, 1.0, {}) for name in "abc"]
    items = [maker.unmade(spans, TraceContext(TRACE, PARENT, True), None, 0.0)] * 2
    result = span_maker.MakingExporter(exporter, maker).export(items)
    assert [[span.name for span in each] for each in taken] == [["a", "b"], ["c", "a"], ["b", "c"]]
    assert result is (SpanExportResult.SUCCESS if takes else SpanExportResult.FAILURE)


def test_a_collector_that_takes_nothing_is_waited_for_only_so_long(caplog: pytest.LogCaptureFixture) -> None:
    takes = threading.Event()
    silent: Any = SimpleNamespace(shutdown=takes.wait)
    try:
        asyncio.run(Telemetry(Collector(), "replica", processor=lambda _: silent).close(limit_s=0.001))
    finally:
        takes.set()
    assert "the collector did not take the last spans within 0.001 s" in caplog.text


def test_nothing_of_opentelemetry_is_imported_without_a_collector() -> None:
    program = """
import sys
from raydix.actors.ingress.application import application
from raydix.actors.ingress.telemetry import telemetry_of
from raydix.configs.schema import ObservabilitySection
assert telemetry_of(ObservabilitySection(), "r", {}) is None
found = {name for name in sys.modules if name.startswith("opentelemetry.sdk.trace")}
assert not found, found
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_the_environment_turns_spans_off(environment: dict[str, str]) -> None:
    assert telemetry_of(ObservabilitySection(), "r", environment) is None


@pytest.mark.parametrize("package", ["http", "grpc"])
def test_packages_that_are_missing_are_named(
    package: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, f"opentelemetry.exporter.otlp.proto.{package}.trace_exporter", None)
    protocol = {"http": "http/protobuf", "grpc": "grpc"}[package]
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", PROTOCOLS[1]: protocol}
    with caplog.at_level(logging.WARNING):
        assert telemetry_of(ObservabilitySection(), "r", environment) is None
    assert "pip install 'raydix[otel]'" in caplog.text
    asked = ObservabilitySection.model_validate({"otlp_endpoint": "http://127.0.0.1:9", "otlp_protocol": protocol})
    with pytest.raises(StartupError, match=r"observability\.otlp_endpoint .* pip install 'raydix\[otel\]'"):
        telemetry_of(asked, "r", {})


@pytest.mark.parametrize("by_key", [True, False])
def test_spans_reach_a_collector(by_key: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if lacks("opentelemetry.exporter.otlp.proto.http")():
        pytest.skip(NO_OTLP)
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    async def play() -> Any:
        taken: list[Any] = []

        async def take(request: web.Request) -> web.Response:
            taken.append(ExportTraceServiceRequest.FromString(await request.read()))
            return web.Response(body=b"", content_type="application/x-protobuf")

        site = web.Application()
        site.router.add_post("/v1/traces", take)
        runner = web.AppRunner(site)
        await runner.setup()
        listener = web.TCPSite(runner, "127.0.0.1", 0)
        await listener.start()
        [(host, port)] = [address[:2] for address in runner.addresses]
        url = f"http://{host}:{port}"
        if not by_key:
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        settings = ObservabilitySection(otlp_endpoint=url if by_key else None)
        replica = Replica()
        replica.frontend.telemetry = telemetry_of(settings, "r")
        assert replica.frontend.telemetry is not None
        await replica.whole()
        await replica.frontend.telemetry.close()
        await runner.cleanup()
        return [s.name for each in taken for r in each.resource_spans for g in r.scope_spans for s in g.spans]

    assert f"text_completion {MODEL}" in asyncio.run(play())
