"""Middleware of the application, around its routes.

* `Compression`: large answers are compressed where the client takes gzip (RFC 9110, 12.5.3). Streams of events stay as
  they are: a proxy or a client that waits for a whole compressed block would hold tokens back.
* `AllowanceHeaders`: the limit of a client's requests and what is left of it, at every route that counts requests. The
  headers stand in answers, in streams and in errors alike, with the numbers of the moment in which the head is sent:
  those of the ingress replica that answers.
* `LoadHeaders`: the load of the workers at the same routes, for a client that asks for it.
* `CrossOrigin`: requests from pages of other sites, as far as the configuration allows (CORS).
"""

import asyncio
import time
import zlib
from collections.abc import Callable, Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raydix.actors.ingress.http import APPLIED_HEADER, IGNORED_HEADER
from raydix.actors.ingress.routes.replica import Replica
from raydix.engine.api.anthropic.errors import ANTHROPIC
from raydix.engine.api.guards import is_allowed_origin
from raydix.engine.api.load_report import FORMAT_HEADER, LOAD_HEADER, load_format, load_report
from raydix.engine.api.route import Route
from raydix.engine.api.wire import OPENAI
from raydix.engine.core.ingress.room import Allowance

LEAST_BYTES = 16 << 10  # smaller bodies cost more time than the network takes for them
# Bodies and slices from here on are compressed beside the event loop: a mebibyte takes some 10 ms.
BESIDE_BYTES = 64 << 10
LEVEL = 1
GZIP = 16 + zlib.MAX_WBITS


class Compression:
    """Compresses the bodies of one application's responses."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_asked = takes_gzip(Headers(scope=scope).get("accept-encoding", ""))
        await self._app(scope, receive, _Compressing(send, is_asked).send)


class _Compressing:
    """Sends one response. Its head is held until the first part of the body, which may tell whether it is large."""

    def __init__(self, send: Send, is_asked: bool) -> None:
        """`is_asked`: the client takes gzip."""
        self._send = send
        self._is_asked = is_asked
        self._head: Message | None = None
        self._compressor: zlib._Compress | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._head = message
            return
        if message["type"] != "http.response.body":
            await self._send(message)
            return

        if self._head is not None:
            head, self._head = self._head, None
            await self._send(self._begun(head, message))
        if self._compressor is not None:
            message = {**message, "body": await self._compressed(self._compressor, message)}
        await self._send(message)

    def _begun(self, head: Message, first: Message) -> Message:
        """Return the head of a response, and get ready to compress a body that is large, for a client that asks."""
        headers = MutableHeaders(raw=list(head["headers"]))
        is_stream = headers.get("content-type", "").startswith("text/event-stream")
        is_fixed = is_stream or "content-encoding" in headers or "content-range" in headers
        if is_fixed or not _is_large(headers, first):
            return head

        # In both forms, so that a cache gives neither to the clients of the other.
        headers.add_vary_header("accept-encoding")
        if self._is_asked:
            self._compressor = zlib.compressobj(LEVEL, wbits=GZIP)
            del headers["content-length"]
            headers["content-encoding"] = "gzip"
            # A strong tag would let a client complete a part of this form with a range of the other.
            if (tag := headers.get("etag", "")).startswith('"'):
                headers["etag"] = f"W/{tag}"
        return {**head, "headers": headers.raw}

    @staticmethod
    async def _compressed(compressor: "zlib._Compress", message: Message) -> bytes:
        """Return the part of the compressed body that a part of the body comes to."""
        body, is_last = message.get("body", b""), not message.get("more_body", False)

        def compressed() -> bytes:
            return compressor.compress(body) + (compressor.flush() if is_last else b"")

        return compressed() if len(body) < BESIDE_BYTES else await asyncio.to_thread(compressed)


def _is_large(headers: Headers, first: Message) -> bool:
    """True if a body is large, by its declared length or its first part. A body of several parts without a length is an
    answer too large to be made at once."""
    declared = headers.get("content-length")
    if declared is not None:
        return int(declared) >= LEAST_BYTES
    return first.get("more_body", False) or len(first.get("body", b"")) >= LEAST_BYTES


def takes_gzip(accepted: str) -> bool:
    """True if an `Accept-Encoding` names gzip, and does not weigh it with nothing."""
    for each in accepted.lower().split(","):
        name, _, weight = each.partition(";")
        if name.strip() in ("gzip", "x-gzip"):
            return weight.replace(" ", "").strip("0.") != "q="
    return False


class AllowanceHeaders:
    """Adds the headers to one application's responses, in the words of the route's API."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            # The route and the tenant are known once the request has reached the one and shown the other's key.
            tenant = scope.get("state", {}).get("tenant")
            if message["type"] == "http.response.start" and tenant is not None:
                route: Route = scope["route"].declared
                if route.has_limit:
                    replica: Replica = scope["app"].state.replica
                    shown = route.wire.allowance(replica.frontend.allowance(tenant), time.time())
                    MutableHeaders(scope=message).update(shown)
            await send(message)

        await self._app(scope, receive, send_with_headers)


class LoadHeaders:
    """Adds the load of the workers to those of one application's responses whose requests ask for it (ORCA)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        form = load_format(Headers(scope=scope).get(FORMAT_HEADER, "")) if scope["type"] == "http" else None
        if form is None:
            await self._app(scope, receive, send)
            return

        async def send_with_load(message: Message) -> None:
            # The tenant is known once the request has shown a key: strangers learn nothing of the load.
            is_known = message["type"] == "http.response.start" and "tenant" in scope.get("state", {})
            if is_known and scope["route"].declared.has_limit:
                replica: Replica = scope["app"].state.replica
                load = await replica.frontend.cluster_load.now()
                if load is not None:
                    MutableHeaders(scope=message)[LOAD_HEADER] = load_report(form, load)
            await send(message)

        await self._app(scope, receive, send_with_load)


METHODS = ("GET", "POST", "DELETE")
# Headers of responses for pages to read, besides the usual ones.
SHOWN_HEADERS = (
    "retry-after",
    IGNORED_HEADER,
    APPLIED_HEADER,
    LOAD_HEADER,
    *(name for wire in (OPENAI, ANTHROPIC) for name in wire.allowance(Allowance(0, 0), 0.0)),
)


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
