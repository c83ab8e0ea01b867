"""Streams go on after the process that their connection ran through was killed: an ingress replica, or HAProxy.

A server with two ingress replicas. The client of the tests sends the same body with the id of the last event; what it
has in the end is compared with the answer to the same body, and the seed that the ids name, without a break."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import pytest

from raydix.engine.api.reconnecting import AWAY, Reconnecting
from raydix.engine.api.resuming import EventId
from tests.integration.cluster import Cluster, paced, processes
from tests.integration.conftest import MODEL, WAIT_S, Server, eventually

CONFIG = {
    "model": {"max_model_len": 2048},
    "cache": {"num_blocks": 600, "segment_gib": 0.1, "swap_gib": 0.05},
    "workers": {"mixed": {"token_budget": 256, "max_requests": 8}},
    "ingress": {"replicas": 2},
}
KILL_AFTER = 12
"""Events of a stream, after which a process is killed."""
PACE_S = 0.2
"""Least time of a step before the kill: the answer is not over by then."""
INGRESS, HAPROXY = "ray::ServeReplica:raydix:ingress", "haproxy"
HTTP_PORT_LIMIT = "RAY_SERVE_DIRECT_INGRESS_{}_HTTP_PORT"
COMPLETION = {
    "prompt": "The four seasons of the year are",
    "max_tokens": 160,
    "ignore_eos": True,
    "temperature": 0,
    "speculation": False,  # with drafts this answer, which repeats itself, is over before a process is killed
}
QUESTION = [{"role": "user", "content": "Tell a long story of a fox, a river and a mill."}]
COLOURS = {"type": "array", "minItems": 40, "maxItems": 60, "items": {"enum": ["red", "green"]}}
TOOL = {
    "type": "function",
    "function": {
        "name": "paint",
        "parameters": {
            "type": "object",
            "properties": {"colours": COLOURS},
            "required": ["colours"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resuming") / "gate"


@pytest.fixture
def two_replicas(cluster: Cluster) -> Server:
    """The server, once two ingress replicas answer."""
    server = cluster.serve(CONFIG).server
    eventually(lambda: len(loads()) == 2, "two ingress replicas")
    eventually(lambda: server.request("GET", "/health")[0] == 200, "healthy")
    return server


def loads() -> dict[int, int]:
    """Answers under way at each ingress replica that answers, by process."""
    found = {}
    for process in processes():
        try:
            is_ingress = " ".join(process.cmdline()).startswith(INGRESS)
            ports = [each.laddr.port for each in process.net_connections() if each.status == psutil.CONN_LISTEN]
        except psutil.Error:
            continue
        for port in ports if is_ingress else ():
            if port in http_ports():
                with contextlib.suppress(OSError, http.client.HTTPException):  # a replica that begins or ends
                    status, _, data = Server("127.0.0.1", port).request("GET", "/load")
                    if status == 200:
                        found[process.pid] = int(json.loads(data)["server_load"])
    return found


def http_ports() -> range:
    """Ports at which ingress replicas answer HAProxy, as this process has told Serve."""
    least, most = (int(os.environ[HTTP_PORT_LIMIT.format(end)]) for end in ("MIN", "MAX"))
    return range(least, most + 1)


def kill(victim: str, gate: Path) -> None:
    """Kill the process through which the only running answer goes, and then let the answer go on at full speed."""
    if victim == HAPROXY:
        pid = next(process.pid for process in processes() if process.name() == HAPROXY)
    else:
        [pid] = [pid for pid, load in loads().items() if load]
    os.kill(pid, signal.SIGKILL)
    gate.unlink()


@dataclass
class Client:
    """Reads one stream to its end, whatever breaks."""

    server: Server
    path: str
    body: dict[str, Any]
    on_event: Callable[[int], object] = lambda _: None
    """Called with the number of events so far."""
    events: list[bytes] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    def run(self) -> "Client":
        place = Reconnecting()
        while not self.attempt(place):
            pause_s = place.pause_s(time.monotonic())
            assert pause_s is not None, "the stream does not go on"
            time.sleep(pause_s)
        self.num_breaks = place.num_breaks
        return self

    def attempt(self, place: Reconnecting) -> bool:
        """Read as much as comes; returns whether that was the end."""
        connection = http.client.HTTPConnection(self.server.host, self.server.port, timeout=WAIT_S)
        try:
            headers = self.server.headers | place.headers
            connection.request("POST", self.path, json.dumps({"model": MODEL, "stream": True, **self.body}), headers)
            response = connection.getresponse()
            if response.status != 200:
                assert response.status in AWAY, response.read()
                return False
            while line := response.readline():
                data = place.take_line(line)
                if data is not None:
                    self.events.append(data)
                    self.ids.append(place.headers["Last-Event-ID"])
                    self.on_event(len(self.events))
            return bool(self.events) and self.events[-1] == b"[DONE]"
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def chunks(self) -> list[dict[str, Any]]:
        return [json.loads(event) for event in self.events if event != b"[DONE]"]

    def choices(self) -> dict[int, dict[str, Any]]:
        """The joined parts of each choice."""
        joined: dict[int, dict[str, Any]] = {}
        for chunk in self.chunks():
            for choice in chunk["choices"]:
                of = joined.setdefault(choice["index"], {"text": "", "tokens": [], "calls": [], "ends": []})
                delta = choice.get("delta") or {"content": choice.get("text")}
                of["text"] += delta.get("content") or ""
                of["tokens"] += choice.get("token_ids") or []
                of["ends"] += [choice["finish_reason"]] * (choice["finish_reason"] is not None)
                for call in delta.get("tool_calls", ()):
                    if "id" in call:
                        of["calls"].append([call["id"], call["function"]["name"], ""])
                    of["calls"][call["index"]][2] += call["function"]["arguments"]
        return joined


def whole(server: Server, client: Client) -> Client:
    """The same answer without a break: the body with the seed that the ids name, unless it names one."""
    seed = EventId.read(client.ids[0]).origin.seed
    return Client(server, client.path, {"seed": seed, **client.body}).run()


def without_call_ids(choices: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Ids of calls are random in each request of its own."""
    return {index: {**each, "calls": [call[1:] for call in each["calls"]]} for index, each in choices.items()}


def usage_of(client: Client) -> dict[str, Any]:
    """All but the number of cached tokens."""
    [usage] = [chunk["usage"] for chunk in client.chunks() if chunk.get("usage")]
    return {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


def broken(gate: Path, server: Server, path: str, body: dict[str, Any], victim: str = INGRESS) -> Client:
    """A stream in whose middle a process was killed, to its end."""

    def kill_once(num_events: int) -> None:
        if num_events == KILL_AFTER:
            kill(victim, gate)

    body = {**body, "return_token_ids": True, "stream_options": {"include_usage": True}}
    with paced(server, gate, PACE_S):
        client = Client(server, path, body, kill_once).run()
    assert client.num_breaks, "the stream was over before the process was dead"
    return client


def assert_is_whole(server: Server, client: Client) -> None:
    reference = whole(server, client)
    assert reference.num_breaks == 0
    assert without_call_ids(client.choices()) == without_call_ids(reference.choices())
    assert all(len(choice["ends"]) == 1 for choice in client.choices().values())
    assert usage_of(client) == usage_of(reference)
    heads = {(chunk["id"], chunk["created"], chunk["system_fingerprint"]) for chunk in client.chunks()}
    assert len(heads) == 1, "one answer"
    assert len({EventId.read(last).origin for last in client.ids}) == 1


CASES: list[Any] = [
    pytest.param("/v1/completions", COMPLETION, id="greedy"),
    pytest.param("/v1/completions", {**COMPLETION, "temperature": 1, "logprobs": 1}, id="sampled"),
    pytest.param("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 120, "n": 2, "temperature": 1}, id="two"),
    pytest.param(
        "/v1/chat/completions",
        {"messages": QUESTION, "tools": [TOOL], "tool_choice": "required", "max_tokens": 600},
        id="tools",
    ),
]


@pytest.mark.parametrize(("path", "body"), CASES)
def test_an_ingress_replica_is_killed(gate: Path, two_replicas: Server, path: str, body: dict[str, Any]) -> None:
    client = broken(gate, two_replicas, path, body)
    assert_is_whole(two_replicas, client)
    if "tools" in body:
        [call, *_] = client.choices()[0]["calls"]
        assert call[1] == "paint" and json.loads(call[2])["colours"]


def test_a_stop_string_behind_the_break(gate: Path, two_replicas: Server) -> None:
    body = {**COMPLETION, "temperature": 2, "seed": 4}
    text = Client(two_replicas, "/v1/completions", body).run().choices()[0]["text"]
    places = range(len(text) * 3 // 4, len(text) - 7)
    stop = next(part for start in places if text.index(part := text[start : start + 7]) == start)
    client = broken(gate, two_replicas, "/v1/completions", {**body, "stop": [stop, "no such text"]})
    assert_is_whole(two_replicas, client)
    [choice] = client.choices().values()
    assert choice["ends"] == ["stop"] and choice["text"] == text[: text.index(stop)]


def test_haproxy_is_killed(gate: Path, two_replicas: Server) -> None:
    client = broken(gate, two_replicas, "/v1/completions", {**COMPLETION, "temperature": 1}, HAPROXY)
    assert_is_whole(two_replicas, client)


def test_an_id_of_another_body_and_a_changed_answer_are_refused(two_replicas: Server) -> None:
    client = Client(two_replicas, "/v1/completions", {**COMPLETION, "max_tokens": 8}).run()

    def status(last: str, **change: Any) -> tuple[int, str]:
        connection = http.client.HTTPConnection(two_replicas.host, two_replicas.port, timeout=WAIT_S)
        body = {"model": MODEL, "stream": True, **client.body, **change}
        try:
            connection.request("POST", client.path, json.dumps(body), two_replicas.headers | {"last-event-id": last})
            response = connection.getresponse()
            return response.status, json.loads(response.read())["error"]["code"]
        finally:
            connection.close()

    last = client.ids[4]
    assert status(last, prompt="The seasons are") == (400, "invalid_request")
    place = last.partition(":")[0]
    tokens, event, check = place.split(".")
    other = f"{int(check, 16) ^ 1:08x}"
    assert status(last.replace(place, f"{tokens}.{event}.{other}")) == (409, "answer_changed")


def test_raydix_chat_goes_on(gate: Path, two_replicas: Server) -> None:
    url, question = two_replicas.url, QUESTION[0]["content"]
    command = [
        sys.executable,
        "-m",
        "raydix.cli.main",
        "chat",
        "--url",
        url,
        "--temperature",
        "0",
        "--max-tokens",
        "160",
    ]
    pipe = subprocess.PIPE  # without a buffer, which communicate() would not read
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0)
    assert process.stdin is not None and process.stdout is not None
    with paced(two_replicas, gate, PACE_S):
        process.stdin.write(question.encode() + b"\n")
        process.stdin.flush()
        beginning = process.stdout.read(20)
        kill(INGRESS, gate)
        rest, said = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, said
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 160}
    reference = Client(two_replicas, "/v1/chat/completions", body).run().choices()[0]["text"]
    assert (beginning + rest).decode().rstrip("\n") == reference.rstrip("\n")


def test_several_streams_go_on(gate: Path, two_replicas: Server) -> None:
    asked = {**COMPLETION, "max_tokens": 200, "return_token_ids": True, "stream_options": {"include_usage": True}}
    bodies = [{**asked, "prompt": f"The {name} of the year are"} for name in ("seasons", "days")]
    clients = [Client(two_replicas, "/v1/completions", body) for body in bodies]
    with paced(two_replicas, gate, PACE_S), ThreadPoolExecutor(len(clients)) as threads:
        runs = [threads.submit(client.run) for client in clients]
        eventually(lambda: all(len(client.events) >= KILL_AFTER for client in clients), "both streams have begun")
        victim = next(pid for pid, load in loads().items() if load)
        os.kill(victim, signal.SIGKILL)
        gate.unlink()
        assert sum(run.result().num_breaks for run in runs) > 0
    for client in clients:
        assert_is_whole(two_replicas, client)


def test_a_response_in_the_background_outlives_its_replica(gate: Path, two_replicas: Server) -> None:
    """The other replica generates it again, and its stream goes on behind the last event of the dead one."""
    client = openai.OpenAI(base_url=f"{two_replicas.url}/v1", api_key="none", max_retries=5, timeout=WAIT_S)
    with client, paced(two_replicas, gate, PACE_S):
        stream = client.responses.create(
            model=MODEL,
            input=QUESTION[0]["content"],
            max_output_tokens=120,
            temperature=1,
            background=True,
            stream=True,
        )
        events: list[Any] = []
        with pytest.raises((openai.APIError, httpx2.HTTPError)):
            for event in stream:
                events.append(event)
                if len(events) == KILL_AFTER:
                    kill(INGRESS, gate)
        response_id, last = events[0].response.id, events[-1].sequence_number
        eventually(lambda: two_replicas.request("GET", "/health")[0] == 200, "healthy")
        eventually(lambda: client.responses.retrieve(response_id).status == "incomplete", "taken over")
        shown = client.responses.retrieve(response_id)
        rest: list[Any] = list(client.responses.retrieve(response_id, stream=True, starting_after=last))
    numbers = [event.sequence_number for event in [*events, *rest]]
    assert numbers == list(range(len(numbers)))
    deltas = [event.delta for event in [*events, *rest] if event.type == "response.output_text.delta"]
    assert "".join(deltas) == shown.output_text, "each token once, before and behind the kill"
    assert shown.usage is not None and shown.usage.output_tokens == 120
