"""Instructions of the segment store to the disk tier."""

from dataclasses import dataclass
from typing import TypeAlias

from raydix.engine.core.manager.block_index import Segment
from raydix.engine.core.types import SegmentHeader


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
