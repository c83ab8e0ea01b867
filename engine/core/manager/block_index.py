"""Records of each block of the cluster, and the journal of blocks that entered and left."""

from bisect import bisect_left
from collections import OrderedDict, defaultdict, deque
from collections.abc import ItemsView, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Generic, NamedTuple, TypeVar

from raydix.engine.core.manager.cache_statistics import ROOM_REASONS, CacheStatistics
from raydix.engine.core.types import BlockHash, EvictionReason, SegmentHeader

MAX_REMEMBERED = 1 << 17  # limit of the evicted blocks, and of the notes about blocks, remembered to explain misses

V = TypeVar("V")

# Thresholds of the garbage collector in the manager's process: the index is millions of objects without cycles, and a
# full collection, usual after a growth by a quarter, makes requests wait. Cycles, such as those of errors, die young.
GC_THRESHOLDS = (10_000, 10, 10_000)
MAX_LOOKS = 1 << 12  # times of evictions that are remembered
EVENTS_CAPACITY = 1 << 16  # limit of the events that a follower may be behind before it gets a snapshot


class BlockEvent(NamedTuple):
    """A block entered the cache (`is_stored`), or left its last place."""

    sequence: int
    is_stored: bool
    block_hash: BlockHash


class Displacements:
    """Numbers the blocks that left their last place to make room, from 1 on, and knows about when each of them left.

    Times are those of `look`, so a time is known as exactly as `look` is called often.
    """

    def __init__(self, capacity: int = MAX_LOOKS) -> None:
        self.num = 0
        """Number of the latest displaced block."""
        self._now = 0.0
        # Number of the last block displaced before a look that found new ones, and the time of the look before.
        self._looks: deque[tuple[int, float]] = deque(maxlen=capacity)

    def look(self, now: float) -> None:
        """It is `now`, in seconds since the epoch."""
        if self.num and (not self._looks or self._looks[-1][0] < self.num):
            self._looks.append((self.num, self._now or now))
        self._now = now

    def add(self) -> int:
        """The number of one more displaced block."""
        self.num += 1
        return self.num

    def time_of(self, number: int) -> float:
        """When the block with this number left, in seconds since the epoch; of one that left long ago a later time."""
        at = bisect_left(self._looks, number, key=itemgetter(0))
        return self._looks[at][1] if at < len(self._looks) else self._now


@dataclass(frozen=True, slots=True)
class CacheUpdate:
    """Answer to a follower that has seen all events before some number."""

    next_sequence: int
    """The number to ask for the next time."""
    events: tuple[BlockEvent, ...]
    snapshot: tuple[BlockHash, ...] | None
    """All stored blocks, in place of events that are forgotten."""


class CacheEvents:
    """The last `capacity` events, numbered without gaps."""

    def __init__(self, capacity: int = EVENTS_CAPACITY) -> None:
        self._events: deque[BlockEvent] = deque(maxlen=capacity)
        self.next_sequence = 0

    def add(self, is_stored: bool, block_hash: BlockHash) -> None:
        self._events.append(BlockEvent(self.next_sequence, is_stored, block_hash))
        self.next_sequence += 1

    def since(self, sequence: int | None, stored: Iterable[BlockHash]) -> CacheUpdate:
        """The events from `sequence` on, or a snapshot of all `stored` blocks.

        A snapshot if some of the events are forgotten, if `sequence` lies in the future (of another manager), or if
        `sequence` is None.
        """
        # Events in [first, next_sequence) are remembered.
        first = self.next_sequence - len(self._events)
        if sequence is None or not first <= sequence <= self.next_sequence:
            return CacheUpdate(self.next_sequence, (), tuple(stored))
        events = [self._events[index] for index in range(sequence - first, len(self._events))]
        return CacheUpdate(self.next_sequence, tuple(events), None)


@dataclass(slots=True, eq=False)
class Segment:
    """An exported run of blocks. Only `SegmentStore` writes to the fields.

    `ref`: the object store's reference, opaque here; dropping the reference frees the bytes.
    """

    segment_id: int
    header: SegmentHeader
    ref: object
    exporter: str = ""
    """Worker with the bytes in its node's part of the object store, for a segment that a worker exported."""
    leases: int = 0
    """Admitted requests with a lease of the segment, which is not dropped meanwhile."""
    is_in_store: bool = True
    file: SegmentHeader | None = None
    """The header of the copy on disk, without a tail."""
    copy: int = 0
    """Number of copies that have left the object store before: another one needs another reference."""
    requested_by: frozenset[str] = frozenset()
    """Workers that get the segment once read from disk."""
    node: str = ""
    """Node of the object store that holds the bytes, or that the file is read into; empty if unknown."""

    @property
    def num_bytes(self) -> int:
        return self.header.num_bytes

    @property
    def file_bytes(self) -> int:
        return 0 if self.file is None else self.file.num_bytes


@dataclass(slots=True)
class BlockRecord:
    """Places and producer of one block. A record without worker, segment and producer does not exist.

    Only this module writes to the fields: the producer and the waiting workers change by the methods here, the places
    by the methods of `BlockIndex`, which keeps the journal.
    """

    workers: frozenset[str] = frozenset()
    segment: Segment | None = None
    producer: str | None = None
    """The admitted request that is about to compute the block, or the worker that was asked to export it."""
    awaited_by: frozenset[str] = frozenset()

    @property
    def is_stored(self) -> bool:
        return bool(self.workers) or self.segment is not None

    @property
    def is_known(self) -> bool:
        return self.is_stored or self.producer is not None

    def promised(self, producer: str) -> None:
        """A request is about to compute the block, or a worker was asked to export it."""
        self.producer = producer

    def promise_ended(self) -> None:
        """The producer has kept its promise, or cannot."""
        self.producer = None

    def awaited(self, workers: frozenset[str]) -> None:
        """More workers wait for the block."""
        self.awaited_by = self.awaited_by | workers if self.awaited_by else workers

    def wait_ended(self, workers: frozenset[str]) -> None:
        """Some workers got the block, or were told that it will not come."""
        if self.awaited_by:
            self.awaited_by -= workers


class BlockIndex:
    """The records, by block. A record begins with `held`, `stored`, `promised` or `added`; reading begins none."""

    def __init__(self, statistics: CacheStatistics) -> None:
        self._records: dict[BlockHash, BlockRecord] = {}
        self._statistics = statistics
        self._events = CacheEvents()
        self.displacements = Displacements()
        self.gone: OrderedDict[BlockHash, int | None] = OrderedDict()
        """Blocks that left their last place: the number among `displacements` of one that made room for others then,
        None of any other."""

    # Reading

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, block_hash: BlockHash) -> BlockRecord:
        return self._records[block_hash]

    def get(self, block_hash: BlockHash) -> BlockRecord | None:
        return self._records.get(block_hash)

    def find(self, hashes: Iterable[BlockHash]) -> list[BlockRecord | None]:
        """The record of each block; None for an unknown one."""
        return list(map(self._records.get, hashes))

    def leading(self, hashes: Iterable[BlockHash]) -> Iterator[BlockRecord]:
        """The records of the leading blocks, up to the first unknown one."""
        for block_hash in hashes:
            record = self._records.get(block_hash)
            if record is None:
                return
            yield record

    def items(self) -> ItemsView[BlockHash, BlockRecord]:
        return self._records.items()

    def events_since(self, sequence: int | None) -> CacheUpdate:
        """Blocks stored and removed since `sequence`, or all blocks stored now (`CacheEvents.since`)."""
        stored = (block_hash for block_hash, record in self._records.items() if record.is_stored)
        return self._events.since(sequence, stored)

    # Places

    def held(self, hashes: Iterable[BlockHash], worker: frozenset[str]) -> list[BlockRecord]:
        """A worker holds blocks in its pool, and awaits them no longer; returns their records. `worker`: the set of the
        worker's id."""
        return [self._held(block_hash, worker) for block_hash in hashes]

    def left(self, block_hash: BlockHash, worker_id: str, reason: EvictionReason) -> None:
        """A block left a worker's pool. The record stays until `forget_unknown`."""
        record = self._records[block_hash]
        record.workers -= {worker_id}
        self._has_left(block_hash, record, reason)

    def stored(self, segment: Segment) -> bool:
        """Note a new segment as the place of its blocks without another segment; True if there are any."""
        is_new = False
        for block_hash in segment.header.names:
            record = self.added(block_hash)
            if record.segment is None:
                self._enters(block_hash, record)
                record.segment = segment
                is_new = True
        return is_new

    def moved(self, segment: Segment, successor: Segment) -> None:
        """Replace a segment by another one of the same blocks."""
        for _, record in self._blocks_of(segment):
            record.segment = successor

    def dropped(self, segment: Segment, reason: EvictionReason) -> None:
        """A segment is gone, from the object store and from disk."""
        for block_hash, record in self._blocks_of(segment):
            record.segment = None
            self._has_left(block_hash, record, reason)
        self.forget_unknown(segment.header.names)

    # Promises

    def promised(self, hashes: Iterable[BlockHash], producer: str) -> dict[BlockHash, None]:
        """A request is about to compute the ones of these blocks without a segment and another producer; returns
        them."""
        taken: dict[BlockHash, None] = {}
        records = self._records
        for block_hash in hashes:
            record = records.get(block_hash)
            if record is None:
                records[block_hash] = BlockRecord(producer=producer)
            elif record.producer is None and record.segment is None:
                record.producer = producer
            else:
                continue
            taken[block_hash] = None
        return taken

    def promises_ended(self, hashes: Iterable[BlockHash]) -> list[BlockHash]:
        """The producer of these blocks can produce them no more; returns the awaited ones."""
        awaited: list[BlockHash] = []
        for block_hash in hashes:
            record = self._records[block_hash]
            record.producer = None
            if record.awaited_by:
                awaited.append(block_hash)
        return awaited

    def asked(self, hashes: Iterable[BlockHash], worker_id: str) -> None:
        """A worker was asked to export known blocks."""
        for block_hash in hashes:
            self._records[block_hash].producer = worker_id

    def awaited(self, hashes: Iterable[BlockHash], worker: frozenset[str]) -> list[BlockRecord]:
        """A worker waits for those of these known blocks that have no segment; returns the records of all. `worker`:
        the set of the worker's id."""
        records = [self._records[block_hash] for block_hash in hashes]
        for record in records:
            if record.segment is None:
                record.awaited(worker)
        return records

    # Beginning and end of records

    def added(self, block_hash: BlockHash) -> BlockRecord:
        """The record of a block, known or not. A new one is to get a producer or a place, or to be forgotten."""
        record = self._records.get(block_hash)
        if record is None:
            record = self._records[block_hash] = BlockRecord()
        return record

    def forget_unknown(self, hashes: Iterable[BlockHash]) -> None:
        """Drop the records without worker, segment and producer."""
        records = self._records
        for block_hash in hashes:
            record = records.get(block_hash)
            if record is not None and record.producer is None and not record.workers and record.segment is None:
                del records[block_hash]

    # Inside

    def _held(self, block_hash: BlockHash, worker: frozenset[str]) -> BlockRecord:
        record = self.added(block_hash)
        # Mostly the only holder: its set is shared, and none is made.
        if not record.workers:
            self._enters(block_hash, record)
            record.workers = worker
        else:
            record.workers = record.workers | worker
        if record.awaited_by:
            record.awaited_by -= worker
        return record

    def _blocks_of(self, segment: Segment) -> list[tuple[BlockHash, BlockRecord]]:
        """The blocks with this segment as their place."""
        hashes = segment.header.names
        records = zip(hashes, self.find(hashes), strict=True)
        return [(known, record) for known, record in records if record is not None and record.segment is segment]

    def _enters(self, block_hash: BlockHash, record: BlockRecord) -> None:
        """Journal the first place of a block. Called before the block enters a place."""
        if not record.is_stored:
            self.gone.pop(block_hash, None)
            self._events.add(True, block_hash)

    def _has_left(self, block_hash: BlockHash, record: BlockRecord, reason: EvictionReason) -> None:
        """Journal the end of the last place of a block. Called after the block left a place."""
        self._statistics.evicted_blocks[reason] += 1
        if not record.is_stored:
            made_room = reason in ROOM_REASONS
            self._statistics.num_displaced_blocks += made_room
            self.gone[block_hash] = self.displacements.add() if made_room else None
            # The one that left longest ago is forgotten.
            if len(self.gone) > MAX_REMEMBERED:
                self.gone.popitem(last=False)
            self._events.add(False, block_hash)


class BlockNotes(Generic[V]):
    """What was last noted about each of some blocks, for each tenant.

    Keeps the last `capacity` entries, and at most as many older ones. The older ones are forgotten all at once: one by
    one, forgetting would cost as much as noting.
    """

    def __init__(self, capacity: int = MAX_REMEMBERED) -> None:
        self._capacity = capacity
        self._recent: defaultdict[str, dict[BlockHash, V]] = defaultdict(dict)
        self._older: defaultdict[str, dict[BlockHash, V]] = defaultdict(dict)
        self._num_recent = 0

    def of(self, tenant: str, hashes: Iterable[BlockHash]) -> list[V | None]:
        """The note about each of `hashes`; None if there is none."""
        recent, older = self._recent[tenant], self._older[tenant]
        return [recent.get(block_hash, older.get(block_hash)) for block_hash in hashes]

    def note(self, tenant: str, notes: Mapping[BlockHash, V]) -> None:
        """Note something about each of some blocks, in place of what was noted before."""
        self._recent[tenant].update(notes)
        self._num_recent += len(notes)
        # Two generations: what was noted since the last change stays for a generation more.
        if self._num_recent >= self._capacity:
            self._older, self._recent, self._num_recent = self._recent, defaultdict(dict), 0
