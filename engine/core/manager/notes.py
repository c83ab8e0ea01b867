"""Notes of the directory's stimuli (`engine.core.stimuli`): no tokens, and no references to payloads.

Decisions depend on neither, so the notes are enough to decide the same again.
"""

from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple, Protocol

from engine.core.costs import WorkerCosts
from engine.core.manager.block_index import Segment
from engine.core.manager.segment_store import SegmentStore
from engine.core.objectives import Objectives
from engine.core.stimuli import Notes, as_it_is
from engine.core.tenants import Tenant
from engine.core.types import AdmitRequest, Attempt, BlockHash, CacheHints, SegmentHeader


class Segments(Protocol):
    """A directory, as far as segments go."""

    segments: SegmentStore


class AdmitNote(NamedTuple):
    """An `AdmitRequest` without the preview of its prompt."""

    request_id: str
    attempt: int
    hashes: tuple[BlockHash, ...]
    num_tokens: int
    session: str | None
    ingress_id: str
    cache: CacheHints
    generates: bool
    avoided: tuple[str, ...]
    objectives: Objectives
    priority: int
    reasoning_turn: int | None

    def recall(self, machine: object) -> AdmitRequest:
        return AdmitRequest(
            request_id=self.request_id,
            attempt=self.attempt,
            hashes=self.hashes,
            num_tokens=self.num_tokens,
            session=self.session,
            ingress_id=self.ingress_id,
            cache=self.cache,
            generates=self.generates,
            avoided=self.avoided,
            objectives=self.objectives,
            priority=self.priority,
            reasoning_turn=self.reasoning_turn,
        )


class SegmentNote(NamedTuple):
    """A segment that the directory has handed out; each copy in the object store is another one."""

    segment_id: int
    copy: int

    def recall(self, machine: Segments) -> Segment:
        """The same segment of another directory; an empty one if the segment, or this copy, is gone there too."""
        known = machine.segments.get(self.segment_id)
        if known is not None and known.copy == self.copy:
            return known
        return Segment(self.segment_id, SegmentHeader("", (), 0, 0), None, is_in_store=False)


_facts = attrgetter(*AdmitNote._fields)


def _note_of_request(request: AdmitRequest) -> AdmitNote:
    return AdmitNote._make(_facts(request))


def _note_of_header(header: SegmentHeader) -> SegmentHeader:
    """The header without the token that is handed over."""
    if header.handover is None:
        return header
    return replace(header, handover=header.handover._replace(token_id=0))


def _note_of_segment(segment: Segment) -> SegmentNote:
    return SegmentNote(segment.segment_id, segment.copy)


NOTES = Notes(
    {
        AdmitRequest: _note_of_request,
        Attempt: as_it_is,
        Segment: _note_of_segment,
        SegmentHeader: _note_of_header,
        Tenant: as_it_is,
        Objectives: as_it_is,
        WorkerCosts: as_it_is,
    }
)
