"""The console command: `raydix chat` against a small HTTP server that streams as OpenAI's do, and refusals to start."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import pty
import queue
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console
from starlette.applications import Starlette

from raydix.cli import chat, local
from raydix.cli.cluster import free_port, who_may_use
from raydix.cli.main import main, parser
from raydix.configs import load_config
from raydix.engine.api.responses import ResponseHead, TokenUsage
from raydix.engine.api.stream import DONE, ChunkWriter, error_event, usage_event
from raydix.engine.core.errors import ServiceError, StartupError
from raydix.engine.core.manager.explain import BlockSource, Decision
from raydix.engine.core.types import FinishReason
from tests.unit.waits import WAIT_S

REPOSITORY = Path(__file__).resolve().parents[2]
HEAD = ResponseHead("chat", "chatcmpl-1", 1, "tiny")
STATS = re.compile(r"\d+ ms to first token, [\d.]+ tokens/s, 7 prompt tokens \(4 from the cache\)")


@dataclass
class Server:
    """Answers by what the last message asks for, in pieces; remembers the requests."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    """The `Authorization` header of every request."""
    last_ids: list[str] = field(default_factory=list)
    """The `Last-Event-ID` header of every request for a stream that breaks."""
    explanations: dict[str, Any] = field(default_factory=dict)
    """By the name of an answer."""
    is_hanging: threading.Event = field(default_factory=threading.Event)
    was_left: threading.Event = field(default_factory=threading.Event)
    """A client closed the connection of an answer that did not end."""

    def application(self) -> web.Application:
        application = web.Application()
        application.router.add_get("/v1/models", self.models)
        application.router.add_post("/v1/chat/completions", self.chat)
        application.router.add_get("/v1/requests/{name}/explain", self.explain)
        return application

    async def explain(self, request: web.Request) -> web.Response:
        if (explained := self.explanations.get(request.match_info["name"])) is None:
            raise web.HTTPNotFound
        return web.json_response(explained)

    async def models(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("authorization"))
        return web.json_response({"object": "list", "data": [{"id": "tiny"}, {"id": "other"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.keys.append(request.headers.get("authorization"))
        body = await request.json()
        self.bodies.append(body)
        question = body["messages"][-1]["content"]
        if question == "refuse":
            return web.json_response({"error": {"message": "the prompt\nis too long"}}, status=400)
        if question == "break":
            return web.Response(status=502, text="<html>Bad Gateway</html>")
        if question == "resume":
            return await self.broken_again_and_again(request)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        writer = ChunkWriter(HEAD, include_usage=True)
        await response.write(writer.first())
        if question == "hang early":
            return await self.hang(request, response)
        if question == "nonsense":
            await response.write(b"data: [1]\n\n")
            return response
        if question.startswith("think"):
            for name in ("reasoning_content", "reasoning"):  # servers have either name
                delta = json.dumps({"choices": [{"index": 0, "delta": {name: f"by {name} "}}]})
                await response.write(f"data: {delta}\n\n".encode())
            if question == "think only":
                await response.write(writer.finish(FinishReason.LENGTH) + usage_event(HEAD, TokenUsage(7, 3, 4)) + DONE)
                return response
        first, second = writer.text("Héllo "), writer.text("wörld")
        # A comment, a cut inside a character, and two events in one piece.
        for piece in (b": alive\n\n" + first[:-60], first[-60:]):
            await response.write(piece)
            await asyncio.sleep(0.005)
        if question == "hang":
            return await self.hang(request, response)
        if question == "fail":
            await response.write(error_event(ServiceError("the worker is gone")))
            return response
        if question == "cut":
            assert request.transport is not None
            request.transport.close()  # behind what was written, in the middle of the body
            return response
        if question == "end":
            return response
        if question.endswith("behind the reason"):
            lost = error_event(ServiceError("the worker is gone")) if question.startswith("fail") else b": cut"
            await response.write(second + writer.finish(FinishReason.STOP) + lost)
            if question.startswith("cut"):
                assert request.transport is not None
                request.transport.close()
            return response
        reason = FinishReason.LENGTH if question == "long" else FinishReason.STOP
        await response.write(second + writer.finish(reason) + usage_event(HEAD, TokenUsage(7, 3, 4)) + DONE)
        return response

    async def broken_again_and_again(self, request: web.Request) -> web.StreamResponse:
        """A stream with ids whose connection breaks behind each event and a part of the next; the server is away once,
        and ends another time as if all had come."""
        last = request.headers["last-event-id"]
        self.last_ids.append(last)
        if self.last_ids.count("e2") == 1:
            return web.Response(status=503)
        writer = ChunkWriter(HEAD, include_usage=True)
        events = [writer.first(), writer.text("Héllo "), writer.text("wörld"), writer.finish(FinishReason.STOP)]
        events = [
            b"id: e%d\n%s" % (n, event) for n, event in enumerate([*events, usage_event(HEAD, TokenUsage(7, 3, 4))], 1)
        ]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        first, *others = [*events[int(last.removeprefix("e")) :], DONE]
        if first == DONE:
            await response.write(DONE)
            return response
        await response.write(first + others[0][: -len(last) - 2])
        if last != "e3":
            assert request.transport is not None
            request.transport.close()
        return response

    async def hang(self, request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
        self.is_hanging.set()
        while request.transport is not None and not request.transport.is_closing():
            await asyncio.sleep(0.005)
        self.was_left.set()
        return response

    def roles(self, index: int) -> list[tuple[str, str]]:
        """Role and text of each message of a request."""
        return [(message["role"], message["content"]) for message in self.bodies[index]["messages"]]


@contextmanager
def serving(application: web.Application) -> Iterator[str]:
    """Serve from another thread on a free loopback port; gives the URL."""
    loop, ready, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    address: list[tuple[str, int]] = []

    async def serve() -> None:
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address.extend(runner.addresses)
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(WAIT_S)
        yield f"http://127.0.0.1:{address[0][1]}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@pytest.fixture
def server() -> Iterator[Server]:
    served = Server()
    with serving(served.application()) as served.url:
        yield served


@pytest.fixture
def ask(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, list[str]]]:
    """Runs the command with lines on stdin; gives the exit code, stdout, and the lines of stderr."""

    def run(lines: str, *arguments: str) -> tuple[int, str, list[str]]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        code = main(["chat", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err.splitlines()

    return run


Ask = Callable[..., tuple[int, str, list[str]]]


class TestPipedChat:
    def test_answers_each_line_and_keeps_the_conversation(self, server: Server, ask: Ask) -> None:
        code, out, err = ask("one\n\ntwo\n", "--url", server.url, "--system", "Be brief.", "--max-tokens", "9")
        assert (code, out) == (0, "Héllo wörld\nHéllo wörld\n")
        assert len(err) == 2 and all(STATS.fullmatch(line) for line in err)
        assert server.roles(1) == [
            ("system", "Be brief."),
            ("user", "one"),
            ("assistant", "Héllo wörld"),
            ("user", "two"),
        ]
        body = server.bodies[0]
        assert {key: body[key] for key in body if key != "messages"} == {
            "model": "tiny",
            "max_tokens": 9,
            "temperature": 0.2,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def test_goes_on_after_a_broken_connection(self, server: Server, ask: Ask) -> None:
        code, out, err = ask("resume\n", "--url", server.url)
        assert (code, out) == (0, "Héllo wörld\n")
        assert len(err) == 1 and STATS.fullmatch(err[0])
        assert server.last_ids == ["0", "e1", "e2", "e2", "e3", "e4", "e5"]
        assert server.bodies == [server.bodies[0]] * 7

    def test_reasoning_is_shown_beside_the_answer_and_is_no_part_of_it(self, server: Server, ask: Ask) -> None:
        code, out, err = ask("think\nthink only\nafter\n", "--url", server.url)
        assert (code, out) == (0, "Héllo wörld\nHéllo wörld\n")
        thought = "by reasoning_content by reasoning "
        assert [err[0], err[2]] == [thought, thought]
        assert STATS.fullmatch(err[1]) and err[3].endswith(", cut off by the token limit")
        assert server.roles(2) == [("user", "think"), ("assistant", "Héllo wörld"), ("user", "after")]

    def test_new_and_quit(self, server: Server, ask: Ask) -> None:
        code, _, err = ask("one\n/new\ntwo\n/quit\nthree\n", "--url", server.url, "--system", "S", "--model", "other")
        assert code == 0
        assert err[1] == "a new conversation"
        assert [body["model"] for body in server.bodies] == ["other", "other"]
        assert server.roles(1) == [("system", "S"), ("user", "two")]

    @pytest.mark.parametrize(
        ("question", "line"),
        [
            ("refuse", r"error: HTTP 400: the prompt is too long"),
            ("break", r"error: HTTP 502 Bad Gateway"),
            ("fail", r"error: the worker is gone; \d+ ms to first token"),
            ("nonsense", r"error: the server sent what is no event of a chat completion: \[1\]"),
        ],
    )
    def test_a_failure_is_one_line_and_leaves_no_trace(
        self, server: Server, ask: Ask, question: str, line: str
    ) -> None:
        code, _, err = ask(f"{question}\nafter\n", "--url", server.url)
        assert code == 1
        assert len(err) == 2
        assert re.fullmatch(line, err[0])
        assert server.roles(1) == [("user", "after")]

    @pytest.mark.parametrize(
        ("question", "line"),
        [
            ("cut", r"error: no answer from http://127.0.0.1:\d+: .+; what came of the answer is kept; .*"),
            ("end", r"error: \S+ ended the stream before the answer was complete; what came of the answer is kept; .*"),
        ],
    )
    def test_a_lost_connection_keeps_what_was_said(self, server: Server, ask: Ask, question: str, line: str) -> None:
        code, out, err = ask(f"{question}\nafter\n", "--url", server.url)
        assert (code, out) == (1, "Héllo \nHéllo wörld\n")
        assert re.fullmatch(line, err[0])
        assert server.roles(1) == [("user", question), ("assistant", "Héllo "), ("user", "after")]

    @pytest.mark.parametrize("question", ["cut behind the reason", "fail behind the reason"])
    def test_a_whole_answer_is_kept_without_the_end_of_its_stream(
        self, server: Server, ask: Ask, question: str
    ) -> None:
        code, out, err = ask(f"{question}\nafter\n", "--url", server.url)
        assert (code, out) == (0, "Héllo wörld\nHéllo wörld\n")
        assert err[0].startswith("the answer is complete, but the end of the stream is missing: ")
        assert server.roles(1) == [("user", question), ("assistant", "Héllo wörld"), ("user", "after")]

    @pytest.mark.parametrize("line", ["/helps", "/news", "/New", "/quit now", "/", "/new one", "/save"])
    def test_an_unknown_command_is_not_sent(self, server: Server, ask: Ask, line: str) -> None:
        code, _, err = ask(f"{line}\none\n", "--url", server.url)
        assert code == 1
        assert err[0] == f"no such command: {line}; {chat.COMMANDS}, // begins a question with /"
        assert [server.roles(index) for index in range(len(server.bodies))] == [[("user", "one")]]

    def test_a_question_may_begin_with_a_slash(self, server: Server, ask: Ask) -> None:
        assert ask("//etc is what?\n/usr/bin is what?\n/new\n", "--url", server.url)[0] == 0
        assert [server.roles(index)[-1][1] for index in range(2)] == ["/etc is what?", "/usr/bin is what?"]

    def test_another_system_message_begins_anew(self, server: Server, ask: Ask) -> None:
        code, _, err = ask("one\n/system Be  kind.\ntwo\n/new\nthree\n/system\nfour\n", "--url", server.url)
        assert code == 0 and err.count("a new conversation") == 3
        kind = ("system", "Be  kind.")
        assert server.roles(1) == [kind, ("user", "two")] and server.roles(2) == [kind, ("user", "three")]
        assert server.roles(3) == [("user", "four")]

    def test_a_conversation_is_saved_once(self, server: Server, ask: Ask, tmp_path: Path) -> None:
        path = tmp_path / "a name.json"
        code, _, err = ask(f"one\n/save {path}\ntwo\n/save {path}\n", "--url", server.url, "--system", "S")
        assert json.loads(path.read_text()) == {
            "model": "tiny",
            "messages": [
                {"role": "system", "content": "S"},
                {"role": "user", "content": "one"},
                {"role": "assistant", "content": "Héllo wörld"},
            ],
        }
        assert code == 1 and err[1] == "saved: 3 messages" and err[3].endswith(f"File exists: '{path}'")

    def test_help_names_every_command(self, server: Server, ask: Ask) -> None:
        code, _, err = ask("/help\n", "--url", server.url)
        assert code == 0 and [line.split()[0] for line in err] == ["/new", "/system", "/why", "/save", "/quit", "//"]

    def test_why_explains_the_last_answer(self, server: Server, ask: Ask) -> None:
        explained = Decision(0, "t", 170, 16, ((BlockSource.LOCAL, 10),), "p", "d", 0.3, (), 0.25).as_json()
        server.explanations["chatcmpl-1"] = {"choices": [{"id": "chatcmpl-1-0", "attempts": [explained]}]}
        code, out, err = ask("/why\none\nrefuse\n/why\n", "--url", server.url)
        assert code == 1 and out == "Héllo wörld\n"
        assert err[0] == "error: there is no answer yet"
        assert err[3] == "chatcmpl-1-0, attempt 1: 170 prompt tokens"
        assert any("94% cached" in line for line in err[4:])

    def test_why_of_a_server_that_explains_nothing(self, server: Server, ask: Ask) -> None:
        code, _, err = ask("one\n/why\ntwo\n", "--url", server.url)
        assert code == 1 and err[1].startswith(f"error: {server.url}: 404") and len(server.bodies) == 2

    def test_says_that_the_answer_was_cut_off(self, server: Server, ask: Ask) -> None:
        assert ask("long\n", "--url", server.url)[2][0].endswith(", cut off by the token limit")

    @pytest.mark.parametrize("form", ["{}/", "{}/v1", "{}/v1/"])
    def test_forms_of_the_url(self, server: Server, ask: Ask, form: str) -> None:
        assert ask("one\n", "--url", form.format(server.url))[0] == 0
        assert ask("one\n", "--url", form.format(server.url.removeprefix("http://")))[0] == 0

    def test_the_api_key_comes_from_the_environment(
        self, server: Server, ask: Ask, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        ask("one\n", "--url", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "rdx-1")
        ask("one\n", "--url", server.url)
        monkeypatch.setenv("OTHER_KEY", "rdx-2")
        ask("one\n", "--url", server.url, "--api-key-env", "OTHER_KEY")
        assert server.keys == [None, None, "Bearer rdx-1", "Bearer rdx-1", "Bearer rdx-2", "Bearer rdx-2"]
        code, _, err = ask("one\n", "--url", server.url, "--api-key-env", "NOT_SET_ANYWHERE")
        assert (code, err) == (2, ["raydix: --api-key-env NOT_SET_ANYWHERE: no such variable in the environment"])

    def test_a_reader_that_leaves_is_no_traceback(self, server: Server) -> None:
        read, write = os.pipe()
        os.close(read)
        command = [sys.executable, "-m", "raydix.cli.main", "chat", "--url", server.url]
        done = subprocess.run(
            command, input=b"one\n", stdout=write, stderr=subprocess.PIPE, cwd=REPOSITORY, timeout=WAIT_S, check=False
        )
        os.close(write)
        assert (done.returncode, done.stderr) == (1, b"")


class TestNoServer:
    @pytest.mark.parametrize("arguments", [[], ["--model", "tiny"]])
    def test_unreachable(self, ask: Ask, arguments: list[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{probe.getsockname()[1]}"
            code, out, err = ask("one\n", "--url", url, *arguments)
        assert (code, out, err) == (2, "", [f"raydix: cannot reach {url}: Connection refused"])

    @pytest.mark.parametrize("url", ["http://[::1", "ftp://x", "http://h:99999"])
    def test_no_url(self, ask: Ask, url: str) -> None:
        assert ask("", "--url", url) == (2, "", [f"raydix: cannot reach {url}: that is no HTTP URL"])

    @pytest.mark.parametrize(
        ("reply", "reason"),
        [
            ({"status": 404, "text": "no"}, "does not list its models: HTTP 404 Not Found; try --model"),
            ({"status": 503, "text": '{"detail": "loading"}'}, "does not list its models: HTTP 503: loading; try"),
            ({"status": 401, "text": "no"}, "does not list its models: HTTP 401 Unauthorized"),
            ({"text": '{"data": []}'}, "lists no model"),
            ({"text": "<html>"}, "lists no model"),
        ],
    )
    def test_no_model(self, reply: dict[str, Any], reason: str) -> None:
        async def models(request: web.Request) -> web.Response:
            return web.Response(**reply)

        application = web.Application()
        application.router.add_get("/v1/models", models)
        with serving(application) as url:
            with pytest.raises(StartupError, match=re.escape(reason)) as refused:
                asyncio.run(chat.ChatServer(url).model(None))
            assert ("try --model" in str(refused.value)) == (reply.get("status") in (404, 503))
            assert asyncio.run(chat.ChatServer(url).model("named")) == "named"


class Terminal:
    """The command in a terminal of its own: what is written there is typed."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        # A leader of a session gets the first terminal that it opens, and with it what Ctrl-C sends; that is ignored
        # where the tests themselves run in the background of a shell.
        start = (
            "import os, signal, sys; os.open(os.ttyname(0), os.O_RDWR); from raydix.cli.main import main; "
            "signal.signal(signal.SIGINT, signal.default_int_handler); sys.exit(main())"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", start, "chat", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=REPOSITORY,
            env={**os.environ, "TERM": "xterm", "INPUTRC": os.devnull},
            start_new_session=True,
        )
        os.close(slave)
        self.screen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, pattern: str) -> str:
        """Read until the screen shows `pattern`; gives all up to there, and forgets it."""
        deadline = time.monotonic() + WAIT_S
        while not (found := re.search(pattern, self.screen)):
            ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{pattern!r} is not on the screen: {self.screen!r}"
            self.screen += os.read(self._master, 4096).decode()
        shown, self.screen = self.screen[: found.end()], self.screen[found.end() :]
        return shown

    def leave(self) -> None:
        """Ctrl-C until it is heard: one that is typed while readline takes over the terminal is lost."""
        while self.process.poll() is None:
            self.type("\x03")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(WAIT_S / 4)

    def exit_code(self) -> int:
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)


@contextmanager
def terminal(server: Server) -> Iterator[Terminal]:
    opened = Terminal("--url", server.url)
    try:
        opened.wait_for("> ")
        yield opened
    finally:
        opened.close()


class TestTerminalChat:
    def test_shows_the_answer_then_a_dim_line_and_recalls_questions(self, server: Server) -> None:
        with terminal(server) as screen:
            screen.type("one\n")
            shown = screen.wait_for(r"from the cache\)\x1b\[0m\r\n.*> ")
            assert "Héllo wörld\r\n\x1b[2m" in shown
            screen.type("\x1b[A\n")  # up
            screen.wait_for(r"from the cache\)\x1b\[0m\r\n.*> ")
            assert [message["content"] for message in server.bodies[1]["messages"]] == ["one", "Héllo wörld", "one"]
            screen.type("\x04")
            assert screen.exit_code() == 0

    def test_a_pasted_text_of_three_lines_is_one_question(self, server: Server) -> None:
        pasted = "first line\nsecond line\nthird line"
        with terminal(server) as screen:
            screen.type(f"\x1b[200~{pasted}\x1b[201~\n")  # as terminals mark a paste
            screen.wait_for(r"from the cache\)\x1b\[0m\r\n.*> ")
            assert [server.roles(index) for index in range(len(server.bodies))] == [[("user", pasted)]]
            screen.type("\x04")
            assert screen.exit_code() == 0

    def test_reasoning_is_dim_and_the_answer_begins_in_a_line_of_its_own(self, server: Server) -> None:
        with terminal(server) as screen:
            screen.type("think\n")
            shown = screen.wait_for(r"from the cache\)\x1b\[0m\r\n.*> ")
            assert "\x1b[2mby reasoning_content \x1b[0m\x1b[2mby reasoning \x1b[0m\r\nHéllo wörld\r\n" in shown
            screen.type("\x04")
            assert screen.exit_code() == 0

    def test_ctrl_c_stops_the_answer_and_keeps_what_came(self, server: Server) -> None:
        with terminal(server) as screen:
            screen.type("hang\n")
            screen.wait_for("Héllo ")
            screen.type("\x03")
            screen.wait_for(r"\x1b\[2mstopped; \d+ ms to first token\x1b\[0m\r\n.*> ")
            assert server.was_left.wait(WAIT_S)
            screen.type("next\n")
            screen.wait_for(r"ms to first token.*\r\n.*> ")
            assert server.roles(1) == [("user", "hang"), ("assistant", "Héllo "), ("user", "next")]
            screen.leave()
            assert screen.exit_code() == 0
            assert "Traceback" not in screen.screen

    def test_ctrl_c_before_the_first_token_forgets_the_question(self, server: Server) -> None:
        with terminal(server) as screen:
            screen.type("hang early\n")
            assert server.is_hanging.wait(WAIT_S)
            screen.type("\x03")
            screen.wait_for(r"\x1b\[2mstopped\x1b\[0m\r\n.*> ")
            assert server.was_left.wait(WAIT_S)
            screen.type("next\n")
            screen.wait_for("> ")
            assert server.roles(1) == [("user", "next")]
            screen.type("/quit\n")
            assert screen.exit_code() == 0

    def test_a_failure_does_not_end_it(self, server: Server) -> None:
        with terminal(server) as screen:
            screen.type("refuse\n")
            screen.wait_for(r"\x1b\[2merror: HTTP 400: the prompt is too long\x1b\[0m\r\n.*> ")
            screen.type("one\n")
            screen.wait_for("> ")
            screen.type("/quit\n")
            assert screen.exit_code() == 0


class TestReadEvent:
    def test_shapes_of_other_servers(self) -> None:
        assert chat.read_event(b'{"choices": null, "usage": null}') == chat.Event()
        assert chat.read_event(b'{"choices": [{"delta": {"content": null}}]}') == chat.Event()
        usage = b'{"usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": null}}'
        assert chat.read_event(usage) == chat.Event(usage=chat.TokenCounts(3, 2, None))

    @pytest.mark.parametrize(
        "error",
        [{"error": {"message": "m"}}, {"error": "m"}, {"error": {"detail": "m"}}, {"error": {"message": "\x1bm"}}],
    )
    def test_errors(self, error: dict[str, Any]) -> None:
        with pytest.raises(chat.AnswerError, match=r"^m$"):
            chat.read_event(json.dumps(error).encode())

    @pytest.mark.parametrize("data", [b"", b"1", b"{", b'{"choices": [1]}', b'{"usage": {"prompt_tokens": "x"}}'])
    def test_nonsense(self, data: bytes) -> None:
        with pytest.raises(chat.AnswerError, match="no event of a chat completion"):
            chat.read_event(data)


class TestSummary:
    def test_rate_leaves_out_the_time_to_the_first_token(self) -> None:
        answer = chat.StreamedAnswer()
        answer.add(chat.Event("a"), 2.0)
        answer.add(chat.Event("b", "stop"), 4.0)
        answer.add(chat.Event(usage=chat.TokenCounts(7, 9, None)), 5.0)
        assert answer.summary() == "2.00 s to first token, 4.0 tokens/s, 7 prompt tokens"

    def test_nothing_came(self) -> None:
        assert chat.StreamedAnswer().summary() == ""


class TestServeRefuses:
    """Each refusal comes before Ray: importing it would end the process otherwise."""

    @pytest.fixture
    def serve(self, tmp_path: Path) -> Callable[..., str]:
        """Runs `raydix serve`, which must refuse; gives its one line."""
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "__init__.py").write_text("import os\nos._exit(99)\n")

        def run(*arguments: str, before: str = "") -> str:
            """`before`: statements that run in the process before the command."""
            command = f"import sys; from raydix.cli.main import main; {before or None}; sys.exit(main())"
            done = subprocess.run(
                [sys.executable, "-c", command, "serve", *arguments],
                capture_output=True,
                text=True,
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": str(tmp_path)},
                timeout=60,
                check=False,
            )
            assert (done.returncode, done.stdout) == (2, ""), done.stderr
            (line,) = done.stderr.splitlines()
            return line

        return run

    def test_a_mistake_in_a_configuration_is_found_without_torch(
        self, serve: Callable[..., str], tmp_path: Path
    ) -> None:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").write_text("import os\nos._exit(99)\n")
        (tmp_path / "bad.yaml").write_text("{cache: {block_size: -1}, workers: {mixed: {}}}")
        assert "cache.block_size" in serve("--config", str(tmp_path / "bad.yaml"))
        (tmp_path / "large.yaml").write_text("{cache: {segment_gib: 1.0e+6}, workers: {mixed: {}}}")
        assert "object store" in serve("--config", str(tmp_path / "large.yaml"), "--port", str(free_port()))

    def test_too_little_shared_memory_for_the_object_store(self, serve: Callable[..., str], tmp_path: Path) -> None:
        """Before anything is started. /proc stands in for a full /dev/shm: a file system without a free byte."""
        (tmp_path / "small.yaml").write_text("{cache: {segment_gib: 0.7}, workers: {mixed: {}}}")
        before = "import pathlib; from raydix.cli import serve; serve.SHARED_MEMORY = pathlib.Path('/proc')"
        line = serve("--config", str(tmp_path / "small.yaml"), "--port", str(free_port()), before=before)
        assert line.startswith("raydix: /proc has 0.00 GiB free, and the object store needs 1.45 GiB")
        assert "--shm-size=2g" in line

    def test_too_few_open_files(self, serve: Callable[..., str]) -> None:
        before = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))"
        line = serve("--config", "cpu_mixed", "--port", str(free_port()), before=before)
        assert line == "raydix: a process may open 100 files (ulimit -Hn), and a server needs 256"

    def test_no_such_config(self, serve: Callable[..., str]) -> None:
        assert serve("--config", "nowhere.yaml").startswith("raydix: config nowhere.yaml: no such file")

    def test_bad_config(self, serve: Callable[..., str], tmp_path: Path) -> None:
        config = tmp_path / "bad.yaml"
        config.write_text((REPOSITORY / "configs" / "cpu.yaml").read_text() + "\nhtpp:\n  port: 1\n")
        line = serve("--config", str(config))
        assert line == f"raydix: config {config}: unknown key 'htpp', did you mean 'http'?"
        config.write_text("http: [\n")
        assert serve("--config", str(config)).startswith(f"raydix: config {config}: ")

    def test_every_file_counts(self, serve: Callable[..., str], tmp_path: Path) -> None:
        """Shares of a cache that the second file turns off: known only where the tenants of the first are kept."""
        first, second = tmp_path / "tenants.yaml", tmp_path / "mine.yaml"
        first.write_text("tenants: [{name: alice, cache_min: 0.5}]")
        second.write_text("{cache: {prefix_caching: false}, workers: {mixed: {}}}")
        for files in ((first, second), (second, first)):
            line = serve(*(word for file in files for word in ("--config", str(file))))
            assert line.startswith(f"raydix: config {files[0]} + {files[1]}: cache_min and cache_max (of tenant alice)")

    def test_no_such_model(self, serve: Callable[..., str], tmp_path: Path) -> None:
        line = serve("--model", f"{tmp_path}/none", "--port", str(free_port()))  # a server may have the default one
        assert line.startswith(f"raydix: there is no model at {tmp_path}/none")

    def test_more_in_the_object_store_than_there_is_memory(self, serve: Callable[..., str], tmp_path: Path) -> None:
        (tmp_path / "large.yaml").write_text("{cache: {segment_gib: 1.0e+6}, workers: {mixed: {}}}")
        line = serve("--config", str(tmp_path / "large.yaml"), "--port", str(free_port()))
        assert line.startswith("raydix: cache.segment_gib and each worker's cache.swap_gib come to an object store of ")

    def test_port_in_use(self, serve: Callable[..., str], tmp_path: Path) -> None:
        fields = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        model = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64, **dict.fromkeys(fields, 16)}
        (tmp_path / "config.json").write_text(json.dumps(model))
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = str(taken.getsockname()[1])
            line = serve("--model", str(tmp_path), "--port", port)
        assert line == f"raydix: 127.0.0.1:{port} is in use; choose another with --port or --host"


def test_the_example_request_sends_a_key_where_one_is_needed(tmp_path: Path) -> None:
    from raydix.cli.serve import example

    assert "Authorization" not in example(load_config("cpu"), tmp_path)
    with_tenants = example(load_config("cpu", {"tenants": [{"name": "a"}]}), tmp_path)
    assert ' -H "Authorization: Bearer $OPENAI_API_KEY" ' in with_tenants


@pytest.mark.parametrize(
    ("file", "content", "is_chat"),
    [
        ("chat_template.jinja", "{{ messages }}", True),
        ("tokenizer_config.json", '{"chat_template": "{{ messages }}"}', True),
        ("tokenizer_config.json", '{"chat_template": null}', False),
        ("tokenizer_config.json", "[]", False),
        ("other.json", "{}", False),
    ],
)
def test_the_example_is_a_chat_where_the_model_has_a_template(
    tmp_path: Path, file: str, content: str, is_chat: bool
) -> None:
    from raydix.cli.serve import example

    (tmp_path / file).write_text(content)
    shown = example(load_config("cpu"), tmp_path)
    assert ("/v1/chat/completions" in shown, '"messages"' in shown) == (is_chat, is_chat)
    assert ("the model has no chat template" in shown, '"prompt"' in shown) == (not is_chat, not is_chat)
    assert json.loads(shown[shown.index("-d '") + 4 : -1])["max_tokens"] == 100


def test_the_age_of_a_process_has_its_imports_in_it() -> None:
    program = (
        "import time; began = time.monotonic(); from raydix.cli.waiting import age_s; "
        "print(time.monotonic() - began, age_s())"
    )
    asked = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    imports_s, age_s = map(float, done.stdout.split())
    assert imports_s < age_s < time.monotonic() - asked + 2 / os.sysconf("SC_CLK_TCK")


def test_a_command_without_a_terminal_says_again_and_again_what_it_waits_for() -> None:
    from raydix.cli.waiting import Waiting

    class Written(io.StringIO):
        """A file of which each line is waited for."""

        def __init__(self) -> None:
            super().__init__()
            self.lines: queue.Queue[str] = queue.Queue()

        def write(self, text: str) -> int:
            if text.strip():
                self.lines.put(text.strip())
            return len(text)

    written = Written()
    with Waiting(Console(file=written), "starting Ray", interval_s=0.001) as waiting:
        assert re.fullmatch(r"starting Ray, \d+ s so far", written.lines.get(timeout=WAIT_S))
        waiting.update("starting the actors")
        while not (line := written.lines.get(timeout=WAIT_S)).startswith("starting the actors, "):
            assert line.startswith("starting Ray, ")
    assert not any(thread.name == "waiting" for thread in threading.enumerate())


def test_several_files_mean_the_same_to_every_command() -> None:
    files = ("--config", "cpu", "--config", "tenants.yaml")
    for command in (("serve",), ("deploy",), ("batch", "in.jsonl", "-o", "out.jsonl")):
        assert parser().parse_args([*command, *files]).config == ["cpu", "tenants.yaml"]


@pytest.mark.parametrize(
    ("tenants", "line"),
    [
        ([], "open, without a key, to anybody who reaches [::1]:8000"),
        ([("alice", "k")], "open to tenant alice, by key"),
        ([("alice", "k"), ("bob", "l"), ("carol", None)], "open to tenants alice, bob, by key"),
        ([("carol", None)], "open to nobody over HTTP: no tenant has a key"),
        (
            [(f"t{number}", f"k{number}") for number in range(12)],
            "open to tenants t0, t1, t2, t3, t4, t5, t6, t7, t8, t9 and 2 more, by key",
        ),
    ],
)
def test_the_start_says_who_may_use_the_server(tenants: list[tuple[str, str | None]], line: str) -> None:
    sections = [
        {"name": name, "key_hashes": [hashlib.sha256(key.encode()).hexdigest()] if key else []} for name, key in tenants
    ]
    assert who_may_use(load_config("cpu", {"tenants": sections, "http": {"host": "::1"}})) == line


def test_each_key_is_a_new_one_and_printed_with_its_hash(capsys: pytest.CaptureFixture[str]) -> None:
    keys = set()
    for _ in range(2):
        assert main(["key"]) == 0
        (name, key), (label, key_hash) = (line.split() for line in capsys.readouterr().out.splitlines())
        assert (name, label) == ("key", "hash")
        assert re.fullmatch(r"rdx-[\w-]{43}", key)
        assert key_hash == hashlib.sha256(key.encode()).hexdigest()
        keys.add(key)
    assert len(keys) == 2


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert re.fullmatch(r"raydix \d\S+\n", capsys.readouterr().out)


def test_a_command_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "usage: raydix" in capsys.readouterr().err


def test_an_installation_names_each_step_and_shows_its_progress() -> None:
    command = ["make", "--dry-run", "--always-make", "develop"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=True)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("make")]  # one make may run another
    steps: list[tuple[str, str]] = []
    commands: list[list[str]] = []
    for line in lines:
        if match := re.match(r"echo '(\d) of (\d): ", line):
            steps.append((match[1], match[2]))
            commands.append([])
        elif "pip install" in line or "-m venv" in line:
            commands[-1].append(line)  # a step was named before
    assert steps == [(str(step), "4") for step in range(1, 5)] + [("1", "2"), ("2", "2")]
    assert all(commands), "a step without a command"
    assert not [line for step in commands for line in step if "--quiet" in line or " -q " in line]


def test_a_port_that_was_taken_during_the_start_of_one_process_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        config = load_config("cpu_mixed", {"http": {"host": "127.0.0.1", "port": port}})

        async def listen() -> None:
            stopping = asyncio.create_task(asyncio.Event().wait())
            await local._listen(Starlette(), config, Console(file=io.StringIO()), stopping)

        with pytest.raises(StartupError, match=f"127.0.0.1:{port}"):
            asyncio.run(listen())
