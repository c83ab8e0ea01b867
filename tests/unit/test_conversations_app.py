"""`/v1/chat/completions/batch` and `/invocations`: bodies of several conversations, and bodies told apart by shape."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from raydix.engine.api.conversations import MAX_CONVERSATIONS, parse_conversations
from raydix.engine.core.errors import RequestError
from raydix.engine.core.tenants import Tenant, Tenants, key_hash
from raydix.engine.core.types import FinishReason
from tests.unit.ingress import ANSWER, END, MODEL, Replica, Reply, Served, call, objects_of
from tests.unit.served_app import app

BATCH = "/v1/chat/completions/batch"
TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def ask(path: str, headers: dict[str, str] | None = None, **fields: Any) -> Callable[[], Awaitable[Reply]]:
    return lambda: call(app, "POST", path, json.dumps(fields).encode(), headers=headers or {})


def batch(*texts: str, headers: dict[str, str] | None = None, **fields: Any) -> Callable[[], Awaitable[Reply]]:
    return ask(BATCH, headers, messages=[user(text) for text in texts], **fields)


def test_a_choice_for_each_conversation(served: Served) -> None:
    replica = Replica()
    headers = {"x-request-id": "trace", "x-session-id": "s"}
    reply = served(replica, batch("hi", "you", headers=headers, model=MODEL, temperature=0, seed=3))
    assert reply.status == 200
    body = reply.json
    assert (body["id"], body["object"], body["model"]) == ("chatcmpl-trace", "chat.completion", MODEL)
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert [choice["message"]["content"] for choice in body["choices"]] == [ANSWER, ANSWER]
    assert body["usage"]["prompt_tokens"] == len("hi") + len("you")
    assert body["usage"]["completion_tokens"] == 2 * (len(ANSWER) + 1)
    begun = replica.dispatcher.begun
    assert sorted(bytes(generation.prompt) for generation in begun) == [b"hi", b"you"]
    assert {generation.session for generation in begun} == {"s"}
    names = [generation.request_id.rsplit("-", 2)[0] for generation in begun]
    assert sorted(names) == ["trace-0", "trace-1"], "as explain finds them"
    assert replica.room.num_held == 0 and len(replica.ledger.ended) == 2


def test_data_of_tokens(served: Served) -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    body = served(Replica(), batch("hi", "you", **fields)).json
    for choice in body["choices"]:
        assert choice["token_ids"] == [*ANSWER.encode(), END]
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == [*ANSWER, "</s>"]
    assert body["prompt_token_ids"] is None, "there is no one prompt"


def test_a_conversation_that_fails_fails_the_request(served: Served) -> None:
    replica = Replica()
    replica.dispatcher.fails_after = 2
    reply = served(replica, batch("hi", "you"))
    assert (reply.status, reply.json["error"]["message"]) == (503, "every worker died")
    assert replica.room.num_held == 0


def test_conversations_find_room_together_or_not_at_all(served: Served) -> None:
    replica = Replica(max_requests=2)
    reply = served(replica, batch("a", "b", "c"))
    assert reply.status == 400 and "needs 3 answers, but at most 2" in reply.json["error"]["message"]
    assert not replica.dispatcher.begun and replica.room.num_held == 0
    assert served(replica, batch("a", "b")).status == 200


def test_what_one_conversation_cannot_have_takes_no_room(served: Served) -> None:
    replica = Replica(tenants=Tenants([Tenant("a", min_priority=0)], {key_hash("k"): "a"}))
    headers = {"authorization": "Bearer k"}
    assert served(replica, batch("a", "b", headers=headers, priority=-1)).json["error"]["param"] == "priority"
    long = served(replica, batch("a", "b" * 100, headers=headers))
    assert long.status == 400 and replica.room.num_held == 0
    assert not replica.dispatcher.begun


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": user("hi")}, "messages[0]"),
        ({"messages": []}, "messages"),
        ({"messages": [[]]}, "messages[0]"),
        ({"messages": [user("a"), [{"role": "user"}]]}, "messages[1][0].content"),
        ({"messages": [[{"role": "user"}]]}, "messages[0][0].content"),
        ({"messages": [user("a"), [{"role": "user", "content": 3}]]}, "messages[1][0].content"),
        ({"messages": [user("a")] * (MAX_CONVERSATIONS + 1)}, "messages"),
        ({"n": 2}, "n"),
        ({"stream": True}, "stream"),
        ({"tools": [TOOL]}, "tools"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"temperature": 3}, "temperature"),
        ({"promt": 3}, "promt"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_conversations(json.dumps({"messages": [user("a"), user("b")], **fields}).encode())
    assert caught.value.param == param and param in caught.value.message


def test_all_other_fields_are_those_of_a_chat() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    fields = {"n": 1, "stream": False, "tools": [], "max_tokens": 4.0, "stop": ["x"], "response_format": schema}
    one, other = parse_conversations(
        json.dumps({"messages": [user("a"), user("b")], "logit_bias": {"5": 1}, **fields}).encode()
    )
    assert one.max_tokens == other.max_tokens == 4 and one.stop == ("x",)
    assert one.sampling == other.sampling and one.sampling.grammar is not None
    assert [spec.messages[0]["content"] for spec in (one, other)] == ["a", "b"]


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"messages": user("hi")}, "chat.completion"),
        ({"prompt": "hi"}, "text_completion"),
        ({"input": "hi"}, "list"),
    ],
)
def test_invocations_go_by_shape(served: Served, fields: dict[str, Any], kind: str) -> None:
    reply = served(Replica(), ask("/invocations", **fields))
    assert (reply.status, reply.json["object"]) == (200, kind)


def test_invocations_stream(served: Served) -> None:
    replica = Replica()
    replica.dispatcher.finish = FinishReason.LENGTH
    events = objects_of(served(replica, ask("/invocations", prompt="hi", stream=True)).body)
    assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("body", "param"), [(b"{}", None), (b"[]", None), (b"{", None), (b'{"prompt": "a", "x": 1}', "x")]
)
def test_bodies_of_no_shape_are_refused(served: Served, body: bytes, param: str | None) -> None:
    reply = served(Replica(), lambda: call(app, "POST", "/invocations", body))
    assert (reply.status, reply.json["error"]["param"]) == (400, param)
    if body == b"{}":
        assert "'messages'" in reply.json["error"]["message"] and "'input'" in reply.json["error"]["message"]
