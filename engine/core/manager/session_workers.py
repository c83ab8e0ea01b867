"""Remembers the last workers of each session, so that a tie keeps the session there."""

from collections import OrderedDict
from hashlib import blake2b
from typing import NamedTuple

MAX_REMEMBERED = 1 << 16
"""Sessions; the least recently used is forgotten first."""


class SessionWorkers(NamedTuple):
    """The workers of a session's last request."""

    prefill: str
    decode: str


NO_WORKERS = SessionWorkers("", "")


class Sessions:
    """The last workers of the most recent `capacity` sessions, by tenant and name."""

    def __init__(self, capacity: int = MAX_REMEMBERED) -> None:
        self._capacity = capacity
        self._sessions: OrderedDict[bytes, SessionWorkers] = OrderedDict()

    def of(self, tenant: str, session: str | None) -> SessionWorkers:
        """The last workers of a session; `NO_WORKERS` if unknown."""
        return NO_WORKERS if session is None else self._sessions.get(_key(tenant, session), NO_WORKERS)

    def moved(self, tenant: str, session: str | None, workers: SessionWorkers) -> None:
        """Note the placement of a session's request."""
        if session is None:
            return
        key = _key(tenant, session)
        self._sessions[key] = workers
        self._sessions.move_to_end(key)
        if len(self._sessions) > self._capacity:
            self._sessions.popitem(last=False)


def _key(tenant: str, session: str) -> bytes:
    """Names have any length; a digest has a fixed one."""
    return blake2b(f"{len(tenant)} {tenant}{session}".encode(), digest_size=16).digest()
