"""The kinds of actors that hosts start: how each is made of a part of the configuration, and told a change.

`take` keeps the values for the next incarnation; `tell` hands the same values to a running one. So an actor that is
replaced after a change has the changed values, too.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raydix.actors.manager.kv_cache_manager import KVCacheManager
from raydix.actors.names import namespace
from raydix.actors.rpc import ActorClient, ManagerClient, WorkerClient
from raydix.actors.runtime import RayRuntime
from raydix.actors.worker.worker import WORKER_CLASSES
from raydix.configs.schema import LoggingSection
from raydix.configs.sections import (
    MANAGER,
    MANAGER_CPUS,
    ManagerArguments,
    ManagerLive,
    WorkerArguments,
    WorkerLive,
    read,
    shares,
)
from raydix.configs.settings import (
    elastic_limits,
    manager_settings,
    objectives,
    prior,
    settings_of,
    sharing,
    step_limits,
    turn_limits,
)
from raydix.configs.tenants import TenantsFile
from raydix.engine.core.types import Role
from raydix.engine.model.host import num_cores

MAX_CONCURRENT_CALLS = 10_000

L = TypeVar("L", ManagerLive, WorkerLive)


class Hosted(ABC):
    """An actor of one host, through all its incarnations."""

    def __init__(self, actor_id: str, app_name: str) -> None:
        self.actor_id = actor_id
        self.tenants_file = TenantsFile()
        self._app_name = app_name

    @property
    @abstractmethod
    def logs(self) -> LoggingSection:
        """Settings of the log, of the actor's and the host's."""

    @abstractmethod
    def take(self, live: Mapping[str, Any]) -> bool:
        """Keep other values for this and all later incarnations; False if they are the present ones. Raises
        StartupError for invalid ones, and keeps the old."""

    @abstractmethod
    def create(self, name: str, epoch: int) -> ActorClient:
        """Create an incarnation with the values kept last."""

    @abstractmethod
    def tell(self, child: ActorClient) -> Awaitable[None]:
        """Hand the values kept last to an incarnation; answered when they are applied."""

    def _with_shares(self, live: L) -> L:
        """The values with the shares of the tenants' file, if there is one. Raises StartupError for a wrong file."""
        if live.tenants_file is None:
            return live
        return live.model_copy(update={"shares": shares(self.tenants_file.tenants(live.tenants_file))})

    def _options(self, name: str, **options: Any) -> dict[str, Any]:
        # Serve puts the host into a placement group with room for its actor; elsewhere the actor would wait for
        # resources that the group holds.
        group = ray.util.get_current_placement_group()
        if group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=-1)
        return {
            "name": name,
            "namespace": namespace(self._app_name),
            "max_concurrency": MAX_CONCURRENT_CALLS,
            **options,
        }


class HostedManager(Hosted):
    """The manager."""

    def __init__(self, arguments: Mapping[str, Any], app_name: str) -> None:
        super().__init__(MANAGER, app_name)
        self._arguments = read(ManagerArguments, arguments)
        self._taken: ManagerLive | None = None

    @property
    def logs(self) -> LoggingSection:
        return _at_level(self._arguments.logging, self._taken)

    def take(self, live: Mapping[str, Any]) -> bool:
        # Read before anything is assigned: wrong values leave the old ones in place.
        before, self._taken = self._taken, self._with_shares(read(ManagerLive, live))
        return self._taken != before

    @property
    def _live(self) -> ManagerLive:
        return _present(self._taken)

    def create(self, name: str, epoch: int) -> ManagerClient:
        # Half, since a manager and its successor live side by side for the time of a hand-over.
        actor: Any = ray.remote(KVCacheManager).options(**self._options(name, num_cpus=MANAGER_CPUS / 2))
        settings = manager_settings(self._arguments, self._live)
        handle = actor.remote(**settings, runtime=RayRuntime(self._app_name), logs=self.logs)
        return ManagerClient(handle)

    def tell(self, child: ActorClient) -> Awaitable[None]:
        manager, live = ManagerClient(child.handle), self._live
        return manager.reconfigure(
            live.placement.piggyback_tokens,
            prior(live),
            sharing(live.shares),
            objectives(live.slo),
            live.level,
            elastic_limits(live),
            turn_limits(live),
        )


class HostedWorker(Hosted):
    """A worker of one role."""

    def __init__(self, role: Role, arguments: Mapping[str, Any], worker_id: str, app_name: str) -> None:
        super().__init__(worker_id, app_name)
        self._role = role
        self._arguments = read(WorkerArguments, arguments)
        self._taken: WorkerLive | None = None

    @property
    def logs(self) -> LoggingSection:
        return _at_level(self._arguments.logging, self._taken)

    def take(self, live: Mapping[str, Any]) -> bool:
        # Read before anything is assigned: wrong values leave the old ones in place.
        before, self._taken = self._taken, self._with_shares(read(WorkerLive, live))
        return self._taken != before

    @property
    def _live(self) -> WorkerLive:
        return _present(self._taken)

    def create(self, name: str, epoch: int) -> WorkerClient:
        section = self._arguments.worker
        actor: Any = ray.remote(WORKER_CLASSES[self._role]).options(
            **self._options(
                name,
                num_cpus=section.num_cpus,
                num_gpus=section.num_gpus,
                resources=section.resources,
            )
        )
        settings, runtime = settings_of(self._arguments, self._live), RayRuntime(self._app_name)
        # The cores that this process may use, not those of the machine: containers and `taskset` have fewer.
        num_threads = section.num_threads or num_cores()
        handle = actor.remote(settings, self._role, self.actor_id, epoch, runtime, self.logs, num_threads=num_threads)
        return WorkerClient(handle)

    def tell(self, child: ActorClient) -> Awaitable[None]:
        worker = WorkerClient(child.handle)
        return worker.reconfigure(step_limits(self._live), sharing(self._live.shares), self._live.level)


def hosted(kind: str, arguments: Mapping[str, Any], replica: str, app_name: str) -> Hosted:
    """The actor of a host: the manager, or the worker of a role. Raises StartupError for invalid arguments."""
    if kind == MANAGER:
        return HostedManager(arguments, app_name)
    return HostedWorker(Role(kind), arguments, f"{kind}-{replica}", app_name)


def _present(live: L | None) -> L:
    assert live is not None, "an actor is made after its host was configured"
    return live


def _at_level(logs: LoggingSection, live: ManagerLive | WorkerLive | None) -> LoggingSection:
    return logs if live is None else logs.model_copy(update={"level": live.level})
