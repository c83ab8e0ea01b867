"""Typed clients of the actors: the remote methods of each, with their arguments and answers.

A call is sent when the client's method is called. Awaiting the returned object gives the answer; it raises the remote
method's error, or RayError if the actor is dead or out of reach.
"""

from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import ray
from ray import ObjectRef
from ray.actor import ActorHandle

from raydix.actors.messages import ImportReport, Registration, WorkerState
from raydix.actors.metric_values import MetricFamily
from raydix.actors.names import manager_name, named_actor
from raydix.actors.tracing import Recorded
from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.doctor import Miss
from raydix.engine.core.manager.block_index import CacheUpdate
from raydix.engine.core.manager.elastic import PoolLimits, Wanted
from raydix.engine.core.manager.turns import TurnLimits
from raydix.engine.core.objectives import Late, Objectives
from raydix.engine.core.settings import SchedulerLimits
from raydix.engine.core.tenants import Tenant
from raydix.engine.core.types import (
    Adapter,
    AdapterReport,
    Admission,
    AdmitRequest,
    Assignment,
    AttemptName,
    BlockHash,
    Ended,
    FirstToken,
    Membership,
    Paused,
    ProcessName,
    SegmentHeader,
    StreamEvent,
)
from raydix.engine.serving.answer_keeper import AnswerKeeper

if TYPE_CHECKING:
    from raydix.actors.manager.succession import Succession

P = ParamSpec("P")
T = TypeVar("T")

Handle: TypeAlias = ActorHandle[Any]
"""Ray's handle of an actor, without types."""


class ActorClient:
    """Client of the methods that every hosted actor has for its host."""

    def __init__(self, handle: Handle) -> None:
        self.handle: Any = handle

    def start(self) -> Awaitable[object]:
        """Answered when the actor is ready. Raises the constructor's error."""
        return _sent(self.handle.start.remote())

    def check(self) -> Awaitable[None]:
        """Answered unless the actor hangs."""
        return _sent(self.handle.check.remote())

    def join(self) -> Awaitable[None]:
        """Never answered: raises RayError when the actor is dead."""
        return _sent(self.handle.join.remote())

    def metrics(self) -> Awaitable[tuple[MetricFamily, ...]]:
        """The actor's metrics so far."""
        return _sent(self.handle.metrics.remote())

    def kill(self) -> None:
        """End the actor's process."""
        ray.kill(self.handle)


class WorkerClient(ActorClient):
    """One incarnation of a worker (`raydix.actors.worker.worker.Worker`)."""

    def reconfigure(self, limits: SchedulerLimits, tenants: Sequence[Tenant], level: str) -> Awaitable[None]:
        return _sent(self.handle.reconfigure.remote(limits, tenants, level))

    def submit(self, assignments: Sequence[Assignment]) -> Awaitable[None]:
        return _sent(self.handle.submit.remote(assignments))

    def abort(self, request_id: str, attempt: int, *, has_ended: bool = False) -> Awaitable[None]:
        return _sent(self.handle.abort.remote(request_id, attempt, has_ended))

    def stop_awaiting(self, request_ids: Sequence[str]) -> Awaitable[None]:
        return _sent(self.handle.stop_awaiting.remote(request_ids))

    def ping(
        self,
        ingress_id: str,
        taken: Sequence[AttemptName],
        sent: Sequence[AttemptName],
        awaiting: Sequence[str],
        process: ProcessName,
    ) -> Awaitable[None]:
        return _sent(self.handle.ping.remote(ingress_id, taken, sent, awaiting, process))

    def token_stream(self, ingress_id: str) -> AsyncIterable[Awaitable[list[StreamEvent]]]:
        return _streamed(self.handle.token_stream.remote(ingress_id))

    def export_stream(self) -> "AsyncIterable[ObjectRef[Any]]":
        """References to `ExportItem`s, each followed by a reference to its payload if there is one."""
        return _streamed(self.handle.export_stream.remote())

    def import_segment(
        self, header: SegmentHeader, payload: Sequence[object], patience_s: float | None
    ) -> Awaitable[ImportReport]:
        """`payload` holds one reference, or none for no bytes; Ray does not fetch a reference inside a list before the
        call."""
        return _sent(self.handle.import_segment.remote(header, payload, patience_s))

    def trace(self, seconds: float) -> Awaitable[Recorded]:
        return _sent(self.handle.trace.remote(seconds))

    def export_blocks(self, hashes: Sequence[BlockHash]) -> Awaitable[None]:
        return _sent(self.handle.export_blocks.remote(hashes))

    def blocks_lost(self, hashes: Sequence[BlockHash]) -> Awaitable[None]:
        return _sent(self.handle.blocks_lost.remote(hashes))

    def register_again(self) -> Awaitable[None]:
        return _sent(self.handle.register_again.remote())

    def reset_cache(self, number: int) -> Awaitable[int]:
        return _sent(self.handle.reset_cache.remote(number))

    def load_adapter(self, adapter: Adapter) -> Awaitable[str | None]:
        return _sent(self.handle.load_adapter.remote(adapter))

    def unload_adapter(self, adapter: Adapter) -> Awaitable[bool]:
        return _sent(self.handle.unload_adapter.remote(adapter))


class AdaptersClient:
    """The adapters that a manager has loaded into all workers at run time."""

    def __init__(self, handle: Handle) -> None:
        self.handle: Any = handle

    def adapters(self) -> Awaitable[tuple[Adapter, ...] | None]:
        return _sent(self.handle.adapters.remote())

    def load_adapter(self, adapter: Adapter, limit: int, *, in_place: bool) -> Awaitable[str | None]:
        return _sent(self.handle.load_adapter.remote(adapter, limit, in_place))

    def unload_adapter(self, name: str) -> Awaitable[bool]:
        return _sent(self.handle.unload_adapter.remote(name))


class ReportsClient:
    """What a manager tells of its decisions and of the cache, for those who look."""

    def __init__(self, handle: Handle) -> None:
        self.handle: Any = handle

    def explain(self, name: str, tenant: str | None) -> Awaitable[list[dict[str, object]]]:
        return _sent(self.handle.explain.remote(name, tenant))

    def misses(self, tenant: str, period_s: float) -> Awaitable[list[Miss]]:
        return _sent(self.handle.misses.remote(tenant, period_s))

    def cache_report(self, tenant: str, is_admin: bool) -> Awaitable[dict[str, Any]]:
        return _sent(self.handle.cache_report.remote(tenant, is_admin))


class SuccessionClient:
    """What one manager leaves to the next (`raydix.actors.manager.succession`)."""

    def __init__(self, handle: Handle) -> None:
        self.handle: Any = handle

    def of_succession(
        self, method: "Callable[Concatenate[Succession, P], Awaitable[T]]", *args: P.args, **kwargs: P.kwargs
    ) -> Awaitable[T]:
        """Call a method of the hand-over from one manager to the next."""
        return _sent(self.handle.of_succession.remote(method.__name__, *args, **kwargs))

    def copies(self, segment_ids: Sequence[int]) -> "AsyncIterable[ObjectRef[Any]]":
        """References to copies of the payloads of these segments, which belong to the caller; None for a segment that
        is gone."""
        return _streamed(self.handle.copies.remote(segment_ids))


class ManagerClient(ActorClient):
    """One incarnation of the manager (`raydix.actors.manager.kv_cache_manager.KVCacheManager`)."""

    def __init__(self, handle: Handle) -> None:
        super().__init__(handle)
        self.loaded_adapters = AdaptersClient(handle)
        self.reports = ReportsClient(handle)

    def reconfigure(
        self,
        piggyback_tokens: int,
        prior: WorkerCosts,
        tenants: Sequence[Tenant],
        objectives: Objectives,
        level: str,
        elastic: PoolLimits,
        turns: TurnLimits,
    ) -> Awaitable[None]:
        return _sent(
            self.handle.reconfigure.remote(piggyback_tokens, prior, tenants, objectives, level, elastic, turns)
        )

    def register(self, registration: Registration, worker: Handle) -> Awaitable[str | None]:
        # In a list, because Ray would take a handle that is an argument by itself for a dependency of the call.
        return _sent(self.handle.register.remote(registration, [worker]))

    def heartbeat(self, worker_id: str, epoch: int, state: WorkerState) -> Awaitable[bool]:
        return _sent(self.handle.heartbeat.remote(worker_id, epoch, state))

    def worker_starting(self, worker_id: str) -> Awaitable[None]:
        return _sent(self.handle.worker_starting.remote(worker_id))

    def worker_leaving(self, worker_id: str) -> Awaitable[bool | None]:
        return _sent(self.handle.worker_leaving.remote(worker_id))

    def children_hung(self, kind: str, number: int) -> Awaitable[None]:
        return _sent(self.handle.children_hung.remote(kind, number))

    def wanted_workers(self) -> Awaitable[Wanted | None]:
        return _sent(self.handle.wanted_workers.remote())

    def workers(
        self, ingress_id: str, active: Sequence[str], process: ProcessName, adapters: AdapterReport
    ) -> Awaitable[Membership]:
        return _sent(self.handle.workers.remote(ingress_id, active, process, adapters))

    def of_answers(
        self, method: Callable[Concatenate[AnswerKeeper, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> Awaitable[T]:
        """Call a method of what the manager keeps of answers for later requests."""
        return _sent(self.handle.of_answers.remote(method.__name__, *args, **kwargs))

    def admit(self, requests: Sequence[AdmitRequest]) -> Awaitable[list[Admission | Late | Paused | None]]:
        return _sent(self.handle.admit.remote(requests))

    def ask_again(self, request_ids: Sequence[str]) -> Awaitable[list[Paused | None]]:
        return _sent(self.handle.ask_again.remote(request_ids))

    def settle(self, ingress_id: str, first_tokens: Sequence[FirstToken], ended: Sequence[Ended]) -> Awaitable[None]:
        return _sent(self.handle.settle.remote(ingress_id, first_tokens, ended))

    def trace(self, seconds: float) -> Awaitable[Recorded]:
        return _sent(self.handle.trace.remote(seconds))

    def events_since(self, sequence: int | None) -> Awaitable[CacheUpdate]:
        return _sent(self.handle.events_since.remote(sequence))

    def reset_cache(self) -> Awaitable[dict[str, int]]:
        return _sent(self.handle.reset_cache.remote())


async def find_manager(app_name: str) -> ManagerClient | None:
    """Find the last announced manager, alive or not; None if there is none. Raises RayError if Ray cannot say."""
    name = await manager_name(app_name)
    handle = None if name is None else await named_actor(name, app_name)
    return None if handle is None else ManagerClient(handle)


def _sent(call: Any) -> Awaitable[Any]:
    """Awaitable reference of Ray's to the answer of a call."""
    return call  # type: ignore[no-any-return]


def _streamed(call: Any) -> AsyncIterable[Any]:
    """Ray's reference to a stream of references."""
    return call  # type: ignore[no-any-return]
