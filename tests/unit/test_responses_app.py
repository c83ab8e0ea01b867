"""OpenAI's Responses API, driven as an ASGI application."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from raydix.engine.api.openai_responses.requests import parse_responses
from raydix.engine.core.errors import RequestError
from raydix.engine.core.tenants import Tenant, Tenants, key_hash
from raydix.engine.core.types import FinishReason
from tests.unit.ingress import ANSWER, END, MODEL, Replica, Reply, Served, body_of, call
from tests.unit.served_app import app

RESPONSES = "/v1/responses"
USER = {"role": "user", "content": "hi"}
CLOCK = {"type": "function", "name": "clock", "parameters": {"type": "object"}}


def post(headers: dict[str, str] | None = None, **fields: Any) -> Callable[[], Awaitable[Reply]]:
    return lambda: call(app, "POST", RESPONSES, body_of("responses", **fields), headers=headers)


def send(method: str, path: str, **headers: str) -> Callable[[], Awaitable[Reply]]:
    return lambda: call(app, method, f"{RESPONSES}/{path}", headers=headers)


def events_of(stream: bytes) -> list[dict[str, Any]]:
    """The data of named events, numbered without a gap, each with its name as type."""
    events = []
    for number, event in enumerate(stream.decode().removesuffix("\n\n").split("\n\n")):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert (name, events[-1]["sequence_number"]) == (f"event: {events[-1]['type']}", number)
    return events


def text_of(response: dict[str, Any]) -> str:
    [item] = response["output"]
    [part] = item["content"]
    text: str = part["text"]
    return text


def test_a_whole_response(served: Served) -> None:
    replica = Replica()
    reply = served(replica, post(instructions="be brief", metadata={"a": "b"}, temperature=0.5))
    assert reply.status == 200
    response = reply.json
    assert response["id"].startswith("resp_") and text_of(response) == ANSWER
    [item] = response["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert response["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 8},
        "output_tokens": len(ANSWER) + 1,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 10 + len(ANSWER) + 1,
    }
    expected = {"object": "response", "status": "completed", "model": MODEL, "instructions": "be brief", "store": True}
    expected |= {"metadata": {"a": "b"}, "temperature": 0.5, "top_p": 1.0, "previous_response_id": None, "error": None}
    assert {name: response[name] for name in expected} == expected
    assert [ended.outcome for ended in replica.ledger.ended] == ["stop"]


def test_a_stream(served: Served) -> None:
    replica = Replica()
    events = events_of(served(replica, post(stream=True)).body)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert "".join(event["delta"] for event in events[4:-4]) == events[-4]["text"] == ANSWER
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    final = events[-1]["response"]
    assert text_of(final) == ANSWER and final["output"] == [events[-2]["item"]]
    assert {event["item_id"] for event in events if "item_id" in event} == {final["output"][0]["id"]}
    assert served(replica, send("GET", f"{final['id']}?stream=false&include[]=x")).json == final
    refused = served(replica, send("GET", f"{final['id']}?stream=true"))
    assert (refused.status, refused.json["error"]["param"]) == (400, "stream")


@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_makes_a_response_incomplete(served: Served, stream: bool) -> None:
    reply = served(Replica(), post(stream=stream, max_output_tokens=3))
    response = events_of(reply.body)[-1]["response"] if stream else reply.json
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert text_of(response) == ANSWER[:3] and response["output"][0]["status"] == "incomplete"
    if stream:
        assert events_of(reply.body)[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(served: Served, stream: bool) -> None:
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    reply = served(Replica(), post(stream=stream, **fields))
    response = events_of(reply.body)[-1]["response"] if stream else reply.json
    logprobs = response["output"][0]["content"][0]["logprobs"]
    assert [each["token"] for each in logprobs] == [*ANSWER, "</s>"]
    assert len(logprobs[0]["top_logprobs"]) == 2
    if stream:
        deltas = [event for event in events_of(reply.body) if event["type"] == "response.output_text.delta"]
        assert [each for delta in deltas for each in delta["logprobs"]] == logprobs


def test_a_conversation_goes_on_from_exactly_the_ids_of_its_answers(served: Served) -> None:
    replica = Replica()
    first = served(replica, post(instructions="sys", input="one")).json
    second = served(replica, post(input="two", previous_response_id=first["id"])).json
    third = served(replica, post(input="three", previous_response_id=second["id"], instructions="new")).json
    answer = [*ANSWER.encode()]
    prompts = [list(generation.prompt) for generation in replica.dispatcher.begun]
    assert prompts[0] == [*b"sysone"]
    assert prompts[1] == [*b"one", *answer, *b"two"], "an earlier response's instructions are not taken over"
    assert prompts[2] == [*b"newone", *answer, *b"two", *answer, *b"three"]
    assert third["previous_response_id"] == second["id"]
    assert END not in prompts[2], "the template closes the answer"
    branch = served(replica, post(input="else", previous_response_id=first["id"])).json
    assert branch["status"] == "completed"
    assert list(replica.dispatcher.begun[-1].prompt) == [*b"one", *answer, *b"else"]


def test_a_count(served: Served) -> None:
    replica = Replica(max_model_len=400)
    first = served(replica, post(input="one")).json

    def count(**fields: Any) -> Reply:
        body = body_of("responses", **fields)
        reply: Reply = served(replica, lambda: call(app, "POST", f"{RESPONSES}/input_tokens", body))
        return reply

    num_tokens = first["usage"]["input_tokens"]
    assert count(input="one").json == {"object": "response.input_tokens", "input_tokens": num_tokens}
    asked = {"input": "and two", "previous_response_id": first["id"]}
    num_tokens = count(**asked).json["input_tokens"]
    assert num_tokens == served(replica, post(**asked)).json["usage"]["input_tokens"], "the answer's ids count"
    reply = count(input="x", previous_response_id="resp_gone")
    assert (reply.status, reply.json["error"]["code"]) == (404, "response_not_found")
    assert replica.room.num_held == 0


def test_the_input_is_listed(served: Served) -> None:
    replica = Replica()
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
        {"role": "developer", "content": "d"},
    ]
    response = served(replica, post(input=items)).json
    page = served(replica, send("GET", f"{response['id']}/input_items?order=asc&limit=2")).json
    assert [item["content"][0]["text"] for item in page["data"]] == ["a\nb", "c"]
    assert [item["content"][0]["type"] for item in page["data"]] == ["input_text", "output_text"]
    assert (page["has_more"], page["first_id"]) == (True, page["data"][0]["id"])
    rest = served(replica, send("GET", f"{response['id']}/input_items?order=asc&after={page['last_id']}")).json
    assert [item["role"] for item in rest["data"]] == ["developer"] and not rest["has_more"]
    newest = served(replica, send("GET", f"{response['id']}/input_items")).json
    assert [item["id"] for item in newest["data"]] == [rest["last_id"], page["last_id"], page["first_id"]]
    for query in ("limit=0", "limit=x", "order=up", "after=x", "before=x", "other=x"):
        reply = served(replica, send("GET", f"{response['id']}/input_items?{query}"))
        assert (reply.status, reply.json["error"]["param"]) == (400, query.partition("=")[0])


def caller() -> Replica:
    replica = Replica(max_model_len=400)
    replica.dispatcher.answer = 'at <tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>'
    return replica


@pytest.mark.parametrize("stream", [False, True])
def test_a_call(served: Served, stream: bool) -> None:
    replica = caller()
    reply = served(replica, post(stream=stream, tools=[CLOCK], max_output_tokens=200))
    response = events_of(reply.body)[-1]["response"] if stream else reply.json
    message, call = response["output"]
    assert message["content"][0]["text"].strip() == "at"
    assert (call["type"], call["name"], call["status"]) == ("function_call", "clock", "completed")
    assert json.loads(call["arguments"]) == {"zone": "UTC"}
    assert response["tools"][0]["name"] == "clock" and response["status"] == "completed"
    if stream:
        events = events_of(reply.body)
        deltas = [event for event in events if event["type"] == "response.function_call_arguments.delta"]
        assert "".join(event["delta"] for event in deltas) == call["arguments"]
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert [(item["id"], item["type"]) for item in done] == [
            (item["id"], item["type"]) for item in response["output"]
        ]


def test_a_call_and_its_result_go_on_from_the_ids(served: Served) -> None:
    replica = caller()
    first = served(replica, post(input="ask", tools=[CLOCK], max_output_tokens=200)).json
    result = {"type": "function_call_output", "call_id": first["output"][1]["call_id"], "output": "12:00"}
    served(replica, post(input=[result], tools=[CLOCK], previous_response_id=first["id"], max_output_tokens=200))
    answer = [*replica.dispatcher.answer.encode()]
    assert list(replica.dispatcher.begun[1].prompt) == [*b"ask", *answer, *b"12:00"]
    call = {"type": "function_call", "call_id": "c", "name": "clock", "arguments": "{}"}
    items = [{"role": "user", "content": "ask"}, call, {**result, "call_id": "c"}]
    stored = served(replica, post(input=items, max_output_tokens=200)).json["id"]
    listed = served(replica, send("GET", f"{stored}/input_items?order=asc")).json["data"]
    assert [item["type"] for item in listed] == ["message", "function_call", "function_call_output"]


def test_what_is_deleted_is_gone_and_nothing_goes_on_from_it(served: Served) -> None:
    replica = Replica()
    first = served(replica, post()).json["id"]
    second = served(replica, post(previous_response_id=first)).json["id"]
    reply = served(replica, send("DELETE", first))
    assert reply.json == {"id": first, "object": "response", "deleted": True}
    for method, path in (("GET", first), ("DELETE", first), ("GET", f"{first}/input_items")):
        reply = served(replica, send(method, path))
        assert (reply.status, reply.json["error"]["code"]) == (404, "response_not_found")
    assert served(replica, send("GET", second)).status == 200
    for gone in (first, second):
        reply = served(replica, post(previous_response_id=gone))
        error = reply.json["error"]
        assert (reply.status, error["code"], error["param"]) == (404, "response_not_found", "previous_response_id")
        assert first in error["message"]


@pytest.mark.parametrize("name", ["bad", "chatcmpl-1", "", 1])
def test_only_a_response_can_be_gone_on_from(served: Served, name: object) -> None:
    reply = served(Replica(), post(previous_response_id=name))
    error = reply.json["error"]
    assert (reply.status, error["code"], error["param"]) == (400, "invalid_request", "previous_response_id")


def test_what_is_not_to_be_stored_is_not(served: Served) -> None:
    replica = Replica()
    response = served(replica, post(store=False)).json
    assert response["store"] is False
    assert served(replica, send("GET", response["id"])).status == 404
    assert replica.reader.next_turns, "the next turn sends the text"


def test_a_response_that_cannot_be_stored_says_so(served: Served) -> None:
    replica = Replica()
    replica.manager.is_away = True
    assert served(replica, post()).json["store"] is False
    assert events_of(served(replica, post(stream=True)).body)[-1]["response"]["store"] is False
    assert served(replica, post(previous_response_id="resp_x")).status == 503


def test_a_response_is_known_to_its_tenant_and_salt_alone(served: Served) -> None:
    tenants = Tenants([Tenant("a"), Tenant("b")], {key_hash("k"): "a", key_hash("l"): "b"})
    replica = Replica(tenants=tenants)
    a, b = {"authorization": "Bearer k"}, {"authorization": "Bearer l"}
    plain = served(replica, post(a)).json["id"]
    salted = served(replica, post(a, cache_salt="s")).json["id"]
    assert served(replica, send("GET", plain, **a)).status == 200
    assert served(replica, send("GET", f"{salted}?cache_salt=s", **a)).status == 200
    for path, headers in ((plain, b), (salted, a), (f"{plain}?cache_salt=s", a), (f"{salted}?cache_salt=s", b)):
        assert served(replica, send("GET", path, **headers)).status == 404
        assert served(replica, send("DELETE", path, **headers)).status == 404
    assert served(replica, post(b, previous_response_id=plain)).status == 404
    assert served(replica, post(a, previous_response_id=plain)).status == 200
    assert served(replica, post(a, cache_salt="s", previous_response_id=plain)).status == 404
    going_on = served(replica, post(a, cache_salt="s", previous_response_id=salted))
    assert going_on.status == 200
    # A response that goes on from another one has a parent, which is known under the salt, too.
    assert served(replica, post(a, cache_salt="s", previous_response_id=going_on.json["id"])).status == 200
    assert served(replica, send("DELETE", f"{salted}?cache_salt=s", **a)).status == 200
    orphaned = served(replica, post(a, cache_salt="s", previous_response_id=going_on.json["id"]))
    assert orphaned.status == 404 and "which is not kept any more" in orphaned.json["error"]["message"]


def test_an_id_is_no_name_that_a_client_gave(served: Served) -> None:
    replica = Replica()
    ids = {served(replica, post({"x-request-id": "mine"})).json["id"] for _ in range(2)}
    assert len(ids) == 2 and "resp_mine" not in ids
    assert all(begun.request_id.startswith("mine-") for begun in replica.dispatcher.begun)


def test_a_failure_in_a_stream_is_a_numbered_event(served: Served) -> None:
    replica = Replica()
    replica.dispatcher.fails_after = 3
    *_, error = events_of(served(replica, post(stream=True)).body)
    assert error["type"] == "error" and error["message"] == "every worker died"
    assert (error["code"], error["param"]) == ("service_unavailable", None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [3]}, "input"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": "x" * 70}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 1}, "max_tokens"),
        ({"background": True, "store": False}, "background"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
        ({"previous_input_messages": [{"role": "user"}]}, "previous_input_messages"),
        ({"conversation": "c"}, "conversation"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"reasoning": {"effort": "utmost"}}, "reasoning.effort"),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"logprob_token_ids": [3]}, "logprob_token_ids"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"tools": [CLOCK, CLOCK]}, "tools[1].name"),
        ({"tools": [{**CLOCK, "strict": True}]}, "tools[0].parameters"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"stream_options": {}}, "stream_options"),
        ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "tools": [CLOCK]}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"tools": [CLOCK], "include": ["message.output_text.logprobs"]}, "include"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    ],
    ids=str,
)
def test_refused_by_name(served: Served, fields: dict[str, Any], param: str) -> None:
    replica = Replica()
    reply = served(replica, post(**fields))
    assert (reply.status, reply.json["error"]["param"]) == (400, param)
    assert not replica.dispatcher.begun


def test_what_asks_for_nothing_is_taken(served: Served) -> None:
    nothing: dict[str, Any] = {
        "tools": [],
        "tool_choice": "auto",
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
    }
    nothing |= {"include": ["reasoning.encrypted_content"], "reasoning": {"effort": None, "summary": None}}
    nothing |= {"enable_response_messages": False, "kv_transfer_params": None, "previous_input_messages": None}
    reply = served(Replica(), post(**nothing, background=False, service_tier="auto", user="u"))
    assert reply.status == 200 and reply.headers["x-raydix-ignored"] == "include.reasoning.encrypted_content"


@pytest.mark.parametrize("stream", [False, True])
def test_hints_and_unknown_fields_are_named_in_a_header(served: Served, stream: bool) -> None:
    hints: dict[str, Any] = {
        "text": {"verbosity": "low"},
        "truncation": "auto",
        "reasoning": {"effort": "low", "summary": "detailed"},
    }
    hints |= {"new\r\nfield": 1}
    tools = [{"type": "web_search"}, CLOCK]
    reply = served(Replica(), post(**hints, tools=tools, stream=stream))
    assert reply.status == 200
    named = reply.headers["x-raydix-ignored"].split(", ")
    assert sorted(named) == [
        "new??field",
        "reasoning.summary",
        "text.verbosity",
        "tools.web_search",
        "truncation",
    ]
    assert "x-raydix-ignored" not in served(Replica(), post(stream=stream)).headers


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_and_answer_as_they_are(served: Served, stream: bool) -> None:
    reply = served(Replica(), post(input="hi", stream=stream, enable_response_messages=True))
    response = events_of(reply.body)[-1]["response"] if stream else reply.json
    raw: dict[str, Any] = {"type": "raw_message_tokens"}
    assert response["input_messages"] == [raw | {"message": "hi", "tokens": [*b"hi"]}]
    assert response["output_messages"] == [raw | {"message": f"{ANSWER}</s>", "tokens": [*ANSWER.encode(), END]}]
    assert "input_messages" not in served(Replica(), post(enable_response_messages=None)).json


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_an_item_before_the_message(served: Served, stream: bool) -> None:
    replica = Replica(max_model_len=400, has_reasoning=True)
    replica.dispatcher.answer = "<think>\nLet me see.\n</think>\n\nIt is noon."
    reply = served(replica, post(stream=stream, max_output_tokens=200, reasoning={"effort": "low", "summary": "auto"}))
    response = events_of(reply.body)[-1]["response"] if stream else reply.json
    thought, message = response["output"]
    assert (thought["type"], thought["status"], thought["summary"]) == ("reasoning", "completed", [])
    assert thought["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert message["content"][0]["text"] == "It is noon." and thought["id"].startswith("rs_")
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert response["reasoning"] == {"effort": "low", "summary": None}
    assert replica.dispatcher.begun
    if stream:
        events = events_of(reply.body)
        deltas = [event for event in events if event["type"] == "response.reasoning_text.delta"]
        assert "".join(event["delta"] for event in deltas) == "Let me see."
        assert {event["item_id"] for event in deltas} == {thought["id"]}
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == response["output"]
        parts = [event["part"] for event in events if event["type"] == "response.content_part.done"]
        assert parts == [*thought["content"], *message["content"]]


def test_an_answer_that_is_cut_in_its_reasoning(served: Served) -> None:
    replica = Replica(max_model_len=400, has_reasoning=True)
    replica.dispatcher.answer, replica.dispatcher.finish = "<think>Let me", FinishReason.LENGTH
    whole = served(replica, post(max_output_tokens=13)).json
    streamed = events_of(served(replica, post(stream=True, max_output_tokens=13)).body)[-1]["response"]
    for response in (whole, streamed):
        [item] = response["output"]
        assert (item["type"], item["status"], response["status"]) == ("reasoning", "incomplete", "incomplete")


def test_reasoning_goes_back_with_the_message_behind() -> None:
    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    called = {"type": "function_call", "call_id": "c", "name": "clock", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "12"}
    said = {"role": "assistant", "content": "noon"}
    nothing: dict[str, Any] = {"type": "reasoning", "summary": [], "encrypted_content": "x", "content": None}
    items = [USER, thought("a"), called, result, thought("b"), said, nothing, USER, thought("c"), USER]
    spec = parse_responses(json.dumps({"input": items}).encode())
    shown = [(message["role"], message["content"], message.get("reasoning_content")) for message in spec.messages]
    assert shown == [
        ("user", "hi", None),
        ("assistant", "", "a"),
        ("tool", "12", None),
        ("assistant", "noon", "b"),
        ("user", "hi", None),
        ("assistant", "", "c"),
        ("user", "hi", None),
    ]
    assert spec.turn is not None and json.loads(spec.turn.items[1])["content"] == thought("a")["content"]
    assert spec.messages[1]["tool_calls"]


def test_only_responses_in_the_background_can_be_cancelled(served: Served) -> None:
    replica = Replica()
    response = served(replica, post(cache_salt="a")).json
    refused = served(replica, send("POST", f"{response['id']}/cancel?cache_salt=a"))
    assert (refused.status, refused.json["error"]["param"]) == (400, "response_id")
    assert refused.json["error"]["message"].startswith("Cannot cancel a synchronous response.")
    for unknown in ("resp_none/cancel", f"{response['id']}/cancel"):
        assert served(replica, send("POST", unknown)).json["error"]["code"] == "response_not_found"
    assert served(replica, send("GET", f"{response['id']}?cache_salt=a")).json == response


@pytest.mark.parametrize("kind", [{}, [], 1, None, "picture"], ids=str)
def test_an_item_of_an_unknown_type_is_refused(kind: object) -> None:
    items = [{"type": kind, "role": "user", "content": "x"}]
    with pytest.raises(RequestError, match="has an item of type") as caught:
        parse_responses(json.dumps({"input": items}).encode())
    assert caught.value.param == "input"
