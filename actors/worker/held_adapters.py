"""The adapters that were loaded at run time, as one worker has them."""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from raydix.actors.worker.engine_thread import EngineThread
from raydix.engine.core.errors import StartupError
from raydix.engine.core.log_fields import about
from raydix.engine.core.types import Adapter

if TYPE_CHECKING:
    from raydix.engine.model.engine import Engine

logger = logging.getLogger(__name__)


class HeldAdapters:
    """Names of the adapters that the manager has had loaded; their weights are the engine's."""

    def __init__(self, engine: "Engine", thread: EngineThread) -> None:
        self._engine = engine
        self._thread = thread
        self._adapters: set[Adapter] = set()
        # Held while weights come or go, so that one adapter is never loaded and dropped at a time.
        self._changes = asyncio.Lock()

    @property
    def all(self) -> tuple[Adapter, ...]:
        return tuple(sorted(self._adapters, key=lambda adapter: adapter.name))

    async def load(self, adapter: Adapter) -> str | None:
        """Have an adapter in memory; returns the reason if this worker cannot."""
        async with self._changes:
            store = self._engine.adapters
            if adapter not in self._adapters and store is not None:
                try:
                    # In a thread of its own: steps go on meanwhile.
                    await asyncio.to_thread(store.add, adapter)
                except StartupError as error:
                    return str(error)
            self._adapters.add(adapter)
        logger.info("adapter %s loaded", adapter.name, extra=about("adapter_loaded", adapter=adapter.name))
        return None

    async def unload(self, adapter: Adapter) -> bool:
        """Forget an adapter, and free its memory where no other name has the same weights; False while a request of
        this worker needs them."""
        async with self._changes:
            if adapter not in self._adapters:
                return True
            others = {each.digest for each in self._adapters - {adapter}}
            if adapter.digest not in others:
                now = time.monotonic()
                # In the engine's thread, so that no step has the weights in its hands.
                if not await self._thread.ask(lambda engine: engine.drop_adapter(adapter.digest, now)):
                    return False
            self._adapters.discard(adapter)
        logger.info("adapter %s unloaded", adapter.name, extra=about("adapter_unloaded", adapter=adapter.name))
        return True

    async def catch_up(self, listed: Sequence[Adapter]) -> str | None:
        """Have all of these in memory, too; returns the reason if this worker cannot."""
        for adapter in listed:
            if (reason := await self.load(adapter)) is not None:
                return reason
        return None
