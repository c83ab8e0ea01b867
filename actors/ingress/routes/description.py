"""Description of all routes, for programs and for people."""

import asyncio
from dataclasses import dataclass

import orjson
from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from raydix.actors.ingress.http import json_response
from raydix.actors.ingress.routes.api_document import api_document
from raydix.engine.api.docs_page import docs_page

router = APIRouter()

POLICY = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
"""The page loads nothing and runs nothing."""


@dataclass(frozen=True, slots=True)
class Description:
    """The document, and the page made of it."""

    document: bytes
    page: str

    @classmethod
    async def of(cls, app: FastAPI) -> "Description":
        """The description of the application's routes; kept in the application, since no route changes. It is made in
        a thread, as that takes some 150 ms, once for all who ask meanwhile. A failure is theirs alone: the next one who
        asks has it made again."""
        known: asyncio.Future[Description] | None = getattr(app.state, "description", None)
        if known is None or (known.done() and (known.cancelled() or known.exception() is not None)):
            known = app.state.description = asyncio.ensure_future(asyncio.to_thread(cls._made, app))
        return await asyncio.shield(known)

    @classmethod
    def _made(cls, app: FastAPI) -> "Description":
        document = api_document(app)
        return cls(orjson.dumps(document), docs_page(document))


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    """All routes, bodies, responses and errors, as OpenAPI's document."""
    return json_response((await Description.of(request.app)).document)


@router.get("/docs")
async def docs(request: Request) -> Response:
    """The same as a page, which needs no other server."""
    return HTMLResponse((await Description.of(request.app)).page, headers=POLICY)
