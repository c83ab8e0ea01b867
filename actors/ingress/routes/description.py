"""Description of all routes, for programs and for people."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from raydix.actors.ingress.http import json_response
from raydix.actors.ingress.routes.replica import Endpoint
from raydix.engine.api import routes
from raydix.engine.api.docs_page import docs_page
from raydix.engine.api.openapi import document
from raydix.engine.api.route import Route

# The page loads nothing and runs nothing.
POLICY = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}


@dataclass(frozen=True, slots=True)
class Description:
    """The document, and the page made of it."""

    document: bytes
    page: str

    @classmethod
    async def of(cls, app: Starlette) -> "Description":
        """The description of the application's routes; kept in the application, since no route changes. It is made in
        a thread, as that takes some 150 ms, once for all who ask meanwhile. A failure is theirs alone: the next one who
        asks has it made again."""
        known: asyncio.Future[Description] | None = getattr(app.state, "description", None)
        if known is None or (known.done() and (known.cancelled() or known.exception() is not None)):
            known = app.state.description = asyncio.ensure_future(asyncio.to_thread(cls._made))
        return await asyncio.shield(known)

    @classmethod
    def _made(cls) -> "Description":
        described = document(routes.ROUTES, version=version("raydix"))
        return cls(orjson.dumps(described), docs_page(described))


async def openapi(request: Request) -> Response:
    return json_response((await Description.of(request.app)).document)


async def docs(request: Request) -> Response:
    return HTMLResponse((await Description.of(request.app)).page, headers=POLICY)


ENDPOINTS: Mapping[Route, Endpoint] = {
    routes.OPENAPI: openapi,
    routes.DOCS: docs,
}
