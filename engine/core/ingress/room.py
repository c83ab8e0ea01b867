"""Limits the concurrent requests of an ingress replica, and of each tenant, and the bytes of unfinished bodies.

Among several tenants none fills the limit alone: a tenant holds at most as many as it leaves free (`Shares.may_take`).

A request counts from before its prompt is tokenized until its last piece is there, and its client has not got it yet:
a burst is refused before it costs anything, and a client may send its next request at once.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from raydix.engine.core.errors import OverloadedError, RequestError
from raydix.engine.core.shares import Shares
from raydix.engine.core.tenants import Tenant, Tenants

RETRY_AFTER_S = 1  # time after which a refused client may try again: the room is full until some other request ends


@dataclass(frozen=True, slots=True)
class Allowance:
    """Permits of one tenant at a moment."""

    limit: int
    """Most permits that the tenant may hold."""
    remaining: int
    """Permits that the tenant could acquire at once."""


@dataclass(slots=True, eq=False)
class Permit:
    """Permission for one request. It has one owner at a time, and its last owner releases it, once."""

    tenant: str
    room: "Room"
    is_held: bool = True

    def release(self) -> None:
        """Let another request in."""
        assert self.is_held, "a permit is released once"
        self.is_held = False
        self.room.released(self)

    def __del__(self) -> None:
        if self.is_held:
            self.release()  # A fault elsewhere is not to make the room smaller for good.
            warnings.warn(f"a permit of {self.tenant!r} was never released", ResourceWarning, source=self, stacklevel=1)


class Room:
    """A limit of `max_requests` permits, and of each tenant's own `Tenant.max_requests`."""

    def __init__(self, max_requests: int, tenants: Tenants | None = None) -> None:
        """`tenants`: those that share the limit."""
        self.max_requests = max_requests
        self._tenants = tenants
        self._most_held = max_requests  # the limit, or the permits that were held already when the limit was lowered
        self._held = Shares()  # permits by tenant

    def limit(self, max_requests: int) -> None:
        """Take another limit. Permits that are held beyond a lower one stay."""
        self.max_requests = max_requests
        self._most_held = max(max_requests, self.num_held)

    @property
    def num_held(self) -> int:
        """Permits that were acquired and not released."""
        return self._held.total

    def held_by(self, tenant: Tenant) -> int:
        """Permits of one tenant that were acquired and not released."""
        return self._held.used(tenant.name)

    def most(self, tenant: Tenant) -> int:
        """Permits that a tenant may hold at most."""
        return min(self.max_requests, tenant.max_requests or self.max_requests)

    def allowance(self, tenant: Tenant) -> Allowance:
        """Limit and remaining permits of a tenant, as `acquire` counts them."""
        left = max(0, self.max_requests - self.num_held)
        if self._tenants is not None and self._tenants.are_several:
            left = self._held.left(tenant.name, self.max_requests)
        most = self.most(tenant)
        return Allowance(most, max(0, min(left, most - self.held_by(tenant))))

    def acquire(self, count: int, tenant: Tenant) -> list[Permit]:
        """Return `count` permits, which the caller owns.

        Raises:
            OverloadedError: `count` more requests would exceed the limit, of the replica or of this tenant.
            RequestError: `count` alone exceeds one of these limits.
        """
        self._require(count, tenant)
        self._held.add(tenant.name, count)
        return [Permit(tenant.name, self) for _ in range(count)]

    @contextmanager
    def reserve(self, count: int, tenant: Tenant, handed: Sequence[Permit] = ()) -> Iterator[list[Permit]]:
        """Acquire permits beside those that an owner has `handed` over, `count` in all, and release those that are left
        in the list at the end. Errors as `acquire`."""
        permits = [*handed]
        try:
            if count > len(permits):
                permits += self.acquire(count - len(permits), tenant)
            yield permits
        finally:
            for permit in permits:
                permit.release()

    def released(self, permit: Permit) -> None:
        """Count a permit less; called by the permit alone."""
        self._held.add(permit.tenant, -1)

    def check_integrity(self) -> None:
        """Assert that no more permits are held than the limit allowed. `Shares` counts no tenant below nothing."""
        assert self.num_held <= self._most_held

    def _require(self, count: int, tenant: Tenant) -> None:
        # First, and another kind of error: such a request would never find room, so it must not be tried again.
        most = self.most(tenant)
        if count > most:
            raise RequestError(f"The request needs {count} answers, but at most {most} are accepted at a time.")

        if self.num_held + count > self.max_requests:
            raise OverloadedError(
                f"{self.num_held} requests are under way and at most {self.max_requests} are accepted; try again later",
                retry_after_s=RETRY_AFTER_S,
            )

        num_own = self._held.used(tenant.name)
        is_shared = self._tenants is not None and self._tenants.are_several
        if is_shared and not self._held.may_take(tenant.name, count, self.max_requests):
            raise OverloadedError(
                f"{num_own} requests of '{tenant.name}' are under way, and the room that is left is for others; try "
                "again later",
                retry_after_s=RETRY_AFTER_S,
            )

        if tenant.max_requests is None:
            return
        if num_own + count > tenant.max_requests:
            raise OverloadedError(
                f"{num_own} requests of '{tenant.name}' are under way and at most {tenant.max_requests} are "
                "accepted; try again later",
                retry_after_s=RETRY_AFTER_S,
            )


@dataclass(slots=True, eq=False)
class Body:
    """The received bytes of one request."""

    parts: list[bytes] = field(default_factory=list)
    num_bytes: int = 0
    is_refused: bool = False


class BodyRoom:
    """A limit of `max_bytes` for all unfinished bodies together.

    Above the limit the largest body is refused. So a client with many large, slow bodies loses these, and a short
    request always fits.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bodies: set[Body] = set()
        self._num_bytes = 0

    def limit(self, max_bytes: int) -> None:
        """Take another limit; above a lower one the largest bodies are refused."""
        self._max_bytes = max_bytes
        self._refuse_largest()

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return self._num_bytes

    def begin(self) -> Body:
        """Register a body without bytes; `end` frees its bytes again."""
        body = Body()
        self._bodies.add(body)
        return body

    def grow(self, body: Body, part: bytes) -> None:
        """Keep another part of a body.

        Raises:
            OverloadedError: the body was refused as the largest, now or when another grew.
        """
        # A refused body's bytes are gone, and its sender hears of it with the next part.
        if not body.is_refused:
            body.parts.append(part)
            body.num_bytes += len(part)
            self._num_bytes += len(part)
        self._refuse_largest()
        if body.is_refused:
            raise OverloadedError(
                f"The request bodies that are arriving have more than {self._max_bytes} bytes together; try again later"
            )

    def end(self, body: Body) -> None:
        """Stop counting a body: complete, or given up."""
        if body in self._bodies:
            self._bodies.remove(body)
            self._num_bytes -= body.num_bytes

    def check_integrity(self) -> None:
        """Assert that the sum is the bodies' and within the limit."""
        assert self._num_bytes == sum(body.num_bytes for body in self._bodies) <= self._max_bytes
        assert all(sum(map(len, body.parts)) == body.num_bytes for body in self._bodies)

    def _refuse_largest(self) -> None:
        while self._num_bytes > self._max_bytes:
            self._refuse(max(self._bodies, key=lambda each: each.num_bytes))

    def _refuse(self, body: Body) -> None:
        body.is_refused = True
        body.parts.clear()
        self.end(body)
