"""The limit of open files (`ulimit -n`), and how many clients' connections it leaves room for.

HAProxy reserves two descriptors for each of its own connections (its `maxconn`), one on either side, and does not start
where the hard limit has no room for them. A client's request that is tried at another part of the server, or that finds
its replica's connection closing, needs a third. Where clients take all connections, HAProxy fails to open the next one
to a replica and declares the replica dead. So clients get two thirds of the connections (`Connections`), and a server
under a low limit has fewer; clients beyond them wait in the kernel's queue.
"""

import resource
from dataclasses import dataclass

from raydix.engine.core.errors import StartupError

MOST_OF_CLIENTS = 4096
OWN = 64  # descriptors of HAProxy beside its connections: listeners, checks of the ingress replicas
LEAST = 256  # least limit: a process of Ray's has up to 90 files open before the first request


@dataclass(frozen=True, slots=True)
class Connections:
    """Connections that HAProxy has at the same time."""

    of_clients: int

    @property
    def total(self) -> int:
        return self.of_clients * 3 // 2


def hard_limit() -> int | None:
    """The limit up to which Ray's processes raise their own; None: there is none."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if hard == resource.RLIM_INFINITY else hard


def connections() -> Connections:
    """Return the numbers of connections for which this process's limit has room."""
    limit = hard_limit()
    return Connections(MOST_OF_CLIENTS if limit is None else max(1, min(MOST_OF_CLIENTS, (limit - OWN) // 3)))


def check_descriptors() -> str:
    """A line for the operator of a server that takes fewer connections for want of descriptors; empty elsewhere.

    Raises:
        StartupError: the limit is too low for a server.
    """
    limit, most = hard_limit(), connections().of_clients
    if limit is not None and limit < LEAST:
        raise StartupError(f"a process may open {limit} files (ulimit -Hn), and a server needs {LEAST}")
    if most == MOST_OF_CLIENTS:
        return ""
    return f"a process may open {limit} files (ulimit -Hn): the server takes {most} connections at a time"
