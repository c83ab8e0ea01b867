"""Where every KV block of the cluster is, and who gets it next: the manager's mind, without Ray and without a clock.

For each block the directory knows which workers hold it, which exported segment contains it, which request is about to
compute it, and which workers want it. Events come in (a worker registers, seals, evicts, exports, dies; a request is
admitted, reaches its first token, ends) and instructions go out:

* `Deliver`: hand this segment to that worker;
* `Export`: ask this worker to export blocks that only workers hold;
* `Lost`: tell that worker that blocks it waits for will not come;
* `WriteFile`, `ReadFile`, `EraseFile`: copy this segment to disk, bring it back into the object store, forget its file.

A segment is in the object store, on disk, or both. It is written as soon as it is known, so that it survives a restart,
and leaves the store without a loss once it is written. Both are bounded, and the least recently used segment leaves
first. A segment is a run of one request's blocks, so instead of sorting out leaves, a request that ends uses its
segments in reverse: the end of a prompt goes before its beginning, without which it could not be hit.

Nothing here is needed for correctness. A worker that gets less than it was promised computes the rest itself, so the
directory may forget anything at any time, and a stale entry costs time, never a wrong token.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import TypeAlias, TypeVar

from engine.core.cache_events import CacheEvents, CacheUpdate
from engine.core.cache_statistics import CacheStatistics
from engine.core.costs import WorkerCosts
from engine.core.errors import NoWorkerError
from engine.core.explain import BlockSource, Decision, Decisions, best_considered, runs_of
from engine.core.placement import Candidate, CostModel, Crowd, Demand, Offer, Placement, place
from engine.core.types import (
    Admission,
    AdmitRequest,
    BlockHash,
    Role,
    SegmentHeader,
)

MAX_REMEMBERED = 1 << 17
"""Blocks that are gone, and continuations of blocks, remembered to explain misses by."""
MAX_WRITING_BYTES = 256 << 20
"""Segments that are being written cannot leave the object store; when the disk does not keep up, others stay off it."""
MIN_SAVED_BLOCKS = 16
"""A busy worker is not asked to export fewer blocks than this for the disk's sake, ..."""
MAX_SAVED_BLOCKS = 64
"""... and no worker more at a time."""
US_PER_S = 1_000_000

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand a segment to a worker."""

    worker_id: str
    segment: "Segment"


@dataclass(frozen=True, slots=True)
class Export:
    """Ask a worker to export blocks it holds."""

    worker_id: str
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """Tell a worker that blocks it waits for will not come."""

    worker_id: str
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class WriteFile:
    """Copy a segment to disk, and answer with `segment_written`."""

    segment: "Segment"


@dataclass(frozen=True, slots=True)
class ReadFile:
    """Put a segment's file into the object store, and answer with `segment_read` or `segment_lost`."""

    segment: "Segment"


@dataclass(frozen=True, slots=True)
class EraseFile:
    """Remove the file with this header."""

    header: SegmentHeader


WorkerInstruction: TypeAlias = Deliver | Export | Lost
DiskInstruction: TypeAlias = WriteFile | ReadFile | EraseFile
Instruction: TypeAlias = WorkerInstruction | DiskInstruction


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


@dataclass(slots=True)
class BlockRecord:
    """What is known of one block. A record without worker, segment and producer does not exist."""

    workers: set[str] = field(default_factory=set)
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


@dataclass(slots=True)
class WorkerRecord:
    """What is known of one worker incarnation."""

    worker_id: str
    role: Role
    epoch: int
    costs: WorkerCosts
    token_budget: int
    num_free_blocks: int | None = None
    blocks: set[BlockHash] = field(default_factory=set)
    requests: set[str] = field(default_factory=set)
    decoding: set[str] = field(default_factory=set)
    """Those of `requests` that decode here, now or once their prefill is done."""
    queued_us: int = 0
    """Predicted time of the prefills promised to it and not done yet."""
    unsaved: list[BlockHash] = field(default_factory=list)
    """Blocks that it sealed and no segment contained, to be exported for the disk."""

    @property
    def offer(self) -> Offer:
        queued_s = self.queued_us / US_PER_S
        return Offer(self.role, self.costs, self.token_budget, queued_s, len(self.decoding), self.num_free_blocks)


@dataclass(slots=True)
class Reservation:
    """An admitted request: what it was promised and what load it puts on whom."""

    admission: Admission
    hashes: tuple[BlockHash, ...]
    queued_us: int
    producing: dict[BlockHash, None]
    """Blocks, in order, that others may rely on it to compute."""
    leased: list[Segment]
    lacking: dict[BlockHash, None]
    """Blocks, in order, that its prefill worker may have to compute yet: others are to send it some of them."""


class Directory:
    """The index, the reservations and the segments of one cluster."""

    def __init__(self, costs: CostModel, segment_budget_bytes: int, disk_budget_bytes: int = 0) -> None:
        self.costs = costs
        self.segment_budget_bytes = segment_budget_bytes
        self.segment_bytes = 0
        """In the object store."""
        self.disk_budget_bytes = disk_budget_bytes
        self.disk_bytes = 0
        """Of payloads in files, those that are being written included."""
        self._writing: dict[int, int] = {}
        """Bytes reserved for each segment that is being written."""
        self.workers: dict[str, WorkerRecord] = {}
        self._crowd = Crowd()
        """The same workers, as requests see them."""
        self._blocks: defaultdict[BlockHash, BlockRecord] = defaultdict(BlockRecord)
        self._segments: OrderedDict[int, Segment] = OrderedDict()
        self._reservations: dict[str, Reservation] = {}
        self._num_segments = 0
        self._gone: OrderedDict[BlockHash, None] = OrderedDict()
        """Blocks that were somewhere once."""
        self._continuations: OrderedDict[tuple[str, BlockHash], BlockHash] = OrderedDict()
        """For a tenant and a block, the one that followed it in the tenant's last prompt with new blocks."""
        self._events = CacheEvents()
        self.statistics = CacheStatistics(costs.block_size)
        self.decisions = Decisions()

    # Workers

    def register(
        self,
        worker_id: str,
        role: Role,
        epoch: int,
        block_bytes: int,
        hashes: Iterable[BlockHash],
        token_budget: int = 512,
    ) -> list[Instruction]:
        """A worker incarnation reports for duty with what its pool holds. What an older one said is forgotten."""
        known = self.workers.get(worker_id)
        if known is not None and known.epoch > epoch:
            return []
        self.costs = replace(self.costs, block_bytes=block_bytes)
        instructions = self.remove_worker(worker_id) if known is not None else []
        self.workers[worker_id] = WorkerRecord(worker_id, role, epoch, self.costs.prior, token_budget)
        self._offer([worker_id])
        return instructions + self.blocks_changed(worker_id, epoch, sealed=hashes, evicted=())

    def remove_worker(self, worker_id: str, epoch: int | None = None) -> list[Instruction]:
        """A worker is gone, and with it its pool and what it was about to compute. Its segments stay."""
        worker = self._worker(worker_id, epoch)
        if worker is None:
            return []
        del self.workers[worker_id]
        self._crowd.remove(worker_id)
        for block_hash in worker.blocks:
            self._leave_worker(block_hash, worker_id, "worker lost")
        instructions = self._fail(block_hash for block_hash in worker.blocks)
        for request_id in worker.requests:
            reservation = self._reservations[request_id]
            if reservation.admission.prefill == worker_id:
                reservation.queued_us = 0
                instructions += self._stop_producing(reservation)
        exported = [h for h, record in self._blocks.items() if record.producer == worker_id]
        for block_hash in exported:
            self._blocks[block_hash].producer = None
        instructions += self._fail(exported)
        self._forget_unknown([*worker.blocks, *exported])
        return instructions

    def is_current(self, worker_id: str, epoch: int) -> bool:
        return self._worker(worker_id, epoch) is not None

    def worker_measured(self, worker_id: str, epoch: int, costs: WorkerCosts | None, num_free_blocks: int) -> None:
        """A worker reports what it costs (None: it has not measured anything yet) and how much room it has."""
        worker = self._worker(worker_id, epoch)
        if worker is not None:
            worker.costs = costs or worker.costs
            worker.num_free_blocks = num_free_blocks
            self._offer([worker_id])

    def blocks_changed(
        self, worker_id: str, epoch: int, sealed: Iterable[BlockHash], evicted: Iterable[BlockHash]
    ) -> list[Instruction]:
        """A worker's pool gained and lost blocks."""
        worker = self._worker(worker_id, epoch)
        if worker is None:
            return []
        wanted = [block_hash for block_hash in sealed if self._sealed(worker, block_hash)]
        lost = [block_hash for block_hash in evicted if block_hash in worker.blocks]
        for block_hash in lost:
            worker.blocks.discard(block_hash)
            self._leave_worker(block_hash, worker_id, "pool full")
        instructions = self._fail(lost)
        self._forget_unknown(lost)
        if wanted:
            instructions.append(Export(worker_id, tuple(wanted)))
        return instructions

    # Segments

    def segment_exported(self, worker_id: str, epoch: int, header: SegmentHeader, ref: object) -> list[Instruction]:
        """A worker exported blocks: index them and hand them to everybody who waits for one of them."""
        if self._worker(worker_id, epoch) is None:
            return []
        segment = Segment(self._num_segments, header, ref)
        self._num_segments += 1
        receivers: set[str] = set()
        instructions: list[Instruction] = []
        for block_hash in header.full_hashes:
            record = self._blocks[block_hash]
            receivers |= record.wanted_by
            record.wanted_by = frozenset()
            self._produced(block_hash, record)
            if record.segment is None:
                self._came(block_hash, record)
                record.segment = segment
        if header.handover is not None:
            reservation = self._reservations.get(header.handover.request_id)
            if reservation is not None and reservation.admission.attempt == header.handover.attempt:
                receivers.add(reservation.admission.decode)
                reservation.lacking.clear()
                instructions = self._stop_producing(reservation)
        receivers.discard(worker_id)
        if header.full_hashes and header.num_bytes:
            self._segments[segment.segment_id] = segment
            self.segment_bytes += header.num_bytes
            instructions += self._write(segment)
            self._drop_segments()
        return instructions + self._deliver(receivers, segment)

    def export_failed(self, worker_id: str, epoch: int, hashes: Iterable[BlockHash]) -> list[Instruction]:
        """A worker no longer holds blocks that it was asked to export."""
        if self._worker(worker_id, epoch) is None:
            return []
        failed = [h for h in hashes if h in self._blocks and self._blocks[h].producer == worker_id]
        for block_hash in failed:
            self._blocks[block_hash].producer = None
        instructions = self.blocks_changed(worker_id, epoch, sealed=(), evicted=failed) + self._fail(failed)
        self._forget_unknown(failed)
        return instructions

    def segment_lost(self, segment_id: int) -> list[Instruction]:
        """A segment could not be read, or was not what it says: nobody is promised it any more."""
        segment = self._segments.get(segment_id)
        if segment is None:
            return []
        self._drop_segment(segment, "segment lost")
        erased: list[Instruction] = [] if segment.file is None else [EraseFile(segment.file)]
        waiting = [worker_id for worker_id in sorted(segment.wanted_by) if worker_id in self.workers]
        return erased + [Lost(worker_id, segment.header.full_hashes) for worker_id in waiting]

    # Disk

    def files_found(self, headers: Iterable[SegmentHeader]) -> list[Instruction]:
        """Segments that an earlier process has written, the least recently used first.

        Those of other models do no harm: no request has their hashes, and they are the first to go.
        """
        unused: list[Instruction] = []
        for header in headers:
            segment = Segment(self._num_segments, header, None, is_in_store=False, file=header)
            self._num_segments += 1
            new = [h for h in header.hashes if h not in self._blocks or self._blocks[h].segment is None]
            for block_hash in new:
                record = self._blocks[block_hash]
                self._came(block_hash, record)
                record.segment = segment
            if new:
                self._segments[segment.segment_id] = segment
                self.disk_bytes += header.num_bytes
            else:
                unused.append(EraseFile(header))
        return unused + self._make_room_on_disk(0)

    def segment_written(self, segment_id: int, file: SegmentHeader | None) -> list[Instruction]:
        """A segment is on disk now, under this header; None if it could not be written."""
        self.disk_bytes -= self._writing.pop(segment_id)
        segment = self._segments.get(segment_id)
        if segment is None:
            return [] if file is None else [EraseFile(file)]
        if file is not None:
            segment.file = file
            self.disk_bytes += file.num_bytes
        self._drop_segments()
        return []

    def segment_read(self, segment_id: int, ref: object) -> list[Instruction]:
        """A segment has come from disk into the object store."""
        segment = self._segments.get(segment_id)
        if segment is None or segment.is_in_store:
            return []
        segment.ref, segment.is_in_store = ref, True
        self.segment_bytes += segment.header.num_bytes
        self._segments.move_to_end(segment_id)
        receivers, segment.wanted_by = segment.wanted_by, set()
        self._drop_segments()
        return self._deliver(receivers, segment)

    def save(self) -> list[Instruction]:
        """Have blocks exported that no segment contains, so that they get to disk; to be called now and then."""
        instructions: list[Instruction] = []
        for worker in self.workers.values():
            worker.unsaved = [h for h in worker.unsaved if h in worker.blocks and self._blocks[h].segment is None]
            ready = [h for h in worker.unsaved if self._blocks[h].producer is None][:MAX_SAVED_BLOCKS]
            if not ready or (len(ready) < MIN_SAVED_BLOCKS and worker.requests):
                continue
            for block_hash in ready:
                self._blocks[block_hash].producer = worker.worker_id
            instructions.append(Export(worker.worker_id, tuple(ready)))
        return instructions

    # Requests

    def admit(self, request: AdmitRequest) -> tuple[Admission, list[Instruction]]:
        """Find the longest prefix, place the request, reserve its load, lease its blocks and mark what it will compute.

        Raises:
            NoWorkerError: no worker is registered; nothing has changed.
        """
        if not self.workers:
            raise NoWorkerError("no worker is ready")
        instructions = self.release(request.request_id)
        placement = place(*self._options(request), self.costs)
        prefill = placement.prefill
        decode = placement.decode if request.generates else prefill
        involved = {prefill, decode}
        num_local = placement.chosen.num_local_blocks
        num_cached = num_local + placement.chosen.num_imported_blocks
        self._record(request, placement)
        prefill_awaited = self._lacking(prefill, request.hashes[num_local:num_cached])
        to_compute = request.hashes[num_cached:]
        decode_awaited = self._lacking(decode, request.hashes) if decode != prefill else ()
        admission = Admission(
            request.request_id,
            request.attempt,
            prefill,
            decode,
            self.workers[prefill].epoch,
            self.workers[decode].epoch,
            prefill_awaited,
            decode_awaited,
        )
        lacking = dict.fromkeys(request.hashes[num_local:])
        compute_us = int(placement.chosen.compute_s * US_PER_S)
        reservation = Reservation(admission, request.hashes, compute_us, {}, [], lacking)
        self._reservations[request.request_id] = reservation
        self.workers[prefill].queued_us += reservation.queued_us
        self.workers[decode].decoding.add(request.request_id)
        for worker_id in involved:
            self.workers[worker_id].requests.add(request.request_id)
        self._offer(involved)
        for block_hash in to_compute:
            record = self._blocks[block_hash]
            if record.producer is None and record.segment is None:
                record.producer = request.request_id
                reservation.producing[block_hash] = None
        instructions += self._promise(reservation, prefill, prefill_awaited)
        instructions += self._promise(reservation, decode, decode_awaited)
        return admission, instructions

    def first_token(self, request_id: str, attempt: int, ttft_s: float) -> Decision | None:
        """The attempt's prefill is done, `ttft_s` after its admission: its worker's queue is shorter by it. Returns the
        decision that was behind it, if it is remembered."""
        reservation = self._reservations.get(request_id)
        if reservation is not None and reservation.admission.attempt == attempt:
            self._unqueue(reservation)
            self._offer([reservation.admission.prefill])
            reservation.lacking.clear()
        return self.decisions.first_token(request_id, attempt, ttft_s)

    def release(self, request_id: str) -> list[Instruction]:
        """The request ended, however it did: its leases, its load and its promises to compute are gone."""
        reservation = self._reservations.pop(request_id, None)
        if reservation is None:
            return []
        self._unqueue(reservation)
        involved = {reservation.admission.prefill, reservation.admission.decode}
        for worker_id in involved & self.workers.keys():
            self.workers[worker_id].requests.discard(request_id)
            self.workers[worker_id].decoding.discard(request_id)
        self._offer(involved)
        for segment in reservation.leased:
            segment.leases -= 1
        self._used(reservation.hashes)
        self._drop_segments()
        return self._stop_producing(reservation)

    # What others may ask

    def reset(self) -> tuple[int, list[Instruction]]:
        """Drop every segment that nobody was promised, from disk too; returns how many blocks they had."""
        unused = [s for s in self._segments.values() if s.leases == 0 and not s.wanted_by]
        for segment in unused:
            self._drop_segment(segment, "reset")
        erased: list[Instruction] = [EraseFile(segment.file) for segment in unused if segment.file is not None]
        return sum(len(segment.header.full_hashes) for segment in unused), erased

    def events_since(self, sequence: int | None) -> CacheUpdate:
        """What was stored and removed since then, or all that is stored now (`CacheEvents.since`)."""
        stored = (block_hash for block_hash, record in self._blocks.items() if record.is_stored)
        return self._events.since(sequence, stored)

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    @property
    def num_reservations(self) -> int:
        return len(self._reservations)

    def check_integrity(self) -> None:
        """Assert that blocks, workers, segments and reservations agree with each other."""
        for block_hash, record in self._blocks.items():
            assert record.is_known, "a record that knows nothing"
            assert all(block_hash in self.workers[worker].blocks for worker in record.workers)
            assert record.segment is None or record.segment.segment_id in self._segments
            producer = record.producer
            assert producer is None or producer in self.workers or producer in self._reservations
        for worker in self.workers.values():
            assert all(worker.worker_id in self._blocks[block_hash].workers for block_hash in worker.blocks)
            assert worker.requests <= self._reservations.keys()
            assert worker.decoding <= worker.requests
            assert self._crowd.offer_of(worker.worker_id) == worker.offer
            queued_us = sum(
                reservation.queued_us
                for reservation in self._reservations.values()
                if reservation.admission.prefill == worker.worker_id
                and reservation.admission.prefill_epoch == worker.epoch
            )
            assert worker.queued_us == queued_us
        for reservation in self._reservations.values():
            for block_hash in reservation.producing:
                assert self._blocks[block_hash].producer == reservation.admission.request_id
        leases = [segment for reservation in self._reservations.values() for segment in reservation.leased]
        segments = self._segments.values()
        for segment in segments:
            assert segment.leases == leases.count(segment)
            assert segment.is_in_store or segment.file is not None
            assert not (segment.is_in_store and segment.wanted_by)
        assert self.segment_bytes == sum(segment.header.num_bytes for segment in segments if segment.is_in_store)
        files = sum(segment.file.num_bytes for segment in segments if segment.file is not None)
        assert self.disk_bytes == files + sum(self._writing.values()) <= self.disk_budget_bytes

    # Inside

    def _worker(self, worker_id: str, epoch: int | None) -> WorkerRecord | None:
        worker = self.workers.get(worker_id)
        return worker if worker is not None and epoch in (None, worker.epoch) else None

    def _offer(self, worker_ids: Iterable[str]) -> None:
        """The load or the costs of these workers may have changed."""
        for worker_id in worker_ids:
            if worker_id in self.workers:
                self._crowd.put(worker_id, self.workers[worker_id].offer)

    def _sealed(self, worker: WorkerRecord, block_hash: BlockHash) -> bool:
        """Note that a worker holds a block; whether others want it and the worker should export it."""
        worker.blocks.add(block_hash)
        record = self._blocks[block_hash]
        self._came(block_hash, record)
        record.workers.add(worker.worker_id)
        if record.wanted_by:
            record.wanted_by -= {worker.worker_id}
        if record.producer not in self.workers:
            self._produced(block_hash, record)
        if self.disk_budget_bytes and record.segment is None:
            worker.unsaved.append(block_hash)
        if not record.wanted_by or record.producer is not None or record.segment is not None:
            return False
        record.producer = worker.worker_id
        return True

    def _produced(self, block_hash: BlockHash, record: BlockRecord) -> None:
        """Nobody needs to compute or export this block any more."""
        reservation = self._reservations.get(record.producer) if record.producer else None
        if reservation is not None:
            reservation.producing.pop(block_hash, None)
        record.producer = None

    def _lacking(self, worker_id: str, hashes: Sequence[BlockHash]) -> tuple[BlockHash, ...]:
        """Those of `hashes` that a worker does not hold."""
        return tuple(block_hash for block_hash in hashes if block_hash not in self.workers[worker_id].blocks)

    def _options(self, request: AdmitRequest) -> tuple[Demand, list[Candidate]]:
        """What a request needs, and what each worker has to offer, in one walk along its blocks."""
        holders: dict[int, set[str]] = {}
        still = set(self.workers)
        num_reachable = 0
        pending_us = 0
        for index, record in enumerate(self.leading(request.hashes)):
            if not still <= record.workers:
                holders[index] = still - record.workers
                still = still & record.workers
            num_reachable = index + 1
            producer = None if record.is_stored else self._reservations.get(record.producer or "")
            if producer is not None:
                pending_us = max(pending_us, self.workers[producer.admission.prefill].queued_us)
        if still:
            holders[num_reachable] = still
        demand = Demand(request.num_tokens, num_reachable, pending_us / US_PER_S, request.session or request.request_id)
        return demand, self._crowd.candidates(holders)

    def leading(self, hashes: Sequence[BlockHash]) -> Iterator[BlockRecord]:
        """The records of the leading blocks that are held or being computed anywhere."""
        for block_hash in hashes:
            record = self._blocks.get(block_hash)
            if record is None:
                return
            yield record

    def _record(self, request: AdmitRequest, placement: Placement) -> None:
        """Keep what explains this placement."""
        num_local = placement.chosen.num_local_blocks
        num_cached = num_local + placement.chosen.num_imported_blocks
        others = self._sources(request.hashes, num_local, num_cached, request.tenant)
        runs = runs_of(chain(repeat(BlockSource.LOCAL, num_local), others))
        decision = Decision(
            request.attempt,
            request.tenant,
            request.num_tokens,
            self.costs.block_size,
            runs,
            placement.prefill,
            placement.decode,
            placement.chosen.ttft_s,
            best_considered(placement),
        )
        self.decisions.admitted(request.request_id, decision)
        self.statistics.admitted(request.tenant, request.num_tokens, request.hashes, runs, request.preview)

    def _sources(
        self, hashes: Sequence[BlockHash], num_local: int, num_cached: int, tenant: str
    ) -> Iterator[BlockSource]:
        """Of the blocks behind the first `num_local`; those from `num_cached` on are not fetched."""
        parent = hashes[num_local - 1] if num_local else b""
        for index in range(num_local, len(hashes)):
            block_hash = hashes[index]
            record = self._blocks.get(block_hash)
            if record is None:
                before = tenant, parent
                others = self._continuations.get(before) if index else None
                if block_hash in self._gone:
                    yield BlockSource.EVICTED
                elif others is not None and others != block_hash:
                    yield BlockSource.DIVERGED
                else:
                    yield BlockSource.NEVER_SEEN
                remember(self._continuations, before, block_hash)
            elif index >= num_cached:
                yield BlockSource.RECOMPUTED
            elif record.segment is not None:
                yield BlockSource.STORE if record.segment.is_in_store else BlockSource.DISK
            else:
                yield BlockSource.WORKER if record.workers else BlockSource.PENDING
            parent = block_hash

    def _came(self, block_hash: BlockHash, record: BlockRecord) -> None:
        """The block is about to be in a place; note it if it was in none."""
        if not record.is_stored:
            self._gone.pop(block_hash, None)
            self._events.add(True, block_hash)

    def _leave_worker(self, block_hash: BlockHash, worker_id: str, reason: str) -> None:
        record = self._blocks[block_hash]
        record.workers.discard(worker_id)
        self._left(block_hash, record, reason)

    def _left(self, block_hash: BlockHash, record: BlockRecord, reason: str) -> None:
        """The block left a place; note it if it was the last one."""
        self.statistics.evicted_blocks[reason] += 1
        if not record.is_stored:
            remember(self._gone, block_hash, None)
            self._events.add(False, block_hash)

    def _promise(self, reservation: Reservation, worker_id: str, hashes: Iterable[BlockHash]) -> list[Instruction]:
        """Arrange that `worker_id` gets `hashes`: from segments now, from other workers or producers when ready."""
        instructions: list[Instruction] = []
        segments: dict[int, Segment] = {}
        exports: dict[str, list[BlockHash]] = {}
        for block_hash in hashes:
            record = self._blocks[block_hash]
            if record.segment is not None:
                segments[record.segment.segment_id] = record.segment
                continue
            record.wanted_by |= {worker_id}
            if record.producer is None and record.workers:
                record.producer = min(record.workers)
                exports.setdefault(record.producer, []).append(block_hash)
        for segment in segments.values():
            segment.leases += 1
            reservation.leased.append(segment)
            if segment.is_in_store:
                instructions.append(Deliver(worker_id, segment))
            else:
                if not segment.wanted_by:
                    instructions.append(ReadFile(segment))
                segment.wanted_by.add(worker_id)
        instructions += [Export(owner, tuple(owned)) for owner, owned in exports.items()]
        return instructions

    def _unqueue(self, reservation: Reservation) -> None:
        worker = self._worker(reservation.admission.prefill, reservation.admission.prefill_epoch)
        if worker is not None:
            worker.queued_us -= reservation.queued_us
        reservation.queued_us = 0

    def _stop_producing(self, reservation: Reservation) -> list[Instruction]:
        """The request computes no more. Its worker may have blocks that it has not told of yet: where somebody waits
        for one, it is asked, and says which ones will not come."""
        abandoned, reservation.producing = reservation.producing, {}
        wanted = [block_hash for block_hash in abandoned if self._blocks[block_hash].wanted_by]
        worker = self._worker(reservation.admission.prefill, reservation.admission.prefill_epoch)
        for block_hash in abandoned:
            self._blocks[block_hash].producer = None
        instructions: list[Instruction] = []
        if worker is None:
            instructions = self._fail(wanted)
        elif wanted:
            for block_hash in wanted:
                self._blocks[block_hash].producer = worker.worker_id
            instructions = [Export(worker.worker_id, tuple(wanted))]
        self._forget_unknown(abandoned)
        return instructions

    def _fail(self, hashes: Iterable[BlockHash]) -> list[Instruction]:
        """Nobody is about to send these blocks any more. Where some are wanted, find who does it instead: a worker that
        holds them, or else the request that was admitted first of those that lack them, whose worker is told not to
        wait for them. Without either, whoever wants them is told.

        The first, because then requests only wait for earlier ones, and never in a circle.
        """
        exports: dict[str, list[BlockHash]] = {}
        lost: dict[str, list[BlockHash]] = {}
        for block_hash in hashes:
            record = self._blocks.get(block_hash)
            if record is None or record.producer is not None or not record.wanted_by:
                continue
            if record.workers:
                record.producer = min(record.workers)
                exports.setdefault(record.producer, []).append(block_hash)
                continue
            told = record.wanted_by
            successor = self._first_lacking(block_hash)
            if successor is not None:
                successor.producing[block_hash] = None
                record.producer = successor.admission.request_id
                told = told & {successor.admission.prefill}
            record.wanted_by -= told
            for worker_id in told & self.workers.keys():
                lost.setdefault(worker_id, []).append(block_hash)
        return [
            *(Export(worker_id, tuple(held)) for worker_id, held in exports.items()),
            *(Lost(worker_id, tuple(missing)) for worker_id, missing in lost.items()),
        ]

    def _first_lacking(self, block_hash: BlockHash) -> Reservation | None:
        """The request that was admitted first of those that could compute a block."""
        for request_id, reservation in self._reservations.items():
            worker = self.workers.get(reservation.admission.prefill)
            if worker is not None and request_id in worker.requests and block_hash in reservation.lacking:
                return reservation
        return None

    def _forget_unknown(self, hashes: Iterable[BlockHash]) -> None:
        for block_hash in hashes:
            record = self._blocks.get(block_hash)
            if record is not None and not record.is_known:
                del self._blocks[block_hash]

    def _deliver(self, receivers: Iterable[str], segment: Segment) -> list[Instruction]:
        return [Deliver(receiver, segment) for receiver in sorted(receivers) if receiver in self.workers]

    def _used(self, hashes: Iterable[BlockHash]) -> None:
        """A request has used these blocks: their segments are the most recent ones, the first block's above all."""
        records = (self._blocks.get(block_hash) for block_hash in hashes)
        segments = {r.segment.segment_id: None for r in records if r is not None and r.segment is not None}
        for segment_id in reversed(segments):
            self._segments.move_to_end(segment_id)

    def _drop_segments(self) -> None:
        """Keep exported bytes within the budget: the least recently used segment that nobody leases goes first."""

        def gives(segment: Segment) -> int:
            movable = segment.is_in_store and segment.segment_id not in self._writing
            return segment.header.num_bytes if movable else 0

        for segment in self._least_recent(self.segment_bytes - self.segment_budget_bytes, gives):
            self._leave_store(segment)

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

    def _leave_store(self, segment: Segment) -> None:
        """Drop a segment's bytes; in its place stays what is on disk. Deliveries under way keep the old one."""
        if segment.file is None:
            self._drop_segment(segment, "object store full")
            return
        on_disk = Segment(segment.segment_id, segment.file, None, is_in_store=False, file=segment.file)
        self._segments[segment.segment_id] = on_disk
        self.segment_bytes -= segment.header.num_bytes
        for block_hash in on_disk.header.hashes:
            record = self._blocks.get(block_hash)
            if record is not None and record.segment is segment:
                record.segment = on_disk

    def _write(self, segment: Segment) -> list[Instruction]:
        """Have a new segment written, unless its blocks are in others or the disk has no room or does not keep up."""
        num_bytes = segment.header.num_bytes
        is_indexed = any(self._blocks[block_hash].segment is segment for block_hash in segment.header.full_hashes)
        keeps_up = not self._writing or sum(self._writing.values()) + num_bytes <= MAX_WRITING_BYTES
        if not is_indexed or not keeps_up or num_bytes > self.disk_budget_bytes:
            return []
        instructions = self._make_room_on_disk(num_bytes)
        if self.disk_bytes + num_bytes <= self.disk_budget_bytes:
            self._writing[segment.segment_id] = num_bytes
            self.disk_bytes += num_bytes
            instructions.append(WriteFile(segment))
        return instructions

    def _make_room_on_disk(self, num_bytes: int) -> list[Instruction]:
        """Give up files until so many bytes fit: the least recently used segment that nobody leases goes first."""
        erased: list[Instruction] = []

        def gives(segment: Segment) -> int:
            return segment.file.num_bytes if segment.file is not None and not segment.wanted_by else 0

        for segment in self._least_recent(self.disk_bytes + num_bytes - self.disk_budget_bytes, gives):
            assert segment.file is not None
            erased.append(EraseFile(segment.file))
            if segment.is_in_store:
                self.disk_bytes -= segment.file.num_bytes
                segment.file = None
            else:
                self._drop_segment(segment, "disk full")
        return erased

    def _drop_segment(self, segment: Segment, reason: str) -> None:
        del self._segments[segment.segment_id]
        self.segment_bytes -= segment.header.num_bytes if segment.is_in_store else 0
        self.disk_bytes -= 0 if segment.file is None else segment.file.num_bytes
        for block_hash in segment.header.full_hashes:
            record = self._blocks.get(block_hash)
            if record is not None and record.segment is segment:
                record.segment = None
                self._left(block_hash, record, reason)
        self._forget_unknown(segment.header.full_hashes)


def remember(memory: OrderedDict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Put something into a memory of bounded size, which forgets what came first."""
    memory[key] = value
    if len(memory) > MAX_REMEMBERED:
        memory.popitem(last=False)
