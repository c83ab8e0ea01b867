"""Answers in harmony over the three APIs, whole and streamed, and through the Python handle."""

import asyncio
import json
from typing import Any

import pytest

from raydix.engine.core.ingress.parsers import HARMONY
from raydix.engine.core.types import FinishReason
from tests.unit import test_messages_app as messages_app
from tests.unit import test_responses_app as responses_app
from tests.unit.ingress import HARMONY_MARKERS, Replica, Served, in_harmony
from tests.unit.test_harmony_parser import ANALYSIS, CALL, FINAL, HEADER, PREAMBLE, ZONE
from tests.unit.test_tool_answers import joined

CHAT_TOOLS = [{"type": "function", "function": {"name": "clock"}}]
MESSAGES_TOOLS = [{"name": "clock", "input_schema": {"type": "object"}}]
RESPONSES_TOOLS = [{"type": "function", "name": "clock", "parameters": {"type": "object"}, "strict": False}]
WHOLE = ANALYSIS + PREAMBLE + CALL


def replica(answer: str, finish: FinishReason = FinishReason.STOP) -> Replica:
    made = Replica(max_model_len=1024, tool_format=HARMONY, has_reasoning=True)
    made.dispatcher.answer, made.dispatcher.finish = in_harmony(answer), finish
    return made


def whole(answer: str, finish: FinishReason = FinishReason.STOP, **fields: Any) -> Any:
    return asyncio.run(replica(answer, finish).whole("chat", **{"max_tokens": 300, **fields}))


def streamed(answer: str, finish: FinishReason = FinishReason.STOP, **fields: Any) -> list[Any]:
    *chunks, done = asyncio.run(replica(answer, finish).streamed("chat", **{"max_tokens": 300, **fields}))
    assert done == "[DONE]"
    return [chunk["choices"][0] for chunk in chunks]


def test_a_chats_answer_has_reasoning_and_content() -> None:
    answer = whole(ANALYSIS + FINAL)
    [choice] = answer["choices"]
    message = choice["message"]
    assert (message["content"], message["reasoning"]) == ("It is noon.", "Let me see.")
    assert message["reasoning_content"] == message["reasoning"] and choice["finish_reason"] == "stop"
    # All tokens of the reasoning, with those before it and behind it that belong to its message.
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("Let me see.") + 2
    chunks = streamed(ANALYSIS + FINAL)
    deltas = [chunk["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "Let me see."
    assert "".join(delta.get("content") or "" for delta in deltas) == "It is noon."
    assert len([delta for delta in deltas if delta.get("content")]) > 5, "the text comes in pieces"


def test_a_chats_answer_has_a_preamble_and_a_call() -> None:
    [choice] = whole(WHOLE, tools=CHAT_TOOLS)["choices"]
    message = choice["message"]
    assert (message["content"], message["reasoning"]) == ("I look.", "Let me see.")
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "clock", "arguments": ZONE} and choice["finish_reason"] == "tool_calls"
    chunks = streamed(WHOLE, tools=CHAT_TOOLS)
    found = joined(chunks)
    assert found["content"] == "I look." and [each["function"] for each in found["tool_calls"]] == [call["function"]]
    assert chunks[-1]["finish_reason"] == "tool_calls"
    assert len([chunk for chunk in chunks if "tool_calls" in chunk["delta"]]) > 10, "arguments come in fragments"


@pytest.mark.parametrize("fields", [{"tools": CHAT_TOOLS, "tool_choice": "none"}, {}])
def test_where_nothing_may_be_called_a_message_is_what_its_channel_says(fields: dict[str, Any]) -> None:
    [choice] = whole(WHOLE, **fields)["choices"]
    assert choice["message"]["content"] == f"I look.\n\n{ZONE}" and "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


def test_reasoning_may_be_left_out_or_left_in_the_text() -> None:
    [choice] = whole(ANALYSIS + FINAL, include_reasoning=False)["choices"]
    assert choice["message"]["content"] == "It is noon." and "reasoning" not in choice["message"]
    [choice] = whole(ANALYSIS + FINAL, separate_reasoning=False)["choices"]
    assert choice["message"]["content"] == ANALYSIS + FINAL
    # Special tokens are the answer's structure, whether or not they are asked for.
    [choice] = whole(ANALYSIS + FINAL, skip_special_tokens=False)["choices"]
    assert choice["message"]["content"] == "It is noon."


def test_the_first_call_ends_an_answer_where_calls_are_not_parallel() -> None:
    made = replica(HEADER + ZONE + "<|call|>" + CALL)
    asked = {"tools": CHAT_TOOLS, "max_tokens": 300, "parallel_tool_calls": False}
    [choice] = asyncio.run(made.whole("chat", **asked))["choices"]
    assert len(choice["message"]["tool_calls"]) == 1 and choice["finish_reason"] == "tool_calls"
    assert made.dispatcher.begun[0].is_stopped


def test_a_chat_that_is_cut_off_at_each_token() -> None:
    """No header and no special token is ever shown, and the finish reason says that more was to come."""
    for length in range(1, len(in_harmony(WHOLE)) + 1):
        [choice] = whole(WHOLE, FinishReason.LENGTH, tools=CHAT_TOOLS, max_tokens=length)["choices"]
        message = choice["message"]
        assert "I look.".startswith(message["content"] or "") and choice["finish_reason"] == "length"
        assert "Let me see.".startswith(message.get("reasoning", ""))
        for call in message.get("tool_calls", ()):
            assert ZONE.startswith(call["function"]["arguments"])


def test_a_kept_answer_and_a_stop_string() -> None:
    [choice] = whole(ANALYSIS + FINAL, store=True)["choices"]
    assert "id" not in choice["message"], "the text alone is no beginning of the tokens' text"
    [choice] = whole(ANALYSIS + FINAL, stop=["noon"])["choices"]
    assert choice["message"]["content"] == "It is " and choice["stop_reason"] == "noon"


def test_a_custom_tools_input() -> None:
    tools = [{"type": "custom", "custom": {"name": "note"}}]
    answer = '<|channel|>commentary to=functions.note <|constrain|>json<|message|>{"input": "a\\nb"}'
    [choice] = whole(answer, tools=tools)["choices"]
    [call] = choice["message"]["tool_calls"]
    assert call["custom"] == {"name": "note", "input": "a\nb"}


def test_workers_know_the_token_that_calls_end_with() -> None:
    made = replica(WHOLE)
    asyncio.run(made.whole("chat", tools=CHAT_TOOLS))
    assert made.dispatcher.begun[0].cache.call_token == HARMONY_MARKERS["<|call|>"]


THINKING = {"type": "thinking", "thinking": "Let me see.", "signature": ""}


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_has_blocks(served: Served, stream: bool) -> None:
    reply = served(replica(WHOLE), messages_app.post(stream=stream, max_tokens=300, tools=MESSAGES_TOOLS))
    if not stream:
        thinking, text, call = reply.json["content"]
        assert (thinking, text) == (THINKING, {"type": "text", "text": "I look."})
        assert (call["type"], call["name"], call["input"]) == ("tool_use", "clock", json.loads(ZONE))
        assert reply.json["stop_reason"] == "tool_use"
        return
    events = messages_app.events_of(reply.body)
    opened = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert opened == ["thinking", "text", "tool_use"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "Let me see."
    assert "".join(delta.get("text", "") for delta in deltas) == "I look."
    assert "".join(delta.get("partial_json", "") for delta in deltas) == ZONE
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_response_has_items(served: Served) -> None:
    fields: dict[str, Any] = {"tools": RESPONSES_TOOLS, "max_output_tokens": 300}
    response = served(replica(WHOLE), responses_app.post(**fields)).json
    reasoning, message, call = response["output"]
    assert (reasoning["type"], reasoning["content"][0]["text"]) == ("reasoning", "Let me see.")
    assert (message["type"], message["content"][0]["text"]) == ("message", "I look.")
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "clock", ZONE)
    events = responses_app.events_of(served(replica(WHOLE), responses_app.post(stream=True, **fields)).body)
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["reasoning", "message", "function_call"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]


@pytest.mark.parametrize(
    "answer", [ANALYSIS + PREAMBLE + "<|start|>assistant" + ANALYSIS + CALL, PREAMBLE + CALL + ANALYSIS]
)
def test_reasoning_behind_text_stands_where_it_was_written(served: Served, answer: str) -> None:
    """A whole answer has the same parts in the same order as a stream."""
    fields: dict[str, Any] = {"tools": RESPONSES_TOOLS, "max_output_tokens": 300}
    events = responses_app.events_of(served(replica(answer), responses_app.post(stream=True, **fields)).body)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"] and len(done) > 2
    asked: dict[str, Any] = {"max_tokens": 300, "tools": MESSAGES_TOOLS}
    content = served(replica(answer), messages_app.post(**asked)).json["content"]
    blocks = messages_app.events_of(served(replica(answer), messages_app.post(stream=True, **asked)).body)
    opened = [event["content_block"]["type"] for event in blocks if event["type"] == "content_block_start"]
    assert [block["type"] for block in content] == opened
