"""Small ASGI pieces: reading a bounded body, streaming server-sent events, watching for a client that leaves."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.api.responses import error_body
from engine.api.stream import error_event
from engine.core.errors import AuthenticationError, BodyTooLargeError, RaydixError, ServiceError

T = TypeVar("T")

JSON = "application/json"


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


async def read_body(request: Request, limit: int) -> bytes:
    """The request's body.

    Raises:
        BodyTooLargeError: it has, or says that it has, more than `limit` bytes; the rest is not read.
        ClientGoneError: the client left before its end.
    """
    too_large = BodyTooLargeError(f"The request body has more than {limit} bytes, which is the limit here.")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise too_large
            parts.append(part)
    except ClientDisconnect:
        raise ClientGoneError from None
    return b"".join(parts)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client leaves first.

    Raises:
        ClientGoneError: it left.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        await _cancel(task, gone)


def json_response(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers, JSON)


def error_response(error: RaydixError) -> Response:
    """OpenAI's error object with the error's status."""
    headers = {}
    if isinstance(error, ServiceError):
        headers["retry-after"] = str(error.retry_after_s)
    elif isinstance(error, AuthenticationError):
        headers["www-authenticate"] = "Bearer"
    return json_response(error_body(error), error.status, headers)


class EventStreamResponse(Response):
    """Streams events as they come. The status line is sent with the first of them, so what fails before is an error
    response; what fails after is an error event, and then the end. When the client leaves, `events` is closed."""

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        self._events = events
        self._head = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(scope, receive, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            await _cancel(pump, gone)

    async def _pump(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async with aclosing(self._events) as events:
                async for data in events:
                    if not started:
                        await send({"type": "http.response.start", "status": 200, "headers": self._head})
                        started = True
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except RaydixError as error:
            if not started:
                await error_response(error)(scope, receive, send)
                return
            await send({"type": "http.response.body", "body": error_event(error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
