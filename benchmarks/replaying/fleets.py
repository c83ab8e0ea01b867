"""Workers that come and go in virtual time: as the planner of the directory wants them, and by a published rule.

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
from raydix.engine.core.manager.records import US_PER_S, WorkerRecord
from raydix.engine.core.objectives import Objectives
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


class DynamoLoad(ReplayedFleet):
    """NVIDIA Dynamo's planner, load-based scaling (docs.nvidia.com/dynamo, "Planner Guide") with its default settings:
    every 5 s one more prefill worker if the estimated time to first token of all is above the objective, one less if
    that of all is below 0.8 (n - 1) / n of it; and the same for decode workers and the time per token."""

    EVERY_S = 5.0
    SENSITIVITY = 0.8

    def __init__(
        self, make: Callable[[Role], ReplayWorker], objectives: Objectives, most: int, start_s: float = START_S
    ) -> None:
        super().__init__(make, start_s)
        assert objectives.ttft_s is not None and objectives.tpot_s is not None
        self._ttft_s, self._tpot_s = objectives.ttft_s, objectives.tpot_s
        self._most = most
        self._decided_at = 0.0

    def wanted(self, router: Managed, now: float) -> Mapping[Role, int]:
        if now - self._decided_at < self.EVERY_S:
            return {}
        self._decided_at = now
        prefill = self._next(router, Role.PREFILL, self._ttft_s, lambda each: each.queued_us / US_PER_S)
        decode = self._next(router, Role.DECODE, self._tpot_s, lambda w: w.costs.decode_step_s(len(w.decoding)))
        room = self._most - self.number(Role.PREFILL, router) - self.number(Role.DECODE, router)
        if prefill + decode > self._most and room <= 0:
            return {}
        return {Role.PREFILL: prefill, Role.DECODE: decode}

    def _next(
        self, router: Managed, role: Role, objective_s: float, estimate_s: Callable[[WorkerRecord], float]
    ) -> int:
        estimates = [estimate_s(router.workers[worker_id]) for worker_id in self._of(role, router)]
        number, present = self.number(role, router), len(estimates)
        if all(estimate > objective_s for estimate in estimates):
            return number if number > present else number + 1
        boundary_s = objective_s * (present - 1) / present * self.SENSITIVITY
        return number - 1 if number > 1 and all(estimate < boundary_s for estimate in estimates) else number
