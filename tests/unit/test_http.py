"""Bodies that arrive and responses that stream: what reaches the connection, and when."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.requests import Request

from raydix.actors.ingress import http
from raydix.actors.ingress.http import (
    ClientGoneError,
    EventStreamResponse,
    error_response,
    read_body,
    while_connected,
)
from raydix.engine.api.wire import OPENAI, PAUSED
from raydix.engine.core.errors import AuthenticationError, BodyTimeoutError, BodyTooLargeError, OverloadedError
from raydix.engine.core.ingress.room import BodyRoom
from tests.unit.waits import WAIT_S


async def messages_of(
    events: AsyncGenerator[bytes],
    leave: asyncio.Event | None = None,
    commented: asyncio.Event | None = None,
    headers: dict[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Messages that the response sends, with `commented` set at a comment; the client leaves when `leave` is set."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        await (leave or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if commented is not None and message.get("body") == OPENAI.waiting:
            commented.set()

    await EventStreamResponse(events, lambda _: None, headers=headers)({"type": "http"}, receive, send)
    return sent


def bodies(sent: list[dict[str, Any]]) -> list[bytes]:
    return [message["body"] for message in sent if message["type"] == "http.response.body"]


def test_a_stream_that_waits_gets_comments_and_then_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "QUIET_S", 0.01)

    async def run() -> list[dict[str, Any]]:
        commented = asyncio.Event()

        async def events() -> AsyncGenerator[bytes]:
            await commented.wait()
            yield b"data: 1\n\n"

        return await messages_of(events(), commented=commented)

    sent = asyncio.run(run())
    assert [message["type"] for message in sent].count("http.response.start") == 1
    assert sent[0]["status"] == 200
    parts = bodies(sent)
    assert parts[0] == OPENAI.waiting
    assert [part for part in parts if part != OPENAI.waiting] == [b"data: 1\n\n", b""]


def test_a_stream_that_fails_at_once_is_an_error_response() -> None:
    async def events() -> AsyncGenerator[bytes]:
        raise OverloadedError("too much to do")
        yield b""

    sent = asyncio.run(messages_of(events(), headers={"request-id": "req_mine"}))
    assert sent[0]["status"] == 429
    assert {(b"request-id", b"req_mine"), (b"content-type", b"application/json")} <= set(sent[0]["headers"])
    assert OPENAI.waiting not in bodies(sent)


def test_a_stream_that_fails_after_a_comment_ends_with_an_error_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "QUIET_S", 0.01)

    async def run() -> list[dict[str, Any]]:
        commented = asyncio.Event()

        async def events() -> AsyncGenerator[bytes]:
            await commented.wait()
            raise OverloadedError("too much to do")
            yield b""

        return await messages_of(events(), commented=commented)

    parts = bodies(asyncio.run(run()))
    assert parts[0] == OPENAI.waiting
    assert b"too much to do" in parts[-2] and parts[-1] == b""


def test_the_events_are_closed_when_the_client_leaves() -> None:
    closed = []

    async def run() -> None:
        leave = asyncio.Event()

        async def events() -> AsyncGenerator[bytes]:
            try:
                yield b"data: 1\n\n"
                leave.set()
                await asyncio.Event().wait()
            finally:
                closed.append(True)

        await messages_of(events(), leave)

    asyncio.run(run())
    assert closed == [True]


def test_the_end_is_told_when_the_client_left_before_the_first_event() -> None:
    ends = []

    async def run() -> None:
        async def events() -> AsyncGenerator[bytes]:
            await asyncio.Event().wait()
            yield b""

        async def receive() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            raise AssertionError(f"nobody reads {message}")

        await EventStreamResponse(events(), lambda _: None, lambda: ends.append(True))({"type": "http"}, receive, send)

    asyncio.run(run())
    assert ends == [True]


def test_a_quiet_stream_says_whether_its_session_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "QUIET_S", 0.01)
    sent: list[bytes] = []
    is_paused = True

    async def run() -> None:
        nonlocal is_paused
        has_seen = asyncio.Event()

        async def events() -> AsyncGenerator[bytes]:
            await has_seen.wait()
            yield b"data: 1\n\n"

        async def receive() -> dict[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Any) -> None:
            nonlocal is_paused
            sent.append(message.get("body", b""))
            if PAUSED in sent:
                is_paused = False
            if OPENAI.waiting in sent:
                has_seen.set()

        response = EventStreamResponse(events(), lambda _: None, is_paused=lambda: is_paused)
        await asyncio.wait_for(response({"type": "http"}, receive, send), WAIT_S)

    asyncio.run(run())
    bodies = [body for body in sent if body]
    assert bodies[0] == PAUSED == b": x-raydix-paused\n\n"
    assert OPENAI.waiting in bodies and bodies[-1] == b"data: 1\n\n"


class TestBodies:
    """Bodies come in parts, within limits."""

    @staticmethod
    async def read(
        parts: list[bytes], *, limit: int = 10, timeout_s: float = 5, ends: bool = True, **headers: str
    ) -> bytes:
        """The body of a request that sends these parts, and then leaves or, unless it `ends`, keeps still."""

        async def receive() -> dict[str, Any]:
            if parts:
                return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts) or not ends}
            await asyncio.sleep(0 if ends else 60)
            return {"type": "http.disconnect"}

        named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        request = Request({"type": "http", "method": "POST", "headers": named}, receive)
        room = BodyRoom(1000)
        try:
            return await read_body(request, limit, room, timeout_s)
        finally:
            assert room.num_bytes == 0

    def test_parts_are_one_body(self) -> None:
        assert asyncio.run(self.read([b"ab", b"", b"c"])) == b"abc"
        assert asyncio.run(self.read([b""])) == b""

    def test_a_body_over_the_limit_is_refused_by_what_it_declares_or_sends(self) -> None:
        parts = [b"x" * 6, b"x" * 6, b"never read"]
        with pytest.raises(BodyTooLargeError):
            asyncio.run(self.read(parts))
        assert parts == [b"never read"]
        with pytest.raises(BodyTooLargeError):
            asyncio.run(self.read([b"x"], content_length="11"))
        assert asyncio.run(self.read([b"x"], content_length="nonsense")) == b"x"

    def test_a_slow_body_is_refused_and_its_connection_closed(self) -> None:
        with pytest.raises(BodyTimeoutError, match="2 bytes arrived") as caught:
            asyncio.run(self.read([b"ab"], timeout_s=0.01, ends=False))
        assert error_response(caught.value).headers["connection"] == "close"

    def test_a_client_that_leaves_in_its_body(self) -> None:
        async def leave() -> None:
            async def receive() -> dict[str, Any]:
                return {"type": "http.disconnect"}

            await read_body(Request({"type": "http", "headers": []}, receive), 10, BodyRoom(10), 5)

        with pytest.raises(ClientGoneError):
            asyncio.run(leave())


@pytest.mark.parametrize("leaves", [True, False])
def test_work_ends_when_its_client_leaves(leaves: bool) -> None:
    ended = []

    async def run() -> str:
        left, begun = asyncio.Event(), asyncio.Event()

        async def receive() -> dict[str, Any]:
            await (begun if leaves else left).wait()
            return {"type": "http.disconnect"}

        async def work() -> str:
            try:
                begun.set()
                if leaves:
                    await asyncio.Event().wait()
                return "done"
            finally:
                ended.append(True)

        return await while_connected(Request({"type": "http", "headers": []}, receive), work())

    if leaves:
        with pytest.raises(ClientGoneError):
            asyncio.run(run())
    else:
        assert asyncio.run(run()) == "done"
    assert ended == [True]


def test_headers_of_errors() -> None:
    assert error_response(OverloadedError("x", retry_after_s=3)).headers["retry-after"] == "3"
    assert error_response(AuthenticationError("x")).headers["www-authenticate"] == "Bearer"
    assert error_response(BodyTooLargeError("x")).status_code == 413
