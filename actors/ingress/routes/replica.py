"""The answering replica, as seen by code outside of its class."""

from typing import Any, Protocol

from ray import serve
from starlette.requests import Request

from actors.ingress.batches import Batches
from actors.ingress.frontend import Frontend
from configs.schema import Config
from engine.core.errors import RaydixError
from engine.core.tenants import Tenant


class Replica(Protocol):
    """The part of `actors.ingress.app.Ingress` that routes and checks of all requests use."""

    config: Config
    frontend: Frontend
    batches: Batches | None

    def require_trusted(self, request: Request) -> None:
        """Refuse a request that a web page may have made a browser send."""

    def tenant_of(self, authorization: str | None) -> Tenant:
        """The tenant of a request with this header."""

    def refused(self, error: RaydixError, route: str) -> None:
        """Account for an error that a client got at a route."""

    async def body_of(self, request: Request) -> bytes:
        """Read a JSON body within the limits."""


def replica() -> Replica:
    """The ingress replica of this process."""
    servable: Any = serve.get_replica_context().servable_object
    found: Replica = servable
    return found
