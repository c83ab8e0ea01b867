"""Where every KV block of the cluster is, and who gets it next: the manager's mind, without Ray and without a clock.

For each block the directory knows which workers hold it, which exported segment contains it, which request is about to
compute it, and which workers want it. Events come in (a worker registers, seals, evicts, exports, dies; a request is
admitted, reaches its first token, ends) and instructions go out:

* `Deliver`: hand this segment to that worker;
* `Export`: ask this worker to export blocks that only workers hold;
* `Lost`: tell that worker that blocks it waits for will not come;
* those of `engine.core.segment_store`, which decides which segments are kept, and where.

Nothing here is needed for correctness. A worker that gets less than it was promised computes the rest itself, so the
directory may forget anything at any time, and a stale entry costs time, never a wrong token.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import TypeAlias

from engine.core.block_index import BlockIndex, BlockRecord, Continuations, Segment
from engine.core.cache_events import CacheUpdate
from engine.core.cache_statistics import CacheStatistics
from engine.core.costs import WorkerCosts
from engine.core.errors import NoWorkerError
from engine.core.explain import BlockSource, Decision, Decisions, best_considered, runs_of
from engine.core.placement import Candidate, CostModel, Crowd, Demand, Offer, Placement, place
from engine.core.segment_store import DiskInstruction, ReadFile, SegmentStore
from engine.core.tenants import Tenant
from engine.core.types import (
    Admission,
    AdmitRequest,
    BlockHash,
    CacheWish,
    EvictionReason,
    Role,
    SegmentHeader,
)

MIN_SAVED_BLOCKS = 16
"""A busy worker is not asked to export fewer blocks than this for the disk's sake, ..."""
MAX_SAVED_BLOCKS = 64
"""... and no worker more at a time."""
US_PER_S = 1_000_000


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand a segment to a worker."""

    worker_id: str
    segment: Segment


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


WorkerInstruction: TypeAlias = Deliver | Export | Lost
Instruction: TypeAlias = WorkerInstruction | DiskInstruction


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
    exporting: dict[BlockHash, None] = field(default_factory=dict)
    """Blocks, in order, that it was asked to export: it is their producer."""
    silent_since: float | None = None
    """Since when, as far as noted, some of `exporting` have been waited for and none has come."""
    has_sealed: bool = False
    """Whether it has sealed any block since that was last looked at."""
    unsaved: list[BlockHash] = field(default_factory=list)
    """Blocks that it sealed and no segment contained, to be exported for the disk."""
    alone: frozenset[str] = field(init=False)
    """Its id: a set that the records of blocks which only this worker has, or wants, have in common."""

    def __post_init__(self) -> None:
        self.alone = frozenset((self.worker_id,))

    @property
    def offer(self) -> Offer:
        queued_s = self.queued_us / US_PER_S
        return Offer(self.role, self.costs, self.token_budget, queued_s, len(self.decoding), self.num_free_blocks)


@dataclass(slots=True)
class Reservation:
    """An admitted request: what it was promised and what load it puts on whom."""

    admission: Admission
    hashes: tuple[BlockHash, ...]
    wish: CacheWish
    queued_us: int
    producing: dict[BlockHash, None]
    """Blocks, in order, that others may rely on it to compute."""
    leased: list[Segment]
    lacking: dict[BlockHash, None]
    """Blocks, in order, that its prefill worker may have to compute yet: others are to send it some of them."""
    is_awaited: bool = False
    """Whether somebody may wait for some of `producing`."""
    silent_since: float | None = None
    """The same of `producing`, while the request does not wait for others itself."""


class Directory:
    """The index, the reservations and the segments of one cluster."""

    def __init__(
        self,
        costs: CostModel,
        segment_budget_bytes: int,
        disk_budget_bytes: int = 0,
        tenants: Iterable[Tenant] = (),
    ) -> None:
        self.costs = costs
        self.statistics = CacheStatistics(costs.block_size)
        self._blocks = BlockIndex(self.statistics)
        self.segments = SegmentStore(self._blocks, segment_budget_bytes, disk_budget_bytes, tenants)
        self.workers: dict[str, WorkerRecord] = {}
        self._crowd = Crowd()
        """The same workers, as requests see them."""
        self._reservations: dict[str, Reservation] = {}
        self._continuations = Continuations()
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
        for block_hash in worker.exporting:
            self._blocks[block_hash].producer = None
        instructions += self._fail(worker.exporting)
        self._blocks.forget_unknown([*worker.blocks, *worker.exporting])
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
        self,
        worker_id: str,
        epoch: int,
        sealed: Iterable[BlockHash],
        evicted: Iterable[tuple[BlockHash, EvictionReason]],
    ) -> list[Instruction]:
        """A worker's pool gained and lost blocks."""
        worker = self._worker(worker_id, epoch)
        if worker is None:
            return []
        wanted = [block_hash for block_hash in sealed if self._sealed(worker, block_hash)]
        lost = {block_hash: reason for block_hash, reason in evicted if block_hash in worker.blocks}
        for block_hash, reason in lost.items():
            worker.blocks.discard(block_hash)
            self._leave_worker(block_hash, worker_id, reason)
        instructions = self._fail(lost)
        self._blocks.forget_unknown(lost)
        if wanted:
            instructions.append(Export(worker_id, tuple(wanted)))
        return instructions

    # Segments

    def segment_exported(self, worker_id: str, epoch: int, header: SegmentHeader, ref: object) -> list[Instruction]:
        """A worker exported blocks: index them and hand them to everybody who waits for one of them."""
        if self._worker(worker_id, epoch) is None:
            return []
        receivers: set[str] = set()
        instructions: list[Instruction] = []
        for block_hash in header.full_hashes:
            record = self._blocks[block_hash]
            receivers |= record.wanted_by
            record.wanted_by = frozenset()
            self._produced(block_hash, record)
        if header.handover is not None:
            reservation = self._reservations.get(header.handover.request_id)
            if reservation is not None and reservation.admission.attempt == header.handover.attempt:
                receivers.add(reservation.admission.decode)
                reservation.lacking.clear()
                instructions = self._stop_producing(reservation)
        receivers.discard(worker_id)
        segment, disk_instructions = self.segments.exported(header, ref)
        return instructions + disk_instructions + self._deliver(receivers, segment)

    def export_failed(self, worker_id: str, epoch: int, hashes: Iterable[BlockHash]) -> list[Instruction]:
        """A worker no longer holds blocks that it was asked to export."""
        failed = self._take_back(worker_id, epoch, hashes)
        evicted = [(block_hash, EvictionReason.FULL) for block_hash in failed]
        instructions = self.blocks_changed(worker_id, epoch, sealed=(), evicted=evicted) + self._fail(failed)
        self._blocks.forget_unknown(failed)
        return instructions

    def blocks_unsent(self, worker_id: str, epoch: int, hashes: Iterable[BlockHash]) -> list[Instruction]:
        """A worker could not send blocks that it was asked to export, and may hold them still. Nobody is asked again
        for those who wait now, since that could fail for ever: they compute."""
        failed = self._take_back(worker_id, epoch, hashes)
        instructions = self._fail(failed, asks_holders=False)
        self._blocks.forget_unknown(failed)
        return instructions

    def segment_lost(self, segment_id: int) -> list[Instruction]:
        """A segment is damaged, or its file is gone: nobody is promised it any more."""
        segment = self.segments.get(segment_id)
        if segment is None:
            return []
        return [*self.segments.lost(segment), *self.segment_unread(segment)]

    def segment_unread(self, segment: Segment) -> list[Instruction]:
        """A segment could not be read from disk now: its blocks come from elsewhere for those who wait for it, and the
        next one may try again."""
        waiting = frozenset(self.segments.unread(segment) & self.workers.keys())
        hashes = [h for h in segment.header.full_hashes if self._blocks[h].segment in (segment, None)]
        for block_hash in hashes:
            record = self._blocks[block_hash]
            record.wanted_by |= waiting - record.workers
            if record.producer in self._reservations:
                self._reservations[record.producer].is_awaited = True
        instructions = self._fail(hashes)
        self._blocks.forget_unknown(hashes)
        return instructions

    def segment_read(self, segment_id: int, ref: object) -> list[Instruction]:
        """A segment has come from disk into the object store."""
        segment = self.segments.get(segment_id)
        if segment is None or segment.is_in_store:
            return []
        return self._deliver(self.segments.read(segment, ref), segment)

    def save(self) -> list[Instruction]:
        """Have blocks exported that no segment contains, so that they get to disk; to be called now and then."""
        instructions: list[Instruction] = []
        for worker in self.workers.values():
            worker.unsaved = [h for h in worker.unsaved if h in worker.blocks and self._blocks[h].segment is None]
            ready = [h for h in worker.unsaved if self._blocks[h].producer is None][:MAX_SAVED_BLOCKS]
            if not ready or (len(ready) < MIN_SAVED_BLOCKS and worker.requests):
                continue
            for block_hash in ready:
                self._ask(worker.worker_id, block_hash)
            instructions.append(Export(worker.worker_id, tuple(ready)))
        return instructions

    def replace_stalled(self, now: float, patience_s: float) -> list[Instruction]:
        """Have another request compute what workers wait for and whoever was to send it has not sent for `patience_s`.
        To be called several times in that time.

        Not to blame is a request that waits for blocks itself, or for its turn at a worker that computes others; nor
        one whose blocks nobody else could compute: who waits for those, as a decode worker does for its own request's,
        helps itself.
        """
        instructions: list[Instruction] = []
        senders: list[tuple[WorkerRecord | Reservation, WorkerRecord, dict[BlockHash, None]]] = [
            (worker, worker, worker.exporting) for worker in self.workers.values()
        ]
        for reservation in self._reservations.values():
            worker = self._worker(reservation.admission.prefill, reservation.admission.prefill_epoch)
            if reservation.is_awaited and worker is not None:
                senders.append((reservation, worker, reservation.producing))
        stalled: dict[BlockHash, tuple[WorkerRecord, dict[BlockHash, None]]] = {}
        for sender, worker, promised in senders:
            wanted = next((h for h in promised if self._blocks[h].wanted_by), None)
            if isinstance(sender, Reservation):
                sender.is_awaited = wanted is not None
                if worker.has_sealed or self._is_waiting(sender):
                    wanted = None
            if wanted is None:
                sender.silent_since = None
            elif sender.silent_since is None:
                sender.silent_since = now
            elif now - sender.silent_since >= patience_s:
                sender.silent_since = None
                stalled[wanted] = worker, promised
        for worker in self.workers.values():
            worker.has_sealed = False
        for wanted in self._lacked_elsewhere({block: worker.worker_id for block, (worker, _) in stalled.items()}):
            worker, promised = stalled[wanted]
            if wanted in promised and self._first_lacking(wanted, but_not_at=worker.worker_id) is not None:
                instructions += self._replace(worker, promised)
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
        records = [self._blocks.get(block_hash) for block_hash in request.hashes]
        placement = place(*self._options(request, records), self.costs)
        prefill = placement.prefill
        decode = placement.decode if request.generates else prefill
        involved = {prefill, decode}
        num_local = placement.chosen.num_local_blocks
        num_cached = num_local + placement.chosen.num_imported_blocks
        self._record(request, records, placement)
        prefill_awaited = self._lacking(prefill, request.hashes[num_local:num_cached])
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
        reservation = Reservation(admission, request.hashes, request.cache, compute_us, {}, [], lacking)
        self._reservations[request.request_id] = reservation
        self.workers[prefill].queued_us += reservation.queued_us
        self.workers[decode].decoding.add(request.request_id)
        for worker_id in involved:
            self.workers[worker_id].requests.add(request.request_id)
        self._offer(involved)
        for block_hash, record in zip(request.hashes[num_cached:], records[num_cached:], strict=True):
            if record is None:
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
        self.segments.released(reservation.leased, reservation.hashes, reservation.wish)
        return self._stop_producing(reservation)

    # What others may ask

    def events_since(self, sequence: int | None) -> CacheUpdate:
        """What was stored and removed (`BlockIndex.events_since`)."""
        return self._blocks.events_since(sequence)

    def leading(self, hashes: Sequence[BlockHash]) -> Iterator[BlockRecord]:
        """The records of the leading blocks that are held or being computed anywhere."""
        for block_hash in hashes:
            record = self._blocks.get(block_hash)
            if record is None:
                return
            yield record

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_reservations(self) -> int:
        return len(self._reservations)

    def check_integrity(self) -> None:
        """Assert that blocks, workers, segments and reservations agree with each other."""
        exporting: dict[str, set[BlockHash]] = {worker_id: set() for worker_id in self.workers}
        for block_hash, record in self._blocks.items():
            assert record.is_known, "a record that knows nothing"
            assert all(block_hash in self.workers[worker].blocks for worker in record.workers)
            producer = record.producer
            assert producer is None or producer in self.workers or producer in self._reservations
            if producer in exporting:
                exporting[producer].add(block_hash)
        for worker in self.workers.values():
            assert all(worker.worker_id in self._blocks[block_hash].workers for block_hash in worker.blocks)
            assert worker.exporting.keys() == exporting[worker.worker_id]
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
                assert reservation.is_awaited or not self._blocks[block_hash].wanted_by
        self.segments.check_integrity([leased for r in self._reservations.values() for leased in r.leased])

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
        worker.has_sealed = True
        worker.blocks.add(block_hash)
        record = self._blocks[block_hash]
        self._blocks.came(block_hash, record)
        record.workers = record.workers | worker.alone if record.workers else worker.alone
        if record.wanted_by:
            record.wanted_by -= worker.alone
        if record.producer not in self.workers:
            self._produced(block_hash, record)
        if self.segments.disk_budget_bytes and record.segment is None:
            worker.unsaved.append(block_hash)
        if not record.wanted_by or record.producer is not None:
            return False
        self._ask(worker.worker_id, block_hash)
        return True

    def _ask(self, worker_id: str, block_hash: BlockHash) -> None:
        """Note that a worker is asked to export a block."""
        self._blocks[block_hash].producer = worker_id
        self.workers[worker_id].exporting[block_hash] = None

    def _produced(self, block_hash: BlockHash, record: BlockRecord) -> None:
        """Nobody needs to compute or export this block any more."""
        if record.producer in self.workers:
            worker = self.workers[record.producer]
            worker.exporting.pop(block_hash, None)
            worker.silent_since = None
        elif record.producer in self._reservations:
            reservation = self._reservations[record.producer]
            reservation.producing.pop(block_hash, None)
            reservation.silent_since = None
        record.producer = None

    def _lacking(self, worker_id: str, hashes: Sequence[BlockHash]) -> tuple[BlockHash, ...]:
        """Those of `hashes` that a worker does not hold."""
        held = self.workers[worker_id].blocks
        return tuple([block_hash for block_hash in hashes if block_hash not in held])

    def _options(self, request: AdmitRequest, records: Iterable[BlockRecord | None]) -> tuple[Demand, list[Candidate]]:
        """What a request needs, and what each worker has to offer, in one walk along its leading blocks."""
        holders: dict[int, set[str]] = {}
        still = set(self.workers)
        before: Set[str] | None = None  # the last block's workers: mostly the next one's, too
        num_reachable = 0
        producers: set[str | None] = set()
        for record in records:
            if record is None:
                break
            if record.workers is not before:
                before = record.workers
                if not still <= before:
                    holders[num_reachable] = still - before
                    still = still & before
            if not record.workers and record.segment is None:
                producers.add(record.producer)
            num_reachable += 1
        if still:
            holders[num_reachable] = still
        computing = [self._reservations[name].admission.prefill for name in producers if name in self._reservations]
        pending_us = max((self.workers[worker_id].queued_us for worker_id in computing), default=0)
        demand = Demand(request.num_tokens, num_reachable, pending_us / US_PER_S, request.session or request.request_id)
        return demand, self._crowd.candidates(holders)

    def _record(self, request: AdmitRequest, records: Sequence[BlockRecord | None], placement: Placement) -> None:
        """Keep what explains this placement."""
        num_local = placement.chosen.num_local_blocks
        num_cached = num_local + placement.chosen.num_imported_blocks
        imported = [_source(record) for record in records[num_local:num_cached] if record is not None]
        computed = self._misses(request, records, num_cached)
        runs = runs_of(chain(repeat(BlockSource.LOCAL, num_local), imported, computed))
        decision = Decision(
            request.attempt,
            request.cache.tenant,
            request.num_tokens,
            self.costs.block_size,
            runs,
            placement.prefill,
            placement.decode,
            placement.chosen.ttft_s,
            best_considered(placement),
        )
        self.decisions.admitted(request.request_id, decision)
        self.statistics.admitted(request.cache.tenant, request.num_tokens, request.hashes, runs, request.preview)

    def _misses(
        self, request: AdmitRequest, records: Sequence[BlockRecord | None], num_cached: int
    ) -> list[BlockSource]:
        """Why the blocks behind the first `num_cached` have to be computed; remembers what follows what."""
        hashes, parents = request.hashes[num_cached:], (b"", *request.hashes)[num_cached:-1]
        followers = self._continuations.after(request.cache.tenant, parents)
        gone = self._blocks.gone
        reasons: list[BlockSource] = []
        links: dict[BlockHash, BlockHash] = {}
        for parent, block_hash, record, follower in zip(parents, hashes, records[num_cached:], followers, strict=True):
            if record is not None:
                reasons.append(BlockSource.RECOMPUTED)
                continue
            if block_hash in gone:
                reasons.append(BlockSource.EVICTED)
            elif follower is not None and follower != block_hash:
                reasons.append(BlockSource.DIVERGED)
            else:
                reasons.append(BlockSource.NEVER_SEEN)
            if parent:
                links[parent] = block_hash
        self._continuations.note(request.cache.tenant, links)
        return reasons

    def _leave_worker(self, block_hash: BlockHash, worker_id: str, reason: str) -> None:
        record = self._blocks[block_hash]
        record.workers -= {worker_id}
        self._blocks.left(block_hash, record, reason)

    def _promise(self, reservation: Reservation, worker_id: str, hashes: Iterable[BlockHash]) -> list[Instruction]:
        """Arrange that `worker_id` gets `hashes`: from segments now, from other workers or producers when ready."""
        instructions: list[Instruction] = []
        segments: dict[int, Segment] = {}
        exports: dict[str, list[BlockHash]] = {}
        alone = self.workers[worker_id].alone
        for block_hash in hashes:
            record = self._blocks[block_hash]
            if record.segment is not None:
                segments[record.segment.segment_id] = record.segment
                continue
            if worker_id not in record.wanted_by:
                record.wanted_by = record.wanted_by | alone if record.wanted_by else alone
            if record.producer is None and record.workers:
                holder = min(record.workers)
                self._ask(holder, block_hash)
                exports.setdefault(holder, []).append(block_hash)
            elif record.producer in self._reservations:
                self._reservations[record.producer].is_awaited = True
        for segment in segments.values():
            self.segments.lease(segment)
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
        wanted = []
        for block_hash in abandoned:
            record = self._blocks[block_hash]
            record.producer = None
            if record.wanted_by:
                wanted.append(block_hash)
        worker = self._worker(reservation.admission.prefill, reservation.admission.prefill_epoch)
        instructions: list[Instruction] = []
        if worker is None:
            instructions = self._fail(wanted)
        elif wanted:
            for block_hash in wanted:
                self._ask(worker.worker_id, block_hash)
            instructions = [Export(worker.worker_id, tuple(wanted))]
        self._blocks.forget_unknown(abandoned)
        return instructions

    def _take_back(self, worker_id: str, epoch: int, hashes: Iterable[BlockHash]) -> list[BlockHash]:
        """Those of `hashes` that this worker was asked to export; it is not any more."""
        worker = self._worker(worker_id, epoch)
        if worker is None:
            return []
        ordered = [block_hash for block_hash in hashes if block_hash in worker.exporting]
        for block_hash in ordered:
            self._produced(block_hash, self._blocks[block_hash])
        return ordered

    def _fail(self, hashes: Iterable[BlockHash], *, asks_holders: bool = True) -> list[Instruction]:
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
            if record.workers and asks_holders:
                holder = min(record.workers)
                self._ask(holder, block_hash)
                exports.setdefault(holder, []).append(block_hash)
                continue
            told = record.wanted_by
            successor = self._first_lacking(block_hash)
            if successor is not None:
                successor.producing[block_hash] = None
                successor.is_awaited = True
                record.producer = successor.admission.request_id
                told = told & {successor.admission.prefill}
            record.wanted_by -= told
            for worker_id in told & self.workers.keys():
                lost.setdefault(worker_id, []).append(block_hash)
        return [
            *(Export(worker_id, tuple(held)) for worker_id, held in exports.items()),
            *(Lost(worker_id, tuple(missing)) for worker_id, missing in lost.items()),
        ]

    def _first_lacking(self, block_hash: BlockHash, but_not_at: str | None = None) -> Reservation | None:
        """The request that was admitted first of those that could compute a block and whose worker does not hold it."""
        for request_id, reservation in self._reservations.items():
            if block_hash not in reservation.lacking or reservation.admission.prefill == but_not_at:
                continue
            worker = self.workers.get(reservation.admission.prefill)
            if worker is not None and request_id in worker.requests and block_hash not in worker.blocks:
                return reservation
        return None

    def _lacked_elsewhere(self, promised: Mapping[BlockHash, str]) -> list[BlockHash]:
        """Those of the blocks, each promised by a worker, that requests on others lack: mostly none of many, so all
        are looked for in one walk."""
        lacked: set[BlockHash] = set()
        for reservation in self._reservations.values() if promised else ():
            common = reservation.lacking.keys() & promised.keys()
            lacked.update(h for h in common if promised[h] != reservation.admission.prefill)
        return [block_hash for block_hash in promised if block_hash in lacked]

    def _is_waiting(self, reservation: Reservation) -> bool:
        """Whether its prefill worker waits for blocks that the request needs and others are to send."""
        worker_id = reservation.admission.prefill
        for block_hash in reservation.admission.prefill_awaited:
            record = self._blocks.get(block_hash)
            if record is None or block_hash not in reservation.lacking or block_hash in reservation.producing:
                continue
            if worker_id in record.wanted_by or (record.segment and worker_id in record.segment.wanted_by):
                return True
        return False

    def _replace(self, worker: WorkerRecord, promised: Iterable[BlockHash]) -> list[Instruction]:
        """Rely on a worker no more for blocks that it, or a request there, was to send.

        Its other requests that lack them are likely to stand still as well, and from now on wait for a later one. So
        they do not take over, and what they were to compute is taken over too, or there would be a circle.
        """
        behind = [
            reservation
            for reservation in map(self._reservations.__getitem__, worker.requests)
            if reservation.admission.prefill == worker.worker_id
            and any(h in reservation.lacking and h not in worker.blocks for h in promised)
        ]
        given_up = dict.fromkeys(chain(promised, *(reservation.producing for reservation in behind)))
        for reservation in behind:
            reservation.lacking.clear()
        replaced = [h for h in given_up if self._blocks[h].wanted_by and self._first_lacking(h) is not None]
        for block_hash in replaced:
            self._produced(block_hash, self._blocks[block_hash])
        return self._fail(replaced, asks_holders=False)

    def _deliver(self, receivers: Iterable[str], segment: Segment) -> list[Instruction]:
        return [Deliver(receiver, segment) for receiver in sorted(receivers) if receiver in self.workers]


def _source(record: BlockRecord) -> BlockSource:
    """Where a block comes from that is not computed, and not in the pool of the worker that needs it."""
    if record.segment is not None:
        return BlockSource.STORE if record.segment.is_in_store else BlockSource.DISK
    return BlockSource.WORKER if record.workers else BlockSource.PENDING
