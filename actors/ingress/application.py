"""The HTTP application of one replica: its routes, what is checked before each of them, and the form of errors."""

from collections.abc import Collection
from http import HTTPStatus
from importlib.metadata import version

from fastapi import Depends, FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from raydix.actors.ingress.compression import Compression
from raydix.actors.ingress.cross_origin import CrossOrigin
from raydix.actors.ingress.http import (
    CLIENT_CLOSED_REQUEST,
    ClientGoneError,
    HeadAsGet,
    error_response,
    request_id_header,
)
from raydix.actors.ingress.recorder import Recorder, Recording
from raydix.actors.ingress.routes import (
    OPEN_ROUTES,
    PROBED_ROUTES,
    UNSUPPORTED_ROUTES,
    answers,
    batches,
    description,
    operation,
    page,
    tokens,
)
from raydix.actors.ingress.routes.replica import Replica, replica, route_of
from raydix.engine.api.anthropic.errors import ANTHROPIC
from raydix.engine.core.errors import RaydixError, RequestError, ServiceError
from raydix.engine.serving.accounting import internal_error


def application(of: Replica | None) -> FastAPI:
    """The application of a replica; of none, for a description of the routes."""
    app = FastAPI(
        title="raydix",
        version=version("raydix"),
        openapi_url=None,
        dependencies=[Depends(_guard), Depends(_authenticate)],
    )
    app.state.replica = of

    def allowed_origins() -> Collection[str]:
        of: Replica | None = app.state.replica
        return () if of is None else of.config.http.allowed_origins

    def recorder() -> Recorder | None:
        of: Replica | None = app.state.replica
        return None if of is None else of.recorder

    app.add_middleware(Recording, recorder=recorder)
    app.add_middleware(CrossOrigin, allowed=allowed_origins)
    app.add_middleware(Compression)
    app.add_middleware(HeadAsGet)
    for each in (answers, tokens, operation, batches, description, page):
        app.include_router(each.router)
    app.add_exception_handler(RaydixError, _raydix_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGoneError, _client_gone)
    app.add_exception_handler(Exception, unexpected_error)
    return app


async def _guard(request: Request) -> None:
    """Refuse requests that a web page may have made a browser send, before any work for them."""
    replica(request).require_trusted(request)


async def _authenticate(request: Request) -> None:
    """Store the tenant of a request in `request.state.tenant`."""
    if request.scope["route"].path not in OPEN_ROUTES:
        key = request.headers.get("x-api-key")
        by_key = None if key is None else f"Bearer {key}"
        request.state.tenant = replica(request).tenant_of(request.headers.get("authorization", by_key))


def _response(request: Request, error: RaydixError) -> Response:
    """The response with an error, in the form of the route."""
    if not request.url.path.startswith("/v1/messages"):
        return error_response(error)
    return error_response(error, ANTHROPIC, request_id_header(request))


async def _raydix_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RaydixError)
    is_answer = isinstance(error, ServiceError) and route_of(request) in PROBED_ROUTES  # it is what a probe asks for
    if not is_answer:
        replica(request).refused(error, route_of(request))
    return _response(request, error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = error.detail
    if request.url.path in UNSUPPORTED_ROUTES:
        detail = "This server has no model for ranking texts; use /v1/score or compare vectors of /v1/embeddings"
    wrapped = RequestError(f"{request.method} {request.url.path}: {detail}.")
    wrapped.status = error.status_code
    wrapped.code = HTTPStatus(error.status_code).name.lower()
    replica(request).refused(wrapped, route_of(request))
    response = _response(request, wrapped)
    response.headers.update(error.headers or {})
    return response


async def _client_gone(_: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def unexpected_error(request: Request, error: Exception) -> Response:
    """Answer a request that failed by a fault of the server's: the body names the record in the log, and no more."""
    shown = internal_error(error, request_id=getattr(request.state, "request_id", None), route=route_of(request))
    return _response(request, shown)
