"""The replica that answers a request, as routes see it."""

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from raydix.actors.ingress.batches import Batches
from raydix.actors.ingress.frontend import Frontend
from raydix.actors.ingress.recorder import RequestRecorder
from raydix.actors.ingress.telemetry import Telemetry
from raydix.configs.schema import Config
from raydix.engine.api.route import Route
from raydix.engine.core.errors import RaydixError
from raydix.engine.core.tenants import Tenant
from raydix.engine.serving.accounting import OTHER_ROUTE

Endpoint: TypeAlias = Callable[..., Awaitable[Response]]
"""Answers a request of a route; parameters of the path are further arguments."""


class Replica(Protocol):
    """The part of `raydix.actors.ingress.replica.IngressReplica` that routes and the checks of all requests use."""

    config: Config
    frontend: Frontend
    batches: Batches | None
    recorder: RequestRecorder | None

    @property
    def telemetry(self) -> Telemetry | None:
        """Spans of requests, where they are sent anywhere."""

    def require_trusted(self, request: Request) -> None:
        """Refuse a request that a web page may have made a browser send."""

    def tenant_of(self, authorization: str | None) -> Tenant:
        """The tenant of a request with this header."""

    def refused(self, error: RaydixError, route: str) -> None:
        """Account for an error that a client got at a route."""

    async def body_of(self, request: Request) -> bytes:
        """Read a JSON body within the limits."""


def route_of(request: Request) -> Route:
    found: Route = request.scope["route"].declared
    return found


def path_of(request: Request) -> str:
    """Path of the route of a request, with names in place of ids, so that there are few; `OTHER_ROUTE` without one."""
    return str(getattr(request.scope.get("route"), "path", OTHER_ROUTE))


def refusing(request: Request) -> Callable[[RaydixError], None]:
    """Accounts for errors that a stream's client gets."""
    ingress, path = replica(request), path_of(request)
    return lambda error: ingress.refused(error, path)


def replica(request: Request) -> Replica:
    """The ingress replica that serves the request's application."""
    found: Replica = request.app.state.replica
    return found
