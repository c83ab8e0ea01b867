"""Makes OpenTelemetry's spans of a request's life. Imported only where spans are sent: OpenTelemetry is an extra.

A span is made at once, with its end: one that is begun and ended as the SDK's tracer does costs ten times as much. And
it is made where it is sent, in the exporter's thread: the event loop hands over what it knows of a request as one item,
which waits among OpenTelemetry's own in the place of a span.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from raydix.engine.api.trace_context import TraceContext
from raydix.engine.serving.life import LifeSpan

MOST_SPANS = 2048  # in one message: less than a megabyte, of which collectors take four by gRPC

_UNSET, _ERROR = Status(StatusCode.UNSET), Status(StatusCode.ERROR)
_SAMPLED, _NOT_SAMPLED = TraceFlags(TraceFlags.SAMPLED), TraceFlags(TraceFlags.DEFAULT)


class Unmade(NamedTuple):
    """The spans of a request, or that of its serving over HTTP, before they are made."""

    context: SpanContext
    """Of the first span, by which a processor sees that the trace is recorded."""
    parent: SpanContext | None
    spans: Sequence[LifeSpan]
    """The first one, and those below it."""
    ahead_s: float
    """The wall's clock minus the clock of the spans' times."""
    is_server: bool = False
    has_failed: bool = False


class SpanMaker:
    """Makes spans of one resource."""

    def __init__(self, resource: Resource, scope: InstrumentationScope, new_id: Callable[[], int]) -> None:
        """`new_id` gives the ids of the spans below a request's."""
        self._resource = resource
        self._scope = scope
        self._new_id = new_id

    def parent(self, parent: TraceContext | None) -> Context:
        """The context that a sampler is asked with."""
        if parent is None:
            return Context()
        return set_span_in_context(NonRecordingSpan(_span_context(parent, is_remote=True)), Context())

    def unmade(
        self,
        spans: Sequence[LifeSpan],
        own: TraceContext,
        parent: TraceContext | None,
        ahead_s: float,
        *,
        is_server: bool = False,
        has_failed: bool = False,
    ) -> Unmade:
        """Spans of which the first has the context `own`; a server's parent is its client's."""
        above = None if parent is None else _span_context(parent, is_remote=is_server)
        return Unmade(_span_context(own), above, spans, ahead_s, is_server, has_failed)

    def made(self, of: Unmade) -> Iterator[ReadableSpan]:
        """The spans; ids of those below the first are new."""
        first, *parts = of.spans
        context, kind = of.context, SpanKind.SERVER if of.is_server else SpanKind.INTERNAL
        status = _ERROR if of.has_failed else _UNSET
        yield self._made(first, context, of.parent, of.ahead_s, kind=kind, status=status)
        for part in parts:
            below = SpanContext(
                context.trace_id,
                self._new_id(),
                is_remote=False,
                trace_flags=context.trace_flags,
                trace_state=context.trace_state,
            )
            yield self._made(part, below, context, of.ahead_s)

    def _made(
        self,
        span: LifeSpan,
        context: SpanContext,
        parent: SpanContext | None,
        ahead_s: float,
        kind: SpanKind = SpanKind.INTERNAL,
        status: Status = _UNSET,
    ) -> ReadableSpan:
        return ReadableSpan(
            name=span.name,
            context=context,
            parent=parent,
            resource=self._resource,
            attributes=span.about,
            events=[Event(each.name, each.about, _ns(each.at + ahead_s)) for each in span.moments],
            kind=kind,
            status=status,
            start_time=_ns(span.began_at + ahead_s),
            end_time=_ns(span.ended_at + ahead_s),
            instrumentation_scope=self._scope,
        )


class MakingExporter(SpanExporter):
    """Makes the spans that another exporter is to send."""

    def __init__(self, exporter: SpanExporter, maker: SpanMaker) -> None:
        self._exporter = exporter
        self._maker = maker

    def export(self, spans: Sequence[Unmade]) -> SpanExportResult:  # type: ignore[override]
        """Called in the thread of a batch's processor; one batch may become several."""
        made = (span for each in spans for span in self._maker.made(each))
        result = SpanExportResult.SUCCESS
        while batch := [*islice(made, MOST_SPANS)]:
            if self._exporter.export(batch) is not SpanExportResult.SUCCESS:
                result = SpanExportResult.FAILURE
        return result

    def shutdown(self) -> None:
        """End the other one."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Have the other one send what it keeps."""
        return self._exporter.force_flush(timeout_millis)


def _ns(at: float) -> int:
    return int(at * 1e9)


def _span_context(context: TraceContext, *, is_remote: bool = False) -> SpanContext:
    state = TraceState.from_header([context.state]) if context.state else None
    flags = _SAMPLED if context.is_sampled else _NOT_SAMPLED
    return SpanContext(context.trace_id, context.span_id, is_remote=is_remote, trace_flags=flags, trace_state=state)
