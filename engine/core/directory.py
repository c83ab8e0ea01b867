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

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from itertools import chain, repeat

from engine.core.block_index import BlockIndex, BlockRecord, Continuations, Segment
from engine.core.cache_events import CacheUpdate
from engine.core.cache_statistics import CacheStatistics
from engine.core.costs import WorkerCosts
from engine.core.errors import NoWorkerError
from engine.core.explain import BlockSource, Decision, Decisions, best_considered, runs_of
from engine.core.instructions import Export, Instruction
from engine.core.placement import Candidate, CostModel, Crowd, Demand, Placement, place
from engine.core.reservations import US_PER_S, Reservation, WorkerRecord, Workers
from engine.core.segment_store import SegmentStore
from engine.core.supply import Supply
from engine.core.tenants import Tenant
from engine.core.types import (
    Admission,
    AdmitRequest,
    BlockHash,
    EvictionReason,
    Role,
    SegmentHeader,
)

MIN_SAVED_BLOCKS = 16
"""A busy worker is not asked to export fewer blocks than this for the disk's sake, ..."""
MAX_SAVED_BLOCKS = 64
"""... and no worker more at a time."""


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
        self.workers = Workers()
        self._crowd = Crowd()
        """The same workers, as requests see them."""
        self._reservations: dict[str, Reservation] = {}
        self.supply = Supply(self._blocks, self.workers, self._reservations, self.segments)
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
        worker = self.workers.current(worker_id, epoch)
        if worker is None:
            return []
        del self.workers[worker_id]
        self._crowd.remove(worker_id)
        for block_hash in worker.blocks:
            self._leave_worker(block_hash, worker_id, "worker lost")
        instructions = self.supply.fail(block_hash for block_hash in worker.blocks)
        for request_id in worker.requests:
            reservation = self._reservations[request_id]
            if reservation.admission.prefill == worker_id:
                reservation.queued_us = 0
                instructions += self.supply.stop_producing(reservation)
        for block_hash in worker.exporting:
            self._blocks[block_hash].producer = None
        instructions += self.supply.fail(worker.exporting)
        self._blocks.forget_unknown([*worker.blocks, *worker.exporting])
        return instructions

    def is_current(self, worker_id: str, epoch: int) -> bool:
        return self.workers.current(worker_id, epoch) is not None

    def worker_measured(self, worker_id: str, epoch: int, costs: WorkerCosts | None, num_free_blocks: int) -> None:
        """A worker reports what it costs (None: it has not measured anything yet) and how much room it has."""
        worker = self.workers.current(worker_id, epoch)
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
        worker = self.workers.current(worker_id, epoch)
        if worker is None:
            return []
        wanted = [block_hash for block_hash in sealed if self._sealed(worker, block_hash)]
        lost = {block_hash: reason for block_hash, reason in evicted if block_hash in worker.blocks}
        for block_hash, reason in lost.items():
            worker.blocks.discard(block_hash)
            self._leave_worker(block_hash, worker_id, reason)
        instructions = self.supply.fail(lost)
        self._blocks.forget_unknown(lost)
        if wanted:
            instructions.append(Export(worker_id, tuple(wanted)))
        return instructions

    # Segments

    def segment_exported(self, worker_id: str, epoch: int, header: SegmentHeader, ref: object) -> list[Instruction]:
        """A worker exported blocks: index them and hand them to everybody who waits for one of them."""
        if self.workers.current(worker_id, epoch) is None:
            return []
        receivers: set[str] = set()
        instructions: list[Instruction] = []
        for block_hash in header.full_hashes:
            record = self._blocks[block_hash]
            receivers |= record.wanted_by
            record.wanted_by = frozenset()
            self.supply.produced(block_hash, record)
        if header.handover is not None:
            reservation = self._reservations.get(header.handover.request_id)
            if reservation is not None and reservation.admission.attempt == header.handover.attempt:
                receivers.add(reservation.admission.decode)
                reservation.lacking.clear()
                instructions = self.supply.stop_producing(reservation)
        receivers.discard(worker_id)
        segment, disk_instructions = self.segments.exported(header, ref)
        return instructions + disk_instructions + self.supply.deliver(receivers, segment)

    def export_failed(self, worker_id: str, epoch: int, hashes: Iterable[BlockHash]) -> list[Instruction]:
        """A worker no longer holds blocks that it was asked to export."""
        failed = self.supply.take_back(worker_id, epoch, hashes)
        evicted = [(block_hash, EvictionReason.FULL) for block_hash in failed]
        instructions = self.blocks_changed(worker_id, epoch, sealed=(), evicted=evicted) + self.supply.fail(failed)
        self._blocks.forget_unknown(failed)
        return instructions

    def blocks_unsent(self, worker_id: str, epoch: int, hashes: Iterable[BlockHash]) -> list[Instruction]:
        """A worker could not send blocks that it was asked to export, and may hold them still. Nobody is asked again
        for those who wait now, since that could fail for ever: they compute."""
        failed = self.supply.take_back(worker_id, epoch, hashes)
        instructions = self.supply.fail(failed, asks_holders=False)
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
        instructions = self.supply.fail(hashes)
        self._blocks.forget_unknown(hashes)
        return instructions

    def segment_read(self, segment_id: int, ref: object) -> list[Instruction]:
        """A segment has come from disk into the object store."""
        segment = self.segments.get(segment_id)
        if segment is None or segment.is_in_store:
            return []
        return self.supply.deliver(self.segments.read(segment, ref), segment)

    def save(self) -> list[Instruction]:
        """Have blocks exported that no segment contains, so that they get to disk; to be called now and then."""
        instructions: list[Instruction] = []
        for worker in self.workers.values():
            worker.unsaved = [h for h in worker.unsaved if h in worker.blocks and self._blocks[h].segment is None]
            ready = [h for h in worker.unsaved if self._blocks[h].producer is None][:MAX_SAVED_BLOCKS]
            if not ready or (len(ready) < MIN_SAVED_BLOCKS and worker.requests):
                continue
            for block_hash in ready:
                self.supply.ask(worker.worker_id, block_hash)
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
        instructions += self.supply.promise(reservation, prefill, prefill_awaited)
        instructions += self.supply.promise(reservation, decode, decode_awaited)
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
        return self.supply.stop_producing(reservation)

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
            self.supply.produced(block_hash, record)
        if self.segments.disk_budget_bytes and record.segment is None:
            worker.unsaved.append(block_hash)
        if not record.wanted_by or record.producer is not None:
            return False
        self.supply.ask(worker.worker_id, block_hash)
        return True

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

    def _unqueue(self, reservation: Reservation) -> None:
        worker = self.workers.current(reservation.admission.prefill, reservation.admission.prefill_epoch)
        if worker is not None:
            worker.queued_us -= reservation.queued_us
        reservation.queued_us = 0


def _source(record: BlockRecord) -> BlockSource:
    """Where a block comes from that is not computed, and not in the pool of the worker that needs it."""
    if record.segment is not None:
        return BlockSource.STORE if record.segment.is_in_store else BlockSource.DISK
    return BlockSource.WORKER if record.workers else BlockSource.PENDING
