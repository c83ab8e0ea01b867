"""Anthropic's Messages API as its official client sees it, whole and streamed.

The client has no `temperature`: the field goes into `extra_body`.
"""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.integration.conftest import LOCAL_MODEL_LEN, MODEL, WAIT_S, Server

SYSTEM = "You are a helpful guide to the rivers of Europe. " * 12
QUESTION: Any = [{"role": "user", "content": "Name three rivers of Europe."}]
GREEDY = {"temperature": 0}


@pytest.fixture
def client(one_process: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=one_process.url, api_key="none", max_retries=0, timeout=WAIT_S) as client:
        yield client


def ask(client: anthropic.Anthropic, **fields: Any) -> Any:
    """The greedy answer to the question, a message or a stream."""
    create: Any = client.messages.create
    return create(**{"model": MODEL, "max_tokens": 24, "messages": QUESTION, "extra_body": GREEDY} | fields)


def chat(server: Server, messages: Any, **fields: Any) -> dict[str, Any]:
    """The same question by OpenAI's API."""
    body = {"model": MODEL, "messages": messages, "temperature": 0, **fields}
    status, _, data = server.request("POST", "/v1/chat/completions", body)
    assert status == 200, data
    answer: dict[str, Any] = json.loads(data)
    return answer


def text_of(message: Any) -> str:
    [block] = message.content
    text: str = block.text
    return text


def length_of_prompt(usage: Any) -> int:
    length: int = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    return length


def test_a_message_has_the_text_of_a_chat(client: anthropic.Anthropic, one_process: Server) -> None:
    message = ask(client, max_tokens=32, system="Be brief.")
    expected = chat(one_process, [{"role": "system", "content": "Be brief."}, *QUESTION], max_tokens=32)
    assert text_of(message) == expected["choices"][0]["message"]["content"]
    assert length_of_prompt(message.usage) == expected["usage"]["prompt_tokens"]
    assert message.usage.output_tokens == expected["usage"]["completion_tokens"]
    assert (message.role, message.type, message.model) == ("assistant", "message", MODEL)
    is_cut = expected["choices"][0]["finish_reason"] == "length"
    assert message.stop_reason == ("max_tokens" if is_cut else "end_turn")


def test_a_stream_is_the_same_message(client: anthropic.Anthropic) -> None:
    whole = ask(client)
    with client.messages.stream(model=MODEL, max_tokens=24, messages=QUESTION, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(final) == text_of(whole)
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_events_come_in_order(client: anthropic.Anthropic) -> None:
    with ask(client, max_tokens=5, stream=True) as events:
        kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


def test_a_stop_sequence(client: anthropic.Anthropic) -> None:
    word = text_of(ask(client)).split()[3]
    message = ask(client, stop_sequences=[word])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", word)
    assert word not in text_of(message)


def test_an_answer_that_is_begun_is_gone_on_with(client: anthropic.Anthropic, one_process: Server) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": "The three rivers are the Rhine,"}]
    expected = chat(one_process, begun, max_tokens=8, continue_final_message=True, add_generation_prompt=False)
    assert text_of(ask(client, max_tokens=8, messages=begun)) == expected["choices"][0]["message"]["content"]


def test_a_count_is_the_length_of_the_prompt(client: anthropic.Anthropic) -> None:
    count = client.messages.count_tokens(model=MODEL, system=SYSTEM, messages=QUESTION)
    assert count.input_tokens == length_of_prompt(ask(client, system=SYSTEM, max_tokens=1).usage)


def test_marks_show_in_the_usage(client: anthropic.Anthropic, one_process: Server) -> None:
    assert one_process.request("POST", "/v1/cache/reset")[0] == 200
    system = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    questions = ("Name a river.", "What is a lake?")
    first, second = (
        ask(client, max_tokens=1, system=system, messages=[{"role": "user", "content": question}]).usage
        for question in questions
    )
    assert first.cache_read_input_tokens == 0 and first.cache_creation_input_tokens > 100
    assert first.cache_creation.ephemeral_1h_input_tokens == first.cache_creation_input_tokens
    assert second.cache_read_input_tokens > first.cache_creation_input_tokens - 16
    assert second.cache_creation_input_tokens < 16


def test_nothing_is_generated_for_a_limit_of_zero(client: anthropic.Anthropic) -> None:
    message = ask(client, max_tokens=0, system=SYSTEM)
    assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)


def test_a_limit_beyond_the_context(client: anthropic.Anthropic) -> None:
    long = [{"role": "user", "content": "word " * (LOCAL_MODEL_LEN - 150)}]
    message = ask(client, max_tokens=32_000, messages=long, extra_body={**GREEDY, "ignore_eos": True})
    assert message.stop_reason == "model_context_window_exceeded"
    assert length_of_prompt(message.usage) + message.usage.output_tokens == LOCAL_MODEL_LEN


def test_errors_are_the_clients_own(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        ask(client, model="other")
    with pytest.raises(anthropic.BadRequestError, match="'container' is not supported yet"):
        ask(client, extra_body={"container": "c"})


def test_a_model_without_reasoning_keeps_any_limit_of_it(client: anthropic.Anthropic) -> None:
    message = ask(client, thinking={"type": "enabled", "budget_tokens": 1024})
    assert [block.type for block in message.content] == ["text"]


def test_replies_say_how_many_more_requests_there_may_be(client: anthropic.Anthropic, one_process: Server) -> None:
    create: Any = client.messages.with_raw_response.create
    reply = create(model=MODEL, max_tokens=8, messages=QUESTION, extra_body=GREEDY)
    limit, remaining = (int(reply.headers[f"anthropic-ratelimit-requests-{name}"]) for name in ("limit", "remaining"))
    assert 0 < remaining <= limit
    status, headers, _ = one_process.request("POST", "/v1/chat/completions", {"messages": QUESTION, "max_tokens": 8})
    names = {name.lower() for name in headers}
    assert status == 200 and "x-ratelimit-remaining-requests" in names
    assert not [name for name in names if name.startswith("anthropic")]
