"""Anthropic's routes, driven as an ASGI application."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from raydix.engine.core.ingress.parsers import HERMES, LLAMA3, MISTRAL, ToolFormat
from raydix.engine.core.tenants import Tenant, Tenants, key_hash
from raydix.engine.core.types import CacheHints, CacheMark, FinishReason
from tests.unit.ingress import ANSWER, MARKERS, MODEL, Replica, Reply, Served, body_of, call
from tests.unit.served_app import app

MESSAGES = "/v1/messages"
TOOL = {"name": "clock", "input_schema": {"type": "object"}}


def post(path: str = MESSAGES, headers: dict[str, str] | None = None, **fields: Any) -> Callable[[], Awaitable[Reply]]:
    return lambda: call(app, "POST", path, body_of("messages", **fields), headers=headers)


def events_of(stream: bytes) -> list[dict[str, Any]]:
    """The data of named events, each with its name as type."""
    events = []
    for event in stream.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_a_whole_message(served: Served) -> None:
    replica = Replica()
    reply = served(replica, post(system="be brief", headers={"anthropic-version": "2023-06-01"}))
    assert reply.status == 200
    message = reply.json
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": ANSWER}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 8,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
            "output_tokens": len(ANSWER) + 1,
        },
    }
    assert [ended.outcome for ended in replica.ledger.ended] == ["stop"]


def test_a_stream(served: Served) -> None:
    replica = Replica()
    reply = served(replica, post(stream=True))
    start, ping, opened, *deltas, closed, delta, stop = events_of(reply.body)
    assert start["message"]["content"] == [] and start["message"]["stop_reason"] is None
    assert start["message"]["usage"]["cache_read_input_tokens"] == 2
    assert ping == {"type": "ping"}
    assert opened == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert {each["type"] for each in deltas} == {"content_block_delta"}
    assert "".join(each["delta"]["text"] for each in deltas) == ANSWER
    assert closed == {"type": "content_block_stop", "index": 0}
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == len(ANSWER) + 1
    assert stop == {"type": "message_stop"}
    assert [ended.outcome for ended in replica.ledger.ended] == ["stop"]


@pytest.mark.parametrize(
    ("fields", "stop_reason", "stop_sequence", "text"),
    [
        ({"stop_sequences": ["two"]}, "stop_sequence", "two", "one "),
        ({"max_tokens": 3}, "max_tokens", None, "one"),
        ({"stop_token_ids": [ord("w")]}, "end_turn", None, "one t"),
        ({"max_tokens": 0}, "max_tokens", None, ""),
    ],
    ids=str,
)
def test_the_reason_of_the_end(
    served: Served, fields: dict[str, Any], stop_reason: str, stop_sequence: str | None, text: str
) -> None:
    def replica() -> Replica:
        replica = Replica()
        replica.dispatcher.ends_at = ord("w")
        if "stop_token_ids" not in fields:
            replica.dispatcher.ends_at = None
        return replica

    message = served(replica(), post(**fields)).json
    assert (message["stop_reason"], message["stop_sequence"]) == (stop_reason, stop_sequence)
    assert "".join(block["text"] for block in message["content"]) == text
    *_, delta, _ = events_of(served(replica(), post(stream=True, **fields)).body)
    assert delta["delta"] == {"stop_reason": stop_reason, "stop_sequence": stop_sequence}


def test_an_answer_may_fill_the_context(served: Served) -> None:
    replica = Replica(max_model_len=4)
    message = served(replica, post(max_tokens=32_000)).json
    assert replica.dispatcher.begun[0].sampling.max_tokens == 2
    assert (message["stop_reason"], message["content"][0]["text"]) == ("model_context_window_exceeded", ANSWER[:2])


def test_a_count(served: Served) -> None:
    replica = Replica()
    reply = served(replica, post(f"{MESSAGES}/count_tokens", system="abc", max_tokens=None))
    assert reply.json == {"input_tokens": 5}
    assert replica.dispatcher.begun == [] and replica.room.num_held == 0


def test_errors(served: Served) -> None:
    replica = Replica()
    reply = served(replica, post(top_p=2))
    assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")
    assert "'top_p'" in reply.json["error"]["message"]
    error = served(replica, post(thread={"type": "create"})).json["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert "thread" in error["message"] and error["type"] == "invalid_request_error"
    assert served(replica, post(model="other")).json["error"]["type"] == "not_found_error"
    reply = served(replica, lambda: call(app, "GET", MESSAGES))
    assert (reply.status, reply.json["type"]) == (405, "error")
    replica.dispatcher.fails_after = 0
    assert served(replica, post(stream=True)).status == served(replica, post()).status == 529
    replica.dispatcher.fails_after = 3
    *_, error = events_of(served(replica, post(stream=True)).body)
    assert error == {"type": "error", "error": {"type": "overloaded_error", "message": "every worker died"}}


def test_every_reply_has_the_id_of_its_request(served: Served) -> None:
    replica = Replica()
    message = served(replica, post(headers={"x-request-id": "mine"}))
    assert message.headers["request-id"] == "req_mine"
    others = [post(stream=True), post(f"{MESSAGES}/count_tokens", max_tokens=None), post(top_p=2)]
    replies = [served(replica, other) for other in others]
    assert [reply.status for reply in replies] == [200, 200, 400]
    ids = [reply.headers["request-id"] for reply in replies]
    assert len({*ids}) == 3 and all(each.startswith("req_") for each in ids)
    assert "request-id" not in served(replica, lambda: call(app, "GET", "/v1/models")).headers


def test_keys_in_either_header(served: Served) -> None:
    def status(**headers: str) -> int:
        tenants = Tenants([Tenant("a")], {key_hash("k"): "a"})
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        return int(served(Replica(tenants=tenants), post(headers=given)).status)

    assert status() == status(x_api_key="no") == status(x_api_key="k", authorization="Bearer no") == 401
    assert status(x_api_key="k") == status(authorization="Bearer k") == 200


def test_nothing_is_lost_at_a_length_limit(served: Served) -> None:
    replica = Replica()
    replica.dispatcher.finish = FinishReason.LENGTH
    message = served(replica, post(max_tokens=len(ANSWER) + 1)).json
    assert (message["stop_reason"], message["content"][0]["text"]) == ("max_tokens", ANSWER)


def test_marks_keep_the_blocks_before_them_and_show_in_the_usage(served: Served) -> None:
    replica = Replica()
    system = [{"type": "text", "text": "abcdef", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    question = {"type": "text", "text": "gh", "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [question, {"type": "text", "text": "ij"}]}]
    usage = served(replica, post(system=system, messages=messages, cache_priority=3)).json["usage"]
    [generation] = replica.dispatcher.begun
    assert generation.cache == CacheHints("anonymous", 3, marks=(CacheMark(2, 1, 3600.0), CacheMark(2, 1, 300.0)))
    assert usage["cache_read_input_tokens"] == 2
    assert usage["cache_creation"] == {"ephemeral_5m_input_tokens": 2, "ephemeral_1h_input_tokens": 4}
    assert usage["cache_creation_input_tokens"] == 6
    assert usage["input_tokens"] == len("abcdefgh\nij") - 8


@pytest.mark.parametrize("stream", [False, True])
def test_a_call(served: Served, stream: bool) -> None:
    replica = Replica(max_model_len=400)
    replica.dispatcher.answer = 'at <tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>'
    tools = [{"name": "clock", "input_schema": {"type": "object"}}]
    reply = served(replica, post(stream=stream, tools=tools, max_tokens=200))
    if not stream:
        words, call = reply.json["content"]
        assert words["text"].strip() == "at" and call.pop("id")
        assert call == {"type": "tool_use", "name": "clock", "input": {"zone": "UTC"}}
        assert reply.json["stop_reason"] == "tool_use"
        return

    events = events_of(reply.body)
    opened = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [block["type"] for block in opened] == ["text", "tool_use"]
    assert (opened[1]["name"], opened[1]["input"]) == ("clock", {})
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta" and event["index"] == 1]
    assert {delta["type"] for delta in deltas} == {"input_json_delta"}
    assert json.loads("".join(delta["partial_json"] for delta in deltas)) == {"zone": "UTC"}
    assert [event["index"] for event in events if event["type"] == "content_block_stop"] == [0, 1]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_a_block_before_the_text(served: Served, stream: bool) -> None:
    replica = Replica(max_model_len=400, has_reasoning=True)
    replica.dispatcher.answer = "<think>\nLet me see.\n</think>\n\nIt is noon."
    reply = served(replica, post(stream=stream, max_tokens=200))
    thought = {"type": "thinking", "thinking": "Let me see.", "signature": ""}
    if not stream:
        assert reply.json["content"] == [thought, {"type": "text", "text": "It is noon."}]
        hidden = served(replica, post(max_tokens=200, thinking={"type": "disabled"})).json
        assert hidden["content"] == [{"type": "text", "text": "It is noon."}]
        return

    events = events_of(reply.body)
    opened = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert opened == [{**thought, "thinking": ""}, {"type": "text", "text": ""}]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == thought["thinking"]
    assert "".join(delta.get("text", "") for delta in deltas) == "It is noon."
    assert [event["index"] for event in events if event["type"] == "content_block_stop"] == [0, 1]


@pytest.mark.parametrize(
    ("tool_format", "fields", "call_token"),
    [
        (MISTRAL, {"tools": [TOOL]}, MARKERS["[TOOL_CALLS]"]),
        (MISTRAL, {"tools": [TOOL], "tool_choice": {"type": "none"}}, None),
        (MISTRAL, {}, None),
        # Neither is one token of these models.
        (HERMES, {"tools": [TOOL]}, None),
        (LLAMA3, {"tools": [TOOL]}, None),
    ],
)
def test_workers_know_the_token_that_calls_begin_with(
    served: Served, tool_format: ToolFormat, fields: dict[str, Any], call_token: int | None
) -> None:
    replica = Replica(tool_format=tool_format)
    served(replica, post(**fields))
    [generation] = replica.dispatcher.begun
    assert generation.cache.call_token == call_token
