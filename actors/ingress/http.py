"""Small ASGI pieces: reading a bounded body, streaming server-sent events, watching for a client that leaves."""

import asyncio
import contextlib
import re
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raydix.engine.api.guards import IDENTITY
from raydix.engine.api.parameters import TPOT_HEADER, TTFT_HEADER
from raydix.engine.api.prompts import MAX_LABEL_LEN
from raydix.engine.api.spec import MAX_OBJECTIVE_MS, GenerationSpec
from raydix.engine.api.wire import OPENAI, PAUSED, WireFormat
from raydix.engine.core.errors import (
    AuthenticationError,
    BodyTimeoutError,
    BodyTooLargeError,
    ContentEncodingError,
    RaydixError,
    RequestError,
    ServiceError,
)
from raydix.engine.core.ingress.room import BodyRoom
from raydix.engine.core.objectives import Objectives

T = TypeVar("T")

JSON = "application/json"
# Headers of a response with the names of the body's fields that had no effect, and of hints with what they became.
IGNORED_HEADER, APPLIED_HEADER = "x-raydix-ignored", "x-raydix-applied"
MAX_SHOWN = 40  # characters of a header's value in an error
QUIET_S = 10.0  # seconds without an event, and without a status line, after which a stream gets `WireFormat.waiting`


CLIENT_CLOSED_REQUEST = 499  # status that proxies log for a client that left; no client reads it


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


async def read_body(request: Request, limit: int, room: BodyRoom, timeout_s: float) -> bytes:
    """Return the request's body, which has room in `room` while it arrives.

    Raises:
        BodyTooLargeError: the body has, or declares, more than `limit` bytes; the remainder is not read.
        BodyTimeoutError: the end of the body did not come within `timeout_s`.
        OverloadedError: arriving bodies have too many bytes together, and this body the most.
        ClientGoneError: the client left before the end of the body.
    """
    too_large = BodyTooLargeError(f"The request body has more than {limit} bytes, which is the limit here.")
    # Refused before a byte is read where the client says how many come; others are counted as they come.
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and declared.isascii() and int(declared) > limit:
        raise too_large

    body = room.begin()
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                room.grow(body, part)
                if body.num_bytes > limit:
                    raise too_large
        return b"".join(body.parts)
    except ClientDisconnect:
        raise ClientGoneError from None
    except TimeoutError:
        raise BodyTimeoutError(
            f"The request body did not arrive within {timeout_s:g} s; {body.num_bytes} bytes arrived."
        ) from None
    finally:
        room.end(body)


def label_header(request: Request, name: str) -> str | None:
    """The value of a header that stands in for a field of the body, with the field's bound; None without one. Raises
    RequestError naming the header."""
    value = request.headers.get(name)
    if value is not None and len(value) > MAX_LABEL_LEN:
        raise RequestError(
            f"The header '{name}' must have at most {MAX_LABEL_LEN} characters, got {len(value)}.", param=name
        )
    return value or None


def objective_headers(request: Request) -> Objectives:
    """The objectives in a request's headers. Raises RequestError naming the header."""
    return Objectives.of_ms(_milliseconds(request, TTFT_HEADER), _milliseconds(request, TPOT_HEADER))


def _milliseconds(request: Request, name: str) -> float | None:
    value = request.headers.get(name)
    if not value:
        return None
    with contextlib.suppress(ValueError):
        if 0 < (number := float(value)) <= MAX_OBJECTIVE_MS:
            return number
    raise RequestError(
        f"The header '{name}' must be a number of milliseconds above 0, at most {MAX_OBJECTIVE_MS:,}, "
        f"got {value[:MAX_SHOWN]!r}.",
        param=name,
    )


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is cancelled if the client leaves first.

    Raises:
        ClientGoneError: the client left.
    """
    task = _begun(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        await _cancel(task, gone)


def hint_headers(spec: GenerationSpec) -> dict[str, str]:
    """The headers with the names of a body's fields that had no effect, and of those that acted in another way; no
    header without such fields. A client may have made a name up: each character that could end or divide the header
    becomes `?`."""

    def shown(names: Sequence[str]) -> str:
        return ", ".join(re.sub(r"[^\w.:\[\]-]", "?", name, flags=re.ASCII) for name in names)

    both = {IGNORED_HEADER: spec.ignored, APPLIED_HEADER: spec.applied}
    return {header: shown(names) for header, names in both.items() if names}


def request_id_header(request: Request) -> dict[str, str]:
    """Anthropic's header with the id of a request: the one in logs, or a new one before there is one."""
    return {"request-id": f"req_{getattr(request.state, 'request_id', None) or uuid.uuid4().hex}"}


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]


def json_response(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers, JSON)


class SlicedResponse(Response):
    """A JSON body that is sent slice by slice as it is made. When the client leaves, `slices` is closed; what
    `held` holds is given back last."""

    def __init__(
        self, slices: AsyncGenerator[bytes], held: contextlib.AsyncExitStack, headers: Mapping[str, str]
    ) -> None:
        self._slices = slices
        self._held = held
        self._head = _encoded({"content-type": JSON, **headers})
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = _begun(self._pump(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            # Memory of the answer is given back last, when neither task can touch the answer any more.
            async with self._held:
                await _cancel(pump, gone)

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._head})
        async with contextlib.aclosing(self._slices) as slices:
            async for data in slices:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def error_response(error: RaydixError, wire: WireFormat = OPENAI, headers: Mapping[str, str] | None = None) -> Response:
    """An API's error object with the error's status, and with these headers besides the error's own."""
    headers = dict(headers or {})
    if isinstance(error, ServiceError):
        headers["retry-after"] = str(error.retry_after_s)
    elif isinstance(error, BodyTimeoutError):
        headers["connection"] = "close"
    elif isinstance(error, AuthenticationError):
        headers["www-authenticate"] = "Bearer"
    elif isinstance(error, ContentEncodingError):
        headers["accept-encoding"] = IDENTITY  # of requests, as RFC 9110 (12.5.3) has a 415 say
    return json_response(wire.error_body(error), wire.status(error), headers)


class EventStreamResponse(Response):
    """Streams events as they come.

    The status line is sent with the first event, so an error before it is an error response, with the same `headers`;
    an error after it is an error event, and then the end. `on_error` is called in both cases. After each `QUIET_S`
    without an event a sign of life is sent, which clients ignore, so that neither clients nor proxies take the
    connection for dead; `is_paused`: True while that says that the request's session waits for its turn. `wire`: the
    form of errors and signs of life at this moment. When the client leaves, `events` is closed. `on_end` is called
    last, also if the client left before `events` began.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        on_error: Callable[[RaydixError], None],
        on_end: Callable[[], None] | None = None,
        *,
        wire: Callable[[], WireFormat] = lambda: OPENAI,
        headers: Mapping[str, str] | None = None,
        is_paused: Callable[[], bool] | None = None,
    ) -> None:
        self._events = events
        self._is_paused = is_paused
        self._wire = wire
        self._on_error = on_error
        self._on_end = on_end
        self._more_headers = headers or {}
        # Inside an event whose end has not been sent yet there is no sign of life.
        self._is_started = self._is_over = self._is_inside = False
        self._sent_at = time.monotonic()
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = _begun(self._pump(scope, receive, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        comments = asyncio.ensure_future(self._comment(send))
        try:
            await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            try:
                # The end of the pump closes the events, and so ends the request at its workers.
                await _cancel(pump, gone, comments)
            finally:
                if self._on_end is not None:
                    self._on_end()

    async def _pump(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with contextlib.aclosing(self._events) as events:
                async for data in events:
                    await self._send(send, data)
        except RaydixError as error:
            self._on_error(error)
            self._is_over = True
            if not self._is_started:
                await error_response(error, self._wire(), self._more_headers)(scope, receive, send)
                return
            await send({"type": "http.response.body", "body": self._wire().error_event(error), "more_body": True})
        self._is_over = True
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        if not self._is_started:
            self._is_started = True
            usual = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
            head = _encoded({**usual, **self._more_headers})
            await send({"type": "http.response.start", "status": 200, "headers": head})
        self._sent_at = time.monotonic()
        # A slice of a long event has no blank line at its end; a comment there would be a part of the event's data.
        self._is_inside = not data.endswith(b"\n\n")
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _comment(self, send: Send) -> None:
        """Send a sign of life whenever nothing else was sent for `QUIET_S`."""
        while True:
            await asyncio.sleep(self._sent_at + QUIET_S - time.monotonic())
            if self._is_over:
                return
            # The rest of the event is coming, which is a sign of life itself.
            if self._is_inside:
                self._sent_at = time.monotonic()
            elif time.monotonic() >= self._sent_at + QUIET_S:
                is_paused = self._is_paused is not None and self._is_paused()
                await self._send(send, PAUSED if is_paused else self._wire().waiting)


class HeadAsGet:
    """Answers HEAD as GET, without the body: the routes say nothing of HEAD."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        # Other methods, and messages of the server's own life, pass as they are.
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        has_answered = asyncio.Event()

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                has_answered.set()

        async def receive_until_answered() -> Message:
            """Receive a message; after the head the client counts as gone, so that a stream of events ends."""
            coming, answered = asyncio.ensure_future(receive()), asyncio.ensure_future(has_answered.wait())
            try:
                await asyncio.wait({coming, answered}, return_when=asyncio.FIRST_COMPLETED)
                return coming.result() if coming.done() else {"type": "http.disconnect"}
            finally:
                await _cancel(coming, answered)

        await self._app({**scope, "method": "GET"}, receive_until_answered, send_head)


def _begun(work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    """A task for the current one's request, whose name it has for the watchdog."""
    # The watchdog blames a task by its name for a held event loop.
    current = asyncio.current_task()
    return asyncio.create_task(work, name=None if current is None else current.get_name())


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
