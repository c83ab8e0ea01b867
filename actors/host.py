"""Serve deployments that host one actor each, so that Serve restarts, scales and updates our actors.

A host's replica starts its child in the replica's placement group and waits until it is ready; the data plane calls
the child directly. A child that dies is replaced at once by its host; a host that dies takes its child with it (Ray
ends actors whose owner is gone) and Serve starts another.
"""

import asyncio
import logging
import os
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.calls import answer
from actors.kv_cache_manager import KVCacheManager
from actors.names import MANAGER, namespace
from actors.worker import WORKER_CLASSES
from configs.schema import Config, WorkerSection
from configs.settings import configured_tenants, engine_settings
from engine.core.costs import WorkerCosts
from engine.core.placement import CostModel
from engine.core.settings import GIB
from engine.core.types import Role

logger = logging.getLogger(__name__)

MIB = 1 << 20
MAX_CONCURRENT_CALLS = 10_000
CHECK_TIMEOUT_S = 60
"""A child that answers nothing for so long hangs. An engine answers between two steps, and a step may take seconds."""
RESTART_TIMEOUT_S = 1800
"""A child that is not ready after so long, its model loaded and its pool laid out, does not come back by itself."""
MANAGER_CPUS = 0.1


class ActorHost:
    """Starts one actor, replaces it when it dies, and speaks for its health."""

    async def __init__(self, kind: str, config: Mapping[str, Any]) -> None:  # type: ignore[misc]
        self._kind = kind
        self._config = Config.model_validate(config)
        context = serve.get_replica_context()
        self._app_name = context.app_name
        self._name = MANAGER if kind == MANAGER else f"{kind}-{context.replica_id.unique_id}"
        self._failure: str | None = None
        self._child = await self._start_child()
        self._watch = asyncio.create_task(self._replace_when_dead())

    async def check_health(self) -> None:
        """Called by Serve; replaces a child that hangs, and raises when the child cannot be brought back."""
        if self._failure is not None:
            raise RuntimeError(self._failure)
        try:
            await answer(self._child.check.remote(), CHECK_TIMEOUT_S)
        except TimeoutError:
            logger.error("%s does not answer for %d s and is replaced", self._name, CHECK_TIMEOUT_S)
            ray.kill(self._child)
        except RayError:
            pass  # it died; the watch replaces it

    async def _start_child(self) -> ActorHandle[Any]:
        child = self._create_manager() if self._kind == MANAGER else self._create_worker(Role(self._kind))
        await child.start.remote()
        logger.info("%s started", self._name)
        return child

    async def _replace_when_dead(self) -> None:
        while True:
            try:
                await self._child.join.remote()
            except RayError as error:
                logger.warning("%s died (%s), starting another", self._name, type(error).__name__)
            try:
                self._child = await asyncio.wait_for(self._start_child(), RESTART_TIMEOUT_S)
            except Exception as error:  # whatever it was, Serve should try with another host
                self._failure = f"{self._name} does not start again: {type(error).__name__}: {error}"
                return

    def _options(self, **options: Any) -> dict[str, Any]:
        group = ray.util.get_current_placement_group()
        if group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=-1)
        return {
            "name": self._name,
            "namespace": namespace(self._app_name),
            "max_concurrency": MAX_CONCURRENT_CALLS,
            **options,
        }

    def _create_manager(self) -> ActorHandle[Any]:
        placement, cache = self._config.placement, self._config.cache
        costs = CostModel(
            block_size=cache.block_size,
            piggyback_tokens=placement.piggyback_tokens,
            prior=WorkerCosts(import_byte_s=1 / (placement.import_gib_per_s * GIB)),
        )
        actor: Any = ray.remote(KVCacheManager).options(**self._options(num_cpus=MANAGER_CPUS))
        child: ActorHandle[Any] = actor.remote(
            costs,
            int(cache.segment_gib * GIB),
            int(cache.transcript_mib * MIB),
            cache.await_timeout_s,
            int(cache.disk_gib * GIB),
            cache.disk_path,
            configured_tenants(self._config),
        )
        return child

    def _create_worker(self, role: Role) -> ActorHandle[Any]:
        section: WorkerSection = getattr(self._config.workers, role)
        actor: Any = ray.remote(WORKER_CLASSES[role]).options(
            **self._options(
                num_cpus=section.num_cpus,
                num_gpus=section.num_gpus,
                resources=section.resources,
                runtime_env={"env_vars": thread_environment(section.num_threads)},
            )
        )
        settings = engine_settings(self._config, section)
        child: ActorHandle[Any] = actor.remote(settings, role, self._name, self._app_name)
        return child


def thread_environment(num_threads: int) -> dict[str, str]:
    """How many threads a worker computes with (Ray would set one). Those of torch's own operations sleep between them,
    because workers on one machine share its cores; the kernels have threads of their own."""
    return {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": str(num_threads or len(os.sched_getaffinity(0)))}
