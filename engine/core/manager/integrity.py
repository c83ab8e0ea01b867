"""Consistency of the directory's records, for tests and the idle server."""

from collections.abc import Collection, Mapping

from raydix.engine.core.manager.block_index import BlockIndex
from raydix.engine.core.manager.reservations import Reservation, WorkerRecord, Workers
from raydix.engine.core.manager.segment_store import SegmentStore
from raydix.engine.core.manager.supply import Supply
from raydix.engine.core.manager.worker_groups import WorkerGroups


def check_records(
    blocks: BlockIndex,
    workers: Workers,
    reservations: Mapping[str, Reservation],
    groups: WorkerGroups,
    segments: SegmentStore,
    supply: Supply,
) -> None:
    """Assert that blocks, workers, segments and reservations agree with each other."""
    for block_hash, record in blocks.items():
        assert record.is_known, "a record that knows nothing"
        assert all(block_hash in workers[worker].blocks for worker in record.workers)

    for worker in workers.values():
        assert all(worker.worker_id in blocks[block_hash].workers for block_hash in worker.blocks)
        assert worker.requests <= reservations.keys()
        assert worker.decoding <= worker.requests
        assert worker.tpots.keys() <= worker.decoding
        assert groups.load_of(worker.worker_id) == worker.load
        _check_load(worker, reservations.values())

    assert workers.leaving == {worker.worker_id for worker in workers.values() if worker.is_leaving}
    supply.check_integrity(workers, reservations)
    segments.check_integrity([leased for r in reservations.values() for leased in r.leased])


def _check_load(worker: WorkerRecord, reservations: Collection[Reservation]) -> None:
    """Compare a worker's sums with its reservations."""
    here = [reservation for reservation in reservations if reservation.admission.prefill == worker.worker_id]
    assert worker.queued_us == sum(
        reservation.queued_us for reservation in here if reservation.admission.prefill_epoch == worker.epoch
    )

    assert worker.behind_us == sum(
        each.queued_us for each in here if each.is_behind and each.admission.prefill_epoch == worker.epoch
    )

    queued = [reservation for reservation in here if reservation.is_queued]
    assert worker.num_queued == len(queued)
    assert worker.num_reserved_blocks == sum(reservation.num_new_blocks for reservation in queued)
