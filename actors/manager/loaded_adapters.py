"""Loads adapters into all workers at run time, tells the ingress replicas, and unloads adapters again.

The order is what keeps requests whole. A name is listed after every registered worker has its weights, and a worker
that lacks a listed adapter is not registered. A name is listed no more before anything is freed, and a worker frees
weights when no replica has a request of them under way. Workers outlive a manager, so a new one learns the names from
them.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from ray.exceptions import ActorDiedError, RayError

from raydix.actors.manager.executor import Executor
from raydix.actors.messages import Registration
from raydix.actors.rpc import WorkerClient
from raydix.engine.background import Background
from raydix.engine.core.log_fields import about
from raydix.engine.core.types import Adapter, AdapterReport

logger = logging.getLogger(__name__)

LEARNING_S = 4.0  # age up to which a manager that knows of no adapter has perhaps not met the workers that have some
LOOK_S = 0.2  # interval between two looks whether replicas know of a change, and workers need weights no more
NUM_REMEMBERED = 1_000  # unloaded adapters that are remembered, so that a worker which was away does not bring one back

Reports = Callable[[], Mapping[str, AdapterReport | None]]
"""The last report of each ingress replica that lives; None before its first one."""


class LoadedAdapters:
    """The adapters that were loaded at run time, by name."""

    def __init__(self, executor: Executor, background: Background, reports: Reports) -> None:
        self._executor = executor
        self._background = background
        self._reports = reports
        self._listed: dict[str, Adapter] = {}
        self._unloaded: dict[Adapter, None] = {}  # adapters that were unloaded, the latest last
        # Held while workers are asked to load or to free, so that neither overtakes the other.
        self._changes = asyncio.Lock()
        self._started_at = time.monotonic()

    def listed(self) -> tuple[Adapter, ...] | None:
        """The adapters that requests may name; None while this manager may not have learnt of them yet."""
        knows = bool(self._listed or self._unloaded) or time.monotonic() - self._started_at > LEARNING_S
        return tuple(self._listed.values()) if knows else None

    def refusal(self, registration: Registration) -> str | None:
        """The reason why a worker cannot be registered now, if there is one."""
        missing = set(self._listed.values()) - set(registration.adapters)
        return f"it lacks the adapters {', '.join(sorted(each.name for each in missing))}" if missing else None

    def joined(self, registration: Registration) -> None:
        """Take what a worker knows that has just been registered."""
        client = self._executor.clients[registration.worker_id]
        for adapter in registration.adapters:
            if adapter in self._unloaded or self._listed.get(adapter.name, adapter) != adapter:
                self._background.start(self._free(adapter, {registration.worker_id: client}))
            elif adapter.name not in self._listed:
                self._background.start(self._learn(adapter))

    async def load(self, adapter: Adapter, limit: int, *, in_place: bool) -> str | None:
        """Load an adapter into every worker and tell every replica; returns the reason if that cannot be. `in_place`:
        it may take the place of another one of its name. At most `limit` are loaded."""
        async with self._changes:
            before = self._listed.get(adapter.name)
            if before is not None and not in_place:
                return f"The lora adapter '{adapter.name}' has already been loaded."
            if before is None and len(self._listed) >= limit:
                return f"{limit} adapters are loaded, which is the limit ('model.max_loaded_adapters'): unload one."
            if (reason := await self._load_everywhere(adapter)) is not None:
                return reason
            self._list(adapter)
        await self._until(lambda report: adapter in report.known or self._listed.get(adapter.name) != adapter)
        if before is not None and before != adapter:
            # Requests of the former weights go on with these, so that nobody waits for them here.
            self._background.start(self._unload(before))
        return None

    async def unload(self, name: str) -> bool:
        """Unload an adapter: nobody may name it any more; returns when its requests have ended and every worker has
        freed its memory. False for an unknown name."""
        adapter = self._listed.pop(name, None)
        if adapter is None:
            return False
        # Detached: what is begun here goes on when the caller gives up.
        await asyncio.shield(self._background.start(self._unload(adapter)))
        return True

    def _list(self, adapter: Adapter) -> None:
        self._unloaded.pop(adapter, None)
        self._listed[adapter.name] = adapter
        logger.info("adapter %s loaded", adapter.name, extra=about("adapter_loaded", adapter=adapter.name))

    async def _load_everywhere(self, adapter: Adapter) -> str | None:
        """Have every registered worker load an adapter; returns the first reason of one that cannot."""
        asked: dict[str, WorkerClient] = {}
        # A worker may register meanwhile: between the last look and the listing nothing is awaited.
        while new := {name: client for name, client in self._executor.clients.items() if asked.get(name) != client}:
            asked |= new
            answers = await asyncio.gather(*[_loaded(client, adapter) for client in new.values()])
            refused = [f"{name}: {reason}" for name, reason in zip(new, answers, strict=True) if reason is not None]
            if refused:
                if adapter not in self._listed.values():
                    await asyncio.gather(*[_freed(client, adapter) for client in asked.values()])
                return refused[0]
        return None

    async def _learn(self, adapter: Adapter) -> None:
        """List an adapter that a worker has from an earlier manager's time."""
        async with self._changes:
            if adapter.name in self._listed or adapter in self._unloaded:
                return
            if (reason := await self._load_everywhere(adapter)) is not None:
                extra = about("adapter_lost", adapter=adapter.name)
                logger.error("adapter %s is no longer loaded: %s", adapter.name, reason, extra=extra)
                return
            self._list(adapter)

    async def _unload(self, adapter: Adapter) -> None:
        """Free an adapter everywhere that is not listed any more."""
        self._unloaded[adapter] = None
        while len(self._unloaded) > NUM_REMEMBERED:
            del self._unloaded[next(iter(self._unloaded))]
        logger.info("adapter %s is unloaded", adapter.name, extra=about("adapter_unloaded", adapter=adapter.name))
        # The weights may have another name, whose requests go on.
        await self._until(
            lambda report: (
                adapter not in report.known
                and (adapter.digest not in report.in_use or adapter.digest in self._digests())
            )
        )
        await self._free(adapter, None)

    async def _free(self, adapter: Adapter, clients: Mapping[str, WorkerClient] | None) -> None:
        """Have workers free an adapter's memory, as soon as no request is left; None: all registered workers."""
        while True:
            async with self._changes:
                # Loaded again meanwhile: it stays.
                if self._listed.get(adapter.name) == adapter:
                    return
                asked = self._executor.clients if clients is None else clients
                answers = await asyncio.gather(*[_freed(client, adapter) for client in asked.values()])
            if all(answers):
                return
            await asyncio.sleep(LOOK_S)

    def _digests(self) -> set[bytes]:
        return {each.digest for each in self._listed.values()}

    async def _until(self, is_known: Callable[[AdapterReport], bool]) -> None:
        """Wait until every living replica has said what `is_known` asks for."""
        while not all(report is not None and is_known(report) for report in self._reports().values()):
            await asyncio.sleep(LOOK_S)


async def _loaded(client: WorkerClient, adapter: Adapter) -> str | None:
    """The reason if a worker cannot load an adapter."""
    try:
        return await client.load_adapter(adapter)
    except ActorDiedError:
        return None  # Its successor loads what is listed before it is registered.
    except RayError as error:
        return f"the worker does not answer ({type(error).__name__})"


async def _freed(client: WorkerClient, adapter: Adapter) -> bool:
    """True if a worker has freed an adapter, or is out of reach: when it registers again, it is told again."""
    try:
        return await client.unload_adapter(adapter)
    except RayError:
        return True
