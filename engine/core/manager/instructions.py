"""Instructions of the directory to workers, and of the segment store to the disk."""

from dataclasses import dataclass
from typing import TypeAlias

from raydix.engine.core.manager.block_index import Segment
from raydix.engine.core.types import BlockHash, SegmentHeader


@dataclass(frozen=True, slots=True)
class DeliverSegment:
    """Hand a segment to a worker."""

    worker_id: str
    segment: Segment


@dataclass(frozen=True, slots=True)
class Export:
    """Ask a worker to export blocks of its pool."""

    worker_id: str
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """Tell a worker that awaited blocks will not come."""

    worker_id: str
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class HandoverLost:
    """Tell a decode worker that the prefill worker of a request will not hand over."""

    worker_id: str
    request_id: str


@dataclass(frozen=True, slots=True)
class WriteFile:
    """Copy a segment to disk, and answer with `SegmentStore.written`."""

    segment: Segment


@dataclass(frozen=True, slots=True)
class ReadFile:
    """Put a segment's file into the object store, and answer with `Stock.read`, `unread` or `lost`."""

    segment: Segment


class DamagedFileError(Exception):
    """A segment's file is missing or damaged."""


@dataclass(frozen=True, slots=True)
class EraseFile:
    """Remove the file with this header."""

    header: SegmentHeader


DiskInstruction: TypeAlias = WriteFile | ReadFile | EraseFile
WorkerInstruction: TypeAlias = DeliverSegment | Export | Lost | HandoverLost
Instruction: TypeAlias = WorkerInstruction | DiskInstruction
