"""Records of the directory: one per worker, one per admitted request."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.manager.block_index import Segment
from raydix.engine.core.manager.placement import Placement, WorkerLoad
from raydix.engine.core.manager.worker_groups import WorkerGroups
from raydix.engine.core.objectives import NO_OBJECTIVES, Objectives
from raydix.engine.core.types import Admission, AdmitRequest, BlockHash, CacheHints, Role

US_PER_S = 1_000_000


@dataclass(slots=True)
class WorkerRecord:
    """One worker incarnation: load, costs and blocks."""

    worker_id: str
    role: Role
    epoch: int
    costs: WorkerCosts
    token_budget: int
    device: str = "cpu"
    fingerprint: str = ""
    """KV of another fingerprint has other bits."""
    node: str = ""
    """Node that the worker runs on, in whose object store its exports stay."""
    num_free_blocks: int | None = None
    """Blocks without a holder at the last report."""
    num_empty_blocks: int | None = None
    """The part of `num_free_blocks` without contents."""
    num_steps: int | None = None
    """Steps behind the fit of the costs at the last report."""
    num_reserved_blocks: int = 0
    """Blocks to be filled by queued prefills."""
    blocks: set[BlockHash] = field(default_factory=set)
    requests: set[str] = field(default_factory=set)
    decoding: set[str] = field(default_factory=set)
    """The part of `requests` that decodes here, now or after the prefill."""
    queued_us: int = 0
    """Predicted time of the queued, unfinished prefills."""
    behind_us: int = 0
    """The part of `queued_us` behind all other prefills."""
    num_queued: int = 0
    """Number of prefills in `queued_us`."""
    unsaved: list[BlockHash] = field(default_factory=list)
    """Sealed blocks without a segment, to be exported for the disk, or because the worker leaves."""
    is_leaving: bool = False
    """True once the worker is about to stop: new requests go to others, as long as there are others."""
    duty: Role = Role.MIXED
    """Main work of an elastic worker now."""
    tpots: dict[str, float] = field(default_factory=dict)
    """Objectives of the requests that decode on an elastic worker."""
    alone: frozenset[str] = field(init=False)
    """The set of the worker's id alone, shared by the records of all blocks held by this worker only."""

    def __post_init__(self) -> None:
        self.alone = frozenset((self.worker_id,))

    def measured(self, num_free_blocks: int, num_empty_blocks: int | None, num_steps: int | None) -> bool:
        """Take a report; returns whether the worker may have stepped since the last one."""
        has_stepped = num_steps is None or num_steps != self.num_steps
        self.num_free_blocks, self.num_empty_blocks, self.num_steps = num_free_blocks, num_empty_blocks, num_steps
        return has_stepped

    def ahead_us(self, is_behind: bool) -> int:
        """Time of the queued prefills before a new request."""
        return self.queued_us if is_behind else self.queued_us - self.behind_us

    def lacking(self, hashes: Iterable[BlockHash]) -> tuple[BlockHash, ...]:
        """The part of `hashes` not held by the worker."""
        return tuple([block_hash for block_hash in hashes if block_hash not in self.blocks])

    @property
    def is_elastic(self) -> bool:
        return self.role is Role.ELASTIC

    @property
    def load(self) -> WorkerLoad:
        num_free, num_empty = self.num_free_blocks, self.num_empty_blocks
        return WorkerLoad(
            role=self.duty if self.is_elastic else self.role,
            costs=self.costs,
            token_budget=self.token_budget,
            queued_s=self.queued_us / US_PER_S,
            behind_s=self.behind_us / US_PER_S,
            num_decoding=len(self.decoding),
            num_free_blocks=None if num_free is None else _rounded(num_free),
            num_queued=self.num_queued,
            num_empty_blocks=None if num_empty is None else _rounded(num_empty - self.num_reserved_blocks),
            is_elastic=self.is_elastic,
            tpot_s=min(self.tpots.values(), default=None),
            node=self.node,
        )


@dataclass(slots=True)
class Reservation:
    """An admitted request: its blocks, and its load on workers."""

    admission: Admission
    hashes: tuple[BlockHash, ...]
    hints: CacheHints
    queued_us: int
    num_new_blocks: int
    """Blocks of the prompt that the prefill worker lacked at admission: reserved room while `is_queued`."""
    leased: list[Segment] = field(default_factory=list)
    is_queued: bool = True
    """True until the prefill is done."""
    awaits_handover: bool = field(init=False)
    """True until the prefill worker of a request that decodes elsewhere has handed over."""
    tpot_s: float | None = None
    """Objective for the time of a token."""
    is_behind: bool = False
    """True if the request gives way to others."""

    def __post_init__(self) -> None:
        self.awaits_handover = self.admission.prefill != self.admission.decode

    @property
    def needs_prefill(self) -> bool:
        """True until the prefill worker has computed and sent what the request needs of it."""
        return self.is_queued or self.awaits_handover


def _rounded(num_blocks: int) -> int:
    """Round down to three binary digits, so that workers with nearly equal room have equal loads."""
    num_dropped_bits = max(0, num_blocks.bit_length() - 3)
    return max(0, num_blocks) >> num_dropped_bits << num_dropped_bits


class Workers(dict[str, WorkerRecord]):
    """The registered workers, by id."""

    leaving: frozenset[str] = frozenset()
    """The workers that are about to stop."""

    @property
    def elastic(self) -> list[WorkerRecord]:
        """The elastic workers that stay."""
        return [worker for worker in self.values() if worker.is_elastic and not worker.is_leaving]

    def current(self, worker_id: str, epoch: int | None) -> WorkerRecord | None:
        """The worker if registered with this epoch (None: with any), else None."""
        worker = self.get(worker_id)
        return worker if worker is not None and epoch in (None, worker.epoch) else None

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes with workers."""
        return frozenset(worker.node for worker in self.values())

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of the workers' KV, equal for all; None without a worker."""
        return next((worker.fingerprint for worker in self.values()), None)

    def refusal(self, worker_id: str, fingerprint: str) -> str | None:
        """The reason for refusing a worker; None if it may be registered.

        Workers must not share KV with different last bits: answers would depend on the worker of a prefix. The
        fingerprint of the workers registered first counts.
        """
        others = {worker.fingerprint for worker in self.values() if worker.worker_id != worker_id}
        if others <= {fingerprint}:
            return None
        return (
            f"its KV would differ from the other workers': it has the fingerprint {fingerprint}, the others have "
            f"{min(others)} (model, block size, products, version, arithmetic)"
        )

    def regroup(self, groups: WorkerGroups, worker_ids: Iterable[str]) -> None:
        """Put the registered ones of these workers into groups anew, after a change of load or costs."""
        for worker_id in sorted(worker_ids):
            if worker_id in self:
                groups.put(worker_id, self[worker_id].load)

    def take(self, reservation: Reservation) -> set[str]:
        """Add a request to the load of its workers; returns the workers."""
        admission = reservation.admission
        involved = {admission.prefill, admission.decode}
        self.queue(reservation)
        decode = self[admission.decode]
        decode.decoding.add(admission.request_id)
        if decode.is_elastic and reservation.tpot_s is not None:
            decode.tpots[admission.request_id] = reservation.tpot_s
        for worker_id in involved:
            self[worker_id].requests.add(admission.request_id)
        return involved

    def drop(self, reservation: Reservation) -> set[str]:
        """Take a request off the load of its workers; returns the workers that are still registered."""
        admission = reservation.admission
        self.unqueue(reservation)
        involved = {admission.prefill, admission.decode} & self.keys()
        for worker_id in involved:
            self[worker_id].requests.discard(admission.request_id)
            self[worker_id].decoding.discard(admission.request_id)
            self[worker_id].tpots.pop(admission.request_id, None)
        return involved

    def queue(self, reservation: Reservation) -> None:
        """Add a prefill to the queue of its worker."""
        worker = self[reservation.admission.prefill]
        worker.queued_us += reservation.queued_us
        worker.behind_us += reservation.queued_us * reservation.is_behind
        worker.num_queued += 1
        worker.num_reserved_blocks += reservation.num_new_blocks

    def unqueue(self, reservation: Reservation) -> None:
        """Remove a prefill from the queue of its worker: done, or not needed any more."""
        worker = self.current(reservation.admission.prefill, reservation.admission.prefill_epoch)
        if worker is not None and reservation.is_queued:
            worker.queued_us -= reservation.queued_us
            worker.behind_us -= reservation.queued_us * reservation.is_behind
            worker.num_queued -= 1
            worker.num_reserved_blocks -= reservation.num_new_blocks
        reservation.queued_us, reservation.is_queued = 0, False


def reservation_of(
    request: AdmitRequest,
    placement: Placement,
    workers: Workers,
    *,
    num_new_blocks: int,
    objectives: Objectives = NO_OBJECTIVES,
    gives_way: bool = False,
) -> Reservation:
    """Assign a request to the workers of its placement, with the blocks that each of them is to get from elsewhere.

    `num_new_blocks`: blocks of the prompt that the prefill worker lacks. `objectives`: the request's, or of all
    requests; `gives_way`: the request is late, and others go first. Changes nothing.
    """
    chosen, prefill = placement.chosen, placement.prefill
    decode = placement.decode if request.generates else prefill
    num_local = chosen.num_local_blocks
    imported = request.hashes[num_local : num_local + chosen.num_imported_blocks]

    admission = Admission(
        request_id=request.request_id,
        attempt=request.attempt,
        prefill=prefill,
        decode=decode,
        prefill_epoch=workers[prefill].epoch,
        decode_epoch=workers[decode].epoch,
        prefill_awaited=workers[prefill].lacking(imported),
        decode_awaited=workers[decode].lacking(request.hashes) if decode != prefill else (),
        gives_way=gives_way,
    )
    return Reservation(
        admission=admission,
        hashes=request.hashes,
        hints=request.cache,
        queued_us=int(chosen.compute_s * US_PER_S),
        num_new_blocks=num_new_blocks,
        tpot_s=objectives.tpot_s,
        is_behind=gives_way or request.is_behind,
    )
