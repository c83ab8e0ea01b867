"""The HTTP application of one replica: its routes, what is checked before each of them, and the form of errors."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.routing import Route as StarletteRoute
from starlette.types import Scope

from raydix.actors.ingress.http import (
    CLIENT_CLOSED_REQUEST,
    ClientGoneError,
    HeadAsGet,
    error_response,
    request_id_header,
)
from raydix.actors.ingress.middleware import AllowanceHeaders, Compression, CrossOrigin, LoadHeaders
from raydix.actors.ingress.recorder import Recording, RequestRecorder
from raydix.actors.ingress.routes import (
    answers,
    batches,
    conversations,
    description,
    message_batches,
    operation,
    page,
)
from raydix.actors.ingress.routes.replica import Endpoint, Replica, path_of, replica, route_of
from raydix.actors.ingress.telemetry import Telemetry, Traced
from raydix.engine.api.anthropic.errors import ANTHROPIC
from raydix.engine.api.route import Access, Route
from raydix.engine.api.routes import MESSAGES, ROUTES
from raydix.engine.core.errors import RaydixError, RequestError, ServiceError
from raydix.engine.serving.accounting import internal_error

# Routes of other servers for ranking texts, which clients may look for here.
UNSUPPORTED_PATHS = {"/score", "/rerank", "/v1/rerank", "/v2/rerank"}


class ServedRoute(StarletteRoute):
    """A declared route with its handler."""

    def __init__(self, declared: Route, endpoint: Endpoint) -> None:
        super().__init__(declared.path, _checked(declared, endpoint), name=declared.name)
        self.declared = declared
        self.methods = {declared.method}  # without HEAD, which arrives as GET (`HeadAsGet`)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Names the route in the scope, also for another method's error."""
        match, found = super().matches(scope)
        return match, {**found, "route": self}


def _checked(declared: Route, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    """The handler behind the checks of its route; parameters of the path are its arguments."""

    async def checked(request: Request) -> Response:
        here = replica(request)
        here.require_trusted(request)  # before any work for a request that a web page may have made a browser send
        if declared.access is not Access.EVERYBODY:
            key = request.headers.get("x-api-key")
            by_key = None if key is None else f"Bearer {key}"
            request.state.tenant = here.tenant_of(request.headers.get("authorization", by_key))
        if declared.access is Access.ADMINISTRATORS:
            request.state.tenant.require_admin()
        return await endpoint(request, **request.path_params)

    return checked


def application(of: Replica) -> Starlette:
    endpoints = {
        route: endpoint
        for each in (answers, conversations, operation, batches, message_batches, description, page)
        for route, endpoint in each.ENDPOINTS.items()
    }

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        yield
        # Serve stops this replica: the requests have ended, and the process is about to be killed. No more than this
        # ends here: responses in the background go on at another replica, and are not to fail at this one.
        if (spans := telemetry()) is not None:
            await spans.close()

    app = Starlette(routes=[ServedRoute(route, endpoints[route]) for route in ROUTES], lifespan=lifespan)
    app.state.replica = of

    def allowed_origins() -> Collection[str]:
        now: Replica = app.state.replica
        return now.config.http.allowed_origins

    def recorder() -> RequestRecorder | None:
        now: Replica = app.state.replica
        return now.recorder

    def telemetry() -> Telemetry | None:
        now: Replica = app.state.replica
        return now.telemetry

    app.add_middleware(Traced, telemetry=telemetry)
    app.add_middleware(AllowanceHeaders)
    app.add_middleware(LoadHeaders)
    app.add_middleware(Recording, recorder=recorder)
    app.add_middleware(CrossOrigin, allowed=allowed_origins)
    app.add_middleware(Compression)
    app.add_middleware(HeadAsGet)
    app.add_exception_handler(RaydixError, _raydix_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGoneError, _client_gone)
    app.add_exception_handler(Exception, unexpected_error)
    return app


def _response(request: Request, error: RaydixError) -> Response:
    """The response with an error, in the form of the route."""
    if not request.url.path.startswith(MESSAGES.path):  # of a path that is no route, too
        return error_response(error)
    return error_response(error, ANTHROPIC, request_id_header(request))


async def _raydix_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RaydixError)
    is_answer = isinstance(error, ServiceError) and route_of(request).is_probe
    if not is_answer:
        replica(request).refused(error, path_of(request))
    return _response(request, error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = error.detail
    if request.url.path in UNSUPPORTED_PATHS:
        detail = "This server has no model for ranking texts; use /v1/score or compare vectors of /v1/embeddings"
    wrapped = RequestError(f"{request.method} {request.url.path}: {detail}.")
    wrapped.status = error.status_code
    wrapped.code = HTTPStatus(error.status_code).name.lower()
    replica(request).refused(wrapped, path_of(request))
    response = _response(request, wrapped)
    response.headers.update(error.headers or {})
    return response


async def _client_gone(_: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def unexpected_error(request: Request, error: Exception) -> Response:
    """Answer a request that failed by a fault of the server's: the body names the record in the log, and no more."""
    shown = internal_error(error, request_id=getattr(request.state, "request_id", None), route=path_of(request))
    return _response(request, shown)
