"""Workers of a cluster by equal load: one candidate of a placement each."""

from collections.abc import Collection, Mapping, Set

from raydix.engine.core.manager.placement import Candidate, WorkerLoad


class WorkerGroups:
    """The workers of a cluster, grouped by equal load."""

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
    ) -> list[Candidate]:
        """Group all workers for one request. `leaving` workers count only where all others are avoided, and `avoided`
        workers only where no other worker is registered.

        `holders`: the workers by number of held leading blocks, each worker once.
        """
        all_candidates = [
            Candidate(alike, load, num_local)
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
