"""The KV of a cluster: where each block is, in pools and segments, and who is to send it to whom.

| event | instructions |
|---|---|
| blocks sealed | `Export` those that other workers await |
| segment exported, or read from disk | `DeliverSegment` it to the workers that await one of its blocks, `WriteFile` |
| worker gone, block evicted or lost, file unread | by `Supply`: `Export`, or `Lost` (the blocks will not come) |
| blocks without a segment | `Export` for the disk, or out of the pool of a worker that leaves |

`BlockIndex` has the place of each block, `SegmentStore` decides about the retention of segments, `Supply` about
producers. `now`, of all methods: seconds since the epoch, for the expiry of segments.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

from raydix.engine.core.manager.block_index import BlockIndex, Segment
from raydix.engine.core.manager.cache_statistics import CacheStatistics
from raydix.engine.core.manager.instructions import DeliverSegment, Export, Instruction
from raydix.engine.core.manager.segment_store import SegmentStore
from raydix.engine.core.manager.succession import Offer
from raydix.engine.core.manager.supply import Supply
from raydix.engine.core.tenants import Tenant
from raydix.engine.core.types import Admission, BlockHash, EvictionReason, SegmentHeader

MIN_SAVED_BLOCKS = 16  # minimum of blocks for which a busy worker is asked
MAX_SAVED_BLOCKS = 64  # maximum of blocks at a time
MOST_PAIRS = 200  # pairs of a source and a target that are remembered, those with the latest moves
DISK = "disk"  # the source of KV whose worker is not known: it came from the disk


class Moved(NamedTuple):
    """Segments that a target took from a source."""

    num_segments: int
    num_blocks: int
    num_bytes: int


class Moves:
    """Sums since the manager started, by source and target."""

    def __init__(self) -> None:
        self._moved: OrderedDict[tuple[str, str], Moved] = OrderedDict()

    def add(self, source: str, target: str, num_blocks: int, num_bytes: int) -> None:
        """Count a segment that `target` has taken."""
        pair = (source or DISK, target)
        before = self._moved.pop(pair, Moved(0, 0, 0))
        after = Moved(before.num_segments + 1, before.num_blocks + num_blocks, before.num_bytes + num_bytes)
        self._moved[pair] = after  # the last one from now on
        if len(self._moved) > MOST_PAIRS:
            self._moved.popitem(last=False)

    def latest(self) -> list[tuple[str, str, Moved]]:
        """Source, target and sums, those that moved last first."""
        return [(source, target, moved) for (source, target), moved in reversed(self._moved.items())]


@dataclass(slots=True)
class PoolRecord:
    """The contents of one worker's pool. Only `Stock` writes to the fields."""

    worker_id: str
    blocks: set[BlockHash] = field(default_factory=set)
    unsaved: list[BlockHash] = field(default_factory=list)
    """Sealed blocks without a segment, to be exported for the disk, or because the worker leaves."""
    alone: frozenset[str] = field(init=False)
    """The set of the worker's id alone, shared by the records of all blocks held by this worker only."""

    def __post_init__(self) -> None:
        self.alone = frozenset((self.worker_id,))


class Stock:
    """The index of blocks, the pools, the segments and the supply of awaited blocks. Workers are known here by their
    pools; a message of an earlier incarnation of a worker is to be dropped before."""

    def __init__(
        self,
        statistics: CacheStatistics,
        segment_budget_bytes: int,
        disk_budget_bytes: int,
        tenants: Iterable[Tenant],
        *,
        keeps_segments: bool,
        node: str,
    ) -> None:
        """`keeps_segments`: False drops a segment at the end of the request behind the export. `node`: that of the
        manager, into whose object store files are read."""
        self.blocks = BlockIndex(statistics)
        self.segments = SegmentStore(self.blocks, segment_budget_bytes, disk_budget_bytes, tenants, node=node)
        self.supply = Supply(self.blocks)
        self.moves = Moves()
        """Segments that workers have taken."""
        self.keeps_segments = keeps_segments
        self.pools: dict[str, PoolRecord] = {}
        """The pool of each registered worker."""

    # Pools

    def worker_joined(self, worker_id: str) -> None:
        """A worker with an empty pool has come."""
        self.pools[worker_id] = PoolRecord(worker_id)
        self.supply.worker_joined(worker_id)

    def worker_left(self, worker_id: str) -> list[Instruction]:
        """A worker is gone with its pool and its promises. Segments exported by the worker stay."""
        # Sorted, so that a run repeats itself: the order decides about the next producers.
        held = sorted(self.pools.pop(worker_id).blocks)
        for block_hash in held:
            self.blocks.left(block_hash, worker_id, EvictionReason.WORKER_LOST)
        return self.supply.worker_left(worker_id, held)

    def lacking(self, worker_id: str, hashes: Iterable[BlockHash]) -> tuple[BlockHash, ...]:
        """Blocks among `hashes` that a worker does not hold."""
        here = self.pools[worker_id].blocks
        return tuple([block_hash for block_hash in hashes if block_hash not in here])

    def blocks_changed(
        self,
        worker_id: str,
        sealed: Iterable[BlockHash],
        evicted: Iterable[tuple[BlockHash, EvictionReason]],
    ) -> list[Instruction]:
        """Record gained and lost blocks of a worker's pool."""
        pool = self.pools[worker_id]

        # Sealed before evicted: a block may be in both.
        awaited = self._sealed(pool, tuple(sealed))
        lost = {block_hash: reason for block_hash, reason in evicted if block_hash in pool.blocks}
        for block_hash, reason in lost.items():
            pool.blocks.discard(block_hash)
            self.blocks.left(block_hash, worker_id, reason)
        instructions = self.supply.fail(lost)

        if awaited:
            instructions.append(Export(worker_id, awaited))
        return instructions

    def export_failed(self, worker_id: str, hashes: Iterable[BlockHash]) -> list[Instruction]:
        """A worker no longer holds blocks that it was asked to export."""
        failed = self.supply.take_back(worker_id, hashes)
        evicted = [(block_hash, EvictionReason.FULL) for block_hash in failed]
        return self.blocks_changed(worker_id, sealed=(), evicted=evicted) + self.supply.fail(failed)

    def blocks_unsent(self, worker_id: str, hashes: Iterable[BlockHash]) -> list[Instruction]:
        """A worker could not send blocks after a request to export, and may hold the blocks still."""
        # No holder is asked again for the waiting workers, since exports could fail for ever: the workers compute.
        return self.supply.fail(self.supply.take_back(worker_id, hashes), asks_holders=False)

    # Exports that workers are asked for

    def give_away(self, worker_id: str, leaving: frozenset[str], limit: int) -> None:
        """Have a leaving worker export at most `limit` blocks that no worker which stays holds, beside the blocks that
        were to go to the disk anyway."""
        # The index is in the order in which blocks became known. The longest known come first: a block comes before
        # the blocks behind it, and beginnings that many prompts share before what followed once.
        pool = self.pools[worker_id]
        only_here = (
            block_hash
            for block_hash, record in self.blocks.items()
            if record.segment is None and block_hash in pool.blocks and record.workers <= leaving
        )
        pool.unsaved = list(dict.fromkeys([*islice(only_here, limit), *pool.unsaved]))

    def ask_for_unsaved(self, worker_id: str, *, is_busy: bool) -> list[Instruction]:
        """Ask a worker for the next of its blocks that are to be exported, unless another worker is asked for them.
        `is_busy`: the worker has requests, and is left alone while there are few blocks."""
        pool, blocks = self.pools[worker_id], self.blocks
        pool.unsaved = [h for h in pool.unsaved if h in pool.blocks and blocks[h].segment is None]
        ready = [h for h in pool.unsaved if blocks[h].producer is None][:MAX_SAVED_BLOCKS]
        if not ready or (is_busy and len(ready) < MIN_SAVED_BLOCKS):
            return []
        return [self.supply.ask(worker_id, ready)]

    def is_given_away(self, worker_id: str) -> bool:
        """True if no block of a worker is to be exported or under way."""
        return not self.pools[worker_id].unsaved and not self.supply.is_sending(worker_id)

    # Segments

    def exported(
        self,
        header: SegmentHeader,
        ref: object,
        now: float,
        *,
        node: str,
        exporter: str = "",
        handed_over: Admission | None = None,
    ) -> tuple[Segment, list[Instruction]]:
        """Index a new segment in the object store of a node, and deliver it to every worker awaiting one of the blocks.
        `exporter`: the worker that sent it; none for the copy of an earlier manager's segment. `handed_over`: the
        request whose prefill ends with this segment."""
        receivers = self.supply.exported(header.names)
        instructions: list[Instruction] = []
        if handed_over is not None:
            # The worker that decodes gets the segment, awaited or not.
            receivers.add(handed_over.decode)
            instructions = self.supply.computes_no_more(handed_over.request_id)
        receivers.discard(exporter)
        segment, disk_instructions = self.segments.exported(header, ref, now, node=node, exporter=exporter)
        return segment, [*instructions, *disk_instructions, *self._deliver(receivers, segment)]

    def lost(self, segment_id: int, now: float) -> list[Instruction]:
        """Forget a segment with a damaged or missing file."""
        segment = self.segments.get(segment_id)
        if segment is None:
            return []
        return [*self.segments.lost(segment), *self.unread(segment, now)]

    def unread(self, segment: Segment, now: float) -> list[Instruction]:
        """A segment could not be read from disk now: supply its blocks from other places. Later requests may try the
        file again."""
        # The waiting workers await the blocks, instead of the segment.
        waiting = frozenset(self.segments.unread(segment, now) & self.pools.keys())
        hashes = segment.header.names
        records = zip(hashes, self.blocks.find(hashes), strict=True)
        return self.supply.unread([h for h, r in records if r is None or r.segment in (segment, None)], waiting)

    def read(self, segment_id: int, ref: object, now: float) -> list[Instruction]:
        """A segment was copied from disk into the object store: deliver it."""
        segment = self.segments.get(segment_id)
        if segment is None or segment.is_in_store:
            return []
        return self._deliver(self.segments.read(segment, ref, now), segment)

    # Requests

    def supply_to(self, worker_id: str, hashes: Sequence[BlockHash]) -> tuple[list[Segment], list[Instruction]]:
        """Arrange that a worker gets blocks: from segments now, from other workers or producers when ready. Returns the
        segments, each of which has one more lease."""
        if not hashes:
            return [], []
        instructions: list[Instruction] = []
        segments, exports = self.supply.arrange(worker_id, hashes)
        for segment in segments:
            instructions += self.segments.lease(segment, worker_id)
            if segment.is_in_store:
                instructions.append(DeliverSegment(worker_id, segment))
        return segments, [*instructions, *exports]

    # From one manager to the next

    def offers(self, now: float) -> list[Offer]:
        """The segments in the object store, for a successor: the one that eviction would keep longest first."""
        return [
            Offer(segment.segment_id, replace(segment.header, retention=retention), self.segments.node)
            for segment, retention in self.segments.by_worth(now)
        ]

    def lacks(self, block_hash: BlockHash) -> bool:
        record = self.blocks.get(block_hash)
        return record is None or record.segment is None

    def check_integrity(self, requests: Iterable[str], leased: list[Segment]) -> None:
        """Assert that blocks, pools, segments and promises agree. `requests`: the admitted ones, in order; `leased` has
        each segment once for each of its leases."""
        for block_hash, record in self.blocks.items():
            assert record.is_known, "a record that knows nothing"
            assert all(block_hash in self.pools[worker].blocks for worker in record.workers)
        for pool in self.pools.values():
            assert all(pool.worker_id in self.blocks[block_hash].workers for block_hash in pool.blocks)
        self.supply.check_integrity(self.pools, requests)
        self.segments.check_integrity(leased)

    # Inside

    def _sealed(self, pool: PoolRecord, hashes: Sequence[BlockHash]) -> tuple[BlockHash, ...]:
        """Note that a worker holds blocks; returns the ones that it is asked to export for other workers."""
        pool.blocks.update(hashes)
        records = self.blocks.held(hashes, pool.alone)
        if self.segments.disk_budget_bytes:
            pool.unsaved += [h for h, record in zip(hashes, records, strict=True) if record.segment is None]
        return self.supply.sealed(pool.worker_id, hashes, records)

    def _deliver(self, receivers: Iterable[str], segment: Segment) -> list[Instruction]:
        """Hand a segment to the registered workers among `receivers`."""
        return [DeliverSegment(receiver, segment) for receiver in sorted(receivers) if receiver in self.pools]
