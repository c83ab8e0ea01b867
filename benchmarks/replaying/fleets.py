"""Workers that come and go in virtual time: as the planner of the directory wants them.

A worker counts from the order to start it, `START_S` before it takes work, until its last request has ended. So does a
worker of a fixed split, from the first request to the end of the last one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial

from benchmarks.replaying.cluster import Cluster
from benchmarks.replaying.routers import Managed
from benchmarks.replaying.worker import ReplayWorker
from raydix.engine.core.types import Role

START_S = 30.0
"""Time from the order to start a worker until it takes requests: loading a model, not waiting for a machine."""


class ReplayedFleet(ABC):
    """Starts and stops workers of a cluster behind the directory."""

    def __init__(self, make: Callable[[Role], ReplayWorker], start_s: float = START_S) -> None:
        self._make = make
        self._start_s = start_s
        self._since: dict[str, float] = {}
        self._starting: dict[Role, int] = {}
        self._leaving: set[str] = set()
        self._seconds = 0.0
        self.every: list[ReplayWorker] = []
        """Workers that there are or were."""

    def first(self, roles: list[Role]) -> list[ReplayWorker]:
        """The workers that are there at the beginning."""
        workers = [self._make(role) for role in roles]
        self._since |= {worker.worker_id: 0.0 for worker in workers}
        self.every += workers
        return workers

    def look(self, cluster: Cluster, now: float) -> None:
        """Remove workers that have nothing left to do, and start or stop others."""
        router = cluster.router
        assert isinstance(router, Managed)
        for worker_id in sorted(self._leaving):
            if router.has_left(worker_id) and cluster.is_idle(worker_id):
                self._leaving.discard(worker_id)
                router.remove(worker_id)
                del cluster.workers[worker_id]
                self._seconds += now - self._since.pop(worker_id)

        for role, number in self.wanted(router, now).items():
            self._reach(role, number, cluster, router, now)

    @abstractmethod
    def wanted(self, router: Managed, now: float) -> Mapping[Role, int]:
        """Numbers of workers by role; an absent role stays as it is."""

    def worker_seconds(self, end_s: float) -> float:
        """Seconds of all workers up to the end."""
        return self._seconds + sum(end_s - since for since in self._since.values() if since < end_s)

    def number(self, role: Role, router: Managed) -> int:
        """Workers of a role that take requests or will."""
        return len(self._of(role, router)) + self._starting.get(role, 0)

    def _of(self, role: Role, router: Managed) -> list[str]:
        return [each.worker_id for each in router.workers.values() if each.role is role and not each.is_leaving]

    def _reach(self, role: Role, number: int, cluster: Cluster, router: Managed, now: float) -> None:
        for _ in range(number - self.number(role, router)):
            worker = self._make(role)
            self._starting[role] = self._starting.get(role, 0) + 1
            self._since[worker.worker_id] = now
            cluster.at(now + self._start_s, partial(self._started, worker, cluster, router))
        newest_first = self._of(role, router)[::-1]
        for worker_id in newest_first[: max(0, self.number(role, router) - number)]:
            router.leave(worker_id)
            self._leaving.add(worker_id)

    def _started(self, worker: ReplayWorker, cluster: Cluster, router: Managed, now: float) -> None:
        self._starting[worker.role] -= 1
        self.every.append(worker)
        cluster.workers[worker.worker_id] = worker
        router.add(worker)


class Fixed(ReplayedFleet):
    """Always the same workers. Elastic ones change their duties."""

    def wanted(self, router: Managed, now: float) -> Mapping[Role, int]:
        router.divide(now, 1)
        return {}


class Planned(ReplayedFleet):
    """Elastic workers in the number that the directory's planner wants; not fewer before it has watched the load."""

    def __init__(self, make: Callable[[Role], ReplayWorker], least: int, most: int, start_s: float = START_S) -> None:
        super().__init__(make, start_s)
        self._least, self._most = least, most

    def wanted(self, router: Managed, now: float) -> Mapping[Role, int]:
        plan = router.divide(now, self._most)
        if plan is None:
            return {}
        least = self._least if plan.may_shrink else self.number(Role.ELASTIC, router)
        return {Role.ELASTIC: max(least, plan.num_wanted)}
