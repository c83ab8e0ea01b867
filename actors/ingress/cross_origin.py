"""Requests from pages of other sites, as far as the configuration allows (CORS)."""

from collections.abc import Callable, Collection

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from raydix.actors.ingress.http import IGNORED_HEADER
from raydix.engine.api.anthropic.errors import ANTHROPIC
from raydix.engine.api.guards import is_allowed_origin
from raydix.engine.api.wire import OPENAI
from raydix.engine.core.ingress.room import Allowance

METHODS = ("GET", "POST", "DELETE")
SHOWN_HEADERS = (
    "retry-after",
    IGNORED_HEADER,
    *(name for wire in (OPENAI, ANTHROPIC) for name in wire.allowance(Allowance(0, 0), 0.0)),
)
"""Headers of responses for pages to read, besides the usual ones."""


class CrossOrigin:
    """Tells browsers to let pages of allowed origins send requests and read the answers.

    Other requests pass through untouched, so browsers keep the answers from their pages.
    """

    def __init__(self, app: ASGIApp, allowed: Callable[[], Collection[str]]) -> None:
        """`allowed` gives the origins, `*` for all; known only once the replica has its configuration."""
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await self._handler(scope)(scope, receive, send)

    def _handler(self, scope: Scope) -> ASGIApp:
        allowed = self._allowed() if scope["type"] == "http" else ()
        if not allowed or not is_allowed_origin(Headers(scope=scope).get("origin"), allowed):
            return self._app
        return CORSMiddleware(
            self._app,
            allow_origins=allowed,
            allow_methods=METHODS,
            allow_headers=["*"],
            expose_headers=SHOWN_HEADERS,
        )
