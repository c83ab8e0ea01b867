"""Exported KV, in the object store and on disk: what is kept, what is written, and what goes.

A segment is in the object store, on disk, or both. It is written as soon as it is known, so that it survives a restart,
and leaves the store without a loss once it is written. Both are bounded, and each has an eviction queue, as workers'
pools have, in which a segment weighs its bytes: expired ones go first, then the least recently used within what tenants
are granted; of a request's segments the last goes first, since without the others it could not be hit.

Events come in (exported, written, read, lost, used) and instructions go out: `WriteFile`, `ReadFile`, `EraseFile` (copy
a segment to disk, bring it back into the object store, forget its file). Who gets a segment is the directory's matter.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from engine.core.block_index import BlockIndex, Segment
from engine.core.eviction.queue import EvictionQueue
from engine.core.eviction.ranking import LeastRecent
from engine.core.tenants import Tenant, quotas
from engine.core.types import BlockHash, CacheWish, EvictionReason, Retention, SegmentHeader

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

    def __init__(
        self, blocks: BlockIndex, store_budget_bytes: int, disk_budget_bytes: int, tenants: Iterable[Tenant] = ()
    ) -> None:
        """`tenants`: who is granted how much of each budget."""
        self._blocks = blocks
        self.now = 0.0
        """Seconds since the epoch; whoever has a clock sets it. What has expired by then goes first."""
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
        self._segments: dict[int, Segment] = {}
        tenants = tuple(tenants)
        self._in_store = EvictionQueue[int](
            LeastRecent(), quotas(tenants, store_budget_bytes), lambda segment_id: self._segments[segment_id].num_bytes
        )
        """The segments in the object store, by id; evictable are those that can leave it."""
        self._on_disk = EvictionQueue[int](
            LeastRecent(), quotas(tenants, disk_budget_bytes), lambda segment_id: self._segments[segment_id].file_bytes
        )
        """Those with a file; evictable are those whose file can be given up."""
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
                self._use([segment], header.retention)
            else:
                unused += self._erase(header)
        return unused + self._make_room_on_disk(0, "")  # all can go, and floors add up to no more than the budget

    def exported(self, header: SegmentHeader, ref: object) -> tuple[Segment, list[DiskInstruction]]:
        """A segment is in the object store: note which blocks are in it, and keep it if there are any."""
        segment = self._new(header, ref)
        is_new = self._index(segment)
        instructions: list[DiskInstruction] = []
        if header.full_hashes and header.num_bytes:
            self._segments[segment.segment_id] = segment
            self.store_bytes += header.num_bytes
            instructions = self._write(segment) if is_new else []
            self._use([segment], header.retention)
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
        self._use([segment], self._retention_of(segment))
        self._shrink()
        return []

    def read(self, segment: Segment, ref: object) -> set[str]:
        """A segment has come from disk into the object store; returns the workers that want it."""
        segment.ref, segment.is_in_store = ref, True
        self.store_bytes += segment.header.num_bytes
        receivers, segment.wanted_by = segment.wanted_by, set()
        self._use([segment], self._retention_of(segment))
        self._shrink()
        return receivers

    def unread(self, segment: Segment) -> set[str]:
        """A segment could not be read from disk now; returns the workers that wanted it."""
        receivers, segment.wanted_by = segment.wanted_by, set()
        if self._segments.get(segment.segment_id) is segment:
            self._settle(segment)
        return receivers

    def undelivered(self, segment: Segment) -> None:
        """A worker could not fetch a segment from the object store: what is on disk stays there, what is not is
        forgotten, unless it is just being written."""
        if segment.segment_id not in self._writing and self._segments.get(segment.segment_id) is segment:
            self._leave_store(segment, "segment lost")

    def lost(self, segment: Segment) -> list[DiskInstruction]:
        """A segment is damaged, or its file is gone. Another segment of the same blocks keeps the file, which may have
        been written anew for it; if not, it finds out when it is read."""
        self._drop(segment, "segment lost")
        return [] if segment.file is None else self._erase(segment.file)

    def lease(self, segment: Segment) -> None:
        """A request was promised blocks of a segment: it stays until that is `released`."""
        segment.leases += 1
        self._settle(segment)

    def released(self, leased: Iterable[Segment], hashes: Iterable[BlockHash], wish: CacheWish) -> None:
        """A request ended: its leases are gone, and the segments with its blocks are the most recent ones, the first
        block's above all, kept as it wishes."""
        records = map(self._blocks.get, hashes if self._segments else ())
        used = {r.segment.segment_id: r.segment for r in records if r is not None and r.segment is not None}
        for segment in leased:
            segment.leases -= 1
            if self._segments.get(segment.segment_id) is segment:
                used.setdefault(segment.segment_id, segment)
        expires_at = None if wish.ttl_s is None else self.now + wish.ttl_s
        self._use(list(used.values()), Retention(wish.tenant, wish.priority, expires_at))
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
            assert (segment.segment_id in self._in_store) == self._can_leave_store(segment)
            assert (segment.segment_id in self._on_disk) == self._can_leave_disk(segment)
        for queue in (self._in_store, self._on_disk):
            queue.check_integrity()
            assert self._segments.keys() >= set(queue)
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

    def _can_leave_store(self, segment: Segment) -> bool:
        return segment.is_in_store and segment.leases == 0 and segment.segment_id not in self._writing

    def _can_leave_disk(self, segment: Segment) -> bool:
        return segment.file is not None and segment.leases == 0 and not segment.wanted_by

    def _retention_of(self, segment: Segment) -> Retention:
        """What requests wish for a segment, wherever it is."""
        queues = (self._on_disk, self._in_store)
        known = (queue.retention_of(segment.segment_id) for queue in queues)
        return next((retention for retention in known if retention is not None), segment.header.retention)

    def _use(self, path: Sequence[Segment], retention: Retention) -> None:
        """Make these segments, in the order of a prompt, the most recent ones where they are."""
        for queue, here in (
            (self._in_store, [segment.segment_id for segment in path if segment.is_in_store]),
            (self._on_disk, [segment.segment_id for segment in path if segment.file is not None]),
        ):
            for segment_id in here:
                if segment_id in queue:
                    queue.acquire(segment_id)
            queue.visit(here, self.now, retention)
        for segment in reversed(path):
            self._settle(segment)

    def _settle(self, segment: Segment) -> None:
        """Let a segment be evicted from where it may be, and from nowhere else."""
        for queue, is_evictable in (
            (self._in_store, self._can_leave_store(segment)),
            (self._on_disk, self._can_leave_disk(segment)),
        ):
            if is_evictable and segment.segment_id not in queue:
                queue.release([segment.segment_id], self.now)
            elif not is_evictable and segment.segment_id in queue:
                queue.acquire(segment.segment_id)

    def _shrink(self) -> None:
        """Keep exported bytes within the budget."""
        while self.store_bytes > self.store_budget_bytes and len(self._in_store):
            segment_id, reason = self._in_store.evict_with_reason(self.now)
            full = reason is EvictionReason.FULL
            self._leave_store(self._segments[segment_id], "object store full" if full else reason)

    def _leave_store(self, segment: Segment, reason: str) -> None:
        """Drop a segment's bytes; in its place stays what is on disk. Deliveries under way keep the old one."""
        if segment.file is None:
            self._drop(segment, reason)
            return
        self._in_store.forget(segment.segment_id)
        on_disk = Segment(segment.segment_id, segment.file, None, is_in_store=False, file=segment.file)
        self._segments[segment.segment_id] = on_disk
        self.store_bytes -= segment.header.num_bytes
        for block_hash in on_disk.header.hashes:
            record = self._blocks.get(block_hash)
            if record is not None and record.segment is segment:
                record.segment = on_disk
        self._settle(on_disk)

    def _write(self, segment: Segment) -> list[DiskInstruction]:
        """Have a new segment written, unless the disk does not keep up or has no room but what others are granted."""
        num_bytes = segment.header.num_bytes
        keeps_up = (
            not self._writing or sum(file.num_bytes for file in self._writing.values()) + num_bytes <= MAX_WRITING_BYTES
        )
        if not keeps_up or num_bytes > self.disk_budget_bytes:
            return []
        instructions = self._make_room_on_disk(num_bytes, segment.header.retention.tenant)
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

    def _make_room_on_disk(self, num_bytes: int, tenant: str) -> list[DiskInstruction]:
        """Give up files until so many bytes of this tenant's fit, or only those of others are left that their floors
        cover."""
        erased: list[DiskInstruction] = []
        while self.disk_bytes + num_bytes > self.disk_budget_bytes:
            evicted = self._on_disk.evict_for(tenant, self.now)
            if evicted is None:
                break
            segment_id, reason = evicted
            segment = self._segments[segment_id]
            file = segment.file
            assert file is not None
            if segment.is_in_store:
                self._has_no_file(file)
                segment.file = None
            else:
                self._drop(segment, "disk full" if reason is EvictionReason.FULL else reason)
            erased += self._erase(file)
        return erased

    def _drop(self, segment: Segment, reason: str) -> None:
        self._in_store.forget(segment.segment_id)
        self._on_disk.forget(segment.segment_id)
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
