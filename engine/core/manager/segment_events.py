"""The directory's part for segments: asked for, exported, fetched, written to disk, read again, lost."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from raydix.engine.core.manager.block_index import BlockIndex, Segment
from raydix.engine.core.manager.disk_instructions import DiskInstruction
from raydix.engine.core.manager.instructions import Deliver, Instruction
from raydix.engine.core.manager.links import Links
from raydix.engine.core.manager.reservations import Reservation, Workers
from raydix.engine.core.manager.saving import ask_for_blocks
from raydix.engine.core.manager.segment_store import SegmentStore
from raydix.engine.core.manager.succession import Offer
from raydix.engine.core.manager.supply import Supply
from raydix.engine.core.types import BlockHash, SegmentHeader

PATIENCE_S = 0.25
PATIENCE = 3.0
"""A fetch from another node is late after `PATIENCE_S` and `PATIENCE` times what it is predicted to take."""


class SegmentEvents:
    """Events of segments, for `Directory`, which has the attributes.

    `now`: seconds since the epoch, for the expiry of segments.
    """

    segments: SegmentStore
    workers: Workers
    links: Links
    _blocks: BlockIndex
    _supply: Supply
    _reservations: dict[str, Reservation]

    def files_found(self, headers: Sequence[SegmentHeader], now: float) -> list[DiskInstruction]:
        """Take up the segments that an earlier process has written (`SegmentStore.files_found`)."""
        return self.segments.files_found(headers, now)

    def segment_written(self, segment_id: int, file: SegmentHeader | None, now: float) -> list[DiskInstruction]:
        """A segment was written under `file`; None if writing failed."""
        return self.segments.written(segment_id, file, now)

    def segment_undelivered(self, segment: Segment, now: float) -> None:
        """A worker could not fetch a segment from the object store (`SegmentStore.undelivered`)."""
        self.segments.undelivered(segment, now)

    def patience_s(self, worker_id: str, segment: Segment, now: float) -> float | None:
        """Time for which requests of a worker wait for the bytes of a segment of another node, and then compute its
        blocks. None: as long as the fetch takes, because the segment is on the worker's own node."""
        worker = self.workers.get(worker_id)
        if worker is None or not segment.node or segment.node == worker.node:
            return None
        self.links.look(now)
        num_bytes = segment.header.num_bytes
        return PATIENCE_S + PATIENCE * self.links.import_s(segment.node, worker.node, num_bytes, worker.costs)

    def imported(self, worker_id: str, source: str, num_bytes: int, seconds: float, now: float) -> None:
        """A worker has fetched `num_bytes` of KV from a node's object store."""
        worker = self.workers.get(worker_id)
        if worker is not None and source and worker.node and num_bytes:
            self.links.look(now)
            self.links.imported(source, worker.node, num_bytes, seconds, worker.costs)

    def reset_segments(self) -> tuple[int, list[DiskInstruction]]:
        """Drop every segment without a lease, from disk too; returns the number of their blocks."""
        return self.segments.reset()

    def segment_exported(
        self, worker_id: str, epoch: int, header: SegmentHeader, ref: object, now: float
    ) -> list[Instruction]:
        """Index a new segment and deliver it to every worker awaiting one of the blocks."""
        if self.workers.current(worker_id, epoch) is None:
            return []
        receivers = self._supply.exported(header.full_hashes)
        instructions: list[Instruction] = []

        # A handover ends the prefill: its decode worker gets the segment, awaited or not.
        if header.handover is not None:
            reservation = self._reservations.get(header.handover.request_id)
            if reservation is not None and reservation.admission.attempt == header.handover.attempt:
                receivers.add(reservation.admission.decode)
                reservation.awaits_handover = False
                instructions = self._supply.computes_no_more(header.handover.request_id)

        receivers.discard(worker_id)
        node = self.workers[worker_id].node
        segment, disk_instructions = self.segments.exported(header, ref, now, node=node, exporter=worker_id)
        return instructions + disk_instructions + self._deliver(receivers, segment)

    def segment_lost(self, segment_id: int, now: float) -> list[Instruction]:
        """Forget a segment with a damaged or missing file."""
        segment = self.segments.get(segment_id)
        if segment is None:
            return []
        return [*self.segments.lost(segment), *self.segment_unread(segment, now)]

    def segment_unread(self, segment: Segment, now: float) -> list[Instruction]:
        """A segment could not be read from disk now: supply its blocks from other places. Later requests may try the
        file again."""
        # The waiting workers await the blocks, instead of the segment.
        waiting = frozenset(self.segments.unread(segment, now) & self.workers.keys())
        hashes = segment.header.full_hashes
        records = zip(hashes, self._blocks.find(hashes), strict=True)
        return self._supply.unread([h for h, r in records if r is None or r.segment in (segment, None)], waiting)

    def segment_read(self, segment_id: int, ref: object, now: float) -> list[Instruction]:
        """A segment was copied from disk into the object store: deliver it."""
        segment = self.segments.get(segment_id)
        if segment is None or segment.is_in_store:
            return []
        return self._deliver(self.segments.read(segment, ref, now), segment)

    # Exports that workers are asked for

    def blocks_unsent(self, worker_id: str, epoch: int, hashes: Iterable[BlockHash]) -> list[Instruction]:
        """A worker could not send blocks after a request to export, and may hold the blocks still.

        No holder is asked again for the waiting workers, since exports could fail for ever: the workers compute.
        """
        if self.workers.current(worker_id, epoch) is None:
            return []
        return self._supply.fail(self._supply.take_back(worker_id, hashes), asks_holders=False)

    def save(self) -> list[Instruction]:
        """Ask the workers that stay for exports of blocks without a segment, to the disk; called periodically."""
        staying = [worker for worker in self.workers.values() if not worker.is_leaving]
        return ask_for_blocks(staying, self._blocks, self._supply)

    def replace_stalled(self, now: float, patience_s: float) -> list[Instruction]:
        """Replace producers that have sent nothing for `patience_s` (`Supply.replace_stalled`). `now`: monotonic
        seconds."""
        return self._supply.replace_stalled(now, patience_s)

    # From one manager to the next

    def segment_taken_over(
        self, header: SegmentHeader, ref: object, node: str, now: float
    ) -> tuple[int, list[Instruction]]:
        """Index the copy, in a node's object store, of an earlier manager's segment, and deliver the copy to every
        worker awaiting one of the blocks; returns the segment's id."""
        receivers = self._supply.exported(header.full_hashes)
        segment, disk_instructions = self.segments.exported(header, ref, now, node=node)
        return segment.segment_id, [*disk_instructions, *self._deliver(receivers, segment)]

    def segment_refreshed(self, segment_id: int, now: float) -> None:
        """Make a segment the most recent one."""
        self.segments.refresh(segment_id, now)

    def segment_moved_away(self, segment_id: int) -> None:
        """A successor has a copy of a segment in the object store."""
        self.segments.moved_away(segment_id)

    def segments_offered(self, now: float) -> list[Offer]:
        """The segments in the object store, for a successor: the one that eviction would keep longest first."""
        return [
            Offer(segment.segment_id, replace(segment.header, retention=retention), self.segments.node)
            for segment, retention in self.segments.by_worth(now)
        ]

    def lacks(self, block_hash: BlockHash) -> bool:
        """True if no segment has a block."""
        record = self._blocks.get(block_hash)
        return record is None or record.segment is None

    def _supply_to(self, reservation: Reservation, worker_id: str, hashes: Sequence[BlockHash]) -> list[Instruction]:
        """Arrange that a worker gets blocks: from segments now, from other workers or producers when ready."""
        if not hashes:
            return []
        instructions: list[Instruction] = []
        segments, exports = self._supply.arrange(worker_id, hashes)
        reservation.leased += segments
        for segment in segments:
            instructions += self.segments.lease(segment, worker_id)
            if segment.is_in_store:
                instructions.append(Deliver(worker_id, segment))
        return [*instructions, *exports]

    def _deliver(self, receivers: Iterable[str], segment: Segment) -> list[Instruction]:
        """Hand a segment to the registered workers among `receivers`."""
        return [Deliver(receiver, segment) for receiver in sorted(receivers) if receiver in self.workers]
