"""Remembers the last workers of each session, so that a tie keeps the session there."""

from collections import OrderedDict
from hashlib import blake2b
from typing import NamedTuple

MAX_REMEMBERED = 1 << 16
"""Sessions; the least recently used is forgotten first."""


class Home(NamedTuple):
    """The workers of a session's last request."""

    prefill: str
    decode: str


NOWHERE = Home("", "")


class Homes:
    """The homes of the last `capacity` sessions, by tenant and name."""

    def __init__(self, capacity: int = MAX_REMEMBERED) -> None:
        self._capacity = capacity
        self._homes: OrderedDict[bytes, Home] = OrderedDict()

    def of(self, tenant: str, session: str | None) -> Home:
        """The last workers of a session; `NOWHERE` if unknown."""
        return NOWHERE if session is None else self._homes.get(_key(tenant, session), NOWHERE)

    def moved(self, tenant: str, session: str | None, home: Home) -> None:
        """Note the placement of a session's request."""
        if session is None:
            return
        key = _key(tenant, session)
        self._homes[key] = home
        self._homes.move_to_end(key)
        if len(self._homes) > self._capacity:
            self._homes.popitem(last=False)


def _key(tenant: str, session: str) -> bytes:
    """Names have any length; a digest has a fixed one."""
    return blake2b(f"{len(tenant)} {tenant}{session}".encode(), digest_size=16).digest()
