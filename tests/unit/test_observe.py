"""`raydix requests`, `why` and `top` against a small HTTP server with requests of its own."""

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from raydix.cli.main import main
from raydix.cli.observe import MAX_EVENT_BYTES, ObservedServer
from raydix.engine.core.errors import StartupError
from raydix.engine.core.manager.explain import BlockSource, Decision, SessionFacts
from raydix.engine.core.manager.sessions import Branch

ROW = {
    "number": 2,
    "id": "chatcmpl-b",
    "request": "b",
    "state": "ended",
    "outcome": "stop",
    "choices": 1,
    "prefill_workers": ["p"],
    "decode_workers": ["d"],
    "prompt_tokens": 1200,
    "cached_tokens": 900,
    "generated_tokens": 41,
    "max_tokens": 300,
    "arrived_at": 20.0,
    "first_token_s": 0.25,
    "ended_s": 2.25,
}
RUNNING = ROW | {
    "number": 1,
    "id": "cmpl-a",
    "request": "request-a",
    "state": "decoding",
    "outcome": None,
    "arrived_at": 10.0,
    "ended_s": None,
}
COUNTS = {"waiting": 0, "prefilling": 3, "decoding": 1}
RUNS = ((BlockSource.LOCAL, 7), (BlockSource.EVICTED, 2), (BlockSource.NEVER_SEEN, 1))
DECISION = Decision(0, "t", 170, 16, RUNS, "p", "d", 0.3, (), 0.25, uncached_s=1.5, saved_s=1.25)
KEY = "rdx-k"
FINDING = {
    "reason": "volatile",
    "part": "system",
    "prompts": 96,
    "lost_tokens": 8847,
    "lost_s": 301.2,
    "lost_tokens_per_day": 212_922,
    "lost_s_per_day": 7248.7,
    "advice": "Move it.",
    "evicted_ago_s": None,
    "more_blocks": None,
    "example": {
        "id": "chatcmpl-b",
        "previous": "chatcmpl-a",
        "lost_tokens": 92,
        "token_index": 12,
        "part": "system",
        "text_before": "Today is 2026-11-2",
        "previous_text": "7. You  act.\n",
        "text": "8. You act.",
    },
}
EVICTED = FINDING | {
    "reason": "evicted",
    "part": None,
    "lost_s_per_day": None,
    "more_blocks": 1200,
    "example": FINDING["example"] | {"previous_text": "", "text": ""},  # type: ignore[operator]
}
DIAGNOSIS: dict[str, Any] = {
    "object": "cache.doctor",
    "observed_s": 1790.0,
    "prompts": 412,
    "prompt_tokens": 20_000,
    "cached_tokens": 9000,
    "findings": [FINDING, EVICTED],
}
CONTROL = "\x1b[2J\x07[red]x[/red]"
PLAIN = "[2J[red]x[/red]"
"""What is left of it: no byte that a terminal obeys, and nothing that `rich` takes for markup."""


def routes(rows: list[Any], explanation: dict[str, Any], diagnosis: Any = DIAGNOSIS) -> web.Application:
    """The routes that the commands ask, which need the key."""

    @web.middleware
    async def keyed(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return web.json_response({"error": {"message": "A key is needed."}}, status=401)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def requests(request: web.Request) -> web.Response:
        return web.json_response({"object": "requests", "counts": COUNTS, "requests": rows})

    async def explain(request: web.Request) -> web.Response:
        if request.match_info["id"] != ROW["id"]:
            return web.json_response({"error": {"message": "No such request is remembered."}}, status=404)
        return web.json_response(explanation)

    async def events(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        event = f"event: requests\ndata: {json.dumps({'counts': COUNTS, 'requests': rows})}\n\n"
        await response.write(event.encode())
        await asyncio.Event().wait()
        return response

    async def doctor(request: web.Request) -> web.Response:
        return web.json_response(diagnosis)

    application = web.Application(middlewares=[keyed])
    application.router.add_get("/v1/cache/doctor", doctor)
    application.router.add_get("/v1/requests", requests)
    application.router.add_get("/v1/requests/events", events)
    application.router.add_get("/v1/requests/{id}/explain", explain)
    return application


@pytest.fixture
def rows() -> list[Any]:
    return [RUNNING, ROW]


@pytest.fixture
def explanation() -> dict[str, Any]:
    choices = [{"id": "b-0", "attempts": [DECISION.as_json()]}]
    return {
        "id": ROW["id"],
        "object": "request.explanation",
        "choices": choices,
        "prefix": None,
        "ignored": None,
        "applied": None,
    }


@contextmanager
def serving(application: web.Application) -> Iterator[str]:
    """Address of an application that is served in a thread."""
    ready: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        stop = asyncio.Event()
        runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        ready.set_result((f"http://127.0.0.1:{runner.addresses[0][1]}", asyncio.get_running_loop(), stop))
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=asyncio.run, args=[serve()])
    thread.start()
    address, loop, stop = ready.result(timeout=10)
    try:
        yield address
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


@pytest.fixture
def url(rows: list[Any], explanation: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of the server, whose key is in the environment; the screen is wide."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("COLUMNS", "200")
    with serving(routes(rows, explanation)) as address:
        yield address


def answering(status: int, body: bytes, kind: str = "application/json") -> web.Application:
    """An application that answers each path with this body, and then ends the response."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, body=body, content_type=kind)

    application = web.Application()
    application.router.add_get("/{path:.*}", answer)
    return application


def follow(url: str, *, read_timeout_s: float = 30) -> list[Any]:
    """The events of a server until its stream fails."""

    async def run() -> list[Any]:
        return [event async for event in ObservedServer(url, None, read_timeout_s=read_timeout_s).requests()]

    return asyncio.run(run())


def test_requests_are_a_table(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["requests", "--url", url]) == 0
    counts, _, running, ended = capsys.readouterr().out.splitlines()
    assert counts.strip() == "0 waiting · 3 prefilling · 1 decoding"
    assert running.split() == ["decoding", "request-a", "75%", "41/300", "250", "ms", "1,200", "-", "p", "→", "d"]
    assert ended.split() == ["stop", "b", "75%", "41/300", "250", "ms", "1,200", "20", "p", "→", "d"]


def test_a_narrow_terminal_has_whole_names(
    url: str, rows: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rows[0] = rows[0] | {"request": "7b60869c-f283-44f0-9de5-0c132aefed17", "state": "prefilling"}
    assert main(["requests", "--url", url]) == 0
    _, header, running, _ = capsys.readouterr().out.splitlines()
    assert header.split() == ["state", "request", "cached", "answer", "first"]
    assert running.split() == ["prefilling", "7b60869c-f283-44f0-9de5-0c132aefed17", "75%", "41/300", "250", "ms"]


def test_requests_are_an_object_for_programs(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["requests", "--json", "--url", url]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == [RUNNING, ROW]


@pytest.mark.parametrize("name", [[], ["last"], ["chatcmpl-b"]])
def test_why_shows_the_blocks_and_the_reason(url: str, name: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", *name, "--url", url]) == 0
    title, strip, legend, why, sums = capsys.readouterr().out.strip().splitlines()
    assert title == "b-0, attempt 1: 170 prompt tokens"
    assert strip == "█" * 9 + "▒"
    assert legend.split("   ") == ["█ local 7", "█ evicted 2", "▒ never_seen 1", "and 10 tokens, shorter than a block"]
    assert why.startswith("the cached path ends at token 112: the blocks were computed before, and had to make room")
    assert "66% cached; first token after 250 ms, expected 300 ms; all of it computed: 1.50 s" in sums


def test_why_names_the_adapter(url: str, explanation: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    [choice] = explanation["choices"]
    choice["attempts"] = [replace(DECISION, adapter="org/sql").as_json()]
    assert main(["why", "--url", url]) == 0
    assert "b-0, attempt 1 with adapter org/sql: 170 prompt tokens" in capsys.readouterr().out


def test_why_names_the_answer_that_a_branch_left(
    url: str, explanation: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    branch = Branch("chatcmpl-a-0-bb", 7)
    [choice] = explanation["choices"]
    choice["attempts"] = [replace(DECISION, session=SessionFacts(1, 4, 0, 0.0, branch)).as_json()]
    assert main(["why", "--url", url]) == 0
    assert "a branch of chatcmpl-a: their first 7 blocks are the same\n" in capsys.readouterr().out


def test_why_says_where_the_prompt_left_the_one_before(
    url: str, explanation: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    explanation["prefix"] = {"reason": "volatile", "part": "system", "token_index": 1812, "lost_tokens": 9216}
    explanation["ignored"] = ["user", "store"]
    explanation["applied"] = ["reasoning_effort:thinking_token_budget:512"]
    assert main(["why", "--url", url]) == 0
    prefix, ignored, applied = capsys.readouterr().out.splitlines()[-3:]
    assert prefix == "left the prompt before in system at token 1,812: volatile; 9,216 tokens behind it were lost"
    assert ignored == "fields without effect: user, store"
    assert applied == "hints that became something else: reasoning_effort:thinking_token_budget:512"


def test_the_doctor_lists_what_costs_most(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--url", url]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines == [
        "412 prompts of 20,000 tokens, 45% cached, in the last 30 min",
        "1. volatile in system: 96 prompts, 212,922 tokens, 7,249 s a day",
        "   Move it.",
        "   chatcmpl-a was:  …Today is 2026-11-2│7. You  act.⏎…",
        "   chatcmpl-b is:  …Today is 2026-11-2│8. You act.…",
        "2. evicted: 96 prompts, 212,922 tokens a day",
        "   Move it.",
        "   1,200 more blocks of room would have kept them.",
    ]
    assert main(["doctor", "--json", "--url", url]) == 0
    assert json.loads(capsys.readouterr().out) == DIAGNOSIS


def test_the_doctor_of_a_server_without_a_fault(
    rows: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    nothing = DIAGNOSIS | {"prompts": 0, "prompt_tokens": 0, "cached_tokens": None, "findings": []}
    with serving(routes(rows, {}, nothing)) as url:
        assert main(["doctor", "--url", url]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["no chats yet"]
    with serving(routes(rows, {}, nothing | {"prompts": 1, "prompt_tokens": 30})) as url:
        assert main(["doctor", "--url", url]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("1 prompt of 30 tokens, in the last")


def test_texts_of_a_server_command_no_terminal(
    url: str, rows: list[Any], explanation: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    rows[0] = rows[0] | {"request": CONTROL, "state": CONTROL, "prefill_workers": [CONTROL]}
    assert main(["requests", "--url", url]) == 0
    shown = capsys.readouterr().out
    assert shown.count(PLAIN) == 3 and "\x1b" not in shown

    attempt = DECISION.as_json() | {"why": CONTROL, "note": CONTROL, "prefill_worker": CONTROL}
    attempt["blocks"] = [{"source": CONTROL, "hit": True, "count": 1}]
    explanation["choices"] = [{"id": CONTROL, "attempts": [attempt]}]
    explanation["prefix"] = {"reason": CONTROL, "part": CONTROL, "token_index": 0, "lost_tokens": 0}
    explanation["ignored"] = explanation["applied"] = [CONTROL]
    assert main(["why", "--url", url]) == 0
    shown = capsys.readouterr().out
    assert shown.count(PLAIN) == 9 and "\x1b" not in shown

    told = FINDING | {"reason": CONTROL, "advice": CONTROL}
    told["example"] = dict.fromkeys(("id", "previous", "part", "text_before", "previous_text", "text"), CONTROL)
    with serving(routes(rows, {}, DIAGNOSIS | {"findings": [told]})) as doctoring:
        assert main(["doctor", "--url", doctoring]) == 0
    shown = capsys.readouterr().out
    assert shown.count(PLAIN) == 9 and "\x1b" not in shown

    with serving(answering(400, json.dumps({"error": {"message": CONTROL}}).encode())) as refusing:
        assert main(["requests", "--url", refusing]) == 2
    complaint = capsys.readouterr().err
    assert PLAIN in complaint and "\x1b" not in complaint


@pytest.mark.parametrize(
    ("body", "kind"), [(b"<html>", "application/json"), (b"<html>", "text/html"), (b"\xff", "application/json")]
)
def test_an_answer_that_is_no_json(body: bytes, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(answering(200, body, kind)) as url:
        assert main(["requests", "--url", url]) == 2
    assert url in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"event: requests\ndata: {}\n\n", "ended the stream"),
        (b"data: {\n\n", "sent something else"),
        (b"data: " + b" " * (2 * MAX_EVENT_BYTES + 1), "sent something else"),
        (b'data: {"error": {"message": "too many followers"}}\n\n', "too many followers"),
    ],
    ids=["ended", "no JSON", "endless line", "error"],
)
def test_a_stream_that_fails_is_an_error(body: bytes, complaint: str) -> None:
    with serving(answering(200, body, "text/event-stream")) as url, pytest.raises(StartupError, match=complaint):
        follow(url)


def test_a_server_that_falls_silent_is_an_error() -> None:
    async def silent(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    application = web.Application()
    application.router.add_get("/{path:.*}", silent)
    with serving(application) as url:
        with pytest.raises(StartupError, match="cannot be reached"):
            follow(url, read_timeout_s=0.05)
        with pytest.raises(StartupError, match="cannot be reached"):
            asyncio.run(ObservedServer(url, None, read_timeout_s=0.05).get("/v1/requests"))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["why", "other"], "No such request is remembered."),
        (["top"], "raydix top needs a terminal"),
    ],
)
def test_what_cannot_be_shown(
    url: str, arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--url", url]) == 2
    assert complaint in capsys.readouterr().err


def test_a_server_that_has_had_no_request(url: str, rows: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    rows.clear()
    assert main(["why", "--url", url]) == 2
    assert "no request yet" in capsys.readouterr().err


def test_a_wrong_key_and_a_server_that_is_away(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "other")
    assert main(["requests", "--url", url]) == 2
    assert "A key is needed." in capsys.readouterr().err
    assert main(["requests", "--url", "http://127.0.0.1:1"]) == 2
    assert "cannot be reached" in capsys.readouterr().err


def test_top_shows_the_requests_until_it_is_ended(url: str) -> None:
    outer, inner = pty.openpty()
    command = [sys.executable, "-m", "raydix", "top", "--url", url]
    process = subprocess.Popen(command, stdout=inner, stderr=inner, env={**os.environ, "TERM": "xterm"})
    os.close(inner)
    shown = b""
    while b"request-a" not in shown or b"3 prefilling" not in shown:
        shown += os.read(outer, 1 << 16)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130
    os.close(outer)
