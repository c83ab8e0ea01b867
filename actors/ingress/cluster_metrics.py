"""The metrics of this ingress replica, of the workers and of the manager, gathered when somebody asks."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version

from ray.exceptions import RayError

from raydix.actors.calls import answer
from raydix.actors.ingress.exposition import exposition
from raydix.actors.ingress.manager_link import ManagerLink
from raydix.actors.ingress.metric_aliases import aliases
from raydix.actors.metric_values import MetricFamily, labels_of, merged
from raydix.actors.rpc import WorkerClient
from raydix.configs.sections import MANAGER
from raydix.engine.background import run_detached
from raydix.engine.core.errors import ServiceError
from raydix.engine.core.types import WorkerInfo

TIMEOUT_S = 2.0  # limit of one process's answer, with the search for the process

UP = MetricFamily(
    "raydix_process_up",
    "gauge",
    "1 for a process whose metrics are here, 0 for one that did not answer in time.",
    {},
)


BUILD_INFO = MetricFamily("raydix_build_info", "gauge", "1, with the version of raydix and the served model.", {})
MODEL_INFO = MetricFamily(
    "raydix_model_info", "gauge", "1, with the served model, its longest context and its vocabulary in tokens.", {}
)


@dataclass(frozen=True, slots=True)
class ReplicaMetrics:
    """This replica's own metrics."""

    replica: str
    families: Callable[[], Sequence[MetricFamily]]
    model: str = ""
    """Name of the served model."""
    about: Mapping[str, str] = field(default_factory=dict)
    """More of the model, as labels of `MODEL_INFO`."""


class ClusterMetrics:
    """Gathers metrics for `/metrics`. Requests during a gathering get its answer."""

    def __init__(
        self,
        own: ReplicaMetrics,
        manager: ManagerLink,
        workers: Callable[[], Sequence[WorkerInfo]],
        find: Callable[[str, int], Awaitable[WorkerClient | None]],
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`workers` lists the workers to ask; `find` gives a worker's client, by id and epoch."""
        self._own = own
        self._manager = manager
        self._workers = workers
        self._find = find
        self._timeout_s = timeout_s
        self._clients: dict[tuple[str, int], WorkerClient] = {}
        self._gathering: asyncio.Task[str] | None = None
        # Once: the version is read from the package's files.
        self._infos = (_build_info(own.model), _model_info(own))

    async def text(self) -> str:
        """The metrics in Prometheus' text format, after `timeout_s` at most."""
        if self._gathering is None or self._gathering.done():
            self._gathering = run_detached(asyncio.get_running_loop().create_task, self._gather())
        return await asyncio.shield(self._gathering)

    async def of_workers(self, timeout_s: float) -> list[tuple[WorkerInfo, Sequence[MetricFamily] | None]]:
        """The workers, each with its metrics; None for a worker that does not answer within `timeout_s`."""
        workers = self._workers()
        self._clients = {
            (each.worker_id, each.epoch): client
            for each in workers
            if (client := self._clients.get((each.worker_id, each.epoch))) is not None
        }
        families = await asyncio.gather(*(self._of_worker(each, timeout_s) for each in workers))
        return [*zip(workers, families, strict=True)]

    async def _gather(self) -> str:
        manager, workers = await asyncio.gather(self._of_manager(), self.of_workers(self._timeout_s))

        up = {labels_of({"process": self._own.replica, "kind": "ingress"}): 1.0}
        up[labels_of({"process": MANAGER, "kind": MANAGER})] = float(manager is not None)
        for worker, families in workers:
            up[labels_of({"process": worker.worker_id, "kind": str(worker.role)})] = float(families is not None)

        answered = (families for families in (manager, *(each for _, each in workers)) if families is not None)
        gathered = [replace(UP, values=up), *self._own.families(), *(each for some in answered for each in some)]
        families = merged([*self._infos, *gathered])
        return exposition([*families, *aliases(families, self._own.model)])

    async def _of_manager(self) -> Sequence[MetricFamily] | None:
        """None if the manager does not answer in time."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._manager.ask(lambda manager: manager.metrics(), timeout_s=self._timeout_s)
        except (ServiceError, TimeoutError):
            return None

    async def _of_worker(self, worker: WorkerInfo, timeout_s: float) -> Sequence[MetricFamily] | None:
        """None if the worker does not answer in time."""
        known = (worker.worker_id, worker.epoch)
        try:
            async with asyncio.timeout(timeout_s):
                client = self._clients.get(known) or await self._find(*known)
                if client is None:
                    return None
                self._clients[known] = client
                return await answer(client.metrics())
        except (RayError, TimeoutError):
            return None


def _model_info(own: ReplicaMetrics) -> MetricFamily:
    return replace(MODEL_INFO, values={labels_of({"model": own.model, **own.about}): 1.0})


def _build_info(model: str) -> MetricFamily:
    return replace(BUILD_INFO, values={labels_of({"version": version("raydix"), "model": model}): 1.0})
