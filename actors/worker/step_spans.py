"""Spans of a step, an export and an import, for a worker's trace."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from raydix.actors.messages import ImportReport
from raydix.actors.tracing import Span
from raydix.engine.core.types import SegmentHeader

if TYPE_CHECKING:  # the engine imports torch, which only a worker's process needs
    from raydix.engine.core.worker.step import ScheduledChunk
    from raydix.engine.model.engine import StepResult

STEPS, TRANSFERS = "steps", "transfers"  # rows that are no request's


def spans_of_step(result: "StepResult") -> Iterator[Span]:
    """The step, its part for each request, and the waits that it ended."""
    if not result.has_computed:
        return
    shape, began, took = result.shape, result.started_at, result.step_s
    name = f"{shape.num_prefill_tokens} prompt tokens, {shape.num_decodes} decodes"
    yield Span(STEPS, name, started_at=began, seconds=took, about={"drafted": shape.num_draft_tokens})
    for chunk in result.chunks:
        about = {"from": chunk.start, "tokens": chunk.num_tokens}
        yield Span(chunk.request.request_id, _name(chunk), started_at=began, seconds=took, about=about)
        # The first part: for a free place, and where another worker computed the prompt, for its KV.
        request = chunk.request
        if chunk.start == request.num_cached_tokens:
            waited_s = max(0.0, began - request.submitted_at)
            yield Span(request.request_id, "waiting", started_at=request.submitted_at, seconds=waited_s, about={})


def span_of_export(header: SegmentHeader, at: float) -> Span:
    """A segment that is on its way to the manager, or that a request is handed over with."""
    about: dict[str, object] = {"blocks": len(header.hashes), "bytes": header.num_bytes}
    if header.handover is None:
        return Span(TRANSFERS, "export", started_at=at, seconds=0.0, about=about)
    name = header.handover.request_id
    return Span(TRANSFERS, "hand over", started_at=at, seconds=0.0, about={**about, "request": name}, transfer=name)


def _name(chunk: "ScheduledChunk") -> str:
    end = chunk.start + chunk.num_tokens
    if chunk.start < len(chunk.request.assignment.token_ids):
        return f"prefill {chunk.start} to {end}"
    drafted = f", {len(chunk.draft)} drafted" if chunk.draft else ""
    return f"decode {chunk.start - chunk.request.assignment.num_prompt_tokens + 1}{drafted}"


def span_of_import(header: SegmentHeader, report: ImportReport, started_at: float, seconds: float) -> Span:
    """A segment that came, or did not."""
    about: dict[str, object] = {"blocks": len(header.hashes), "bytes": header.num_bytes, "fate": report.fate.name}
    if header.handover is None:
        return Span(TRANSFERS, "import", started_at=started_at, seconds=seconds, about=about)
    name = header.handover.request_id
    about["request"] = name
    return Span(
        TRANSFERS, "take over", started_at=started_at, seconds=seconds, about=about, transfer=name, is_arrival=True
    )
