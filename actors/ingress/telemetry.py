"""Spans of requests for OpenTelemetry, sent to a collector by OTLP where the configuration or the environment asks.

All spans of a request are made in its ingress replica and when it ends, of the times that the replica has anyway
(`raydix.engine.serving.life`): neither the manager nor a worker sends a message for them. A thread sends the spans in
batches; what a collector does not take in time is dropped, and no request waits for it. A replica that is stopped sends
its last batch, one that is killed does not. Without a collector nothing of OpenTelemetry is imported.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raydix.configs.schema import ObservabilitySection
from raydix.engine.api.trace_context import PARENT, STATE, TraceContext
from raydix.engine.core.errors import StartupError
from raydix.engine.core.log_fields import about
from raydix.engine.serving.job import Job
from raydix.engine.serving.life import LifeSpan, Value, life_of

if TYPE_CHECKING:  # an optional extra
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.sdk.trace.export import SpanExporter

    from raydix.actors.ingress.span_maker import Unmade

logger = logging.getLogger(__name__)

SERVICE = "raydix"
EXTRA = "pip install 'raydix[otel]'"
# Variables of the environment that every program with OpenTelemetry knows, the first that is set counts.
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
FAILED_STATUS = 500
# Time for the last spans when a replica is stopped; less than Serve leaves it (`graceful_shutdown_timeout_s`).
CLOSE_S = 5.0
STEPPED_S = 1e-3  # the wall's clock was set if it is so much ahead of, or behind, where it was expected


class Telemetry:
    """Makes the spans of one replica's requests, and passes them on to a processor of OpenTelemetry's."""

    def __init__(
        self,
        exporter: "SpanExporter",
        replica_id: str,
        clock: Callable[[], float] = time.monotonic,
        processor: "Callable[[SpanExporter], SpanProcessor] | None" = None,
    ) -> None:
        """`clock` is that of the jobs' times. `processor` has an exporter send the spans: in batches, if not given."""
        from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        from raydix.actors.ingress.span_maker import MakingExporter, SpanMaker

        # The environment's resource attributes and service name go before these, as users expect.
        named = Resource.create().attributes.get(SERVICE_NAME)
        name = SERVICE if named is None or str(named).startswith("unknown_service") else named
        own = {SERVICE_NAME: name, SERVICE_VERSION: version("raydix"), SERVICE_INSTANCE_ID: replica_id}
        # A provider of its own, not the process' global one: Ray has that.
        self._provider = TracerProvider(resource=Resource.create(own), shutdown_on_exit=False)
        scope, new_id = InstrumentationScope(SERVICE, version("raydix")), self._provider.id_generator.generate_span_id
        self._maker = SpanMaker(self._provider.resource, scope, new_id)
        self._processor = (processor or BatchSpanProcessor)(MakingExporter(exporter, self._maker))
        self._clock = clock
        self._ahead_s = time.time() - clock()  # the wall's clock minus `clock`

    # Requests over HTTP

    def begin(self, parent: TraceContext | None, name: str) -> TraceContext:
        """A new context: part of the parent's trace, or of a trace of its own. Whether it is recorded is asked of the
        sampler, which the environment chooses."""
        ids = self._provider.id_generator
        trace_id = ids.generate_trace_id() if parent is None else parent.trace_id
        result = self._provider.sampler.should_sample(self._maker.parent(parent), trace_id, name)
        is_sampled = bool(result.decision.is_sampled())  # type: ignore[no-untyped-call]
        return TraceContext(trace_id, ids.generate_span_id(), is_sampled, "" if parent is None else parent.state)

    def served(
        self,
        context: TraceContext,
        parent: TraceContext | None,
        *,
        route: str,
        method: str,
        status: int,
        began_at: float,
    ) -> None:
        """The response to a request is sent, or its client has left."""
        facts: dict[str, Value] = {"http.request.method": method, "http.route": route}
        if status:
            facts["http.response.status_code"] = status
        if context.is_sampled:
            spans = (LifeSpan(f"{method} {route}", began_at, self._clock(), facts),)
            has_failed = status >= FAILED_STATUS
            self._hand_over(
                self._maker.unmade(spans, context, parent, self._ahead_s, is_server=True, has_failed=has_failed)
            )

    # Requests of any kind

    @contextmanager
    def request(self, job: Job) -> Iterator[None]:
        """Make the spans of a job when the block ends, in whatever way."""
        try:
            yield
        finally:
            self._ended(job)

    def _ended(self, job: Job) -> None:
        # A trace that is not recorded costs no span; a request without a parent is asked about here.
        if job.trace is not None and not job.trace.is_sampled:
            return
        own = self.begin(job.trace, job.spec.kind)
        if own.is_sampled:
            life = life_of(job, self._clock())
            has_failed = "error.type" in life[0].about
            self._hand_over(self._maker.unmade(life, own, job.trace, self._ahead_s, has_failed=has_failed))

    def _hand_over(self, spans: "Unmade") -> None:
        # A processor looks at the context and no further; `MakingExporter` has the rest.
        self._processor.on_end(spans)  # type: ignore[arg-type]

    def now(self) -> float:
        """The time of `clock`."""
        return self._clock()

    def look(self) -> None:
        """Notice if the wall's clock was set; all spans of a request have the same difference otherwise."""
        ahead_s = time.time() - self._clock()
        if abs(ahead_s - self._ahead_s) > STEPPED_S:
            self._ahead_s = ahead_s

    async def close(self, limit_s: float = CLOSE_S) -> None:
        """Send the spans that wait for the next batch; those that a collector does not take in time are lost."""
        loop, sent = asyncio.get_running_loop(), asyncio.Event()

        def send() -> None:
            self._processor.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop has closed: it was too late
                loop.call_soon_threadsafe(sent.set)

        # A thread that no process waits for at its end, as it would for one of the loop's own.
        threading.Thread(target=send, name="last-spans", daemon=True).start()
        try:
            async with asyncio.timeout(limit_s):
                await sent.wait()
        except TimeoutError:
            extra = about("spans_lost", waited_s=limit_s)
            logger.warning("the collector did not take the last spans within %g s", limit_s, extra=extra)


class Traced:
    """Middleware: a span for each request for an answer of the model, and its place in the trace for the client."""

    def __init__(self, app: ASGIApp, telemetry: Callable[[], Telemetry | None]) -> None:
        """`telemetry` is known only once the replica has its configuration."""
        self._app = app
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        telemetry = self._telemetry() if scope["type"] == "http" and scope["method"] == "POST" else None
        if telemetry is None:
            await self._app(scope, receive, send)
            return
        telemetry.look()
        headers, began_at, status = Headers(scope=scope), telemetry.now(), 0
        parent = TraceContext.read(headers.get(PARENT), headers.get(STATE))
        context = telemetry.begin(parent, f"{scope['method']} {scope['path']}")
        scope.setdefault("state", {})["trace"] = context

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if _is_answer(scope):
                    message = {**message, "headers": list(message["headers"])}
                    MutableHeaders(scope=message)[PARENT] = context.header
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception:
            status = FAILED_STATUS  # outside of here it becomes a 500, or ends a stream
            raise
        finally:
            if _is_answer(scope):
                route = scope["route"].declared
                telemetry.served(
                    context, parent, route=route.path, method=route.method, status=status, began_at=began_at
                )


def _is_answer(scope: Scope) -> bool:
    route = scope.get("route")  # none of a path that nothing is served at
    return route is not None and route.declared.is_answer


def telemetry_of(
    settings: ObservabilitySection, replica_id: str, environment: Mapping[str, str] = os.environ
) -> Telemetry | None:
    """The telemetry that a configuration or, without a word there, the environment asks for; None where neither does.

    Raises:
        StartupError: the configuration asks for it, and the packages are not installed.
    """
    is_off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    is_elsewhere = environment.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp"
    from_environment = any(environment.get(name) for name in ENDPOINTS) and not is_elsewhere
    if is_off or not (settings.otlp_endpoint or from_environment):
        return None
    named = (environment[name] for name in PROTOCOLS if environment.get(name))
    protocol: str = settings.otlp_protocol or next(named, "")
    try:
        exporter = _exporter(settings.otlp_endpoint, is_grpc=protocol == "grpc")
    except ImportError as error:
        if settings.otlp_endpoint is None:
            # The variable may be meant for another program of the same machine.
            logger.warning("no spans are sent: %s; %s", error, EXTRA, extra=about("telemetry_off", reason=str(error)))
            return None
        raise StartupError(f"observability.otlp_endpoint needs packages that are not installed: {EXTRA}") from None
    return Telemetry(exporter, replica_id)


def _exporter(endpoint: str | None, *, is_grpc: bool) -> "SpanExporter":
    """The exporter to an endpoint; None: to the environment's. Raises ImportError without its package."""
    if is_grpc:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        grpc: SpanExporter = (
            GrpcExporter() if endpoint is None else GrpcExporter(endpoint, insecure=endpoint.startswith("http://"))
        )
        return grpc
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    # As the variable has it: the path of traces is below the endpoint.
    http: SpanExporter = HttpExporter() if endpoint is None else HttpExporter(f"{endpoint.rstrip('/')}/v1/traces")
    return http
