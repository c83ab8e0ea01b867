"""`Last-Event-ID` over HTTP: a stream that broke goes on at another ingress replica, exactly."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from raydix.engine.api.resuming import EventId
from raydix.engine.core.ingress.parsers import MISTRAL
from raydix.engine.core.tenants import Tenant, Tenants, key_hash
from tests.unit.ingress import ANSWER, MODEL, Replica, Reply, Served, body_of, call
from tests.unit.served_app import app

PATHS = {
    "completion": "/v1/completions",
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
USAGE = {"stream_options": {"include_usage": True}}
TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
CALLS = 'at <tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>' * 2
THOUGHTS = "<think>so\n</think> four"
MESSAGE_TOOL = {"name": "clock", "input_schema": {"type": "object"}}
RESPONSE_TOOL = {"type": "function", "name": "clock", "parameters": {"type": "object"}}

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("completion", ANSWER, {}),
    ("completion", ANSWER, {"n": 2, "temperature": 1, **USAGE}),
    ("completion", ANSWER, {"prompt": ["hi", "ho"], "logprobs": 1, "echo": True, "return_token_ids": True}),
    ("completion", ANSWER, {"stop": "wo", "include_stop_str_in_output": True, **USAGE}),
    ("completion", ANSWER, {"max_tokens": 0, "echo": True}),
    ("chat", ANSWER, {"stop": ["xx", " two"], "stream_options": {"continuous_usage_stats": True}}),
    ("chat", CALLS, {"tools": [TOOL], "max_tokens": 200, **USAGE}),
    ("chat", CALLS, {"tools": [TOOL], "max_tokens": 200, "n": 2, "parallel_tool_calls": False}),
    ("chat", THOUGHTS, {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}),
    ("messages", CALLS, {"tools": [MESSAGE_TOOL], "max_tokens": 200}),
    ("responses", CALLS, {"tools": [RESPONSE_TOOL], "max_output_tokens": 200, "store": False}),
]


def replica(answer: str, together: int = 1, **settings: Any) -> Replica:
    """A replica of its own; events come `together`."""
    made = Replica(max_model_len=400, has_reasoning=True, **settings)
    made.dispatcher.answer, made.dispatcher.together, made.dispatcher.draws = answer, together, answer == ANSWER
    return made


def stream(served: Served, at: Replica, route: str, last: str, key: str = "", **fields: Any) -> Reply:
    headers = {"last-event-id": last, "authorization": f"Bearer {key}"}
    body = body_of(route, stream=True, **fields)
    if route == "responses":
        body = json.dumps({name: value for name, value in json.loads(body).items() if name != "max_tokens"}).encode()
    reply: Reply = served(at, lambda: call(app, "POST", PATHS[route], body, headers=headers))
    return reply


def events_of(body: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in body.split(b"\n\n")[:-1]]


def id_of(event: bytes) -> str:
    assert event.startswith(b"id: "), event
    return event[4:].partition(b"\n")[0].decode()


def by_choice(body: bytes) -> Mapping[int, list[Any]]:
    """Events without their ids by the choice that they are of; -1 for those of none."""
    found: dict[int, list[Any]] = {}
    for event in events_of(body):
        data = event.partition(b"data: ")[2].strip()
        choices = [] if data == b"[DONE]" else json.loads(data).get("choices") or []
        found.setdefault(choices[0]["index"] if choices else -1, []).append(data)
    return found


@pytest.mark.parametrize(("route", "answer", "fields"), CASES, ids=lambda part: str(part)[:40])
@pytest.mark.parametrize("together", [1, 3])
def test_the_joined_stream_is_the_whole_one_at_every_cut(
    served: Served, route: str, answer: str, fields: dict[str, Any], together: int
) -> None:
    """At another replica, whose tokens come in other groups."""
    whole = stream(served, replica(answer), route, "0", **fields)
    assert whole.status == 200
    events = events_of(whole.body)
    assert len(events) > 1 and all(event.startswith(b"id: ") for event in events[:-1])
    assert not events[-1].startswith(b"id: "), "there is nothing behind the last event"
    for cut in range(1, len(events)):
        rest = stream(served, replica(answer, together), route, id_of(events[cut - 1]), **fields)
        assert rest.status == 200, rest.body
        assert by_choice(b"".join(events[:cut]) + rest.body) == by_choice(whole.body)


@pytest.mark.parametrize("headers", [{}, {"last-event-id": ""}], ids=str)
def test_without_the_header_a_stream_has_no_ids(served: Served, headers: dict[str, str]) -> None:
    at = Replica()
    at.dispatcher.together = 3
    body = body_of("completion", stream=True)
    reply = served(at, lambda: call(app, "POST", PATHS["completion"], body, headers=headers))
    assert reply.status == 200 and b"id: " not in reply.body
    assert len(events_of(reply.body)) == 3 + 1, "tokens that came together are one event"


def test_a_stream_that_goes_on_has_the_name_of_the_first_one(served: Served) -> None:
    """And not that of the second attempt's header."""
    whole = stream(served, replica(ANSWER), "chat", "0", request_id="mine")
    other = replica(ANSWER)
    headers = {"last-event-id": id_of(events_of(whole.body)[4]), "x-request-id": "other"}
    body = body_of("chat", stream=True)
    reply = served(other, lambda: call(app, "POST", PATHS["chat"], body, headers=headers))
    assert reply.status == 200 and b'"id":"chatcmpl-mine"' in reply.body
    assert other.dispatcher.begun[0].request_id.startswith("mine-")


def test_all_attempts_at_a_response_have_one_name_in_logs(served: Served) -> None:
    """Serve gives each attempt another `x-request-id`."""

    def attempt(last: str, header: str, **fields: Any) -> tuple[Reply, str]:
        at = replica(ANSWER)
        body = json.dumps({"model": MODEL, "input": "hi", "stream": True, "store": False, **fields}).encode()
        headers = {"last-event-id": last, "x-request-id": header}
        reply: Reply = served(at, lambda: call(app, "POST", PATHS["responses"], body, headers=headers))
        assert reply.status == 200, reply.body
        return reply, at.dispatcher.begun[0].request_id.rsplit("-", 2)[0]

    whole, first = attempt("0", "serve-1")
    assert f'"resp_{first}"'.encode() in whole.body
    assert attempt(id_of(events_of(whole.body)[4]), "serve-2")[1] == first


def test_ids_of_short_calls(served: Served) -> None:
    answer = '[TOOL_CALLS][{"name": "clock", "arguments": {}}]'
    tokens = replica(answer, tool_format=MISTRAL)
    whole = stream(served, tokens, "chat", "0", tools=[TOOL], max_tokens=200)
    rest = stream(
        served,
        replica(answer, tool_format=MISTRAL),
        "chat",
        id_of(events_of(whole.body)[0]),
        tools=[TOOL],
        max_tokens=200,
    )
    assert by_choice(events_of(whole.body)[0] + rest.body) == by_choice(whole.body)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"messages": [{"role": "user", "content": "ho"}]}, "another request"),
        ({"temperature": 0.5}, "another request"),
        ({"n": 2}, "another request"),
        ({"user": "somebody", "session_id": "other", "priority": 1}, None),
    ],
    ids=str,
)
def test_an_id_is_for_its_body(served: Served, change: dict[str, Any], word: str | None) -> None:
    whole = stream(served, replica(ANSWER), "chat", "0")
    at = replica(ANSWER)
    reply = stream(served, at, "chat", id_of(events_of(whole.body)[3]), **change)
    if word is None:
        assert reply.status == 200
        return
    error = reply.json["error"]
    assert (reply.status, error["param"], error["code"]) == (400, "Last-Event-ID", "invalid_request")
    assert word in error["message"]
    assert at.room.num_held == 0 and at.dispatcher.begun == []


def test_a_stream_goes_on_that_an_earlier_version_began(served: Served) -> None:
    """The id is one of an earlier version's stream, and no change of the code may make another necessary."""
    whole = stream(served, replica(ANSWER), "chat", "0", temperature=0.5, seed=3)
    last = (
        "3.1.08aff459:0/6b05bed2.20d816bb408647c0.017f10129db4e76640b69a7f.fp_2c63339773"
        ".3209b6d5854c409fa01b23244f58b434"
    )
    rest = stream(served, replica(ANSWER), "chat", last, temperature=0.5, seed=3)
    assert rest.status == 200, rest.body

    def contents(body: bytes) -> list[Any]:
        return [json.loads(each)["choices"][0]["delta"] for each in by_choice(body)[0]]

    assert contents(rest.body) == contents(whole.body)[4:], "the client has four events"


def test_an_id_is_for_its_tenant_and_route(served: Served) -> None:
    tenants = Tenants([Tenant("a"), Tenant("b")], {key_hash("ka"): "a", key_hash("kb"): "b"})
    whole = stream(served, replica(ANSWER, tenants=tenants), "chat", "0", key="ka")
    last = id_of(events_of(whole.body)[3])
    assert stream(served, replica(ANSWER, tenants=tenants), "chat", last, key="ka").status == 200
    assert stream(served, replica(ANSWER, tenants=tenants), "chat", last, key="kb").status == 400
    reply = stream(served, replica(ANSWER, tenants=tenants), "messages", last, key="ka")
    assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")


def test_an_id_is_for_its_model(served: Served) -> None:
    whole = stream(served, replica(ANSWER), "completion", "0")
    last = id_of(events_of(whole.body)[3])
    fingerprint = EventId.read(last).origin.fingerprint
    assert fingerprint is not None
    reply = stream(served, replica(ANSWER), "completion", last.replace(fingerprint, "fp_0"))
    assert (reply.status, reply.json["error"]["code"]) == (409, "answer_changed")
    reply = stream(served, replica(ANSWER), "messages", last.replace(fingerprint, "fp_0"))
    assert (reply.status, reply.json["error"]["type"]) == (409, "invalid_request_error")


def test_an_answer_that_became_another_is_an_error_and_no_text(served: Served) -> None:
    whole = stream(served, replica(CALLS), "completion", "0", max_tokens=200)
    last = id_of(events_of(whole.body)[10])
    at = replica(CALLS.upper())
    reply = stream(served, at, "completion", last, max_tokens=200)
    assert (reply.status, reply.json["error"]["code"]) == (409, "answer_changed")
    assert at.room.num_held == 0
    reply = stream(served, replica(CALLS[:5]), "completion", last, max_tokens=200)
    assert (reply.status, reply.json["error"]["code"]) == (409, "answer_changed")


@pytest.mark.parametrize(
    ("last", "fields", "word"),
    [
        ("1", {}, "must be the id of an event"),
        ("x" * 5000, {}, "must be the id of an event"),
        ("0", {"stream": False}, "is for streams"),
        ("0", {"n": 65}, "at most 64 choices"),
    ],
    ids=lambda part: str(part)[:20],
)
def test_what_cannot_have_ids_is_refused(served: Served, last: str, fields: dict[str, Any], word: str) -> None:
    at = Replica(max_requests=100)
    body = body_of("completion", **{"stream": True, **fields})
    reply = served(at, lambda: call(app, "POST", PATHS["completion"], body, headers={"last-event-id": last}))
    assert (reply.status, reply.json["error"]["param"]) == (400, "Last-Event-ID")
    assert word in reply.json["error"]["message"]
    assert at.room.num_held == 0
