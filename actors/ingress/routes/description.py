"""Description of all routes, for programs and for people."""

from dataclasses import dataclass

import orjson
from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from actors.ingress.http import json_response
from actors.ingress.routes.api_document import api_document
from engine.api.docs_page import docs_page

router = APIRouter()

POLICY = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
"""The page loads nothing and runs nothing."""


@dataclass(frozen=True, slots=True)
class _Description:
    """The document, and the page made of it."""

    document: bytes
    page: str

    @classmethod
    def of(cls, app: FastAPI) -> "_Description":
        """The description of the application's routes; kept in the application, since no route changes."""
        known = getattr(app.state, "description", None)
        if not isinstance(known, cls):
            document = api_document(app)
            known = app.state.description = cls(orjson.dumps(document), docs_page(document))
        return known


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    """All routes, bodies, responses and errors, as OpenAPI's document."""
    return json_response(_Description.of(request.app).document)


@router.get("/docs")
async def docs(request: Request) -> Response:
    """The same as a page, which needs no other server."""
    return HTMLResponse(_Description.of(request.app).page, headers=POLICY)
