"""Spans of the manager's decisions, for a trace: what each request was placed on, and what moves KV."""

from collections.abc import Mapping
from types import MappingProxyType

from raydix.actors.tracing import Recorder, Span
from raydix.engine.core.manager.instructions import (
    DeliverSegment,
    EraseFile,
    Export,
    HandoverLost,
    Instruction,
    Lost,
    ReadFile,
    WriteFile,
)
from raydix.engine.core.types import Admission, AdmitRequest, SegmentHeader

ADMISSIONS, MOVES, DISK = "admissions", "KV to workers", "KV and the disk"  # rows of the manager
NOTHING: Mapping[str, object] = MappingProxyType({})


def note_admission(recorder: Recorder, request: AdmitRequest, admission: Admission, began_at: float, at: float) -> None:
    """Record the placement of a request, with what was found of its prompt. Times are monotonic."""
    about: dict[str, object] = {
        "prefill": admission.prefill,
        "decode": admission.decode,
        "attempt": request.attempt,
        "tokens": request.num_tokens,
        "session": request.session is not None,
        "awaited_blocks": len(admission.prefill_awaited),
        "gives_way": admission.gives_way,
    }
    if admission.expected is not None:
        about["expected_ttft_s"] = round(admission.expected.ttft_s, 6)
        about["blocks"] = dict(admission.expected.blocks)
    if request.avoided:
        about["avoided"] = list(request.avoided)
    recorder.add([Span(ADMISSIONS, request.request_id, started_at=began_at, seconds=at - began_at, about=about)])


def note_refusal(recorder: Recorder, request: AdmitRequest, why: str, began_at: float, at: float) -> None:
    """Record that a request was not placed: it waits, is late, or there is no worker."""
    about = {"why": why, "attempt": request.attempt, "tokens": request.num_tokens}
    recorder.add(
        [Span(ADMISSIONS, f"{request.request_id} {why}", started_at=began_at, seconds=at - began_at, about=about)]
    )


def note_instruction(
    recorder: Recorder,
    instruction: Instruction,
    began_at: float,
    seconds: float = 0.0,
    more: Mapping[str, object] = NOTHING,
) -> None:
    """Record what a worker or the disk was told, and how long it took where that is known."""
    row, name, about = _told(instruction)
    recorder.add([Span(row, name, started_at=began_at, seconds=seconds, about={**about, **more})])


def _told(instruction: Instruction) -> tuple[str, str, dict[str, object]]:
    """Row, name and facts of an instruction."""
    match instruction:
        case DeliverSegment(worker_id=worker_id, segment=segment):
            about = _of_header(segment.header) | {"from": segment.exporter or "the disk", "to": worker_id}
            return MOVES, f"deliver to {worker_id}", about
        case Export(worker_id=worker_id, hashes=hashes):
            return MOVES, f"ask {worker_id} for blocks", {"blocks": len(hashes), "from": worker_id}
        case Lost(worker_id=worker_id, hashes=hashes):
            return MOVES, f"tell {worker_id} of lost blocks", {"blocks": len(hashes), "to": worker_id}
        case HandoverLost(worker_id=worker_id, request_id=request_id):
            return MOVES, f"tell {worker_id} of a lost hand-over", {"request": request_id, "to": worker_id}
        case WriteFile(segment=segment):
            return DISK, "write", _of_header(segment.header)
        case ReadFile(segment=segment):
            return DISK, "read", _of_header(segment.header)
        case EraseFile(header=header):
            return DISK, "erase", _of_header(header)


def _of_header(header: SegmentHeader) -> dict[str, object]:
    about: dict[str, object] = {"blocks": len(header.hashes), "bytes": header.num_bytes}
    if header.handover is not None:
        about["request"] = header.handover.request_id
    return about
