"""The surroundings of an actor: how it finds the others, and where it puts what they are to read.

`RayRuntime` is a Ray cluster. `raydix.actors.local.LocalRuntime` is one process, in which actors call each other
directly.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raydix.actors.calls import answer
from raydix.actors.last_words import begin_words, named_requests
from raydix.actors.metrics import HoldMetrics
from raydix.actors.names import incarnation_name, named_actor, own_node
from raydix.actors.process_metrics import ProcessMetrics
from raydix.actors.rpc import Handle, ManagerClient, WorkerClient, find_manager
from raydix.actors.watchdog import Watchdog

OTHER_NODE_TIMEOUT_S = 1.0  # limit of reading a process's last words on another node


class Words(Protocol):
    """Where a worker notes what it computes for (`raydix.actors.last_words`)."""

    def note(self, request_ids: Sequence[str]) -> None:
        """Note the requests that the calling thread computes for."""

    def end(self, reason: str) -> None:
        """Write down that this process ends by what it computes."""


class Runtime(Protocol):
    """What actors need of the place they run in. Calls may raise RayError if the place cannot say now."""

    async def find_worker(self, worker_id: str, epoch: int) -> WorkerClient | None:
        """Find the worker incarnation, alive or not; None if there is none."""

    async def find_manager(self) -> ManagerClient | None:
        """Find the last announced manager, alive or not; None if there is none."""

    async def start_first_worker(self) -> None:
        """Have a pool that may be empty start a worker; returns when there is one."""

    def own_node(self) -> str:
        """Id of the node that this process runs on."""

    def handle_of(self, actor: object) -> Handle:
        """The handle by which others call an actor of this process."""

    def request_metrics(self) -> Any:
        """The module with the classes of an ingress replica's metrics."""

    def put(self, value: object) -> Any:
        """Keep an object for other actors; returns a reference, which is awaited for the object."""

    def begin_words(self, name: str) -> Words | None:
        """Begin the last words of this process, for others to read after its death, under the name of a worker's
        incarnation; None where nobody would. Called in the thread of the event loop."""

    async def named_requests(self, name: str, node: str, *, is_dead: bool) -> tuple[str, ...]:
        """The requests that the last words of a worker's incarnation on a node name; none if they cannot be read.
        `is_dead`: as others know it; its threads may look alive for a moment longer."""

    def process_metrics(self, process: str) -> ProcessMetrics | None:
        """Metrics of an actor's own process, under its name; None where it shares the process with an ingress replica,
        which has them."""

    def watch_process(self, holds: HoldMetrics) -> None:
        """Have work that keeps this process to itself noticed and counted (`raydix.actors.watchdog`), from now on;
        needs a running event loop."""


class RayRuntime:
    """The Ray cluster that this process belongs to, and one Serve application on it."""

    def __init__(self, app_name: str) -> None:
        self._app_name = app_name

    async def find_worker(self, worker_id: str, epoch: int) -> WorkerClient | None:
        handle = await named_actor(incarnation_name(worker_id, epoch), self._app_name)
        return None if handle is None else WorkerClient(handle)

    async def find_manager(self) -> ManagerClient | None:
        return await find_manager(self._app_name)

    async def start_first_worker(self) -> None:
        from raydix.actors.scaling import start_first_worker  # all of Serve, which workers and the manager can spare

        await start_first_worker(self._app_name)

    def own_node(self) -> str:
        return own_node()

    def handle_of(self, actor: object) -> Handle:
        handle: Handle = ray.get_runtime_context().current_actor
        return handle

    def request_metrics(self) -> Any:
        from ray.serve import metrics  # all of Serve, which workers and the manager can spare

        return metrics

    def put(self, value: object) -> Any:
        return ray.put(value)

    def begin_words(self, name: str) -> Words | None:
        return begin_words(name)

    async def named_requests(self, name: str, node: str, *, is_dead: bool) -> tuple[str, ...]:
        if node == own_node():
            return await asyncio.to_thread(named_requests, name, is_dead=is_dead)
        # Another node's files are read by a task there; where the node is gone, nobody waits for it long.
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        reader: Any = ray.remote(named_requests)  # type: ignore[arg-type]
        options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": strategy}
        read = reader.options(**options).remote(name, is_dead=is_dead)
        try:
            found: tuple[str, ...] = await answer(read, OTHER_NODE_TIMEOUT_S)
        except (RayError, TimeoutError):
            return ()
        return found

    def process_metrics(self, process: str) -> ProcessMetrics | None:
        return ProcessMetrics(process)

    def watch_process(self, holds: HoldMetrics) -> None:
        holds.begin()
        Watchdog(asyncio.get_running_loop(), holds.held).start()
