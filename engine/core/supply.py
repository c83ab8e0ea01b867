"""Who computes or sends the blocks that workers wait for, and who does it instead when nobody does.

A block that is wanted has a *producer*: the admitted request that is about to compute it, or the worker that was asked
to export it. When the producer ends, fails, dies or stalls, one other takes over and the rest go on waiting.
"""

from collections.abc import Iterable, Mapping
from itertools import chain

from engine.core.block_index import BlockIndex, BlockRecord, Segment
from engine.core.instructions import Deliver, Export, Instruction, Lost
from engine.core.reservations import Reservation, WorkerRecord, Workers
from engine.core.segment_store import ReadFile, SegmentStore
from engine.core.types import BlockHash


class Supply:
    """Part of the directory: changes its blocks, workers and reservations, and returns what is to be done."""

    def __init__(
        self, blocks: BlockIndex, workers: Workers, reservations: dict[str, Reservation], segments: SegmentStore
    ) -> None:
        self._blocks = blocks
        self._workers = workers
        self._reservations = reservations
        self._segments = segments

    def ask(self, worker_id: str, block_hash: BlockHash) -> None:
        """Note that a worker is asked to export a block."""
        self._blocks[block_hash].producer = worker_id
        self._workers[worker_id].exporting[block_hash] = None

    def produced(self, block_hash: BlockHash, record: BlockRecord) -> None:
        """Nobody needs to compute or export this block any more."""
        if (worker := self._workers.get(record.producer or "")) is not None:
            worker.exporting.pop(block_hash, None)
            worker.silent_since = None
        elif record.producer in self._reservations:
            reservation = self._reservations[record.producer]
            reservation.producing.pop(block_hash, None)
            reservation.silent_since = None
        record.producer = None

    def deliver(self, receivers: Iterable[str], segment: Segment) -> list[Instruction]:
        """Hand a segment to those of these workers that are there."""
        return [Deliver(receiver, segment) for receiver in sorted(receivers) if receiver in self._workers]

    def promise(self, reservation: Reservation, worker_id: str, hashes: Iterable[BlockHash]) -> list[Instruction]:
        """Arrange that `worker_id` gets `hashes`: from segments now, from other workers or producers when ready."""
        instructions: list[Instruction] = []
        segments: dict[int, Segment] = {}
        exports: dict[str, list[BlockHash]] = {}
        alone = self._workers[worker_id].alone
        for block_hash in hashes:
            record = self._blocks[block_hash]
            if record.segment is not None:
                segments[record.segment.segment_id] = record.segment
                continue
            if worker_id not in record.wanted_by:
                record.wanted_by = record.wanted_by | alone if record.wanted_by else alone
            if record.producer is None and record.workers:
                holder = min(record.workers)
                self.ask(holder, block_hash)
                exports.setdefault(holder, []).append(block_hash)
            elif record.producer in self._reservations:
                self._reservations[record.producer].is_awaited = True
        for segment in segments.values():
            self._segments.lease(segment)
            reservation.leased.append(segment)
            if segment.is_in_store:
                instructions.append(Deliver(worker_id, segment))
            else:
                if not segment.wanted_by:
                    instructions.append(ReadFile(segment))
                segment.wanted_by.add(worker_id)
        instructions += [Export(owner, tuple(owned)) for owner, owned in exports.items()]
        return instructions

    def stop_producing(self, reservation: Reservation) -> list[Instruction]:
        """The request computes no more. Its worker may have blocks that it has not told of yet: where somebody waits
        for one, it is asked, and says which ones will not come."""
        abandoned, reservation.producing = reservation.producing, {}
        wanted = []
        for block_hash in abandoned:
            record = self._blocks[block_hash]
            record.producer = None
            if record.wanted_by:
                wanted.append(block_hash)
        worker = self._workers.current(reservation.admission.prefill, reservation.admission.prefill_epoch)
        instructions: list[Instruction] = []
        if worker is None:
            instructions = self.fail(wanted)
        elif wanted:
            for block_hash in wanted:
                self.ask(worker.worker_id, block_hash)
            instructions = [Export(worker.worker_id, tuple(wanted))]
        self._blocks.forget_unknown(abandoned)
        return instructions

    def take_back(self, worker_id: str, epoch: int, hashes: Iterable[BlockHash]) -> list[BlockHash]:
        """Those of `hashes` that this worker was asked to export; it is not any more."""
        worker = self._workers.current(worker_id, epoch)
        if worker is None:
            return []
        ordered = [block_hash for block_hash in hashes if block_hash in worker.exporting]
        for block_hash in ordered:
            self.produced(block_hash, self._blocks[block_hash])
        return ordered

    def fail(self, hashes: Iterable[BlockHash], *, asks_holders: bool = True) -> list[Instruction]:
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
                self.ask(holder, block_hash)
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
            for worker_id in told & self._workers.keys():
                lost.setdefault(worker_id, []).append(block_hash)
        return [
            *(Export(worker_id, tuple(held)) for worker_id, held in exports.items()),
            *(Lost(worker_id, tuple(missing)) for worker_id, missing in lost.items()),
        ]

    def replace_stalled(self, now: float, patience_s: float) -> list[Instruction]:
        """Have another request compute what workers wait for and whoever was to send it has not sent for `patience_s`.
        To be called several times in that time.

        Not to blame is a request that waits for blocks itself, or for its turn at a worker that computes others; nor
        one whose blocks nobody else could compute: who waits for those, as a decode worker does for its own request's,
        helps itself.
        """
        instructions: list[Instruction] = []
        senders: list[tuple[WorkerRecord | Reservation, WorkerRecord, dict[BlockHash, None]]] = [
            (worker, worker, worker.exporting) for worker in self._workers.values()
        ]
        for reservation in self._reservations.values():
            worker = self._workers.current(reservation.admission.prefill, reservation.admission.prefill_epoch)
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
        for worker in self._workers.values():
            worker.has_sealed = False
        for wanted in self._lacked_elsewhere({block: worker.worker_id for block, (worker, _) in stalled.items()}):
            worker, promised = stalled[wanted]
            if wanted in promised and self._first_lacking(wanted, but_not_at=worker.worker_id) is not None:
                instructions += self._replace(worker, promised)
        return instructions

    # Inside

    def _first_lacking(self, block_hash: BlockHash, but_not_at: str | None = None) -> Reservation | None:
        """The request that was admitted first of those that could compute a block and whose worker does not hold it."""
        for request_id, reservation in self._reservations.items():
            if block_hash not in reservation.lacking or reservation.admission.prefill == but_not_at:
                continue
            worker = self._workers.get(reservation.admission.prefill)
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
            self.produced(block_hash, self._blocks[block_hash])
        return self.fail(replaced, asks_holders=False)
