"""Reports of the cache and of placement decisions for clients, and control of the cache for administrators."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import orjson

from raydix.actors.ingress.manager_link import ManagerLink
from raydix.actors.rpc import ManagerClient
from raydix.engine.api.responses import Json, name_in
from raydix.engine.background import run_detached
from raydix.engine.core.doctor import PERIOD_S, Miss
from raydix.engine.core.errors import NotFoundError, OverloadedError, ServiceError
from raydix.engine.core.tenants import Tenant
from raydix.engine.serving.prompt_records import PromptRecords

POLL_S = 0.2
REPORT_S = 10.0  # age up to which a report of the doctor is given again: one costs up to a second of a thread
MAX_FOLLOWERS = 16  # each asks the manager five times a second


@dataclass(frozen=True, slots=True)
class _Report:
    at: float
    made: "asyncio.Task[Json]"


class CacheOperations:
    """Asks the manager on behalf of a tenant. `decode` turns token ids into text."""

    def __init__(
        self,
        manager: ManagerLink,
        decode: Callable[[Sequence[int]], str],
        records: PromptRecords,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manager = manager
        self._records = records
        self._decode = decode
        self._num_followers = 0
        self._clock = clock
        self._reports: dict[str, _Report] = {}  # the doctor's latest report of each tenant that asked

    async def explain(self, request_id: str, tenant: Tenant) -> Json:
        """Explain the placement of a tenant's request.

        Raises:
            NotFoundError: the tenant has had no such request, or its record has been dropped.
        """
        name = name_in(request_id)
        asking = None if tenant.is_admin else tenant.name
        choices = await self._manager.ask(lambda manager: manager.reports.explain(name, asking))
        if not choices:
            raise NotFoundError(f"No request '{request_id}' is remembered.", param="id")
        known = await self._records.explained(request_id, tenant, choices)
        return {"id": request_id, "object": "request.explanation", "choices": choices, **known}

    async def report(self, tenant: Tenant) -> Json:
        """State of the cache with the tenant's own use and prefixes. An administrator also sees the use of every tenant
        and the cache's contents, but only prefixes of its own: prefixes are text of prompts."""
        report = await self._manager.ask(lambda manager: manager.reports.cache_report(tenant.name, tenant.is_admin))
        for prefix in report["hottest_prefixes"]:
            prefix["preview"] = self._decode(prefix.pop("token_ids"))
        return report

    async def doctor(self, tenant: Tenant) -> Json:
        """What costs the tenant's own prompts at this replica their hits, for administrators too. A report is given to
        all who ask within `REPORT_S` of its making."""
        known = self._reports.get(tenant.name)
        now = self._clock()
        if known is None or (known.made.done() and (now - known.at > REPORT_S or known.made.exception() is not None)):
            made = run_detached(asyncio.get_running_loop().create_task, self._doctor(tenant.name))
            known = self._reports[tenant.name] = _Report(now, made)
        return await asyncio.shield(known.made)

    async def _doctor(self, tenant: str) -> Json:
        # Without the manager the texts still tell what changes, though not what it costs.
        misses: list[Miss] = []
        with suppress(ServiceError):
            misses = await self._manager.ask(lambda manager: manager.reports.misses(tenant, PERIOD_S))
        return await self._records.doctor(tenant, misses)

    async def reset(self) -> Json:
        """Forget all KV that no request uses."""
        counts = await self._manager.ask(lambda manager: manager.reset_cache())
        return {"object": "cache.reset", **counts}

    async def events(self, since: int | None) -> AsyncGenerator[bytes]:
        """Server-sent events: `snapshot` first unless everything from `since` on is known, then `stored` and `removed`,
        each with the sequence number to go on from.

        Raises:
            OverloadedError: others follow already, as many as a replica takes.
        """
        if self._num_followers >= MAX_FOLLOWERS:
            raise OverloadedError(
                f"{MAX_FOLLOWERS} clients follow the cache's events and no more are accepted; try again later",
                retry_after_s=5,
            )

        self._num_followers += 1
        try:
            while True:
                update = await self._manager.ask(partial(ManagerClient.events_since, sequence=since))
                if update.snapshot is not None:
                    yield _event("snapshot", update.next_sequence, [block_hash.hex() for block_hash in update.snapshot])
                for event in update.events:
                    yield _event(
                        "stored" if event.is_stored else "removed", event.sequence + 1, [event.block_hash.hex()]
                    )
                since = update.next_sequence
                await asyncio.sleep(POLL_S)
        finally:
            self._num_followers -= 1


def _event(kind: str, next_sequence: int, hashes: list[str]) -> bytes:
    data = orjson.dumps({"next": next_sequence, "blocks": hashes})
    return b"event: %s\nid: %d\ndata: %s\n\n" % (kind.encode(), next_sequence, data)
