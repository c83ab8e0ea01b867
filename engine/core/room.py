"""How many requests an ingress replica has under way, and whether there is room for more.

A request counts from before its prompt is tokenized to its end, so that a burst is refused before it costs anything.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from weakref import WeakSet

from engine.core.errors import OverloadedError, RequestError
from engine.core.generation import Generation
from engine.core.tenants import Tenant


class Room:
    """For at most `max_requests` requests, and as many of a tenant as that may have."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._counts: Counter[str] = Counter()
        """Of each tenant, reserved and begun."""
        self._expected: WeakSet[Generation] = WeakSet()
        """Made and not begun. One whose client leaves before it begins is forgotten by everybody, and so here."""

    @contextmanager
    def reserve(self, count: int, tenant: Tenant) -> Iterator[None]:
        """Room for the requests that are being made inside.

        Raises:
            OverloadedError: `count` more requests would be too many, in all or of this tenant.
            RequestError: they are more than this tenant may ever have.
        """
        self._require(count, tenant)
        self._counts[tenant.name] += count
        try:
            yield
        finally:
            self._counts[tenant.name] -= count

    def expect(self, generations: Iterable[Generation]) -> None:
        """These have been made and are about to begin."""
        self._expected.update(generations)

    def begin(self, generation: Generation) -> None:
        self._expected.discard(generation)
        self._counts[generation.tenant] += 1

    def end(self, generation: Generation) -> None:
        self._counts[generation.tenant] -= 1

    def _require(self, count: int, tenant: Tenant) -> None:
        num_all = self._counts.total() + len(self._expected)
        if num_all + count > self._max_requests:
            raise OverloadedError(
                f"{num_all} requests are under way and at most {self._max_requests} are accepted; try again later",
                retry_after_s=1,
            )
        if tenant.max_requests is None:
            return
        if count > tenant.max_requests:
            raise RequestError(f"{count} answers are more than the {tenant.max_requests} that are accepted at a time.")
        num_own = self._counts[tenant.name] + sum(each.tenant == tenant.name for each in self._expected)
        if num_own + count > tenant.max_requests:
            raise OverloadedError(
                f"{num_own} requests of '{tenant.name}' are under way and at most {tenant.max_requests} are "
                "accepted; try again later",
                retry_after_s=1,
            )
