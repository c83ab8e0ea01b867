"""Serve deployments that host one actor each, so that Serve restarts, scales and updates our actors.

A host's replica starts its child in the replica's placement group and waits until the child is ready; the data plane
calls the child directly.

* The child dies: its host starts another incarnation at once, under a new name and with a newer epoch.
* The child answers nothing for `CHECK_TIMEOUT_S`: its host kills it.
* An incarnation does not start: its host tries again, after growing pauses. While `MAX_FAILURES` or more have failed in
  a row the host is unhealthy, and Serve replaces it.
* Serve stops the host (fewer replicas, an update, a node that is drained): the child's requests and blocks go to other
  workers first.
* The host dies: Ray ends its child, whose owner is gone, and Serve starts another host.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import Coroutine, Mapping
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.calls import answer
from actors.logs import log_to_ray
from actors.manager.kv_cache_manager import KVCacheManager
from actors.messages import STARTING_REPORT_S
from actors.names import MANAGER, announce_manager, incarnation_name, namespace
from actors.rpc import ActorClient, find_manager
from actors.worker.worker import WORKER_CLASSES
from configs.schema import Config, WorkerSection
from configs.settings import answer_bytes, configured_tenants, engine_settings
from engine.core.costs import WorkerCosts
from engine.core.log_fields import about
from engine.core.manager.placement import CostModel
from engine.core.settings import GIB
from engine.core.types import Role

logger = logging.getLogger(__name__)

MIB = 1 << 20
MAX_CONCURRENT_CALLS = 10_000
CHECK_TIMEOUT_S = 60
"""A child that answers nothing for so long hangs. An engine answers between two steps, and a step may take seconds."""
RESTART_TIMEOUT_S = 1800
"""Limit of a child's start, from its creation to a loaded model and a laid-out pool."""
RETRY_S = 0.5
MAX_RETRY_S = 30.0
"""First pause before a child that did not start is started again; each further pause is twice as long."""
MAX_FAILURES = 3
"""Starts in a row that may fail before Serve is to try with another host."""
MANAGER_CPUS = 0.1
LEAVE_S = 0.2
"""Between two questions whether a worker's requests and blocks are elsewhere."""
LEAVE_TIMEOUT_S = 50.0
"""Limit of a worker's leaving; less than Serve's `graceful_shutdown_timeout_s` of hosts."""


class ActorHost:
    """Starts one actor, replaces the actor after its death, and reports its health to Serve."""

    async def __init__(self, kind: str, config: Mapping[str, Any]) -> None:  # type: ignore[misc]
        self._kind = kind
        self._config = Config.model_validate(config)
        log_to_ray(f"host-{kind}", self._config.logging)
        context = serve.get_replica_context()
        self._app_name = context.app_name
        self._actor_id = MANAGER if kind == MANAGER else f"{kind}-{context.replica_id.unique_id}"
        self._num_failures = 0
        self._failure = ""
        self._child = await self._start_first_child()
        self._watch = asyncio.create_task(self._replace_when_dead())

    async def check_health(self) -> None:
        """Called by Serve; kills a child that hangs, and raises while the child cannot be brought back."""
        if self._num_failures >= MAX_FAILURES:
            raise RuntimeError(self._failure)
        try:
            await answer(self._child.check(), CHECK_TIMEOUT_S)
        except TimeoutError:
            extra = about("child_hangs", child=self._actor_id)
            logger.error("%s does not answer for %d s and is killed", self._actor_id, CHECK_TIMEOUT_S, extra=extra)
            self._child.kill()
        except RayError:
            pass  # The child died, and `_replace_when_dead` starts another.

    def __del__(self) -> Coroutine[Any, Any, None] | None:
        """Called by Serve before the host's process ends; awaited by Serve if a worker is to leave first."""
        watch: asyncio.Task[None] | None = getattr(self, "_watch", None)  # None before the first child is ready
        is_over = watch is None or watch.done() or watch.cancelling()
        return None if is_over or self._kind == MANAGER else self._leave()

    async def _leave(self) -> None:
        """Return when other workers have the child's requests and blocks, at the latest after `LEAVE_TIMEOUT_S`."""
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(RayError, TimeoutError):  # the manager may be away and come back
                manager = await find_manager(self._app_name)
                if manager is None or await answer(manager.worker_leaving(self._actor_id), CHECK_TIMEOUT_S):
                    break
            await asyncio.sleep(LEAVE_S)
        self._watch.cancel()
        took_s = round(time.monotonic() - deadline + LEAVE_TIMEOUT_S, 3)
        logger.info("%s leaves", self._actor_id, extra=about("child_leaves", child=self._actor_id, took_s=took_s))

    async def _start_first_child(self) -> ActorClient:
        """Start a child. Raises the constructor's error, so that Serve can say why the application does not start. A
        child killed during its start is started again, `MAX_FAILURES` starts in all."""
        for number in itertools.count(1):
            try:
                return await self._start_child()
            except RayActorError as error:
                if error.actor_init_failed or number == MAX_FAILURES:
                    raise
                reason = type(error).__name__
                extra = about("child_died", child=self._actor_id, reason=reason)
                logger.warning("%s died while it started (%s)", self._actor_id, reason, extra=extra)
            await asyncio.sleep(RETRY_S)
        raise AssertionError("counting does not end")

    async def _start_child(self) -> ActorClient:
        """Start a new incarnation; returns when it is ready. Raises RayError if the start fails."""
        began, epoch = time.monotonic(), time.time_ns()
        name = incarnation_name(self._actor_id, epoch)
        if self._kind == MANAGER:
            child = self._create_manager(name)
        else:
            child = self._create_worker(Role(self._kind), name, epoch)

        try:
            await self._ready(child)
        except BaseException:
            child.kill()
            raise

        if self._kind == MANAGER:
            await announce_manager(name, self._app_name)

        took_s = round(time.monotonic() - began, 3)
        extra = about("child_started", child=self._actor_id, epoch=epoch, took_s=took_s)
        logger.info("%s started in %.1f s", name, took_s, extra=extra)
        return child

    async def _ready(self, child: ActorClient) -> None:
        """Wait until a child has started; meanwhile tell the manager that a worker is starting."""
        started = asyncio.ensure_future(answer(child.start(), RESTART_TIMEOUT_S))
        try:
            while not (await asyncio.wait({started}, timeout=STARTING_REPORT_S))[0]:
                await self._report_starting()
            started.result()
        finally:
            started.cancel()

    async def _report_starting(self) -> None:
        if self._kind != MANAGER and self._num_failures < MAX_FAILURES:
            with contextlib.suppress(RayError, TimeoutError):
                manager = await find_manager(self._app_name)
                if manager is not None:
                    await answer(manager.worker_starting(self._actor_id), STARTING_REPORT_S)

    async def _replace_when_dead(self) -> None:
        while True:
            try:
                await self._child.join()
            except Exception as error:  # Of any kind: no other process would start another child.
                reason = type(error).__name__
                extra = about("child_died", child=self._actor_id, reason=reason)
                logger.warning("%s died (%s) and is replaced", self._actor_id, reason, extra=extra)
                self._child.kill()  # The child may be only out of reach.
            self._child = await self._start_next_child()

    async def _start_next_child(self) -> ActorClient:
        """Start a new incarnation, with as many tries as needed."""
        pause_s = RETRY_S
        while True:
            try:
                child = await self._start_child()
            except Exception as error:  # Of any kind: the next try may succeed.
                self._num_failures += 1
                self._failure = f"{self._actor_id} does not start again: {type(error).__name__}: {error}"
                extra = about("child_not_started", child=self._actor_id, failures=self._num_failures)
                logger.exception("%s does not start; next try in %.1f s", self._actor_id, pause_s, extra=extra)
            else:
                self._num_failures = 0
                return child
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_RETRY_S)

    def _options(self, name: str, **options: Any) -> dict[str, Any]:
        group = ray.util.get_current_placement_group()
        if group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=-1)
        return {
            "name": name,
            "namespace": namespace(self._app_name),
            "max_concurrency": MAX_CONCURRENT_CALLS,
            **options,
        }

    def _create_manager(self, name: str) -> ActorClient:
        placement, cache = self._config.placement, self._config.cache
        costs = CostModel(
            block_size=cache.block_size,
            piggyback_tokens=placement.piggyback_tokens,
            prior=WorkerCosts(import_byte_s=1 / (placement.import_gib_per_s * GIB)),
        )

        actor: Any = ray.remote(KVCacheManager).options(**self._options(name, num_cpus=MANAGER_CPUS))
        handle = actor.remote(
            costs,
            segment_budget_bytes=int(cache.segment_gib * GIB),
            transcript_budget_bytes=int(cache.transcript_mib * MIB),
            response_budget_bytes=int(cache.response_mib * MIB),
            response_ttl_s=cache.response_ttl_s,
            answer_budget_bytes=answer_bytes(self._config),
            await_timeout_s=cache.await_timeout_s,
            disk_budget_bytes=int(cache.disk_gib * GIB),
            disk_path=cache.disk_path,
            tenants=configured_tenants(self._config),
            prefix_caching=cache.prefix_caching,
            logs=self._config.logging,
        )
        return ActorClient(handle)

    def _create_worker(self, role: Role, name: str, epoch: int) -> ActorClient:
        section: WorkerSection = getattr(self._config.workers, role)
        actor: Any = ray.remote(WORKER_CLASSES[role]).options(
            **self._options(
                name,
                num_cpus=section.num_cpus,
                num_gpus=section.num_gpus,
                resources=section.resources,
                runtime_env={"env_vars": thread_environment(section.num_threads)},
            )
        )
        settings = engine_settings(self._config, section)
        logs = self._config.logging
        return ActorClient(actor.remote(settings, role, self._actor_id, epoch, self._app_name, logs))


def thread_environment(num_threads: int) -> dict[str, str]:
    """Number of threads a worker computes with (Ray would set one). The threads of torch's own operations sleep between
    them, because workers on one machine share its cores; the kernels have threads of their own."""
    return {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": str(num_threads or len(os.sched_getaffinity(0)))}
