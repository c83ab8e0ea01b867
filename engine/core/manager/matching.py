"""Finds the longest prefix of a request's blocks in the cluster, for each worker."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from itertools import takewhile
from typing import NamedTuple

from raydix.engine.core.manager.block_index import BlockRecord
from raydix.engine.core.manager.links import Sources
from raydix.engine.core.manager.placement import Demand, SessionWorkers, WorkersAlike
from raydix.engine.core.manager.records import US_PER_S, Reservation, WorkerRecord
from raydix.engine.core.objectives import NO_OBJECTIVES, Objectives
from raydix.engine.core.types import AdmitRequest


class Prefix(NamedTuple):
    """Leading blocks of a request that are held or being computed."""

    num_reachable: int
    """Blocks in some pool, in a segment, or with a producer."""
    holders: dict[int, set[str]]
    """All workers, each under the number of leading blocks in its pool."""
    pending_us: int
    """Predicted time until the blocks that are only being computed will have been computed."""
    promised: Mapping[str, int]
    """Workers that are to compute some of these blocks, each with the leading blocks that it holds or will have
    computed."""


def match(
    records: Sequence[BlockRecord | None], workers: Mapping[str, WorkerRecord], reservations: Mapping[str, Reservation]
) -> Prefix:
    """Match the records of a request's blocks, in order, in one walk along the leading ones."""
    holders: dict[int, set[str]] = {}
    still = set(workers)  # holders of all blocks so far
    before: Set[str] | None = None  # workers of the last block: mostly those of the next one, too
    num_reachable = 0
    producers: set[str | None] = set()

    for record in records:
        if record is None:
            break
        workers_here = record.workers
        # Records of neighbours mostly share one set, and the comparison by identity is the quick one.
        if workers_here is not before:
            before = workers_here
            # Some workers end here: their leading blocks are the first `num_reachable`.
            if not still <= before:
                holders[num_reachable] = still - before
                still = still & before
        # Nobody has the block yet: it comes when its producer has computed it.
        if not workers_here and record.segment is None:
            producers.add(record.producer)
        num_reachable += 1
    if still:
        holders[num_reachable] = still

    # Blocks that are only being computed: available when the last queue of their producers is done.
    computing = [found for name in producers if (found := reservations.get(name or "")) is not None]
    pending_us = max((workers[each.admission.prefill].ahead_us(each.is_behind) for each in computing), default=0)
    promised = {
        worker_id: _num_promised(records, worker_id, reservations)
        for worker_id in sorted({each.admission.prefill for each in computing})
    }
    return Prefix(num_reachable, holders, pending_us, promised)


def _num_promised(
    records: Iterable[BlockRecord | None], worker_id: str, reservations: Mapping[str, Reservation]
) -> int:
    """Leading blocks that a worker holds or is to compute."""

    def is_there(record: BlockRecord | None) -> bool:
        if record is None:
            return False
        if worker_id in record.workers:
            return True
        producer = reservations.get(record.producer or "")
        return producer is not None and producer.admission.prefill == worker_id

    return sum(1 for _ in takewhile(is_there, records))


def with_promised(candidates: Sequence[WorkersAlike], promised: Mapping[str, int]) -> list[WorkersAlike]:
    """The candidates of a request, of which each worker that is to compute some of its blocks stands alone, with their
    number (`Prefix.promised`)."""
    apart: list[WorkersAlike] = []
    for candidate in candidates:
        here = [
            each for each in promised if each in candidate.worker_ids and promised[each] > candidate.num_local_blocks
        ]
        for worker_id in here:
            num_more = promised[worker_id] - candidate.num_local_blocks
            apart.append(candidate._replace(worker_ids=frozenset((worker_id,)), num_promised_blocks=num_more))
        others = frozenset(candidate.worker_ids) - {*here} if here else candidate.worker_ids
        if others:
            apart.append(candidate._replace(worker_ids=others))
    return apart


def with_states(
    holders: Mapping[int, Set[str]], num_usable: int, state_behind: Callable[[int], BlockRecord | None]
) -> dict[int, set[str]]:
    """All workers by the number of leading blocks behind which they have a recurrent state, too. A request could go on
    behind its first `num_usable` blocks at most; `state_behind` gives the record of the state behind so many, and is
    asked for those alone that decide."""
    found: dict[int, set[str]] = {}
    states: dict[int, BlockRecord | None] = {}
    for num_blocks, workers in holders.items():
        left = set(workers)
        # From the last block on: the first state that is met is the one to go on from.
        for number in range(min(num_blocks, num_usable), 0, -1):
            if number not in states:
                states[number] = state_behind(number)
            if (record := states[number]) is not None and (here := left & record.workers):
                found.setdefault(number, set()).update(here)
                left -= here
                if not left:
                    break
        if left:
            found.setdefault(0, set()).update(left)
    return found


def last_state(num_blocks: int, state_behind: Callable[[int], BlockRecord | None]) -> int:
    """Number of leading blocks, of `num_blocks`, behind the last of which the cluster has a recurrent state; 0 without
    one. `state_behind` as in `with_states`."""
    for number in range(num_blocks, 0, -1):
        if (record := state_behind(number)) is not None and record.is_stored:
            return number
    return 0


def sources_of(
    records: Iterable[BlockRecord | None], workers: Mapping[str, WorkerRecord], reservations: Mapping[str, Reservation]
) -> Sources:
    """The nodes that the leading blocks come from: a segment's, the producer's, or that of the holder to be asked."""
    runs: list[tuple[str, int]] = []
    last: tuple[object, ...] | None = None
    for record in records:
        if record is None:
            break
        places = record.segment, record.producer, record.workers
        # A run of blocks with the same places has one source, looked up once.
        if places == last:
            node = runs[-1][0]
        else:
            node, last = _source(record, workers, reservations), places
        if runs and runs[-1][0] == node:
            runs[-1] = node, runs[-1][1] + 1
        else:
            runs.append((node, 1))
    return runs


def _source(record: BlockRecord, workers: Mapping[str, WorkerRecord], reservations: Mapping[str, Reservation]) -> str:
    if record.segment is not None:
        return record.segment.node
    reservation = reservations.get(record.producer or "")
    sender = record.producer if reservation is None else reservation.admission.prefill
    if sender is None:
        sender = min(record.workers)
    return workers[sender].node if sender in workers else ""


def demand_of(
    request: AdmitRequest,
    prefix: Prefix,
    last_workers: SessionWorkers,
    *,
    return_rate: float,
    objectives: Objectives = NO_OBJECTIVES,
    sources: Sources | None = None,
) -> Demand:
    """The needs of a request for its placement. `objectives`: the request's, or of all requests."""
    return Demand(
        num_tokens=request.num_tokens,
        num_reachable_blocks=prefix.num_reachable,
        pending_s=prefix.pending_us / US_PER_S,
        session=request.session or request.request_id,
        return_rate=return_rate,
        last_workers=last_workers,
        objectives=objectives,
        sources=sources,
        generates=request.generates,
        is_behind=request.is_behind,
    )
