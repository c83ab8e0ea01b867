"""Anthropic's SDK: messages, streams, functions and marks as Anthropic's guides show them.

The client has no `temperature`: the field goes into `extra_body`.
"""

import time
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, beta_tool

from tests.clients.cases import (
    MAX_FORM_TOKENS,
    MAX_TOKENS,
    NEXT_QUESTION,
    QUESTION,
    REPORT,
    TIMEOUT_S,
    WEATHER_QUESTION,
    WEATHER_SCHEMA,
    City,
    Days,
    River,
    assert_query,
    weather,
)
from tests.clients.server import MODEL, Server

VERSION = version("anthropic")
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
ASKING: Any = [{"role": "user", "content": WEATHER_QUESTION}]
TOOLS: Any = [{"name": "weather", "description": "Ask for the weather.", "input_schema": WEATHER_SCHEMA}]
GREEDY = {"temperature": 0}
ENDS = ("end_turn", "max_tokens")
BATCH_S = 300


@pytest.fixture
def client(server: Server) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
        yield client


def ask(client: Anthropic, **fields: Any) -> Any:
    create: Any = client.messages.create
    return create(**{"model": MODEL, "max_tokens": MAX_TOKENS, "messages": MESSAGES, "extra_body": GREEDY} | fields)


def test_message(client: Anthropic) -> None:
    message = ask(client, system="Be brief.")
    [block] = message.content
    assert (message.role, block.type) == ("assistant", "text") and block.text
    assert message.stop_reason in ENDS
    assert message.usage.input_tokens > 0 and 0 < message.usage.output_tokens <= MAX_TOKENS


def test_conversation(client: Anthropic) -> None:
    first = ask(client)
    turns = [*MESSAGES, {"role": "assistant", "content": first.content}, {"role": "user", "content": NEXT_QUESTION}]
    assert ask(client, messages=turns).stop_reason in ENDS


def test_stream(client: Anthropic) -> None:
    with client.messages.stream(model=MODEL, max_tokens=MAX_TOKENS, messages=MESSAGES, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert [block.text for block in final.content if block.type == "text"] == [text]
    assert final.stop_reason in ENDS and final.usage.output_tokens > 0


def test_events(client: Anthropic) -> None:
    with ask(client, stream=True) as events:
        kinds = [event.type for event in events]
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert {"content_block_start", "content_block_delta", "content_block_stop", "message_delta"} <= set(kinds)


def test_tools_and_their_results(client: Anthropic) -> None:
    any_one = {"type": "any", "disable_parallel_tool_use": True}
    message = ask(client, messages=ASKING, tools=TOOLS, tool_choice=any_one, max_tokens=MAX_FORM_TOKENS)
    assert message.stop_reason == "tool_use"
    [call] = [block for block in message.content if block.type == "tool_use"]
    assert call.name == "weather"
    assert_query(call.input)

    result = {"type": "tool_result", "tool_use_id": call.id, "content": REPORT}
    turns = [*ASKING, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert ask(client, messages=turns, tools=TOOLS).stop_reason in (*ENDS, "tool_use")


def test_tools_stream(client: Anthropic) -> None:
    with client.messages.stream(
        model=MODEL,
        max_tokens=MAX_FORM_TOKENS,
        messages=ASKING,
        tools=TOOLS,
        tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        extra_body=GREEDY,
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    [call] = [block for block in final.content if block.type == "tool_use"]
    assert_query(dict(call.input))
    assert "input_json" in kinds and final.stop_reason == "tool_use"


def test_tool_runner(client: Anthropic) -> None:
    """The runner requires the first call only; its result is in the second turn."""
    asked: list[City] = []

    @beta_tool
    def forecast(city: City, days: Days) -> str:
        """Ask for the weather in a city."""
        asked.append(city)
        return weather(city, days)

    runner = client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=MAX_FORM_TOKENS,
        messages=ASKING,
        tools=[forecast],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_iterations=2,
        extra_body=GREEDY,
    )
    first, second = runner
    assert first.stop_reason == "tool_use" and asked
    assert second.stop_reason in (*ENDS, "tool_use")


def test_count_tokens(client: Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES, system="Be brief.").input_tokens
    usage = ask(client, system="Be brief.", max_tokens=1).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


def test_cache_control(client: Anthropic) -> None:
    text = "You are a guide to the rivers of Europe, who has seen them all. " * 20
    system = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]
    ask(client, system=system)
    usage = ask(client, system=system, messages=[{"role": "user", "content": NEXT_QUESTION}]).usage
    assert usage.cache_read_input_tokens > 200


def test_parse(client: Anthropic) -> None:
    message = client.messages.parse(
        model=MODEL, max_tokens=MAX_FORM_TOKENS, messages=MESSAGES, output_format=River, extra_body=GREEDY
    )
    assert isinstance(message.parsed_output, River)


def test_models(client: Anthropic) -> None:
    assert client.models.retrieve(MODEL).id == MODEL


def test_errors(client: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        ask(client, model="other")
    with pytest.raises(anthropic.BadRequestError):
        ask(client, messages=[])


@pytest.mark.slow
def test_message_batches(client: Anthropic) -> None:
    params: Any = {"model": MODEL, "max_tokens": 8, "messages": MESSAGES}
    requests: Any = [{"custom_id": "a", "params": params}, {"custom_id": "b", "params": {**params, "max_tokens": -1}}]
    batch = client.messages.batches.create(requests=requests)
    deadline = time.monotonic() + BATCH_S
    while batch.processing_status != "ended":
        assert time.monotonic() < deadline, batch
        time.sleep(0.5)
        batch = client.messages.batches.retrieve(batch.id)
    assert (batch.request_counts.succeeded, batch.request_counts.errored) == (1, 1)
    results: Any = {line.custom_id: line.result for line in client.messages.batches.results(batch.id)}
    assert results["a"].message.content[0].text and results["b"].error.error.type == "invalid_request_error"
    assert client.messages.batches.cancel(batch.id).id == batch.id
    assert batch.id in [each.id for each in client.messages.batches.list()]
    assert client.messages.batches.delete(batch.id).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve(batch.id)


def test_limits_in_headers(client: Anthropic) -> None:
    create: Any = client.messages.with_raw_response.create
    headers = create(model=MODEL, max_tokens=8, messages=MESSAGES).headers
    limit, remaining = (int(headers[f"anthropic-ratelimit-requests-{name}"]) for name in ("limit", "remaining"))
    assert 0 < remaining <= limit
