"""What the manager knows of each block of the cluster, and which blocks came and went."""

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from engine.core.cache_events import CacheEvents, CacheUpdate
from engine.core.cache_statistics import CacheStatistics
from engine.core.types import BlockHash, SegmentHeader

MAX_REMEMBERED = 1 << 17
"""Blocks that are gone, and continuations of blocks, remembered to explain misses by."""

GC_THRESHOLDS = (10_000, 10, 10_000)
"""The index is millions of objects without cycles. A look at all of them, usual whenever they have grown by a quarter,
makes requests wait. Cycles, such as those of errors, die young."""


@dataclass(slots=True, eq=False)
class Segment:
    """An exported run of blocks. `ref` is the object store's reference, opaque here; dropping it frees the bytes."""

    segment_id: int
    header: SegmentHeader
    ref: object
    leases: int = 0
    """Admitted requests that were promised blocks of it; it is not dropped while there are any."""
    is_in_store: bool = True
    file: SegmentHeader | None = None
    """The header of its copy on disk, which has no tail."""
    wanted_by: set[str] = field(default_factory=set)
    """Workers that get it when it has been read from disk."""

    @property
    def num_bytes(self) -> int:
        return self.header.num_bytes

    @property
    def file_bytes(self) -> int:
        return 0 if self.file is None else self.file.num_bytes


@dataclass(slots=True)
class BlockRecord:
    """What is known of one block. A record without worker, segment and producer does not exist."""

    workers: frozenset[str] = frozenset()
    segment: Segment | None = None
    producer: str | None = None
    """The admitted request that is about to compute it, or the worker that was asked to export it."""
    wanted_by: frozenset[str] = frozenset()

    @property
    def is_stored(self) -> bool:
        return bool(self.workers) or self.segment is not None

    @property
    def is_known(self) -> bool:
        return self.is_stored or self.producer is not None


class BlockIndex(defaultdict[BlockHash, BlockRecord]):
    """The records, by block. Who changes where a block is says so: `came` before, `left` after."""

    def __init__(self, statistics: CacheStatistics) -> None:
        super().__init__(BlockRecord)
        self._statistics = statistics
        self._events = CacheEvents()
        self.gone: OrderedDict[BlockHash, None] = OrderedDict()
        """Blocks that were somewhere once."""

    def came(self, block_hash: BlockHash, record: BlockRecord) -> None:
        """The block is about to be in a place; note it if it was in none."""
        if not record.is_stored:
            self.gone.pop(block_hash, None)
            self._events.add(True, block_hash)

    def left(self, block_hash: BlockHash, record: BlockRecord, reason: str) -> None:
        """The block left a place; note it if it was the last one."""
        self._statistics.evicted_blocks[reason] += 1
        if not record.is_stored:
            self.gone[block_hash] = None
            if len(self.gone) > MAX_REMEMBERED:
                self.gone.popitem(last=False)
            self._events.add(False, block_hash)

    def forget_unknown(self, hashes: Iterable[BlockHash]) -> None:
        """Drop the records that know nothing any more."""
        for block_hash in hashes:
            record = self.get(block_hash)
            if record is not None and not record.is_known:
                del self[block_hash]

    def events_since(self, sequence: int | None) -> CacheUpdate:
        """What was stored and removed since then, or all that is stored now (`CacheEvents.since`)."""
        stored = (block_hash for block_hash, record in self.items() if record.is_stored)
        return self._events.since(sequence, stored)


class Continuations:
    """For a tenant and a block, the one that followed it in the tenant's last prompt with new blocks.

    The last `capacity` that were noted are remembered, and at most as many older ones, which are forgotten all at
    once: one by one that cost as much as to note them.
    """

    def __init__(self, capacity: int = MAX_REMEMBERED) -> None:
        self._capacity = capacity
        self._recent: defaultdict[str, dict[BlockHash, BlockHash]] = defaultdict(dict)
        self._older: defaultdict[str, dict[BlockHash, BlockHash]] = defaultdict(dict)
        self._num_recent = 0

    def after(self, tenant: str, hashes: Iterable[BlockHash]) -> list[BlockHash | None]:
        """What followed each of these blocks."""
        recent, older = self._recent[tenant], self._older[tenant]
        return [recent.get(block_hash) or older.get(block_hash) for block_hash in hashes]

    def note(self, tenant: str, links: Mapping[BlockHash, BlockHash]) -> None:
        """What follows what in a prompt."""
        self._recent[tenant].update(links)
        self._num_recent += len(links)
        if self._num_recent >= self._capacity:
            self._older, self._recent, self._num_recent = self._recent, defaultdict(dict), 0
