"""Makes OpenTelemetry's spans of a request's life. Imported only where spans are sent: OpenTelemetry is an extra.

A span is made at once, with its end: one that is begun and ended as the SDK's tracer does costs ten times as much.
"""

from collections.abc import Callable, Iterator, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
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

_UNSET, _ERROR = Status(StatusCode.UNSET), Status(StatusCode.ERROR)
_SAMPLED, _NOT_SAMPLED = TraceFlags(TraceFlags.SAMPLED), TraceFlags(TraceFlags.DEFAULT)


class SpanMaker:
    """Makes spans of one resource. `ahead_s`: the wall's clock minus the clock of the spans' times."""

    def __init__(self, resource: Resource, scope: InstrumentationScope) -> None:
        self._resource = resource
        self._scope = scope

    def parent(self, parent: TraceContext | None) -> Context:
        """The context that a sampler is asked with."""
        if parent is None:
            return Context()
        return set_span_in_context(NonRecordingSpan(_span_context(parent, is_remote=True)), Context())

    def of_server(
        self, span: LifeSpan, own: TraceContext, parent: TraceContext | None, ahead_s: float, *, has_failed: bool
    ) -> ReadableSpan:
        """The span of a request over HTTP, whose parent is the client's."""
        of_client = None if parent is None else _span_context(parent, is_remote=True)
        status = _ERROR if has_failed else _UNSET
        return self._made(span, _span_context(own), of_client, ahead_s, kind=SpanKind.SERVER, status=status)

    def of_life(
        self,
        life: Sequence[LifeSpan],
        own: TraceContext,
        parent: TraceContext | None,
        new_id: Callable[[], int],
        ahead_s: float,
    ) -> Iterator[ReadableSpan]:
        """The request's span, of the context `own`, and those of its parts, whose ids are new."""
        whole, *parts = life
        context = _span_context(own)
        above = None if parent is None else _span_context(parent)
        status = _ERROR if "error.type" in whole.about else _UNSET
        yield self._made(whole, context, above, ahead_s, status=status)
        for part in parts:
            below = SpanContext(
                context.trace_id,
                new_id(),
                is_remote=False,
                trace_flags=context.trace_flags,
                trace_state=context.trace_state,
            )
            yield self._made(part, below, context, ahead_s)

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


def _ns(at: float) -> int:
    return int(at * 1e9)


def _span_context(context: TraceContext, *, is_remote: bool = False) -> SpanContext:
    state = TraceState.from_header([context.state]) if context.state else None
    flags = _SAMPLED if context.is_sampled else _NOT_SAMPLED
    return SpanContext(context.trace_id, context.span_id, is_remote=is_remote, trace_flags=flags, trace_state=state)
