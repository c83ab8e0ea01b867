"""Admits requests to workers, and decides about deliveries of their KV; no Ray, no clock.

`Fleet` knows who computes, `Stock` where KV is. The directory has the requests between them: it places a request by
what both say, reserves its load in the fleet, and arranges with the stock which blocks it gets and which it computes.

| event | instructions |
|---|---|
| request admitted | `DeliverSegment` a segment to a worker, `Export` blocks held by workers only, `ReadFile` |
| blocks or segments change | those of `Stock` |
| worker or request gone | by `Supply`: `Export`, or `Lost` (the blocks will not come) |
| worker silent or registered again | `HandoverLost` |

Events that concern one side only go there: costs to `fleet`, files to `stock`.

Nothing here is needed for correctness. A worker with less KV than promised computes the rest, so the directory may
forget anything at any time: a stale entry costs time, never a wrong token.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from functools import cache

from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.errors import LateError, NoWorkerError
from raydix.engine.core.hashing import state_hash
from raydix.engine.core.manager.block_index import BlockRecord
from raydix.engine.core.manager.cache_statistics import CacheStatistics
from raydix.engine.core.manager.elastic import with_roles
from raydix.engine.core.manager.explain import Decision, Decisions, SessionFacts, names_of
from raydix.engine.core.manager.explanations import Explanations
from raydix.engine.core.manager.fleet import Fleet
from raydix.engine.core.manager.instructions import HandoverLost, Instruction, Lost
from raydix.engine.core.manager.matching import demand_of, last_state, match, sources_of, with_promised, with_states
from raydix.engine.core.manager.placement import (
    NO_WORKERS,
    CostModel,
    Demand,
    Placement,
    SessionWorkers,
    WorkersAlike,
    place,
)
from raydix.engine.core.manager.records import US_PER_S, Reservation, WorkerRecord
from raydix.engine.core.manager.sessions import Session, Sessions
from raydix.engine.core.manager.stock import Stock
from raydix.engine.core.manager.turns import NO_TURNS, PausedError, TurnLimits, Turns
from raydix.engine.core.objectives import NO_OBJECTIVES, Late, Objectives, WhenLate
from raydix.engine.core.shares import weights_of
from raydix.engine.core.tenants import Tenant
from raydix.engine.core.types import (
    Admission,
    AdmitRequest,
    AttemptName,
    BlockHash,
    EvictionReason,
    Expected,
    Handover,
    Paused,
    Role,
    SegmentHeader,
)

PAUSED_WHY = (
    "the sessions under way need more blocks than the pools have, and this one waits for its turn; meanwhile nobody "
    "evicts the blocks of those whose turn it is."
)
IDLE = 0.1  # a worker counts as idle for a prompt if its queue takes at most this share of the prompt's own time


class Directory:
    """The workers, the KV and the admitted requests of one cluster.

    `now`, of all methods: seconds since the epoch, for the expiry of segments.
    """

    def __init__(
        self,
        costs: CostModel,
        segment_budget_bytes: int,
        disk_budget_bytes: int = 0,
        tenants: Iterable[Tenant] = (),
        *,
        keeps_segments: bool = True,
        objectives: Objectives = NO_OBJECTIVES,
        node: str = "",
        turns: TurnLimits = NO_TURNS,
    ) -> None:
        """`keeps_segments`: False drops a segment at the end of the request behind the export. `objectives`: those of
        requests without their own. `node`: that of the manager, into whose object store files are read. `turns`: times
        of the turns of sessions."""
        self.objectives = objectives
        self.statistics = CacheStatistics(costs.block_size)
        self.decisions = Decisions()
        self.fleet = Fleet(costs.prior)
        self.costs = replace(costs, links=self.fleet.links)
        self.stock = Stock(
            self.statistics,
            segment_budget_bytes,
            disk_budget_bytes,
            tenants,
            keeps_segments=keeps_segments,
            node=node,
        )
        self._reservations: dict[str, Reservation] = {}  # the admitted requests by id, in order of admission
        self.sessions = Sessions()
        self.turns = Turns(turns, weights_of(tenants))
        self._explanations = Explanations(
            self.stock.blocks,
            self.statistics,
            self.decisions,
            block_size=costs.block_size,
            keeps_segments=keeps_segments,
        )

    def change_limits(
        self,
        piggyback_tokens: int,
        prior: WorkerCosts,
        tenants: Sequence[Tenant],
        objectives: Objectives = NO_OBJECTIVES,
        turns: TurnLimits = NO_TURNS,
    ) -> None:
        """Place by another longest suffix for decode workers, other first costs and other objectives, give tenants
        other shares of the segments' budgets, and sessions other times of their turns, from now on."""
        self.objectives = objectives
        self.costs = replace(self.costs, piggyback_tokens=piggyback_tokens, prior=prior)
        self.fleet.change_prior(prior)
        self.turns.limits, self.turns.weights = turns, weights_of(tenants)
        if not turns.quantum_s:
            self.turns.clear()
        self.stock.segments.limit(tenants)

    # Workers

    def register(
        self,
        worker_id: str,
        role: Role,
        epoch: int,
        block_bytes: int,
        hashes: Iterable[BlockHash],
        token_budget: int = 512,
        device: str = "cpu",
        fingerprint: str = "",
        node: str = "",
        attempts: Container[AttemptName] = (),
        *,
        num_blocks: int | None = None,
        state_bytes: int = 0,
    ) -> list[Instruction]:
        """Register a worker incarnation with the blocks of its pool, in place of an older incarnation. `attempts`:
        those under way there; what the worker has sent for others was lost if it did not arrive before.
        `num_blocks`: all blocks of the pool, None if not known yet. `state_bytes`: as `CostModel.state_bytes`."""
        known = self.fleet.get(worker_id)
        if known is not None and known.epoch > epoch:
            return []

        self.costs = replace(self.costs, block_bytes=block_bytes, state_bytes=state_bytes)
        instructions = self.remove_worker(worker_id) if known is not None else []
        self.fleet.add(
            WorkerRecord(
                worker_id=worker_id,
                role=role,
                epoch=epoch,
                costs=self.costs.prior,
                token_budget=token_budget,
                device=device,
                fingerprint=fingerprint,
                node=node,
                num_blocks=num_blocks,
            )
        )
        self.stock.segments.keep_nodes(self.fleet.nodes)
        self.stock.worker_joined(worker_id)
        instructions += self.stock.blocks_changed(worker_id, sealed=hashes, evicted=())
        return instructions + self._handovers_lost(worker_id, epoch, attempts)

    def leave(self, worker_id: str) -> list[Instruction]:
        """A worker is about to stop: place requests elsewhere, and ask for the next of its blocks that nobody else has,
        as many in all as the object store has room for. To be called again until the worker `has_left`."""
        worker = self.fleet.get(worker_id)
        if worker is None:
            return []
        stock = self.stock
        if not worker.is_leaving:
            self.fleet.leave(worker_id)
            room = stock.segments.store_budget_bytes // max(1, self.costs.block_bytes) if stock.keeps_segments else 0
            stock.give_away(worker_id, self.fleet.leaving, room)
        return stock.ask_for_unsaved(worker_id, is_busy=False)

    def has_left(self, worker_id: str) -> bool:
        """True if no request needs a registered worker any more, and no block is to be exported or under way."""
        worker = self.fleet.get(worker_id)
        if worker is None or worker.decoding or not self.stock.is_given_away(worker_id):
            return False
        # A request that decodes elsewhere needs its prefill worker up to the handover.
        return not any(self._reservations[name].needs_prefill for name in worker.requests)

    def remove_worker(self, worker_id: str, epoch: int | None = None) -> list[Instruction]:
        """Forget a worker with its pool and promises to compute. Segments exported by the worker stay."""
        worker = self.fleet.current(worker_id, epoch)
        if worker is None:
            return []
        self.fleet.remove(worker_id)
        if not self.fleet:
            self.turns.suspend()
        self.stock.segments.keep_nodes(self.fleet.nodes)

        # The queue of a worker that is gone has no load. A later incarnation never had these prefills.
        for request_id in worker.requests:
            reservation = self._reservations[request_id]
            if reservation.admission.prefill == worker_id:
                reservation.dequeue()
        return self.stock.worker_left(worker_id)

    def worker_silent(self, worker_id: str, now: float) -> list[Instruction]:
        """Forget a worker that may be cut off with its node, and what it exported: a fetch would wait for the node. The
        workers that were to get these segments compute the blocks."""
        worker = self.fleet.get(worker_id)
        if worker is None:
            return []
        instructions = self.remove_worker(worker_id)
        for segment in self.stock.segments.out_of_reach(worker_id, now):
            leasing = [r.admission for r in self._reservations.values() if segment in r.leased]
            receivers = {each for admission in leasing for each in (admission.prefill, admission.decode)}
            hashes = segment.header.names
            instructions += [Lost(receiver, hashes) for receiver in sorted(receivers & self.fleet.keys())]
        return instructions + self._handovers_lost(worker_id, worker.epoch)

    # Messages of one incarnation of a worker, ignored when they come from an older one

    def blocks_changed(
        self,
        worker_id: str,
        epoch: int,
        sealed: Iterable[BlockHash],
        evicted: Iterable[tuple[BlockHash, EvictionReason]],
    ) -> list[Instruction]:
        """Record gained and lost blocks of a worker's pool."""
        if self.fleet.current(worker_id, epoch) is None:
            return []
        return self.stock.blocks_changed(worker_id, sealed, evicted)

    def segment_exported(
        self, worker_id: str, epoch: int, header: SegmentHeader, ref: object, now: float
    ) -> list[Instruction]:
        """Index a new segment and deliver it to every worker awaiting one of the blocks."""
        worker = self.fleet.current(worker_id, epoch)
        if worker is None:
            return []
        _, instructions = self.stock.exported(
            header,
            ref,
            now,
            node=worker.node,
            exporter=worker_id,
            handed_over=None if header.handover is None else self._handed_over(header.handover),
        )
        return instructions

    def export_failed(self, worker_id: str, epoch: int, hashes: Iterable[BlockHash]) -> list[Instruction]:
        """A worker no longer holds blocks that it was asked to export."""
        if self.fleet.current(worker_id, epoch) is None:
            return []
        return self.stock.export_failed(worker_id, hashes)

    def blocks_unsent(self, worker_id: str, epoch: int, hashes: Iterable[BlockHash]) -> list[Instruction]:
        """A worker could not send blocks after a request to export, and may hold the blocks still."""
        if self.fleet.current(worker_id, epoch) is None:
            return []
        return self.stock.blocks_unsent(worker_id, hashes)

    def save(self) -> list[Instruction]:
        """Ask the workers that stay for exports of blocks without a segment, to the disk; called periodically."""
        instructions: list[Instruction] = []
        for worker in self.fleet.values():
            if not worker.is_leaving:
                instructions += self.stock.ask_for_unsaved(worker.worker_id, is_busy=bool(worker.requests))
        return instructions

    # Requests

    def admit(self, request: AdmitRequest, now: float) -> tuple[Admission, list[Instruction]]:
        """Find the longest prefix, place the request, reserve load, lease segments and mark the blocks to be computed.

        Raises:
            NoWorkerError: no worker is registered; nothing has changed.
            LateError: the request is to be refused rather than late, and all workers would be; nothing has changed.
            PausedError: the request's session is to wait for its turn, and the request is to ask again.
        """
        if not self.fleet:
            raise NoWorkerError("no worker is ready")
        is_new = request.attempt == 0 and request.request_id not in self._reservations
        found = self.sessions.find(request)
        session = found.session
        if is_new and session is not None and not request.is_behind:
            paused = self._turn_of(session, request, now)
            if paused is not None:
                raise PausedError(paused)
        instructions = self.end_request(request.request_id, now)

        self.fleet.links.look(now)
        self.stock.blocks.displacements.look(now)
        records = self.stock.blocks.find(request.hashes)
        objectives = request.objectives.over(self.objectives)
        avoided = self._avoided(session, request)
        last_workers = self.sessions.workers_of(request, session)
        demand, placement, when_late = self._place(request, records, objectives, avoided, last_workers, is_new=is_new)
        decision = self._explanations.record(
            request,
            records,
            placement,
            self.fleet,
            now,
            objectives.ttft_s,
            when_late,
            num_with_state=demand.num_reachable_blocks if self.costs.state_bytes else None,
        )

        # Blocks of the prompt: [0, num_local) in the pool, [num_local, num_cached) imported, the rest computed.
        num_local = placement.chosen.num_local_blocks
        num_cached = num_local + placement.chosen.num_imported_blocks
        lacking = dict.fromkeys(request.hashes[num_local:])

        # The load on its workers.
        num_known = next((index for index, record in enumerate(records) if record is None), len(records))
        reservation = self._reservation(
            request,
            placement,
            objectives,
            num_known=num_known,
            imported=request.hashes[num_local:num_cached],
            num_new_blocks=len(lacking),
            gives_way=when_late is WhenLate.GIVE_WAY,
            expected=decision.expected,
        )
        admission = reservation.admission
        prefill, decode = admission.prefill, admission.decode
        if self.fleet[prefill].is_elastic and not request.is_behind:
            self.fleet.elastic_load.admitted(placement.chosen.compute_s, now)
        self._reservations[request.request_id] = reservation
        session = self.sessions.admitted(request, found, num_known, SessionWorkers(prefill, decode), now)
        self._move_place(session, decode)
        decision.session = SessionFacts(
            num_requests=session.num_requests,
            num_blocks=self.sessions.footprint(session),
            num_pauses=session.num_pauses,
            paused_s=session.paused_s,
            branch=session.branch,
        )
        self.fleet.take(reservation)

        # The blocks that it will compute and may be asked for, and the blocks that it gets.
        supply, computed = self.stock.supply, request.hashes[num_cached:]
        awaited = (*admission.prefill_awaited, *admission.prefill_states)
        supply.admitted(request.request_id, prefill, awaited=awaited, lacking=lacking, computed=computed)
        for worker_id, hashes in ((prefill, awaited), (decode, admission.decode_awaited)):
            leased, supplying = self.stock.supply_to(worker_id, hashes)
            reservation.leased += leased
            instructions += supplying
        instructions += supply.pass_over(request.avoided, request.hashes)
        return admission, instructions

    def ask_again(self, request_ids: Sequence[str], now: float) -> list[Paused | None]:
        """Paused requests ask for their sessions' turns again, by their ids alone; None: `admit` is to be asked."""
        sizes = self._sizes_of_turns()
        if sizes is None:
            return [None] * len(request_ids)
        block_size = self.costs.block_size
        return self.turns.ask_again(request_ids, sizes, lambda num_blocks: self._idle_for(num_blocks * block_size), now)

    def first_token(self, request_id: str, attempt: int, ttft_s: float) -> Decision | None:
        """Take an attempt with a finished prefill off its worker's queue. `ttft_s`: since the admission.

        Returns the decision for the attempt, None if forgotten.
        """
        reservation = self._reservations.get(request_id)
        if reservation is not None and reservation.admission.attempt == attempt:
            self.fleet.prefill_done(reservation)
            self.stock.supply.prefill_done(request_id)
        return self.decisions.first_token(request_id, attempt, ttft_s)

    def has_newer_attempt(self, request_id: str, attempt: int) -> bool:
        """True if a later attempt of the request is admitted, so that reports of `attempt` come late."""
        reservation = self._reservations.get(request_id)
        return reservation is not None and reservation.admission.attempt > attempt

    def end_request(self, request_id: str, now: float) -> list[Instruction]:
        """End a request, for whatever reason: drop the leases, the load, the promises to compute and the wait for its
        session's turn."""
        self.turns.gone(request_id)
        reservation = self._reservations.pop(request_id, None)
        if reservation is None:
            return []
        self.sessions.ended(request_id, now)
        self.fleet.drop(reservation)
        self.stock.segments.released(reservation.leased, reservation.hashes, reservation.hints, now)
        if not self.stock.keeps_segments:
            self.stock.segments.handed_over(reservation.hashes)
        return self.stock.supply.request_ended(request_id)

    # Queries

    @property
    def num_reservations(self) -> int:
        return len(self._reservations)

    def sizes(self) -> dict[str, int]:
        """Counts and bytes, after a check of the integrity."""
        self.check_integrity()
        return {
            "num_workers": len(self.fleet),
            "num_blocks": len(self.stock.blocks),
            "num_segments": len(self.stock.segments),
            "segment_bytes": self.stock.segments.store_bytes,
            "disk_bytes": self.stock.segments.disk_bytes,
            "num_reservations": self.num_reservations,
        }

    def check_integrity(self) -> None:
        """Assert that workers, KV and reservations agree with each other."""
        reservations = self._reservations
        assert self.fleet.keys() == self.stock.pools.keys()
        self.fleet.check_integrity(reservations)
        self.sessions.check_integrity(reservations)
        self.turns.check_integrity()
        self.decisions.check_integrity()
        self.stock.check_integrity(reservations, [leased for r in reservations.values() for leased in r.leased])

    # Inside

    def _turn_of(self, session: Session, request: AdmitRequest, now: float) -> Paused | None:
        """Ask for a session's turn; None: it may go on."""
        sizes = self._sizes_of_turns()
        if sizes is None:
            return None
        footprint = self.sessions.footprint(session, request.hashes)
        num_tokens = request.num_tokens
        return self.turns.ask(session, request.request_id, footprint, sizes, lambda _: self._idle_for(num_tokens), now)

    def _move_place(self, session: Session, worker_id: str) -> None:
        """Have a session's place follow its KV."""
        if self.turns.place_of(session) in (None, worker_id):
            return
        sizes = self._sizes_of_turns()
        if sizes is not None:
            self.turns.moved(session, worker_id, sizes)

    def _sizes_of_turns(self) -> dict[str, int] | None:
        """All blocks of the pool of each worker that may have places; None while nobody takes turns."""
        if not self.turns.limits.quantum_s:
            return None
        workers = [each for each in self.fleet.values() if each.role is not Role.PREFILL and not each.is_leaving]
        sizes = {each.worker_id: each.num_blocks for each in workers if each.num_blocks}
        # A worker of a size that is not known yet may have room for anybody.
        return None if len(sizes) < len(workers) or not sizes else sizes

    def _idle_for(self, num_tokens: int) -> set[str]:
        """Workers whose queues are short beside the time of computing a whole prompt of so many tokens."""

        def is_idle(worker: WorkerRecord) -> bool:
            computing_s = worker.costs.prefill_s(num_tokens, 0, worker.token_budget, len(worker.decoding))
            return worker.queued_us <= IDLE * US_PER_S * computing_s

        return {each.worker_id for each in self.fleet.values() if is_idle(each)}

    def _avoided(self, session: Session | None, request: AdmitRequest) -> Sequence[str]:
        """Workers that a request avoids. While sessions pause, also those where its session has no place: there it
        would take the blocks of others."""
        worker_id = None if session is None else self.turns.place_of(session)
        if worker_id is None or not self.turns.num_paused:
            return request.avoided
        worker = self.fleet.get(worker_id)
        if worker is None or worker.is_leaving or worker_id in request.avoided:
            return request.avoided
        others = {each.worker_id for each in self.fleet.values() if each.role is not Role.PREFILL}
        return sorted({*request.avoided, *others} - {worker_id})

    def _place(
        self,
        request: AdmitRequest,
        records: Sequence[BlockRecord | None],
        objectives: Objectives,
        avoided: Sequence[str],
        last_workers: SessionWorkers,
        *,
        is_new: bool,
    ) -> tuple[Demand, Placement, WhenLate | None]:
        """Choose workers by a request's needs, once more for a request that gives way. Raises LateError for one that is
        refused; a request under way and one that is behind all others are never late."""
        demand, candidates = self._options(request, records, objectives, avoided, last_workers)
        placement = place(demand, with_roles(candidates, demand, self.costs), self.costs)
        when_late = _check_in_time(placement, objectives) if is_new and not request.is_behind else None
        if when_late is WhenLate.GIVE_WAY:
            demand = replace(demand, is_behind=True)
            placement = place(demand, with_roles(candidates, demand, self.costs), self.costs)
        return demand, placement, when_late

    def _options(
        self,
        request: AdmitRequest,
        records: Sequence[BlockRecord | None],
        objectives: Objectives,
        avoided: Sequence[str] = (),
        last_workers: SessionWorkers = NO_WORKERS,
    ) -> tuple[Demand, list[WorkersAlike]]:
        """The needs of a request, and the workers grouped by load and held blocks."""
        prefix = match(records, self.fleet, self._reservations)
        demand = demand_of(
            request,
            prefix,
            last_workers,
            return_rate=self.statistics.return_rate,
            objectives=objectives,
            # On one node every import takes alike.
            sources=sources_of(records, self.fleet, self._reservations) if len(self.fleet.nodes) > 1 else None,
        )
        if self.costs.state_bytes:
            # A request goes on from a state and all blocks before it, its own worker's or those that are sent.
            num_usable = min(len(request.hashes), max(0, request.num_tokens - 1) // self.costs.block_size)

            @cache
            def state_behind(number: int) -> BlockRecord | None:
                return self.stock.blocks.get(state_hash(request.hashes[number - 1]))

            holders = with_states(prefix.holders, num_usable, state_behind)
            num_reachable = last_state(min(prefix.num_reachable, num_usable), state_behind)
            # What others are computing lies behind all states that there are.
            demand = replace(demand, num_reachable_blocks=num_reachable, pending_s=0.0)
            return demand, self.fleet.candidates(holders, avoided)
        candidates = self.fleet.candidates(prefix.holders, avoided)
        return demand, with_promised(candidates, prefix.promised) if prefix.promised else candidates

    def _reservation(
        self,
        request: AdmitRequest,
        placement: Placement,
        objectives: Objectives,
        *,
        num_known: int,
        imported: Sequence[BlockHash],
        num_new_blocks: int,
        gives_way: bool,
        expected: Expected,
    ) -> Reservation:
        """Assign a request to the workers of its placement, with the blocks that each of them is to get from elsewhere.
        Changes nothing.

        `num_known`: as in the admission; `imported`: blocks of the prompt that the prefill worker does not compute;
        `num_new_blocks`: blocks of the prompt that it lacks. `gives_way`: the request is late, and others go first.
        """
        prefill = placement.prefill
        decode = placement.decode if request.generates else prefill
        states: tuple[BlockHash, ...] = ()
        if self.costs.state_bytes and placement.chosen.num_imported_blocks:
            num_cached = placement.chosen.num_local_blocks + placement.chosen.num_imported_blocks
            states = self.stock.lacking(prefill, [state_hash(request.hashes[num_cached - 1])])
        admission = Admission(
            request_id=request.request_id,
            attempt=request.attempt,
            prefill=prefill,
            decode=decode,
            prefill_epoch=self.fleet[prefill].epoch,
            decode_epoch=self.fleet[decode].epoch,
            prefill_awaited=self.stock.lacking(prefill, imported),
            decode_awaited=self.stock.lacking(decode, request.hashes) if decode != prefill else (),
            gives_way=gives_way,
            expected_ttft_s=expected.ttft_s,
            found=expected.blocks,
            num_known=num_known,
            prefill_states=states,
        )
        return Reservation(
            admission=admission,
            hashes=request.hashes,
            hints=request.cache,
            queued_us=int(placement.chosen.compute_s * US_PER_S),
            num_new_blocks=num_new_blocks,
            tpot_s=objectives.tpot_s,
            is_behind=gives_way or request.is_behind,
        )

    def _handed_over(self, handover: Handover) -> Admission | None:
        """Note the end of a prefill; returns its request's admission, None for an attempt that is over."""
        reservation = self._reservations.get(handover.request_id)
        if reservation is None or reservation.admission.attempt != handover.attempt:
            return None
        reservation.awaits_handover = False
        return reservation.admission

    def _handovers_lost(self, worker_id: str, epoch: int, attempts: Container[AttemptName] = ()) -> list[HandoverLost]:
        """Have the decode workers wait no longer for an incarnation of a prefill worker, whose messages to the manager
        were lost or cannot come; but for `attempts`, which are still under way there."""
        # After a worker's death the ingress replicas decide where a request goes on. This is for a worker that lives.
        instructions: list[HandoverLost] = []
        for request_id, reservation in self._reservations.items():
            admission = reservation.admission
            is_sender = (admission.prefill, admission.prefill_epoch) == (worker_id, epoch)
            is_lost = reservation.awaits_handover and AttemptName(request_id, admission.attempt) not in attempts
            if is_sender and is_lost and admission.decode in self.fleet:
                instructions.append(HandoverLost(admission.decode, request_id))
        return instructions


def explained(directory: Directory, name: str, tenant: str | None, now: float) -> list[dict[str, object]]:
    """Decisions behind each choice of a request, by the request's name at its client (`Decisions.of`), and its wait for
    its session's turn."""
    found: dict[str, dict[str, object]] = {
        request_id: {"id": request_id, "attempts": [attempt.as_json() for attempt in attempts], "paused": None}
        for request_id, attempts in directory.decisions.of(name, tenant).items()
    }
    for request_id, (session, paused) in directory.turns.paused(now).items():
        if name in names_of(request_id) and tenant in (None, session.tenant):
            found.setdefault(request_id, {"id": request_id, "attempts": []})["paused"] = {
                "why": PAUSED_WHY,
                "ahead": paused.num_ahead,
                "placed": paused.num_placed,
                "blocks": paused.num_blocks,
                "paused_s": round(paused.paused_s, 6),
            }
    return [*found.values()]


def _check_in_time(placement: Placement, objectives: Objectives) -> WhenLate | None:
    """The treatment of a request with an objective for the first token, if all workers are predicted to miss it; None
    in time, or without an objective.

    Raises:
        LateError: the request is to be refused.
    """
    if objectives.ttft_s is None:
        return None
    earliest_s = min(prediction.ttft_s for prediction in (placement.chosen, *placement.considered))
    if earliest_s <= objectives.ttft_s:
        return None
    if objectives.when_late is WhenLate.REFUSE:
        raise LateError(Late(earliest_s, objectives.ttft_s))
    return objectives.when_late or WhenLate.WAIT
