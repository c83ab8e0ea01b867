"""The page at `/`: files of `actors/ingress/page`, which are the same for everybody and know nothing of this server.

The page asks the other routes for everything that it shows, with the key that its reader enters; so it shows nobody
more than those routes do.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import Response

from raydix.actors.ingress.routes.replica import Endpoint, replica
from raydix.engine.api import routes
from raydix.engine.api.route import Route
from raydix.engine.core.errors import NotFoundError

FOLDER = Path(__file__).parents[1] / "page"
INDEX = "index.html"
# Content types by the ends of names.
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing comes from elsewhere or goes there, no other page frames this one, and no text can become markup: answers of
# models are shown as text nodes.
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    ]
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # asks each time whether the file is another one
}


@dataclass(frozen=True, slots=True)
class File:
    """A file of the page."""

    content: bytes
    content_type: str
    etag: str
    """Weak, since the content may be sent compressed."""

    @classmethod
    def read(cls, path: Path) -> "File":
        content = path.read_bytes()
        return cls(content, TYPES[path.suffix], f'W/"{hashlib.sha256(content).hexdigest()[:20]}"')


# Files of the page by name. They are read once: nothing that a client writes reaches a file system.
FILES: Mapping[str, File] = MappingProxyType({path.name: File.read(path) for path in sorted(FOLDER.iterdir())})


async def page(request: Request) -> Response:
    return await page_file(request, INDEX)


async def page_file(request: Request, name: str) -> Response:
    file = FILES.get(name)
    if file is None or not replica(request).config.http.page:
        raise NotFoundError(f"There is no page '{request.url.path[:100]}' here.")
    headers = {**HEADERS, "etag": file.etag}
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.content_type)


ENDPOINTS: Mapping[Route, Endpoint] = {
    routes.PAGE: page,
    routes.PAGE_FILE: page_file,
}
