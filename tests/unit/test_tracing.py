"""A trace: what every process does for some seconds, on one clock, in Chrome's format."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from ray.exceptions import ActorDiedError

import raydix.actors.tracing as tracing
from raydix.actors.ingress.cluster_trace import ClusterTrace, chrome_trace
from raydix.actors.ingress.dispatcher import Deliveries, Delivery
from raydix.actors.ingress.manager_link import ManagerLink
from raydix.actors.local import LocalRuntime
from raydix.actors.manager.decision_spans import note_instruction
from raydix.actors.metrics import IngressMetrics
from raydix.actors.rpc import WorkerClient
from raydix.actors.tracing import Recorded, Recorder, Span
from raydix.cli.main import main
from raydix.engine.core.errors import OverloadedError
from raydix.engine.core.manager.block_index import Segment
from raydix.engine.core.manager.instructions import EraseFile, Export, HandoverLost, Lost, ReadFile, WriteFile
from raydix.engine.core.tenants import Tenant, Tenants, key_hash
from raydix.engine.core.types import AdmitRequest, Role, SegmentHeader, WorkerInfo
from tests.unit.ingress import Replica, Served, call
from tests.unit.local_actors import answer_of
from tests.unit.served_app import app
from tests.unit.test_data_plane import NUM_TOKENS, Scene, expected, prompt_of, scene
from tests.unit.test_observe import KEY, serving
from tests.unit.waits import until

__all__ = ["scene"]


@pytest.fixture
def is_over(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set by the test to end its recordings."""
    event = asyncio.Event()

    async def wait(seconds: float) -> None:
        await event.wait()

    monkeypatch.setattr(tracing, "sleep", wait)
    # All processes of these tests are one, whose clock each of them would read at another moment.
    monkeypatch.setattr(tracing, "ahead_of_monotonic", lambda: 1e9)
    return event


def slices(trace: Any, process: str) -> dict[str, list[Any]]:
    """Slices of one process by the name of their row."""
    events = trace["traceEvents"]
    [pid] = [e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == process]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == pid}
    found: defaultdict[str, list[Any]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["pid"] == pid:
            found[rows[event["tid"]]].append(event)
    return found


def test_a_trace_shows_a_request_at_each_process(scene: Scene, is_over: asyncio.Event) -> None:
    own = Recorder("r", "ingress")

    async def play() -> None:
        manager, dispatcher = await scene.start()
        dispatcher._on_delivery = Deliveries(IngressMetrics([]), own).took
        trace = ClusterTrace(own, lambda: dispatcher.workers, scene.local.find_worker, ManagerLink(scene.local))
        await answer_of(dispatcher, "before", prompt_of(1), NUM_TOKENS)
        recorders = [own, manager._recorder, *(worker._recorder for worker in scene.workers.values())]
        recording = asyncio.create_task(trace.record(5))
        await until(lambda: all(each.is_on for each in recorders))
        with pytest.raises(OverloadedError, match="being recorded"):
            await trace.record(5)

        prompt = (7, *prompt_of(2))
        assert await answer_of(dispatcher, "r", prompt, NUM_TOKENS) == expected(prompt)
        [decision] = manager._directory.decisions.of("r")["r"]
        arrivals = scene.workers[decision.decode]._recorder._recordings[0].spans
        await until(lambda: any(span.is_arrival for span in arrivals))
        is_over.set()
        found = json.loads(await recording)
        assert not any(each.is_on for each in recorders)

        assert found["otherData"]["missing"] == [] and found["otherData"]["dropped"] == 0
        prefill = slices(found, f"prefill {decision.prefill}")
        decode = slices(found, f"decode {decision.decode}")
        tokens = slices(found, "ingress r")["r"]
        assert set(slices(found, "ingress r")) == {"r"}, "of a request before nothing is known"
        decided = slices(found, "manager kv_cache_manager")
        [admitted] = decided["admissions"]
        about = admitted["args"]
        assert (admitted["name"], about["prefill"], about["decode"]) == ("r", decision.prefill, decision.decode)
        assert about["blocks"] == {"never_seen": len(prompt) // 4} and about["tokens"] == len(prompt)
        assert about["expected_ttft_s"] == pytest.approx(decision.predicted_ttft_s, abs=1e-6)
        delivered = [each["args"] for each in decided["KV to workers"] if each["name"].startswith("deliver")]
        assert {(each["from"], each["to"]) for each in delivered} == {(decision.prefill, decision.decode)}
        assert [each.get("request") for each in delivered][-1] == "r" and delivered[-1]["fate"] == "TAKEN"
        assert sum(each["args"]["tokens"] for each in prefill["r"] if each["name"].startswith("prefill")) == len(prompt)
        assert prefill["r"][0]["name"] == "waiting"
        decoded = [each["name"] for each in decode["r"]]
        assert decoded[:2] == ["waiting", "decode 1"] and decoded[-1] == f"decode {NUM_TOKENS - 1}"
        assert sum(each["args"]["tokens"] for each in tokens) == NUM_TOKENS
        assert tokens[0]["name"].startswith("token 1")
        assert len(decode["steps"]) == len(decoded) - 1, "it was alone"
        # The last slice of the prefill begins before the hand-over, and the first decode comes behind it.
        [sent] = [each for each in prefill["transfers"] if each["name"] == "hand over"]
        [taken] = [each for each in decode["transfers"] if each["name"] == "take over"]
        assert prefill["r"][-1]["ts"] <= sent["ts"] <= taken["ts"] <= decode["r"][1]["ts"]
        arrows = [each for each in found["traceEvents"] if each["name"] == "hand-over"]
        assert [(each["ph"], each["id"]) for each in sorted(arrows, key=lambda each: -ord(each["ph"]))] == [
            ("s", "r"),
            ("f", "r"),
        ]

    scene.run(play())


def test_nothing_is_recorded_without_a_recording_and_no_more_than_the_limit(
    monkeypatch: pytest.MonkeyPatch, is_over: asyncio.Event
) -> None:
    monkeypatch.setattr(tracing, "MAX_SPANS", 2)

    async def play() -> Recorded:
        recorder = Recorder("w", "mixed")
        recorder.add([Span("row", "early", 1.0, 0.5, {})])
        recording = asyncio.create_task(recorder.record(1))
        await until(lambda: recorder.is_on)
        for name in "abc":
            assert recorder.has_room == (name != "c")
            recorder.add([Span("row", name, 1.0, 0.5, {})])
        recorder.lost(2)
        is_over.set()
        recorded = await recording
        recorder.add([Span("row", "late", 1.0, 0.5, {})])
        return recorded

    recorded = asyncio.run(play())
    assert [span.name for span in recorded.spans] == ["a", "b"] and recorded.num_dropped == 3
    assert recorded.spans[0].started_at == 1e9 + 1.0, "in seconds since the epoch"


def test_slices_that_overlap_have_lines_of_their_own() -> None:
    spans = (Span("row", "b", 11.0, 3.0, {}), Span("row", "a", 10.0, 2.0, {}), Span("row", "c", 12.0, 0.0, {}))
    trace: Any = chrome_trace([Recorded("w", "mixed", spans, 4)], ["x"], began_at=11.5)
    found = {event["name"]: event for event in trace["traceEvents"] if event["ph"] == "X"}
    assert {name: event["tid"] for name, event in found.items()} == {"a": 1, "b": 2, "c": 1}
    assert [found["a"]["ts"], found["b"]["ts"], found["b"]["dur"], found["c"]["dur"]] == [0, 1_000_000, 3_000_000, 1]
    assert trace["otherData"]["dropped"] == 4 and trace["otherData"]["missing"] == ["x"]
    nothing: Any = chrome_trace([], [], began_at=60.0)
    assert nothing["traceEvents"] == [] and nothing["otherData"]["started_at"] == "1970-01-01T00:01:00+00:00"


def test_a_worker_that_does_not_answer_is_named(is_over: asyncio.Event) -> None:
    class FakeWorker(WorkerClient):
        def __init__(self, answer: Callable[[], Awaitable[Recorded]]) -> None:
            self._answer = answer

        def trace(self, seconds: float) -> Awaitable[Recorded]:
            return self._answer()

    async def never() -> Recorded:
        await asyncio.Event().wait()
        raise AssertionError

    async def dies() -> Recorded:
        raise ActorDiedError

    clients = {"silent": FakeWorker(never), "dead": FakeWorker(dies)}
    workers = [WorkerInfo(name, Role.MIXED, 1) for name in (*clients, "unknown")]

    async def find(worker_id: str, epoch: int) -> WorkerClient | None:
        return clients.get(worker_id)

    async def play() -> Any:
        is_over.set()
        link = ManagerLink(LocalRuntime())  # finds no manager
        trace = ClusterTrace(Recorder("r", "ingress"), lambda: workers, find, link, 0.01)
        return json.loads(await trace.record(0.01))

    assert asyncio.run(play())["otherData"]["missing"] == ["kv_cache_manager", "silent", "dead", "unknown"]


def test_what_the_manager_refuses_and_what_it_tells_the_disk_is_in_a_trace(scene: Scene, tmp_path: Path) -> None:
    async def play() -> None:
        manager = await scene.local.start_manager(tmp_path)
        recorder = manager._recorder
        # A recording under way, without waiting for its end.
        recording = tracing._Recording()
        recorder._recordings.append(recording)
        request = AdmitRequest("nobody", 0, (), 8)
        assert await manager.admit([request]) == [None]
        header = SegmentHeader("f", (b"a" * 16,), 10, 0)
        segment = Segment(1, header, None)
        for instruction in (WriteFile(segment), ReadFile(segment), EraseFile(header)):
            note_instruction(recorder, instruction, 1.0)
        note_instruction(recorder, Export("w", (b"a", b"b")), 1.0)
        note_instruction(recorder, Lost("w", (b"a",)), 1.0)
        note_instruction(recorder, HandoverLost("w", "r"), 1.0)
        first, *others = recording.spans
        assert (first.row, first.name, first.about["why"]) == ("admissions", "nobody no worker", "no worker")
        assert [span.name for span in others] == [
            "write",
            "read",
            "erase",
            "ask w for blocks",
            "tell w of lost blocks",
            "tell w of a lost hand-over",
        ]

    scene.run(play())


def test_the_route_is_for_administrators_and_bounded(served: Served, is_over: asyncio.Event) -> None:
    is_over.set()
    tenants = Tenants([Tenant("a"), Tenant("boss", is_admin=True)], {key_hash("k"): "a", key_hash("b"): "boss"})

    def ask(key: str, query: str = "") -> Any:
        headers = {"authorization": f"Bearer {key}"}
        replica = Replica(tenants=tenants)
        return served(replica, lambda: call(app, "POST", f"/v1/debug/trace{query}", headers=headers))

    assert [ask(key).status for key in ("x", "k", "b")] == [401, 403, 200]
    assert ask("b", "?seconds=60").json["displayTimeUnit"] == "ms"
    for wrong in ("0", "-1", "61", "nan", "x", ""):
        reply = ask("b", f"?seconds={wrong}")
        assert reply.status == 400 and "above 0 and up to 60" in reply.json["error"]["message"], wrong


def test_a_delivery_is_a_gap_except_for_the_first() -> None:
    metrics = IngressMetrics([])
    deliveries = Deliveries(metrics, Recorder("r", "ingress"))
    deliveries.took(Delivery("r", 0, 1, since=1.0, at=3.0))
    deliveries.took(Delivery("r", 1, 2, since=3.0, at=3.25))
    [observed] = metrics._gap_s.family().values.values()
    assert not isinstance(observed, float) and (sum(observed.counts), observed.total) == (1, 0.25)


def traced(status: int = 200) -> web.Application:
    async def trace(request: web.Request) -> web.Response:
        if status != 200:
            return web.json_response({"error": {"message": "A trace is being recorded."}}, status=status)
        assert request.query["seconds"] == "2.5" and request.headers["authorization"] == f"Bearer {KEY}"
        events = [{"ph": "X", "name": "a"}, {"ph": "M", "name": "b"}]
        about = {"started_at": "2026-11-28T10:00:00+00:00", "dropped": 3, "missing": ["decode-1"]}
        return web.json_response({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about})

    application = web.Application()
    application.router.add_post("/v1/debug/trace", trace)
    return application


def test_the_command_writes_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    path = tmp_path / "trace.json"
    with serving(traced()) as url:
        assert main(["trace", "-o", str(path), "--seconds", "2.5", "--url", url]) == 0
        assert len(json.loads(path.read_text())["traceEvents"]) == 2
        said = capsys.readouterr().err
        assert f"{path}: 1 slices" in said and "decode-1 did not answer" in said and "3 slices were too many" in said
        assert main(["trace", "-o", str(tmp_path / "no" / "trace.json"), "--url", url]) == 2
        assert "cannot be written" in capsys.readouterr().err
    with serving(traced(429)) as url:
        assert main(["trace", "-o", str(path), "--url", url]) == 2
        assert "being recorded" in capsys.readouterr().err
    assert len(json.loads(path.read_text())["traceEvents"]) == 2, "the earlier trace stays"
