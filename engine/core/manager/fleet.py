"""The workers of a cluster: who computes, with which load, and at which costs.

A `WorkerRecord` of a registered worker changes by the methods of `Fleet` only, which keeps the groups of equal load up
to date: placement looks at groups, and its cost does not grow with the number of workers that are alike.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Set

from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.manager.elastic import SHRINK_S, Elastic, Plan
from raydix.engine.core.manager.links import Links
from raydix.engine.core.manager.peers import PeerCosts
from raydix.engine.core.manager.placement import WorkerLoad, WorkersAlike
from raydix.engine.core.manager.records import Reservation, WorkerRecord
from raydix.engine.core.objectives import Objectives
from raydix.engine.core.types import Role

PATIENCE_S = 0.25
PATIENCE = 3.0  # a fetch from another node is late after `PATIENCE_S` and `PATIENCE` times what it is predicted to take


class Fleet(Mapping[str, WorkerRecord]):
    """The registered workers, by id."""

    def __init__(self, prior: WorkerCosts) -> None:
        """`prior`: costs of workers while none has measured anything."""
        self._workers: dict[str, WorkerRecord] = {}
        self.leaving: frozenset[str] = frozenset()
        """The workers that are about to stop."""
        self.nodes: frozenset[str] = frozenset()
        """The nodes with workers."""
        self.links = Links()
        self.elastic_load = Elastic()
        self.plan: Plan | None = None
        """Outcome of the last look at the elastic workers' load; None without such workers."""
        self._groups = WorkerGroups()
        self._peers = PeerCosts(prior)

    def __getitem__(self, worker_id: str) -> WorkerRecord:
        return self._workers[worker_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._workers)

    def __len__(self) -> int:
        return len(self._workers)

    # Reading

    def current(self, worker_id: str, epoch: int | None) -> WorkerRecord | None:
        """The worker if registered with this epoch (None: with any), else None."""
        worker = self._workers.get(worker_id)
        return worker if worker is not None and epoch in (None, worker.epoch) else None

    @property
    def elastic(self) -> list[WorkerRecord]:
        return [worker for worker in self._workers.values() if worker.is_elastic and not worker.is_leaving]

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of the workers' KV, equal for all; None without a worker."""
        return next((worker.fingerprint for worker in self._workers.values()), None)

    def refusal(self, worker_id: str, fingerprint: str) -> str | None:
        """The reason for refusing a worker; None if it may be registered.

        Workers must not share KV with different last bits: answers would depend on the worker of a prefix. The
        fingerprint of the workers registered first counts.
        """
        others = {worker.fingerprint for worker in self._workers.values() if worker.worker_id != worker_id}
        if others <= {fingerprint}:
            return None
        return (
            f"its KV would differ from the other workers': it has the fingerprint {fingerprint}, the others have "
            f"{min(others)} (model, block size, products, version, arithmetic)"
        )

    def candidates(self, holders: Mapping[int, Set[str]], avoided: Collection[str]) -> list[WorkersAlike]:
        """The workers for one request, grouped by load and held blocks (`WorkerGroups.candidates`)."""
        return self._groups.candidates(holders, avoided, self.leaving)

    # Workers come and go

    def add(self, worker: WorkerRecord) -> None:
        """Register a worker, whose id is unknown. Its costs are its peers' from now on."""
        self._peers.add(worker.worker_id, _kind(worker))
        worker.costs = self._peers.costs_of(worker.worker_id)
        self._workers[worker.worker_id] = worker
        self.nodes |= {worker.node}
        self._regroup([worker.worker_id])

    def leave(self, worker_id: str) -> None:
        """A worker is about to stop: new requests go to others, as long as there are others."""
        self._workers[worker_id].is_leaving = True
        self.leaving |= {worker_id}

    def remove(self, worker_id: str) -> None:
        """Forget a worker."""
        del self._workers[worker_id]
        self.nodes = frozenset(worker.node for worker in self._workers.values())
        self.leaving -= {worker_id}
        self._groups.remove(worker_id)
        self._peers.remove(worker_id)

    # Costs

    def measured(
        self,
        worker_id: str,
        epoch: int,
        costs: WorkerCosts | None,
        num_free_blocks: int,
        num_empty_blocks: int | None = None,
        *,
        num_steps: int | None = None,
        token_budget: int | None = None,
        num_blocks: int | None = None,
    ) -> None:
        """Record a worker's costs and room.

        `costs`: None before the first measurement. `num_free_blocks`: blocks without a holder; `num_empty_blocks`: the
        part without contents. `num_steps`: steps behind the fit of the costs so far; None stands for more than before.
        `token_budget`: that of a step now, `num_blocks`: all blocks of the pool; None: as before.
        """
        worker = self.current(worker_id, epoch)
        if worker is None:
            return
        has_stepped = worker.measured(num_free_blocks, num_empty_blocks, num_steps)
        worker.num_blocks = worker.num_blocks if num_blocks is None else num_blocks
        if token_budget is not None and token_budget != worker.token_budget:
            # A worker with another budget has other peers.
            worker.token_budget = token_budget
            self._peers.add(worker_id, _kind(worker))

        # A report may change the costs of all peers, by way of their median.
        changed = [worker_id] if costs is None else self._peers.report(worker_id, costs, has_stepped=has_stepped)
        for changed_id in changed:
            self._workers[changed_id].costs = self._peers.costs_of(changed_id)
        self._regroup({worker_id, *changed})

    def change_prior(self, prior: WorkerCosts) -> None:
        """Take other costs of workers while none has measured anything, from now on."""
        self._peers.prior = prior
        for worker_id, worker in self._workers.items():
            worker.costs = self._peers.costs_of(worker_id)
        self._regroup(self._workers)

    def patience_s(self, worker_id: str, source: str, num_bytes: int, now: float) -> float | None:
        """Time for which requests of a worker wait for bytes from the object store of the node `source`, and then
        compute the blocks. None: as long as the fetch takes, because the bytes are on the worker's own node."""
        worker = self._workers.get(worker_id)
        if worker is None or not source or source == worker.node:
            return None
        self.links.look(now)
        return PATIENCE_S + PATIENCE * self.links.import_s(source, worker.node, num_bytes, worker.costs)

    def imported(self, worker_id: str, source: str, num_bytes: int, seconds: float, now: float) -> None:
        """A worker has fetched `num_bytes` of KV from a node's object store."""
        worker = self._workers.get(worker_id)
        if worker is not None and source and worker.node and num_bytes:
            self.links.look(now)
            self.links.imported(source, worker.node, num_bytes, seconds, worker.costs)

    # Load

    def take(self, reservation: Reservation) -> None:
        """Add a request to the load of its workers."""
        admission = reservation.admission
        prefill, decode = self._workers[admission.prefill], self._workers[admission.decode]
        prefill.queued_us += reservation.queued_us
        prefill.behind_us += reservation.queued_us * reservation.is_behind
        prefill.num_queued += 1
        prefill.num_reserved_blocks += reservation.num_new_blocks

        decode.decoding.add(admission.request_id)
        if decode.is_elastic and reservation.tpot_s is not None:
            decode.tpots[admission.request_id] = reservation.tpot_s
        for worker in (prefill, decode):
            worker.requests.add(admission.request_id)
        self._regroup({prefill.worker_id, decode.worker_id})

    def prefill_done(self, reservation: Reservation) -> None:
        """Take a request's prefill off the queue of its worker."""
        self._unqueue(reservation)
        self._regroup([reservation.admission.prefill])

    def drop(self, reservation: Reservation) -> None:
        """Take a request off the load of those of its workers that are still registered."""
        admission = reservation.admission
        self._unqueue(reservation)
        involved = {admission.prefill, admission.decode} & self._workers.keys()
        for worker_id in involved:
            worker = self._workers[worker_id]
            worker.requests.discard(admission.request_id)
            worker.decoding.discard(admission.request_id)
            worker.tpots.pop(admission.request_id, None)
        self._regroup(involved)

    def divide(
        self, objectives: Objectives, now: float, most: int = 1, shrink_after_s: float = SHRINK_S, least: int = 1
    ) -> Plan | None:
        """Give the elastic workers the duties that suit the load; to be called every second or so. For
        `Plan.num_wanted`, `most`, `least`: limits of their number; `shrink_after_s`: time for which fewer must have
        been enough."""
        self.elastic_load.shrink_after(shrink_after_s)
        self.plan = self.elastic_load.plan(self.elastic, objectives, most, now, least)
        if self.plan is not None:
            self.assign(self.plan.duties)
        return self.plan

    def assign(self, duties: Mapping[str, Role]) -> None:
        """Give elastic workers these duties."""
        for worker_id, duty in duties.items():
            self._workers[worker_id].duty = duty
        self._regroup(duties)

    def check_integrity(self, reservations: Mapping[str, Reservation]) -> None:
        """Assert that the load of each worker is that of the requests placed there, and the groups are right."""
        for worker in self._workers.values():
            assert worker.requests <= reservations.keys()
            assert worker.decoding <= worker.requests
            assert worker.tpots.keys() <= worker.decoding
            assert self._groups.load_of(worker.worker_id) == worker.load
            _check_load(worker, reservations.values())
        assert self.nodes == {worker.node for worker in self._workers.values()}
        assert self.leaving == {worker.worker_id for worker in self._workers.values() if worker.is_leaving}

    # Inside

    def _unqueue(self, reservation: Reservation) -> None:
        """Remove a prefill from the queue of its worker: done, or not needed any more."""
        # A later incarnation of the worker knows nothing of the request: its queue never had the prefill.
        worker = self.current(reservation.admission.prefill, reservation.admission.prefill_epoch)
        if worker is not None and reservation.is_queued:
            worker.queued_us -= reservation.queued_us
            worker.behind_us -= reservation.queued_us * reservation.is_behind
            worker.num_queued -= 1
            worker.num_reserved_blocks -= reservation.num_new_blocks
        reservation.dequeue()

    def _regroup(self, worker_ids: Iterable[str]) -> None:
        """Put the registered ones of these workers into groups anew, after a change of load or costs."""
        # Sorted, because the order of the groups decides between equal candidates.
        for worker_id in sorted(worker_ids):
            if worker_id in self._workers:
                self._groups.put(worker_id, self._workers[worker_id].load)


class WorkerGroups:
    """The workers of a cluster, grouped by equal load: one candidate of a placement each."""

    def __init__(self) -> None:
        self._loads: dict[str, WorkerLoad] = {}
        self._groups: dict[WorkerLoad, set[str]] = {}

    def put(self, worker_id: str, load: WorkerLoad) -> None:
        """Add a worker, or change its load."""
        self.remove(worker_id)
        self._loads[worker_id] = load
        self._groups.setdefault(load, set()).add(worker_id)

    def remove(self, worker_id: str) -> None:
        """Remove a worker; an unknown one is no error."""
        load = self._loads.pop(worker_id, None)
        if load is not None:
            group = self._groups[load]
            group.remove(worker_id)
            if not group:
                del self._groups[load]

    def load_of(self, worker_id: str) -> WorkerLoad | None:
        return self._loads.get(worker_id)

    def candidates(
        self, holders: Mapping[int, Set[str]], avoided: Collection[str] = (), leaving: Collection[str] = ()
    ) -> list[WorkersAlike]:
        """Group all workers for one request. `leaving` workers count only where all others are avoided, and `avoided`
        workers only where no other worker is registered.

        `holders`: the workers by number of held leading blocks, each worker once.
        """
        all_candidates = [
            WorkersAlike(alike, load, num_local)
            for load, group in self._groups.items()
            for num_local, workers in holders.items()
            if (alike := group & workers)
        ]
        for left_out in ({*avoided, *leaving}, avoided):
            if not left_out:
                break
            others = [each._replace(worker_ids=frozenset(each.worker_ids) - {*left_out}) for each in all_candidates]
            if others := [each for each in others if each.worker_ids]:
                return others
        return all_candidates


def _kind(worker: WorkerRecord) -> tuple[Role, int, str]:
    """Workers of one kind are peers."""
    return worker.role, worker.token_budget, worker.device


def _check_load(worker: WorkerRecord, reservations: Collection[Reservation]) -> None:
    """Compare a worker's sums with its reservations."""
    here = [each for each in reservations if each.admission.prefill == worker.worker_id]
    of_now = [each for each in here if each.admission.prefill_epoch == worker.epoch]
    assert worker.queued_us == sum(each.queued_us for each in of_now)
    assert worker.behind_us == sum(each.queued_us for each in of_now if each.is_behind)

    queued = [each for each in here if each.is_queued]
    assert worker.num_queued == len(queued)
    assert worker.num_reserved_blocks == sum(each.num_new_blocks for each in queued)
