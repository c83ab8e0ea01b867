"""Answers with calls: whole, streamed, and through the Python handle."""

import asyncio
import json
from typing import Any

import pytest

from raydix.engine.api.generate import HandleCall
from raydix.engine.core.ingress.parsers import HERMES, LLAMA3, MISTRAL, ToolFormat
from raydix.engine.core.types import FinishReason
from tests.unit.ingress import ANSWER, END, Replica

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("clock", "weather")]
ZONE = '{"zone": "UTC"}'
CALL = f'<tool_call>\n{{"name": "clock", "arguments": {ZONE}}}\n</tool_call>'
OTHER = '\n<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
MESSAGES = [{"role": "user", "content": "?"}]


def replica(answer: str, finish: FinishReason = FinishReason.STOP, tool_format: ToolFormat = HERMES) -> Replica:
    made = Replica(max_model_len=512, tool_format=tool_format)
    made.dispatcher.answer, made.dispatcher.finish = answer, finish
    return made


def whole(answer: str, finish: FinishReason = FinishReason.STOP, **fields: Any) -> dict[str, Any]:
    """The choice of a whole answer."""
    body = {"tools": TOOLS, "max_tokens": 300, **fields}
    [choice] = asyncio.run(replica(answer, finish).whole("chat", **body))["choices"]
    return dict(choice)


def streamed(answer: str, finish: FinishReason = FinishReason.STOP, **fields: Any) -> list[dict[str, Any]]:
    """The choices of a streamed answer's chunks."""
    body = {"tools": TOOLS, "max_tokens": 300, **fields}
    *chunks, done = asyncio.run(replica(answer, finish).streamed("chat", **body))
    assert done == "[DONE]"
    return [chunk["choices"][0] for chunk in chunks]


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """A stream's message, put together as OpenAI's clients do."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    for chunk in chunks:
        delta = chunk["delta"]
        message["content"] += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["function"]["arguments"] == "" and call["index"] == len(message["tool_calls"])
                message["tool_calls"].append({key: call[key] for key in ("id", "type", "function")})
            else:
                assert set(call) == {"index", "function"}
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message


def test_a_call_alone() -> None:
    choice = whole(CALL)
    [call] = choice["message"]["tool_calls"]
    assert choice["message"]["content"] is None
    assert (call["type"], call["function"]) == ("function", {"name": "clock", "arguments": ZONE})
    assert call["id"].startswith("call_")
    assert choice["finish_reason"] == "tool_calls"


def test_text_and_several_calls() -> None:
    for _ in range(2):
        choice = whole("Wait.\n" + CALL + OTHER)
        assert choice["message"]["content"] == "Wait."
        names = [call["function"]["name"] for call in choice["message"]["tool_calls"]]
        assert names == ["clock", "weather"]
        assert len({call["id"] for call in choice["message"]["tool_calls"]}) == 2


@pytest.mark.parametrize("fields", [{}, {"tool_choice": "none"}, {"tools": None}], ids=str)
def test_an_answer_without_calls_is_as_ever(fields: dict[str, Any]) -> None:
    answer = ANSWER if not fields else CALL
    choice = whole(answer, **fields)
    assert choice["message"] == {"role": "assistant", "content": answer, "refusal": None}
    assert choice["finish_reason"] == "stop"
    chunks = streamed(answer, **fields)
    assert joined(chunks) == {"content": answer, "tool_calls": []}
    assert chunks[-1]["finish_reason"] == "stop" and chunks[-1]["delta"] == {}


@pytest.mark.parametrize("answer", [CALL, "Wait. " + CALL + OTHER, CALL + "\nThere."])
def test_a_stream_says_the_same(answer: str) -> None:
    chunks, choice = streamed(answer), whole(answer)
    message, expected = joined(chunks), choice["message"]
    assert message["content"] == (expected["content"] or "")
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions == [call["function"] for call in expected["tool_calls"]]
    assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["tool_calls"]
    assert len([chunk for chunk in chunks if "tool_calls" in chunk["delta"]]) > 10, "arguments come in fragments"


def test_the_first_call_ends_the_answer_where_calls_are_not_parallel() -> None:
    made = replica(CALL + OTHER)
    [choice] = asyncio.run(made.whole("chat", tools=TOOLS, max_tokens=300, parallel_tool_calls=False))["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["clock"]
    assert choice["finish_reason"] == "tool_calls"
    [generation] = made.dispatcher.begun
    assert generation.is_stopped and len(generation.token_ids) - len(generation.prompt) < len(CALL)
    chunks = streamed(CALL + OTHER, parallel_tool_calls=False)
    assert len(joined(chunks)["tool_calls"]) == 1 and chunks[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("beginning", ["<tool_call>\n", '\n<tool_call>\n{"na'])
def test_a_required_call_that_is_cut_off_before_its_name_is_no_text(beginning: str) -> None:
    expected = {"content": "", "tool_calls": []}
    assert joined(streamed(beginning, FinishReason.LENGTH, tool_choice="required")) == expected
    choice = whole(CALL + beginning, FinishReason.LENGTH, tool_choice="required")
    assert choice["message"]["content"] is None and len(choice["message"]["tool_calls"]) == 1
    assert whole(beginning, FinishReason.LENGTH)["message"]["content"] == beginning


def test_a_call_that_is_cut_off_keeps_what_there_is() -> None:
    cut = CALL.index("UTC")
    choice = whole(CALL, max_tokens=cut)
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "clock", "arguments": '{"zone": "'}
    assert choice["finish_reason"] == "length"
    assert joined(streamed(CALL, max_tokens=cut))["tool_calls"][0]["function"] == call["function"]


def test_a_broken_call_is_text() -> None:
    broken = 'Hm. <tool_call>{"name": "clock", "arguments": {"zone": oops}}</tool_call>'
    choice = whole(broken)
    assert choice["message"]["content"] == broken and "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    assert streamed(broken)[-1]["finish_reason"] == "stop"


def test_a_stop_string_ends_calls_too() -> None:
    assert whole(CALL + OTHER, stop=["</tool_call>"])["finish_reason"] == "tool_calls"
    choice = whole(CALL, stop=["UTC"])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "UTC")
    assert choice["message"]["content"] == CALL[: CALL.index("UTC")]


def test_data_of_tokens_comes_once() -> None:
    fields: dict[str, Any] = {"logprobs": True, "return_token_ids": True}
    choice = whole(CALL, **fields)
    assert choice["token_ids"] == [*CALL.encode(), END] and len(choice["logprobs"]["content"]) == len(CALL) + 1
    chunks = streamed(CALL, **fields)
    assert [token for chunk in chunks for token in chunk.get("token_ids") or ()] == choice["token_ids"]
    entries = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
    assert entries == choice["logprobs"]["content"]


def test_usage_in_every_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body: dict[str, Any] = {"tools": TOOLS, "max_tokens": 300, "stream_options": options}
    *chunks, total, _ = asyncio.run(replica(CALL).streamed("chat", **body))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and chunks[-1]["usage"] == total["usage"]
    assert set(counts) == set(range(len(CALL) + 2))


def test_several_choices_have_calls_of_their_own() -> None:
    answer = asyncio.run(replica(CALL).whole("chat", tools=TOOLS, max_tokens=300, n=3))
    ids = {choice["message"]["tool_calls"][0]["id"] for choice in answer["choices"]}
    assert len(ids) == 3


def test_special_tokens_of_the_format_are_seen() -> None:
    made = replica('\x01 [{"name": "clock", "arguments": {}}]', tool_format=MISTRAL)
    [choice] = asyncio.run(made.whole("chat", tools=TOOLS, max_tokens=300))["choices"]
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "clock"
    assert len(call["id"]) == 9 and call["id"].isalnum()
    made = replica("a\x01b", tool_format=MISTRAL)
    assert asyncio.run(made.whole("chat", max_tokens=300))["choices"][0]["message"]["content"] == "ab"


def test_only_the_requests_own_functions_are_called_without_marks() -> None:
    made = replica('{"name": "Ann", "parameters": {}}', tool_format=LLAMA3)
    [choice] = asyncio.run(made.whole("chat", tools=TOOLS, max_tokens=300))["choices"]
    assert "tool_calls" not in choice["message"]


def test_an_answer_with_calls_is_not_kept_and_the_next_turn_has_its_calls() -> None:
    async def run() -> None:
        made = replica(CALL)
        stored = await made.whole("chat", tools=TOOLS, max_tokens=300, store=True)
        assert "id" not in stored["choices"][0]["message"] and made.manager.kept == {}
        answer = await made.whole("chat", tools=TOOLS, max_tokens=300)
        await asyncio.sleep(0)
        message = answer["choices"][0]["message"]
        [turn] = made.reader.next_turns
        assert turn.answer == {"role": "assistant", "content": "", "tool_calls": message["tool_calls"]}
        assert [tool["function"] for tool in turn.tools] == [
            {"name": name, "parameters": {"type": "object", "properties": {}}} for name in ("clock", "weather")
        ]

    asyncio.run(run())


def test_the_handle_gives_calls() -> None:
    request = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 300}

    async def run() -> tuple[Any, list[Any]]:
        response = await replica("So. " + CALL).frontend.generate(request)
        return response, [chunk async for chunk in replica("So. " + CALL).frontend.stream(request)]

    response, chunks = asyncio.run(run())
    assert (response.text, response.finish_reason) == ("So.", FinishReason.TOOL_CALLS)
    [call] = response.tool_calls
    assert (call.index, call.name, json.loads(call.arguments)) == (0, "clock", {"zone": "UTC"})
    parts = [part for chunk in chunks for part in chunk.tool_calls]
    assert "".join(chunk.text for chunk in chunks) == "So." and chunks[-1].finish_reason is FinishReason.TOOL_CALLS
    assert parts[0] == HandleCall(index=0, id=parts[0].id, name="clock", arguments="")
    assert "".join(part.arguments for part in parts) == call.arguments
    assert asyncio.run(replica("x").frontend.generate({"messages": MESSAGES})).tool_calls is None
