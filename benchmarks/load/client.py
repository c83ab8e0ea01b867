"""One request to the server, and its record."""

from __future__ import annotations

import asyncio
import os
import time
from array import array
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from benchmarks.load.options import BenchmarkError, Options
from benchmarks.load.sse import Stream, error_message
from raydix.engine.api.reconnecting import AWAY, Reconnecting

JSON_HEADERS = {"Content-Type": "application/json", "Accept": "text/event-stream"}
PREFLIGHT_S = 10.0
# Below the 5 s after which uvicorn closes an idle connection: one closed while reused would look like a failure.
KEEPALIVE_S = 4.0


@dataclass(frozen=True, slots=True)
class Record:
    """One answered or failed request. Times are seconds from the start of the run.

    late_s: sent so much after it was due. arrivals, events: of `Stream`. error: None, an HTTP status, or one of
    connect, disconnect, timeout, stream, cut; `message` says more. The token counts are the server's own;
    completion_tokens falls back to counted events, the others to None.
    """

    index: int
    sent_s: float
    ended_s: float
    late_s: float = 0.0
    user: int | None = None
    turn: int = 0
    arrivals: array[float] = field(default_factory=lambda: array("d"))
    events: array[int] = field(default_factory=lambda: array("I"))
    prompt_tokens: int | None = None
    completion_tokens: int = 0
    cached_tokens: int | None = None
    text: str = ""
    error: str | None = None
    message: str = ""
    breaks: int = 0
    """Broken connections behind which the stream went on."""

    @property
    def latency_s(self) -> float:
        """From sending to the end of the stream."""
        return self.ended_s - self.sent_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return self.arrivals[0] - self.sent_s if self.arrivals else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first."""
        if self.completion_tokens < 2 or not self.arrivals:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.completion_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Pauses seen by a reader: between reads that carried tokens. Tokens that arrived together leave none."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Ticket:
    """Identity of a request: its number, the lateness of its sending, and in chat its user and turn."""

    index: int
    late_s: float = 0.0
    user: int | None = None
    turn: int = 0


class Client:
    """Sends requests over one connection pool; opened and closed as a context. Redirects are not followed."""

    def __init__(self, options: Options, api_key: str | None = None) -> None:
        self._url = options.url
        self._timeout_s = options.timeout
        self._resumes = options.resume
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._origin = time.perf_counter()

    async def __aenter__(self) -> Client:
        timeout = aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=PREFLIGHT_S)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout, connector=connector)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._session.close()

    def restart_clock(self) -> None:
        """The run starts now."""
        self._origin = time.perf_counter()

    def now(self) -> float:
        """Seconds from the start of the run."""
        return time.perf_counter() - self._origin

    async def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON (None where it is none) of a GET; raises BenchmarkError when nobody answers."""
        timeout = aiohttp.ClientTimeout(total=PREFLIGHT_S)
        try:
            async with self._session.get(self._url + path, timeout=timeout, allow_redirects=False) as response:
                body = await response.read()
                return response.status, _json(body)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise BenchmarkError(f"no answer from {self._url}{path}: {_reason(error)}") from error

    async def send(self, path: str, body: bytes, ticket: Ticket, keep_text: bool = False) -> Record:
        """Send one streaming request and follow it to its end; failures become part of the record."""
        stream = Stream(keep_text, Reconnecting() if self._resumes else None)
        sent_s = self.now()
        error, message = await self._follow(path, body, stream)
        ended_s = self.now()
        fault, complaint = _verdict(stream, ended_s)
        error, message = (fault, complaint) if error is None else (error, message)
        usage = stream.usage or {}
        return Record(
            index=ticket.index,
            sent_s=sent_s,
            ended_s=ended_s,
            late_s=ticket.late_s,
            user=ticket.user,
            turn=ticket.turn,
            arrivals=stream.arrivals,
            events=stream.events,
            prompt_tokens=usage.get("prompt_tokens"),
            completion_tokens=usage.get("completion_tokens") or sum(stream.events),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            text=stream.text,
            error=error,
            message=message,
            breaks=0 if stream.place is None else stream.place.num_breaks,
        )

    async def _follow(self, path: str, body: bytes, stream: Stream) -> tuple[str | None, str]:
        """Feed the response to `stream`, and what follows after a broken connection; returns the kind of an HTTP
        failure, if any, and a sentence about it."""
        while True:
            error, message = await self._attempt(path, body, stream)
            if stream.place is None or stream.has_end or not _may_pass(error):
                return error, message
            pause_s = stream.place.pause_s(self.now())
            if pause_s is None:
                return error, message
            stream.broken()
            await asyncio.sleep(pause_s)

    async def _attempt(self, path: str, body: bytes, stream: Stream) -> tuple[str | None, str]:
        """The same of one connection."""
        url = self._url + path
        headers = JSON_HEADERS if stream.place is None else JSON_HEADERS | stream.place.headers
        try:
            async with self._session.post(url, data=body, headers=headers, allow_redirects=False) as response:
                if response.status != 200:
                    return str(response.status), _refusal(await response.read())
                async for data in response.content.iter_any():
                    stream.feed(data, self.now())
        except (aiohttp.ClientError, TimeoutError) as error:
            return _kind(error), _reason(error)
        except ValueError as error:
            return "stream", f"not an event stream: {error}"
        return None, ""


def _may_pass(error: str | None) -> bool:
    """True for a failure after which another attempt may go on; None: the stream has ended too early."""
    return error in (None, "connect", "disconnect") or (error.isdecimal() and int(error) in AWAY)


def _verdict(stream: Stream, ended_s: float) -> tuple[str | None, str]:
    """True if the arrived text is a whole answer."""
    try:
        stream.finish(ended_s)
    except ValueError as error:
        return "stream", f"not an event stream: {error}"
    if stream.error is not None:
        return "stream", stream.error
    return (None, "") if stream.done else ("cut", "the stream ended without [DONE]")


def _refusal(body: bytes) -> str:
    parsed = _json(body)
    return error_message(body.decode("utf-8", "replace") if parsed is None else parsed)


def _kind(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "connect"
    return "disconnect" if isinstance(error, aiohttp.ClientError) else "stream"


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        return os.strerror(number).lower() if number else str(error.os_error)
    return " ".join((str(error) or type(error).__name__).split())


def _json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None


async def find_model(client: Client, options: Options) -> str:
    """The model to name in requests: the one asked for, else the first the server lists."""
    status, body = await client.get("/v1/models")
    if options.model:
        return options.model
    if status != 200:
        raise BenchmarkError(f"{options.url}/v1/models answered {status}: {error_message(body)}; name one with --model")
    try:
        return str(body["data"][0]["id"])
    except (LookupError, TypeError) as error:
        raise BenchmarkError(f"{options.url}/v1/models lists no model; name one with --model") from error


async def find_version(client: Client) -> str | None:
    """Return the server's answer at /version, if there is one."""
    status, body = await client.get("/version")
    version = body.get("version") if status == 200 and isinstance(body, dict) else None
    return version if version is None else str(version)
