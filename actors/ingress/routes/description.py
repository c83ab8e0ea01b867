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
class _Description:
    """The document, and the page made of it."""

    document: bytes
    page: str

    @classmethod
    async def of(cls, app: FastAPI) -> "_Description":
        """The description of the application's routes; kept in the application, since no route changes. It is made in
        a thread, as that takes some 150 ms, once for all who ask meanwhile."""
        if getattr(app.state, "description", None) is None:
            app.state.description = asyncio.ensure_future(asyncio.to_thread(cls._made, app))
        made: asyncio.Future[_Description] = app.state.description
        return await asyncio.shield(made)

    @classmethod
    def _made(cls, app: FastAPI) -> "_Description":
        document = api_document(app)
        return cls(orjson.dumps(document), docs_page(document))


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    """All routes, bodies, responses and errors, as OpenAPI's document."""
    return json_response((await _Description.of(request.app)).document)


@router.get("/docs")
async def docs(request: Request) -> Response:
    """The same as a page, which needs no other server."""
    return HTMLResponse((await _Description.of(request.app)).page, headers=POLICY)
