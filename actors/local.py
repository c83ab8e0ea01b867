"""Actors in one process and one event loop, without a Ray cluster: the same actors, called through the same clients.

A call runs as a task of the event loop, and its arguments and answer are not copied. Nothing is lost, since nothing
dies alone: the process ends as a whole.
"""

import asyncio
import concurrent.futures
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from typing import Any, cast

from ray.util import metrics

from raydix.actors.metrics import HoldMetrics
from raydix.actors.names import incarnation_name
from raydix.actors.process_metrics import ProcessMetrics
from raydix.actors.rpc import Handle, ManagerClient, WorkerClient
from raydix.actors.runtime import Words

NODE = "local"  # the one node that all actors are on


class LocalReference:
    """Reference to an object that stays in this process; awaited for the object, as Ray's."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __await__(self) -> Generator[None, None, Any]:
        yield from ()
        return self._value

    def future(self) -> concurrent.futures.Future[Any]:
        """The object as the result of a future, as Ray's."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_result(self._value)
        return future


class LocalHandle:
    """Handle of an actor in this process."""

    def __init__(self, actor: object) -> None:
        self.actor = actor

    def __getattr__(self, name: str) -> "LocalMethod":
        return LocalMethod(self, getattr(self.actor, name))

    async def call(self, method: Callable[..., Awaitable[Any]], *args: object, **kwargs: object) -> Any:
        """The result of a method of the actor."""
        return await method(*args, **kwargs)


class LocalMethod:
    """A method of a handle."""

    def __init__(self, handle: LocalHandle, method: Callable[..., Any]) -> None:
        self._handle = handle
        self._method = method

    def remote(self, *args: object, **kwargs: object) -> Any:
        """Call the method; the answer is awaited. Of a generator: its items, each to be awaited."""
        if inspect.isasyncgenfunction(self._method):
            return self._items(self._method(*args, **kwargs))
        call = asyncio.ensure_future(self._handle.call(self._method, *args, **kwargs))
        call.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody needs to await a call
        return call

    async def _items(self, stream: AsyncIterator[Any]) -> AsyncIterator[Awaitable[Any]]:
        while True:
            try:
                item = await self._handle.call(anext, stream)
            except StopAsyncIteration:
                return
            yield LocalReference(item)


class LocalRuntime:
    """The actors of this process, by name."""

    def __init__(self) -> None:
        self.handles: dict[str, LocalHandle] = {}
        self.manager_name: str | None = None
        """Name of the manager that is found; None: there is none."""

    async def find_worker(self, worker_id: str, epoch: int) -> WorkerClient | None:
        handle = self.handles.get(incarnation_name(worker_id, epoch))
        return None if handle is None else WorkerClient(cast(Handle, handle))

    async def find_manager(self) -> ManagerClient | None:
        handle = None if self.manager_name is None else self.handles.get(self.manager_name)
        return None if handle is None else ManagerClient(cast(Handle, handle))

    async def start_first_worker(self) -> None:
        """There is nothing to start: the workers of a process begin with it."""

    def own_node(self) -> str:
        return NODE

    def handle_of(self, actor: object) -> Handle:
        [handle] = [each for each in self.handles.values() if each.actor is actor]
        return cast(Handle, handle)

    def request_metrics(self) -> Any:
        return metrics

    def put(self, value: object) -> LocalReference:
        return LocalReference(value)

    def begin_words(self, name: str) -> Words | None:
        """Nobody would read the last words of a process that ends as a whole."""
        return None

    async def named_requests(self, name: str, node: str, *, is_dead: bool) -> tuple[str, ...]:
        return ()

    def process_metrics(self, process: str) -> ProcessMetrics | None:
        return None

    def watch_process(self, holds: HoldMetrics) -> None:
        """Nothing is watched: the actors of a process share its event loop, which is another's to watch."""
