"""Exported KV, in the object store and on disk: what is kept, what is written, and what goes.

A segment is in the object store, on disk, or both. It is written as soon as it is known, so that it survives a restart,
and leaves the store without a loss once it is written. Both are bounded, and the least recently used segment leaves
first. A segment is a run of one request's blocks, so instead of sorting out leaves, a request that ends uses its
segments in reverse: the end of a prompt goes before its beginning, without which it could not be hit.

Events come in (exported, written, read, lost, used) and instructions go out: `WriteFile`, `ReadFile`, `EraseFile` (copy
a segment to disk, bring it back into the object store, forget its file). Who gets a segment is the directory's matter.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from engine.core.block_index import BlockIndex, Segment
from engine.core.types import BlockHash, SegmentHeader

MAX_WRITING_BYTES = 256 << 20
"""Segments that are being written cannot leave the object store; when the disk does not keep up, others stay off it."""


@dataclass(frozen=True, slots=True)
class WriteFile:
    """Copy a segment to disk, and answer with `SegmentStore.written`."""

    segment: Segment


@dataclass(frozen=True, slots=True)
class ReadFile:
    """Put a segment's file into the object store, and answer with `Directory.segment_read`, `segment_unread` or
    `segment_lost`."""

    segment: Segment


class DamagedFileError(Exception):
    """A segment's file is gone, or not what it was."""


@dataclass(frozen=True, slots=True)
class EraseFile:
    """Remove the file with this header."""

    header: SegmentHeader


DiskInstruction: TypeAlias = WriteFile | ReadFile | EraseFile


class SegmentStore:
    """The segments of one cluster. Which of them has a block is noted in `blocks`."""

    def __init__(self, blocks: BlockIndex, store_budget_bytes: int, disk_budget_bytes: int) -> None:
        self._blocks = blocks
        self.store_budget_bytes = store_budget_bytes
        self.store_bytes = 0
        """In the object store."""
        self.disk_budget_bytes = disk_budget_bytes
        self.disk_bytes = 0
        """Of payloads in files, those that are being written included."""
        self._writing: dict[int, SegmentHeader] = {}
        """The header of each segment that is being written: its bytes on disk are reserved."""
        self._num_sharing: Counter[tuple[BlockHash, ...]] = Counter()
        """How many segments have a file, or are being written to it: those of exactly the same blocks share one."""
        self._segments: OrderedDict[int, Segment] = OrderedDict()
        self._num_ever = 0

    def __len__(self) -> int:
        return len(self._segments)

    def get(self, segment_id: int) -> Segment | None:
        return self._segments.get(segment_id)

    # What happens to segments

    def files_found(self, headers: Iterable[SegmentHeader]) -> list[DiskInstruction]:
        """Segments that an earlier process has written, the least recently used first.

        Those of other models do no harm: no request has their hashes, and they are the first to go.
        """
        unused: list[DiskInstruction] = []
        for header in headers:
            segment = self._new(header, None, is_in_store=False, file=header)
            if self._index(segment):
                self._segments[segment.segment_id] = segment
                self._has_file(header)
            else:
                unused += self._erase(header)
        return unused + self._make_room_on_disk(0)

    def exported(self, header: SegmentHeader, ref: object) -> tuple[Segment, list[DiskInstruction]]:
        """A segment is in the object store: note which blocks are in it, and keep it if there are any."""
        segment = self._new(header, ref)
        is_new = self._index(segment)
        instructions: list[DiskInstruction] = []
        if header.full_hashes and header.num_bytes:
            self._segments[segment.segment_id] = segment
            self.store_bytes += header.num_bytes
            instructions = self._write(segment) if is_new else []
            self._shrink()
        return segment, instructions

    def written(self, segment_id: int, file: SegmentHeader | None) -> list[DiskInstruction]:
        """A segment is on disk now, under this header; None if it could not be written."""
        self._has_no_file(self._writing.pop(segment_id))
        segment = self._segments.get(segment_id)
        if segment is None:
            return [] if file is None else self._erase(file)
        if file is not None:
            segment.file = file
            self._has_file(file)
        self._shrink()
        return []

    def read(self, segment: Segment, ref: object) -> set[str]:
        """A segment has come from disk into the object store; returns the workers that want it."""
        segment.ref, segment.is_in_store = ref, True
        self.store_bytes += segment.header.num_bytes
        self._segments.move_to_end(segment.segment_id)
        receivers, segment.wanted_by = segment.wanted_by, set()
        self._shrink()
        return receivers

    def undelivered(self, segment: Segment) -> None:
        """A worker could not fetch a segment from the object store: what is on disk stays there, what is not is
        forgotten, unless it is just being written."""
        if segment.segment_id not in self._writing and self._segments.get(segment.segment_id) is segment:
            self._leave_store(segment, "segment lost")

    def lost(self, segment: Segment) -> list[DiskInstruction]:
        """A segment is damaged, or its file is gone, which then is of no use to any other segment either."""
        self._drop(segment, "segment lost")
        return [] if segment.file is None else [EraseFile(segment.file)]

    def released(self, leased: Iterable[Segment], hashes: Iterable[BlockHash]) -> None:
        """A request ended: its leases are gone, and the segments with its blocks are the most recent ones, the first
        block's above all."""
        for segment in leased:
            segment.leases -= 1
        if not self._segments:
            return
        records = (self._blocks.get(block_hash) for block_hash in hashes)
        used = {r.segment.segment_id: None for r in records if r is not None and r.segment is not None}
        for segment_id in reversed(used):
            self._segments.move_to_end(segment_id)
        self._shrink()

    def reset(self) -> tuple[int, list[DiskInstruction]]:
        """Drop every segment that nobody was promised, from disk too; returns how many blocks they had."""
        unused = [s for s in self._segments.values() if s.leases == 0 and not s.wanted_by]
        for segment in unused:
            self._drop(segment, "reset")
        erased = [gone for segment in unused if segment.file for gone in self._erase(segment.file)]
        return sum(len(segment.header.full_hashes) for segment in unused), erased

    def check_integrity(self, leased: list[Segment]) -> None:
        """Assert that the sums are right; `leased` has each segment once for each of its leases."""
        assert all(r.segment is None or r.segment.segment_id in self._segments for r in self._blocks.values())
        segments = self._segments.values()
        for segment in segments:
            assert segment.leases == leased.count(segment)
            assert segment.is_in_store or segment.file is not None
            assert not (segment.is_in_store and segment.wanted_by)
        assert self.store_bytes == sum(segment.header.num_bytes for segment in segments if segment.is_in_store)
        files = [segment.file for segment in segments if segment.file is not None] + list(self._writing.values())
        assert self.disk_bytes == sum(file.num_bytes for file in files) <= self.disk_budget_bytes
        assert self._num_sharing == Counter(file.full_hashes for file in files)

    # Inside

    def _new(
        self, header: SegmentHeader, ref: object, *, is_in_store: bool = True, file: SegmentHeader | None = None
    ) -> Segment:
        self._num_ever += 1
        return Segment(self._num_ever - 1, header, ref, is_in_store=is_in_store, file=file)

    def _index(self, segment: Segment) -> bool:
        """Note where its blocks are that no other segment has; whether there are any."""
        is_new = False
        for block_hash in segment.header.full_hashes:
            record = self._blocks[block_hash]
            if record.segment is None:
                self._blocks.came(block_hash, record)
                record.segment = segment
                is_new = True
        return is_new

    def _shrink(self) -> None:
        """Keep exported bytes within the budget: the least recently used segment that nobody leases goes first."""

        def gives(segment: Segment) -> int:
            movable = segment.is_in_store and segment.segment_id not in self._writing
            return segment.header.num_bytes if movable else 0

        for segment in self._least_recent(self.store_bytes - self.store_budget_bytes, gives):
            self._leave_store(segment, "object store full")

    def _least_recent(self, num_bytes: int, gives: Callable[[Segment], int]) -> list[Segment]:
        """The least recently used segments that nobody leases and that give something, as many as it takes."""
        chosen = []
        for segment in self._segments.values():
            if num_bytes <= 0:
                break
            if segment.leases == 0 and (given := gives(segment)):
                chosen.append(segment)
                num_bytes -= given
        return chosen

    def _leave_store(self, segment: Segment, reason: str) -> None:
        """Drop a segment's bytes; in its place stays what is on disk. Deliveries under way keep the old one."""
        if segment.file is None:
            self._drop(segment, reason)
            return
        on_disk = Segment(segment.segment_id, segment.file, None, is_in_store=False, file=segment.file)
        self._segments[segment.segment_id] = on_disk
        self.store_bytes -= segment.header.num_bytes
        for block_hash in on_disk.header.hashes:
            record = self._blocks.get(block_hash)
            if record is not None and record.segment is segment:
                record.segment = on_disk

    def _write(self, segment: Segment) -> list[DiskInstruction]:
        """Have a new segment written, unless the disk has no room or does not keep up."""
        num_bytes = segment.header.num_bytes
        keeps_up = (
            not self._writing or sum(file.num_bytes for file in self._writing.values()) + num_bytes <= MAX_WRITING_BYTES
        )
        if not keeps_up or num_bytes > self.disk_budget_bytes:
            return []
        instructions = self._make_room_on_disk(num_bytes)
        if self.disk_bytes + num_bytes <= self.disk_budget_bytes:
            self._writing[segment.segment_id] = segment.header
            self._has_file(segment.header)
            instructions.append(WriteFile(segment))
        return instructions

    def _has_file(self, file: SegmentHeader) -> None:
        self.disk_bytes += file.num_bytes
        self._num_sharing[file.full_hashes] += 1

    def _has_no_file(self, file: SegmentHeader) -> None:
        self.disk_bytes -= file.num_bytes
        self._num_sharing[file.full_hashes] -= 1
        if not self._num_sharing[file.full_hashes]:
            del self._num_sharing[file.full_hashes]

    def _erase(self, file: SegmentHeader) -> list[DiskInstruction]:
        """Remove a file that a segment has no more, unless another has it."""
        return [] if file.full_hashes in self._num_sharing else [EraseFile(file)]

    def _make_room_on_disk(self, num_bytes: int) -> list[DiskInstruction]:
        """Give up files until so many bytes fit: the least recently used segment that nobody leases goes first."""
        erased: list[DiskInstruction] = []

        def gives(segment: Segment) -> int:
            return segment.file.num_bytes if segment.file is not None and not segment.wanted_by else 0

        for segment in self._least_recent(self.disk_bytes + num_bytes - self.disk_budget_bytes, gives):
            file = segment.file
            assert file is not None
            if segment.is_in_store:
                self._has_no_file(file)
                segment.file = None
            else:
                self._drop(segment, "disk full")
            erased += self._erase(file)
        return erased

    def _drop(self, segment: Segment, reason: str) -> None:
        del self._segments[segment.segment_id]
        self.store_bytes -= segment.header.num_bytes if segment.is_in_store else 0
        if segment.file is not None:
            self._has_no_file(segment.file)
        for block_hash in segment.header.full_hashes:
            record = self._blocks.get(block_hash)
            if record is not None and record.segment is segment:
                record.segment = None
                self._blocks.left(block_hash, record, reason)
        self._blocks.forget_unknown(segment.header.full_hashes)
