"""Locates every KV block of the cluster and decides about deliveries; no Ray, no clock.

For each block the directory records the workers holding the block, the segment containing it, its producer (the request
about to compute the block, or the worker asked to export it), and the workers awaiting it.

| event | instructions |
|---|---|
| request admitted | `Deliver` a segment to a worker, `Export` blocks held by workers only, `ReadFile` |
| blocks sealed or exported | `Export` awaited blocks, `Deliver` the segment, `WriteFile` |
| worker or request gone, block evicted or lost | by `Supply`: `Export`, or `Lost` (the blocks will not come) |
| worker silent or registered again | `HandoverLost` |

`raydix.engine.core.manager.segment_store` decides about the retention of segments, in the object store and on disk.

Nothing here is needed for correctness. A worker with less KV than promised computes the rest, so the directory may
forget anything at any time: a stale entry costs time, never a wrong token.
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace

from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.errors import NoWorkerError
from raydix.engine.core.manager.block_index import BlockIndex, BlockRecord
from raydix.engine.core.manager.cache_events import CacheUpdate
from raydix.engine.core.manager.cache_statistics import CacheStatistics
from raydix.engine.core.manager.elastic import SHRINK_S, Elastic, Plan
from raydix.engine.core.manager.explain import Decision, Decisions
from raydix.engine.core.manager.explanations import Explanations
from raydix.engine.core.manager.handovers import handovers_lost
from raydix.engine.core.manager.instructions import Export, Instruction, Lost
from raydix.engine.core.manager.integrity import check_records
from raydix.engine.core.manager.lateness import check_in_time
from raydix.engine.core.manager.links import Links
from raydix.engine.core.manager.matching import demand_of, match, sources_of
from raydix.engine.core.manager.peers import PeerCosts
from raydix.engine.core.manager.placement import Candidate, CostModel, Demand, Placement, place
from raydix.engine.core.manager.reservations import Reservation, WorkerRecord, Workers, reservation_of
from raydix.engine.core.manager.roles import with_roles
from raydix.engine.core.manager.saving import ask_for_blocks, give_away
from raydix.engine.core.manager.segment_events import SegmentEvents
from raydix.engine.core.manager.segment_store import SegmentStore
from raydix.engine.core.manager.session_workers import Sessions, SessionWorkers
from raydix.engine.core.manager.supply import Supply
from raydix.engine.core.manager.worker_groups import WorkerGroups
from raydix.engine.core.objectives import NO_OBJECTIVES, Objectives, WhenLate
from raydix.engine.core.tenants import Tenant
from raydix.engine.core.types import Admission, AdmitRequest, Attempt, BlockHash, EvictionReason, Role


class Directory(SegmentEvents):
    """The index, the reservations and the segments of one cluster.

    `now`, of all methods but `replace_stalled`: seconds since the epoch, for the expiry of segments.
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
    ) -> None:
        """`keeps_segments`: False drops a segment at the end of the request behind the export. `objectives`: those of
        requests without their own. `node`: that of the manager, into whose object store files are read."""
        self.links = Links()
        self.costs = replace(costs, links=self.links)
        self.objectives = objectives
        self.keeps_segments = keeps_segments
        self.statistics = CacheStatistics(costs.block_size)
        self._blocks = BlockIndex(self.statistics)
        self.segments = SegmentStore(self._blocks, segment_budget_bytes, disk_budget_bytes, tenants, node=node)
        self.workers = Workers()
        self._is_spread = False
        """True if the workers are on several nodes."""
        self._groups = WorkerGroups()
        """The registered workers by load, for placement."""
        self._elastic = Elastic()
        self.plan: Plan | None = None
        """Outcome of the last look at the elastic workers' load; None without such workers."""
        self._peers = PeerCosts(costs.prior)
        self._reservations: dict[str, Reservation] = {}
        self._supply = Supply(self._blocks)
        self._sessions = Sessions()
        self.decisions = Decisions()
        self._explanations = Explanations(
            self._blocks,
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
    ) -> None:
        """Place by another longest suffix for decode workers, other first costs and other objectives, and give tenants
        other shares of the segments' budgets, from now on."""
        self.objectives = objectives
        self.costs = replace(self.costs, piggyback_tokens=piggyback_tokens, prior=prior)
        self._peers.prior = prior
        for worker_id, worker in self.workers.items():
            worker.costs = self._peers.costs_of(worker_id)
        self.workers.regroup(self._groups, self.workers)
        self.segments.limit(tenants)

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
        attempts: Container[Attempt] = (),
    ) -> list[Instruction]:
        """Register a worker incarnation with the blocks of its pool, in place of an older incarnation. `attempts`:
        those under way there; what the worker has sent for others was lost if it did not arrive before."""
        known = self.workers.get(worker_id)
        if known is not None and known.epoch > epoch:
            return []

        self.costs = replace(self.costs, block_bytes=block_bytes)
        instructions = self.remove_worker(worker_id) if known is not None else []
        self._peers.add(worker_id, (role, token_budget, device))
        self.workers[worker_id] = WorkerRecord(
            worker_id=worker_id,
            role=role,
            epoch=epoch,
            costs=self._peers.costs_of(worker_id),
            token_budget=token_budget,
            device=device,
            fingerprint=fingerprint,
            node=node,
        )
        self._nodes_changed()
        self._supply.worker_joined(worker_id)
        self.workers.regroup(self._groups, [worker_id])
        instructions += self.blocks_changed(worker_id, epoch, sealed=hashes, evicted=())
        return instructions + handovers_lost(self._reservations, self.workers, worker_id, epoch, attempts)

    def leave(self, worker_id: str) -> list[Instruction]:
        """A worker is about to stop: place requests elsewhere, and ask for the next of its blocks that nobody else has,
        as many in all as the object store has room for. To be called again until the worker `has_left`."""
        worker = self.workers.get(worker_id)
        if worker is None:
            return []
        if not worker.is_leaving:
            worker.is_leaving = True
            self.workers.leaving |= {worker_id}
            limit = self.segments.store_budget_bytes // max(1, self.costs.block_bytes) if self.keeps_segments else 0
            give_away(worker, self._blocks, self.workers.leaving, limit)
        return ask_for_blocks([worker], self._blocks, self._supply)

    def has_left(self, worker_id: str) -> bool:
        """True if no request needs a registered worker any more, and no block is to be exported or under way. A request
        that decodes elsewhere needs its prefill worker up to the handover."""
        worker = self.workers.get(worker_id)
        if worker is None or worker.unsaved or worker.decoding or self._supply.is_sending(worker_id):
            return False
        return not any(self._reservations[name].needs_prefill for name in worker.requests)

    def remove_worker(self, worker_id: str, epoch: int | None = None) -> list[Instruction]:
        """Forget a worker with its pool and promises to compute. Segments exported by the worker stay."""
        worker = self.workers.current(worker_id, epoch)
        if worker is None:
            return []
        del self.workers[worker_id]
        self._nodes_changed()
        self.workers.leaving -= {worker_id}
        self._groups.remove(worker_id)
        self._peers.remove(worker_id)
        held = sorted(worker.blocks)
        for block_hash in held:
            self._blocks.left(block_hash, worker_id, EvictionReason.WORKER_LOST)
        for request_id in worker.requests:
            reservation = self._reservations[request_id]
            if reservation.admission.prefill == worker_id:
                reservation.queued_us, reservation.is_queued = 0, False
        return self._supply.worker_left(worker_id, held)

    def divide(self, now: float, most: int = 1, shrink_after_s: float = SHRINK_S, least: int = 1) -> Plan | None:
        """Give the elastic workers the duties that suit the load; to be called every second or so. For
        `Plan.num_wanted`, `most`, `least`: limits of their number; `shrink_after_s`: time for which fewer must have
        been enough."""
        self._elastic.shrink_after(shrink_after_s)
        self.plan = self._elastic.plan(self.workers.elastic, self.objectives, most, now, least)
        if self.plan is not None:
            for worker_id, duty in self.plan.duties.items():
                self.workers[worker_id].duty = duty
            self.workers.regroup(self._groups, self.plan.duties)
        return self.plan

    def worker_silent(self, worker_id: str, now: float) -> list[Instruction]:
        """Forget a worker that may be cut off with its node, and what it exported: a fetch would wait for the node. The
        workers that were to get these segments compute the blocks."""
        worker = self.workers.get(worker_id)
        if worker is None:
            return []
        instructions = self.remove_worker(worker_id)
        for segment in self.segments.out_of_reach(worker_id, now):
            leasing = [r.admission for r in self._reservations.values() if segment in r.leased]
            receivers = {each for admission in leasing for each in (admission.prefill, admission.decode)}
            hashes = segment.header.full_hashes
            instructions += [Lost(receiver, hashes) for receiver in sorted(receivers & self.workers.keys())]
        return instructions + handovers_lost(self._reservations, self.workers, worker_id, worker.epoch)

    def is_current(self, worker_id: str, epoch: int) -> bool:
        return self.workers.current(worker_id, epoch) is not None

    def worker_measured(
        self,
        worker_id: str,
        epoch: int,
        costs: WorkerCosts | None,
        num_free_blocks: int,
        num_empty_blocks: int | None = None,
        *,
        num_steps: int | None = None,
        token_budget: int | None = None,
    ) -> None:
        """Record a worker's costs and room.

        `costs`: None before the first measurement. `num_free_blocks`: blocks without a holder; `num_empty_blocks`: the
        part without contents. `num_steps`: steps behind the fit of the costs so far; None stands for more than before.
        `token_budget`: that of a step now; None: as before.
        """
        worker = self.workers.current(worker_id, epoch)
        if worker is None:
            return
        has_stepped = worker.measured(num_free_blocks, num_empty_blocks, num_steps)
        if token_budget not in (None, worker.token_budget):
            assert token_budget is not None
            worker.token_budget = token_budget
            self._peers.add(worker_id, (worker.role, token_budget, worker.device))

        # A report may change the costs of all peers, by way of their median.
        changed = [worker_id] if costs is None else self._peers.report(worker_id, costs, has_stepped=has_stepped)
        for changed_id in changed:
            self.workers[changed_id].costs = self._peers.costs_of(changed_id)
        self.workers.regroup(self._groups, {worker_id, *changed})

    def blocks_changed(
        self,
        worker_id: str,
        epoch: int,
        sealed: Iterable[BlockHash],
        evicted: Iterable[tuple[BlockHash, EvictionReason]],
    ) -> list[Instruction]:
        """Record gained and lost blocks of a worker's pool."""
        worker = self.workers.current(worker_id, epoch)
        if worker is None:
            return []

        # Sealed before evicted: a block may be in both.
        awaited = self._sealed(worker, tuple(sealed))
        lost = {block_hash: reason for block_hash, reason in evicted if block_hash in worker.blocks}
        for block_hash, reason in lost.items():
            worker.blocks.discard(block_hash)
            self._blocks.left(block_hash, worker_id, reason)
        instructions = self._supply.fail(lost)

        if awaited:
            instructions.append(Export(worker_id, awaited))
        return instructions

    def export_failed(self, worker_id: str, epoch: int, hashes: Iterable[BlockHash]) -> list[Instruction]:
        """A worker no longer holds blocks that it was asked to export."""
        if self.workers.current(worker_id, epoch) is None:
            return []
        failed = self._supply.take_back(worker_id, hashes)
        evicted = [(block_hash, EvictionReason.FULL) for block_hash in failed]
        return self.blocks_changed(worker_id, epoch, sealed=(), evicted=evicted) + self._supply.fail(failed)

    # Requests

    def admit(self, request: AdmitRequest, now: float) -> tuple[Admission, list[Instruction]]:
        """Find the longest prefix, place the request, reserve load, lease segments and mark the blocks to be computed.

        Raises:
            NoWorkerError: no worker is registered; nothing has changed.
            LateError: the request is to be refused rather than late, and all workers would be; nothing has changed.
        """
        if not self.workers:
            raise NoWorkerError("no worker is ready")
        is_new = request.attempt == 0 and request.request_id not in self._reservations
        instructions = self.end_request(request.request_id, now)

        self.links.look(now)
        records = self._blocks.find(request.hashes)
        objectives = request.objectives.over(self.objectives)
        placement, when_late = self._place(request, records, objectives, is_new=is_new)
        self._explanations.record(request, records, placement, self.workers, objectives.ttft_s, when_late)

        # Blocks of the prompt: [0, num_local) in the pool, [num_local, num_cached) imported, the rest computed.
        num_local = placement.chosen.num_local_blocks
        num_cached = num_local + placement.chosen.num_imported_blocks
        lacking = dict.fromkeys(request.hashes[num_local:])

        # The load on its workers.
        reservation = reservation_of(
            request,
            placement,
            self.workers,
            num_new_blocks=len(lacking),
            objectives=objectives,
            gives_way=when_late is WhenLate.GIVE_WAY,
        )
        admission = reservation.admission
        prefill, decode = admission.prefill, admission.decode
        if self.workers[prefill].is_elastic and not request.is_behind:
            self._elastic.admitted(placement.chosen.compute_s, now)
        self._reservations[request.request_id] = reservation
        self._sessions.moved(request.cache.tenant, request.session, SessionWorkers(prefill, decode))
        self.workers.regroup(self._groups, self.workers.take(reservation))

        # The blocks that it will compute and may be asked for, and the blocks that it gets.
        awaited, computed = admission.prefill_awaited, request.hashes[num_cached:]
        self._supply.admitted(request.request_id, prefill, awaited=awaited, lacking=lacking, computed=computed)
        instructions += self._supply_to(reservation, prefill, awaited)
        instructions += self._supply_to(reservation, decode, admission.decode_awaited)
        instructions += self._supply.pass_over(request.avoided, request.hashes)
        return admission, instructions

    def first_token(self, request_id: str, attempt: int, ttft_s: float) -> Decision | None:
        """Take an attempt with a finished prefill off its worker's queue. `ttft_s`: since the admission.

        Returns the decision for the attempt, None if forgotten.
        """
        reservation = self._reservations.get(request_id)
        if reservation is not None and reservation.admission.attempt == attempt:
            self.workers.unqueue(reservation)
            self.workers.regroup(self._groups, [reservation.admission.prefill])
            self._supply.prefill_done(request_id)
        return self.decisions.first_token(request_id, attempt, ttft_s)

    def has_newer_attempt(self, request_id: str, attempt: int) -> bool:
        """True if a later attempt of the request is admitted, so that reports of `attempt` come late."""
        reservation = self._reservations.get(request_id)
        return reservation is not None and reservation.admission.attempt > attempt

    def end_request(self, request_id: str, now: float) -> list[Instruction]:
        """End a request, for whatever reason: drop the leases, the load and the promises to compute."""
        reservation = self._reservations.pop(request_id, None)
        if reservation is None:
            return []
        self.workers.regroup(self._groups, self.workers.drop(reservation))
        self.segments.released(reservation.leased, reservation.hashes, reservation.hints, now)
        if not self.keeps_segments:
            self.segments.handed_over(reservation.hashes)
        return self._supply.request_ended(request_id)

    # Queries

    def events_since(self, sequence: int | None) -> CacheUpdate:
        """Changes of the set of stored blocks (`BlockIndex.events_since`)."""
        return self._blocks.events_since(sequence)

    def leading(self, hashes: Sequence[BlockHash]) -> Iterator[BlockRecord]:
        """The records of the leading blocks that are held or being computed anywhere."""
        return self._blocks.leading(hashes)

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_reservations(self) -> int:
        return len(self._reservations)

    def sizes(self) -> dict[str, int]:
        """Counts and bytes, after a check of the integrity."""
        self.check_integrity()
        return {
            "num_workers": len(self.workers),
            "num_blocks": self.num_blocks,
            "num_segments": len(self.segments),
            "segment_bytes": self.segments.store_bytes,
            "disk_bytes": self.segments.disk_bytes,
            "num_reservations": self.num_reservations,
        }

    def check_integrity(self) -> None:
        """Assert that blocks, workers, segments and reservations agree with each other."""
        check_records(self._blocks, self.workers, self._reservations, self._groups, self.segments, self._supply)

    # Inside

    def _sealed(self, worker: WorkerRecord, hashes: Sequence[BlockHash]) -> tuple[BlockHash, ...]:
        """Note that a worker holds blocks; returns the ones that it is asked to export for other workers."""
        worker.blocks.update(hashes)
        records = self._blocks.held(hashes, worker.alone)
        if self.segments.disk_budget_bytes:
            worker.unsaved += [h for h, record in zip(hashes, records, strict=True) if record.segment is None]
        return self._supply.sealed(worker.worker_id, hashes, records)

    def _nodes_changed(self) -> None:
        """A worker has come or gone, and maybe its node."""
        nodes = self.workers.nodes
        self._is_spread = len(nodes) > 1
        self.segments.keep_nodes(nodes)

    def _place(
        self,
        request: AdmitRequest,
        records: Sequence[BlockRecord | None],
        objectives: Objectives,
        *,
        is_new: bool,
    ) -> tuple[Placement, WhenLate | None]:
        """Choose workers, once more for a request that gives way. Raises LateError for one that is refused; a request
        under way and one that is behind all others are never late."""
        demand, candidates = self._options(request, records, objectives)
        placement = place(demand, with_roles(candidates, demand, self.costs), self.costs)
        when_late = check_in_time(placement, objectives) if is_new and not request.is_behind else None
        if when_late is WhenLate.GIVE_WAY:
            demand = replace(demand, is_behind=True)
            placement = place(demand, with_roles(candidates, demand, self.costs), self.costs)
        return placement, when_late

    def _options(
        self, request: AdmitRequest, records: Sequence[BlockRecord | None], objectives: Objectives
    ) -> tuple[Demand, list[Candidate]]:
        """The needs of a request, and the workers grouped by load and held blocks."""
        prefix = match(records, self.workers, self._reservations)
        last_workers = self._sessions.of(request.cache.tenant, request.session)
        sources = sources_of(records, self.workers, self._reservations) if self._is_spread else None
        demand = demand_of(
            request,
            prefix,
            last_workers,
            return_rate=self.statistics.return_rate,
            objectives=objectives,
            sources=sources,
        )
        return demand, self._groups.candidates(prefix.holders, request.avoided, self.workers.leaving)
