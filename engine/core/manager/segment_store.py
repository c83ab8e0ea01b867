"""Retention of exported KV in the object store and on disk.

A segment is in the object store, on disk, or both. A new segment is written at once, so that it survives a restart, and
leaves the store without a loss once written. Each node has an object store of its own, in which the segments stay that
its workers export, so each node's part of the store is bounded, as is the disk. Each part and the disk have an eviction
queue, as workers' pools have, in which a segment weighs its bytes: expired segments go first, then the least recently
used within the quotas of tenants; of a request's segments the last goes first, since a hit needs the ones before it.

Events come in (exported, written, read, lost, used) and instructions go out: `WriteFile` (copy a segment to disk),
`ReadFile` (bring it back into the object store), `EraseFile`. The directory decides about deliveries.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from raydix.engine.core.eviction.queue import EvictionQueue
from raydix.engine.core.eviction.ranking import LeastRecent
from raydix.engine.core.eviction.retention import marked, retention
from raydix.engine.core.manager.block_index import BlockIndex, Segment
from raydix.engine.core.manager.instructions import DiskInstruction, EraseFile, ReadFile, WriteFile
from raydix.engine.core.tenants import Tenant, quotas
from raydix.engine.core.types import BlockHash, CacheHints, EvictionReason, Retention, SegmentHeader

# Limit of segments being written, which cannot leave the object store; when the disk falls behind, others stay off it.
MAX_WRITING_BYTES = 256 << 20
NO_MARKS: Mapping[int, Retention] = MappingProxyType({})


class SegmentFileList:
    """The files that are present or being written; segments of exactly the same blocks share a file."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Bytes of payloads."""
        self._num_sharing: Counter[tuple[BlockHash, ...]] = Counter()  # segments by file

    def add(self, file: SegmentHeader) -> None:
        self.num_bytes += file.num_bytes
        self._num_sharing[file.names] += 1

    def remove(self, file: SegmentHeader) -> None:
        self.num_bytes -= file.num_bytes
        self._num_sharing[file.names] -= 1
        if not self._num_sharing[file.names]:
            del self._num_sharing[file.names]

    def erase(self, file: SegmentHeader) -> list[DiskInstruction]:
        """Erase a segment's former file, unless another segment shares it."""
        return [] if file.names in self._num_sharing else [EraseFile(file)]

    def check_integrity(self, files: Iterable[SegmentHeader]) -> None:
        """Assert that the list has exactly these files."""
        listed = [*files]
        assert self.num_bytes == sum(file.num_bytes for file in listed)
        assert self._num_sharing == Counter(file.names for file in listed)


class SegmentStore:
    """The segments of one cluster. The segment of each block is noted in `blocks`.

    `now`, of all methods: seconds since the epoch, since files and their expiry outlive the process. Segments that have
    expired by then go first.
    """

    def __init__(
        self,
        blocks: BlockIndex,
        store_budget_bytes: int,
        disk_budget_bytes: int,
        tenants: Iterable[Tenant] = (),
        node: str = "",
    ) -> None:
        """`store_budget_bytes`: of each node; `tenants`: quotas of each budget; `node`: into whose object store files
        are read."""
        self._blocks = blocks
        self.store_budget_bytes = store_budget_bytes
        self.node_bytes: Counter[str] = Counter()
        """Bytes in the object store of each node."""
        self.node = node
        """Node into whose object store files are read."""
        self._kept_nodes = frozenset({node})
        self.disk_budget_bytes = disk_budget_bytes
        self._files = SegmentFileList()
        # The header of each segment being written: its bytes on disk are reserved.
        self._writing: dict[int, SegmentHeader] = {}
        self._segments: dict[int, Segment] = {}

        self._tenants = tuple(tenants)
        # The segments in the object store of each node, by id; evictable are the ones that can leave it.
        self._parts: dict[str, EvictionQueue[int]] = {}
        # The segments with a file, by id; evictable are the ones whose file can be erased.
        self._on_disk = EvictionQueue[int](
            LeastRecent(),
            quotas(self._tenants, disk_budget_bytes),
            lambda segment_id: self._segments[segment_id].file_bytes,
        )
        self._num_ever = 0

    def __len__(self) -> int:
        return len(self._segments)

    def limit(self, tenants: Iterable[Tenant]) -> None:
        """Take other quotas of each budget, from the next eviction on."""
        self._tenants = tuple(tenants)
        for part in self._parts.values():
            part.limit(quotas(self._tenants, self.store_budget_bytes))
        self._on_disk.limit(quotas(self._tenants, self.disk_budget_bytes))

    @property
    def store_bytes(self) -> int:
        """Bytes in the object stores of all nodes."""
        return sum(self.node_bytes.values())

    @property
    def disk_bytes(self) -> int:
        """Bytes of payloads in files, including files being written."""
        return self._files.num_bytes

    def keep_nodes(self, nodes: Iterable[str]) -> None:
        """Take the nodes with workers: each has a budget of its own. The segments on other nodes stay, since a worker
        may come back there, and share one budget from the next event on."""
        self._kept_nodes = frozenset({self.node, *nodes})

    def get(self, segment_id: int) -> Segment | None:
        return self._segments.get(segment_id)

    # Events

    def files_found(self, headers: Iterable[SegmentHeader], now: float) -> list[DiskInstruction]:
        """Take up segments that an earlier process has written, the least recently used first.

        Segments of other models do no harm: no request has their hashes, so they are evicted first.
        """
        unused: list[DiskInstruction] = []
        for header in headers:
            segment = self._new(header, None, is_in_store=False, file=header, node=self.node)
            # A file whose blocks other segments have is of no use.
            if self._blocks.stored(segment):
                self._segments[segment.segment_id] = segment
                self._files.add(header)
                self._use([segment], header.retention, now)
            else:
                unused += self._files.erase(header)
        return unused + self._make_room_on_disk(0, "", now)  # all can go, and floors add up to no more than the budget

    def exported(
        self, header: SegmentHeader, ref: object, now: float, *, node: str = "", exporter: str = ""
    ) -> tuple[Segment, list[DiskInstruction]]:
        """Index a new segment in the object store of a node, and keep it if it has full blocks."""
        segment = self._new(header, ref, node=node, exporter=exporter)
        is_new = self._blocks.stored(segment)
        instructions: list[DiskInstruction] = []
        # A hand-over of a partial block alone serves one request, and is not kept.
        if header.names and header.num_bytes:
            self._segments[segment.segment_id] = segment
            self.node_bytes[node] += header.num_bytes
            instructions = self._write(segment, now) if is_new else []
            self._use([segment], header.retention, now)
            self._shrink([node], now)
        return segment, instructions

    def written(self, segment_id: int, file: SegmentHeader | None, now: float) -> list[DiskInstruction]:
        """A segment was written under `file`; None if writing failed."""
        # The room that was reserved for the write is the file's now, or free again.
        self._files.remove(self._writing.pop(segment_id))
        segment = self._segments.get(segment_id)
        # The segment was dropped while it was being written.
        if segment is None:
            return [] if file is None else self._files.erase(file)
        if file is not None:
            segment.file = file
            self._files.add(file)
        self._use([segment], self._retention_of(segment), now)
        self._shrink([segment.node], now)
        return []

    def read(self, segment: Segment, ref: object, now: float) -> frozenset[str]:
        """A segment was copied from disk into the object store; returns the workers that await it."""
        segment.ref, segment.is_in_store = ref, True
        self.node_bytes[segment.node] += segment.header.num_bytes
        receivers, segment.requested_by = segment.requested_by, frozenset()
        self._use([segment], self._retention_of(segment), now)
        self._shrink([segment.node], now)
        return receivers

    def unread(self, segment: Segment, now: float) -> frozenset[str]:
        """A segment could not be read from disk now; returns the workers that awaited it."""
        receivers, segment.requested_by = segment.requested_by, frozenset()
        if self._segments.get(segment.segment_id) is segment:
            self._settle(segment, now)
        return receivers

    def undelivered(self, segment: Segment, now: float) -> None:
        """A worker could not fetch a segment from the object store: drop its bytes there, unless they are being
        written."""
        if segment.segment_id not in self._writing and self._segments.get(segment.segment_id) is segment:
            self._leave_store(segment, EvictionReason.SEGMENT_LOST, now)

    def out_of_reach(self, exporter: str, now: float) -> list[Segment]:
        """A worker may be cut off with its node: drop the bytes in the object store that it exported, unless they are
        being written; returns their segments."""
        gone = [
            segment
            for segment in self._segments.values()
            if segment.exporter == exporter and segment.is_in_store and segment.segment_id not in self._writing
        ]
        for segment in gone:
            self._leave_store(segment, EvictionReason.SEGMENT_LOST, now)
        return gone

    def lost(self, segment: Segment) -> list[DiskInstruction]:
        """Forget a segment that is damaged, or whose file is gone.

        Another segment of the same blocks keeps the file, which may have been written anew; otherwise reading will fail
        again.
        """
        self._drop(segment, EvictionReason.SEGMENT_LOST)
        return [] if segment.file is None else self._files.erase(segment.file)

    def lease(self, segment: Segment, worker_id: str) -> list[DiskInstruction]:
        """Lease a segment to a request on a worker: the segment stays until `released`. A segment on disk only is
        read, unless others await it already; the worker gets it then."""
        segment.leases += 1
        for queue in (self._part(segment.node), self._on_disk):
            if segment.segment_id in queue:
                queue.acquire(segment.segment_id)
        if segment.is_in_store:
            return []
        # One read serves all workers that ask while it is under way.
        is_asked = bool(segment.requested_by)
        segment.requested_by |= {worker_id}
        return [] if is_asked else [ReadFile(segment)]

    def released(self, leased: Iterable[Segment], hashes: Sequence[BlockHash], hints: CacheHints, now: float) -> None:
        """A request ended: drop its leases, and make the segments of its blocks the most recent ones, with its
        hints."""
        # Where no segment is kept there is nothing to look for.
        records = self._blocks.find(hashes if self._segments else ())
        used = {r.segment.segment_id: r.segment for r in records if r is not None and r.segment is not None}
        for segment in leased:
            segment.leases -= 1
            if self._segments.get(segment.segment_id) is segment:
                # A leased segment was used even if its blocks have another one by now.
                used.setdefault(segment.segment_id, segment)
        if used:
            self._use(list(used.values()), retention(hints, now), now, self._marked(hashes, hints, now))
        self._shrink(dict.fromkeys(segment.node for segment in used.values()), now)

    def handed_over(self, hashes: Iterable[BlockHash]) -> None:
        """Drop the segments of a request whose blocks no other request will use; deliveries under way keep theirs."""
        for record in self._blocks.find(hashes):
            if record is not None and record.segment is not None and record.segment.leases == 0:
                self._drop(record.segment, EvictionReason.HANDED_OVER)

    def by_worth(self, now: float) -> list[tuple[Segment, Retention]]:
        """The segments in the object stores, each with its retention: leased ones first, then those of one node after
        the other, the next one to be evicted last. Takes no leases and evicts nothing."""
        evictable: list[Segment] = []
        for part in list(self._parts.values()):
            evictable += self._in_order(part, now)

        # Leased segments, and those being written, are in no queue and worth the most.
        ids = {segment.segment_id for segment in evictable}
        held = [each for each in self._segments.values() if each.is_in_store and each.segment_id not in ids]
        return [(segment, self._retention_of(segment)) for segment in (*held, *evictable)]

    def refresh(self, segment_id: int, now: float) -> None:
        """Make a segment the most recent one."""
        segment = self._segments.get(segment_id)
        if segment is not None:
            self._use([segment], self._retention_of(segment), now)

    def moved_away(self, segment_id: int) -> None:
        """Forget a segment in the object store, of which another manager has a copy; a file stays."""
        segment = self._segments.get(segment_id)
        if segment is not None and segment.is_in_store and segment_id not in self._writing:
            self._drop(segment, EvictionReason.HANDED_OVER)

    def reset(self) -> tuple[int, list[DiskInstruction]]:
        """Drop every segment without a lease, from disk too; returns the number of their blocks."""
        unused = [s for s in self._segments.values() if s.leases == 0 and not s.requested_by]
        for segment in unused:
            self._drop(segment, EvictionReason.RESET)
        erased = [gone for segment in unused if segment.file for gone in self._files.erase(segment.file)]
        return sum(len(segment.header.names) for segment in unused), erased

    def check_integrity(self, leased: list[Segment]) -> None:
        """Assert that the sums are right; `leased` has each segment once for each of its leases."""
        assert all(r.segment is None or r.segment.segment_id in self._segments for _, r in self._blocks.items())
        segments = self._segments.values()
        for segment in segments:
            assert segment.leases == leased.count(segment)
            assert segment.is_in_store or segment.file is not None
            assert not (segment.is_in_store and segment.requested_by)
            assert (segment.segment_id in self._part(segment.node)) == self._can_leave_store(segment)
            assert (segment.segment_id in self._on_disk) == self._can_leave_disk(segment)

        for queue in (*self._parts.values(), self._on_disk):
            queue.check_integrity()
            assert self._segments.keys() >= set(queue)

        stored = Counter[str]()
        for segment in segments:
            stored[segment.node] += segment.header.num_bytes if segment.is_in_store else 0
        assert self.node_bytes == stored and self._parts.keys() >= (+stored).keys()
        files = [segment.file for segment in segments if segment.file is not None] + list(self._writing.values())
        self._files.check_integrity(files)
        assert self.disk_bytes <= self.disk_budget_bytes

    # Inside

    def _new(
        self,
        header: SegmentHeader,
        ref: object,
        *,
        is_in_store: bool = True,
        file: SegmentHeader | None = None,
        node: str = "",
        exporter: str = "",
    ) -> Segment:
        self._num_ever += 1
        segment_id = self._num_ever - 1
        return Segment(segment_id, header, ref, exporter, is_in_store=is_in_store, file=file, node=node)

    def _part(self, node: str) -> EvictionQueue[int]:
        """The queue of the segments in a node's object store."""
        part = self._parts.get(node)
        if part is None:
            part = self._parts[node] = EvictionQueue[int](
                LeastRecent(),
                quotas(self._tenants, self.store_budget_bytes),
                lambda segment_id: self._segments[segment_id].num_bytes,
            )
        return part

    def _in_order(self, part: EvictionQueue[int], now: float) -> list[Segment]:
        """The segments that can leave a node's object store, the next one to be evicted last."""
        retention_of = {segment_id: part.retention_of(segment_id) for segment_id in part}
        order = [segment_id for segment_id, _ in part.evict_many(len(retention_of), now)]
        for segment_id in order:  # each comes back behind those that are evicted before it
            segment = self._segments[segment_id]
            self._use([segment], retention_of[segment_id] or segment.header.retention, now)
        return [self._segments[segment_id] for segment_id in reversed(order)]

    def _can_leave_store(self, segment: Segment) -> bool:
        return segment.is_in_store and segment.leases == 0 and segment.segment_id not in self._writing

    def _can_leave_disk(self, segment: Segment) -> bool:
        return segment.file is not None and segment.leases == 0 and not segment.requested_by

    def _retention_of(self, segment: Segment) -> Retention:
        """The retention of a segment, wherever it is."""
        queues = (self._on_disk, self._part(segment.node))
        known = (queue.retention_of(segment.segment_id) for queue in queues)
        return next((retention for retention in known if retention is not None), segment.header.retention)

    def _marked(self, hashes: Sequence[BlockHash], hints: CacheHints, now: float) -> Mapping[int, Retention]:
        """Retention of each segment with a block before a mark, by the first such block."""
        wishes = marked(hints, now)
        found: dict[int, Retention] = {}
        for record, wish in zip(self._blocks.find(hashes[: len(wishes)]), wishes, strict=False):
            if record is not None and record.segment is not None:
                found.setdefault(record.segment.segment_id, wish)
        return found

    def _use(
        self,
        path: Sequence[Segment],
        retention: Retention,
        now: float,
        marked: Mapping[int, Retention] = NO_MARKS,
    ) -> None:
        """Make these segments, in the order of a prompt, the most recent ones in store and on disk. `marked`: retention
        of some of the segments, where it is another."""
        visited = [(self._on_disk, [segment.segment_id for segment in path if segment.file is not None])]
        for node in dict.fromkeys(segment.node for segment in path):
            in_part = [segment.segment_id for segment in path if segment.is_in_store and segment.node == node]
            visited.append((self._part(node), in_part))
        for queue, here in visited:
            # A visit is of held entries: they come back by `_settle`, where they may be evicted.
            for segment_id in here:
                if segment_id in queue:
                    queue.acquire(segment_id)
            queue.visit(here, now, retention, [marked.get(each, retention) for each in here] if marked else ())
        # The last of a prompt first, so that it is the first to go.
        for segment in reversed(path):
            self._settle(segment, now)

    def _settle(self, segment: Segment, now: float) -> None:
        """Make a segment evictable exactly where it may be evicted."""
        for queue, is_evictable in (
            (self._part(segment.node), self._can_leave_store(segment)),
            (self._on_disk, self._can_leave_disk(segment)),
        ):
            if is_evictable and segment.segment_id not in queue:
                queue.release([segment.segment_id], now)
            elif not is_evictable and segment.segment_id in queue:
                queue.acquire(segment.segment_id)

    def _shrink(self, nodes: Iterable[str], now: float) -> None:
        """Keep the bytes in the object stores of these nodes within the budget. Nodes whose workers are gone share one
        budget."""
        for node in [node for node in nodes if node in self._kept_nodes]:
            self._shrink_part(node, self.store_budget_bytes, now)
        left = [node for node in self.node_bytes if node not in self._kept_nodes]
        # Bytes above the one budget that all abandoned nodes share.
        excess = sum(self.node_bytes[node] for node in left) - self.store_budget_bytes
        for node in left:
            before = self.node_bytes[node]
            self._shrink_part(node, before - max(0, excess), now)
            excess -= before - self.node_bytes[node]
            if not self.node_bytes[node]:
                del self.node_bytes[node], self._parts[node]

    def _shrink_part(self, node: str, budget_bytes: int, now: float) -> None:
        part = self._part(node)
        while self.node_bytes[node] > budget_bytes and len(part):
            [(segment_id, reason)] = part.evict_many(1, now)
            full = reason is EvictionReason.FULL
            self._leave_store(self._segments[segment_id], EvictionReason.STORE_FULL if full else reason, now)

    def _leave_store(self, segment: Segment, reason: EvictionReason, now: float) -> None:
        """Drop a segment's bytes in the object store; a copy on disk remains. Deliveries under way keep the old
        object."""
        if segment.file is None:
            self._drop(segment, reason)
            return
        self._part(segment.node).forget(segment.segment_id)
        on_disk = Segment(
            segment.segment_id,
            segment.file,
            None,
            is_in_store=False,
            file=segment.file,
            copy=segment.copy + 1,
            node=self.node,
        )
        self._segments[segment.segment_id] = on_disk
        self.node_bytes[segment.node] -= segment.header.num_bytes
        self._blocks.moved(segment, on_disk)
        self._settle(on_disk, now)

    def _write(self, segment: Segment, now: float) -> list[DiskInstruction]:
        """Have a new segment written, unless the disk falls behind or only room granted to other tenants is left."""
        num_bytes = segment.header.num_bytes
        # A write that is alone may be larger than the limit, or it would never be written.
        keeps_up = (
            not self._writing or sum(file.num_bytes for file in self._writing.values()) + num_bytes <= MAX_WRITING_BYTES
        )
        if not keeps_up or num_bytes > self.disk_budget_bytes:
            return []
        instructions = self._make_room_on_disk(num_bytes, segment.header.retention.tenant, now)
        # The bytes are reserved now: the write ends later.
        if self.disk_bytes + num_bytes <= self.disk_budget_bytes:
            self._writing[segment.segment_id] = segment.header
            self._files.add(segment.header)
            instructions.append(WriteFile(segment))
        return instructions

    def _make_room_on_disk(self, num_bytes: int, tenant: str, now: float) -> list[DiskInstruction]:
        """Give up files until `num_bytes` of this tenant fit, or only files under other tenants' floors are left."""
        erased: list[DiskInstruction] = []
        while self.disk_bytes + num_bytes > self.disk_budget_bytes:
            evicted = self._on_disk.evict_for(tenant, now)
            if evicted is None:
                break

            segment_id, reason = evicted
            segment = self._segments[segment_id]
            file = segment.file
            assert file is not None
            # The copy in the object store stays; without one the segment is gone.
            if segment.is_in_store:
                self._files.remove(file)
                segment.file = None
            else:
                self._drop(segment, EvictionReason.DISK_FULL if reason is EvictionReason.FULL else reason)
            erased += self._files.erase(file)
        return erased

    def _drop(self, segment: Segment, reason: EvictionReason) -> None:
        self._part(segment.node).forget(segment.segment_id)
        self._on_disk.forget(segment.segment_id)
        del self._segments[segment.segment_id]
        self.node_bytes[segment.node] -= segment.header.num_bytes if segment.is_in_store else 0
        if segment.file is not None:
            self._files.remove(segment.file)
        self._blocks.dropped(segment, reason)
