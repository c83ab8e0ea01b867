"""What a client may see of the cache and of decisions, and what an administrator may do to it."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import orjson

from actors.manager_link import ManagerLink
from engine.api.responses import Json
from engine.core.cache_events import CacheUpdate
from engine.core.errors import NotFoundError, OverloadedError, PermissionDeniedError
from engine.core.tenants import Tenant

POLL_S = 0.2
KEEP_ALIVE_S = 15.0
"""A follower of events hears at least that nothing has happened."""
MAX_FOLLOWERS = 16
"""Each asks the manager five times a second."""
ID_PREFIXES = ("chatcmpl-", "cmpl-")


class CacheControl:
    """Asks the manager on behalf of a tenant. `decode` turns token ids into text."""

    def __init__(self, manager: ManagerLink, decode: Callable[[Sequence[int]], str]) -> None:
        self._manager = manager
        self._decode = decode
        self._num_followers = 0

    async def explain(self, request_id: str, tenant: Tenant) -> Json:
        """Why a request of this tenant went where it went.

        Raises:
            NotFoundError: the tenant has had no such request, or it is forgotten.
        """
        name = next((request_id.removeprefix(p) for p in ID_PREFIXES if request_id.startswith(p)), request_id)
        choices = await self._manager.ask("explain", name, None if tenant.is_admin else tenant.name)
        if not choices:
            raise NotFoundError(f"No request '{request_id}' is remembered.", param="id")
        return {"id": request_id, "object": "request.explanation", "choices": choices}

    async def report(self, tenant: Tenant) -> Json:
        """The state of the cache and the tenant's own use and prefixes. An administrator sees the use of every tenant
        and what the cache holds, too, but of the prefixes also only its own: they are text of prompts."""
        report: dict[str, Any] = await self._manager.ask("cache_report", tenant.name, tenant.is_admin)
        for prefix in report["hottest_prefixes"]:
            prefix["preview"] = self._decode(prefix.pop("token_ids"))
        return report

    async def reset(self, tenant: Tenant) -> Json:
        """Forget everything that no request uses.

        Raises:
            PermissionDeniedError: the tenant is no administrator.
        """
        _require_admin(tenant)
        counts: Json = await self._manager.ask("reset_cache")
        return {"object": "cache.reset", **counts}

    async def events(self, since: int | None, tenant: Tenant) -> AsyncGenerator[bytes]:
        """Server-sent events: `snapshot` first unless everything from `since` on is known, then `stored` and `removed`,
        each with the sequence number to go on from.

        Raises:
            PermissionDeniedError: the tenant is no administrator.
            OverloadedError: others follow already, as many as a replica takes.
        """
        _require_admin(tenant)
        if self._num_followers >= MAX_FOLLOWERS:
            raise OverloadedError(
                f"{MAX_FOLLOWERS} clients follow the cache's events and no more are accepted; try again later",
                retry_after_s=5,
            )
        self._num_followers += 1
        quiet_s = 0.0
        try:
            while True:
                update: CacheUpdate = await self._manager.ask("events_since", since)
                if update.snapshot is not None:
                    yield _event("snapshot", update.next_sequence, [block_hash.hex() for block_hash in update.snapshot])
                for event in update.events:
                    yield _event(
                        "stored" if event.is_stored else "removed", event.sequence + 1, [event.block_hash.hex()]
                    )
                quiet_s = 0.0 if since != update.next_sequence else quiet_s + POLL_S
                since = update.next_sequence
                if quiet_s >= KEEP_ALIVE_S:
                    quiet_s = 0.0
                    yield b": nothing new\n\n"
                await asyncio.sleep(POLL_S)
        finally:
            self._num_followers -= 1


def _require_admin(tenant: Tenant) -> None:
    if not tenant.is_admin:
        raise PermissionDeniedError(f"The tenant '{tenant.name}' is no administrator.")


def _event(kind: str, next_sequence: int, hashes: list[str]) -> bytes:
    data = orjson.dumps({"next": next_sequence, "blocks": hashes})
    return b"event: %s\nid: %d\ndata: %s\n\n" % (kind.encode(), next_sequence, data)
