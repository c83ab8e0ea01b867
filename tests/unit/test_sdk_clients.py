"""OpenAI's and Anthropic's clients themselves on the application, with every answer held strictly to their models.

`test_sdk_models` reads the same routes' answers by these models; here the clients also write the requests, put streams
together and make exceptions of errors.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import anthropic
import openai
import pytest
from anthropic import AsyncAnthropic
from httpx2 import ASGITransport, AsyncClient
from openai import AsyncOpenAI
from pydantic import BaseModel

from tests.unit.ingress import MODEL, Served
from tests.unit.served_app import app
from tests.unit.test_sdk_models import CALL, CHANNELS, CHAT_TOOL, MESSAGES_TOOL, REASONED, TOOL, USER, replica_of

Case: TypeAlias = Callable[[Any], Awaitable[None]]
MESSAGES: Any = [{"role": "user", "content": "hi"}]
CHAT: Any = {"model": MODEL, "messages": MESSAGES}
MESSAGE: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 200}
RESPONSE: Any = {"model": MODEL, "input": "hi"}
JSON = '{"name": "Rhine"}'


class River(BaseModel):
    name: str


@asynccontextmanager
async def openai_client() -> AsyncIterator[AsyncOpenAI]:
    http = AsyncClient(transport=ASGITransport(app=app))
    strict: Any = {"_strict_response_validation": True}
    async with AsyncOpenAI(
        api_key="none", base_url="http://test/v1", max_retries=0, http_client=http, **strict
    ) as client:
        yield client


@asynccontextmanager
async def anthropic_client() -> AsyncIterator[AsyncAnthropic]:
    http = AsyncClient(transport=ASGITransport(app=app))
    strict: Any = {"_strict_response_validation": True}
    async with AsyncAnthropic(
        api_key="none", base_url="http://test", max_retries=0, http_client=http, **strict
    ) as client:
        yield client


# OpenAI's


async def models(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL


async def chat(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2, n=2)
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 2
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None


async def chat_stream(client: AsyncOpenAI) -> None:
    async with client.chat.completions.stream(**CHAT, stream_options={"include_usage": True}) as stream:
        async for _ in stream:
            pass
        answer = await stream.get_final_completion()
    assert answer.choices[0].message.content == "one two." and answer.usage is not None


async def chat_calls(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**{**CHAT, "tools": [CHAT_TOOL]})
    [call] = answer.choices[0].message.tool_calls or []
    assert call.type == "function" and (call.function.name, answer.choices[0].finish_reason) == ("clock", "tool_calls")
    names, arguments = "", ""
    async for chunk in await client.chat.completions.create(**{**CHAT, "tools": [CHAT_TOOL], "stream": True}):
        for delta in chunk.choices[0].delta.tool_calls or ():
            assert delta.function is not None
            names, arguments = names + (delta.function.name or ""), arguments + (delta.function.arguments or "")
    assert (names, arguments) == ("clock", call.function.arguments)


async def chat_parse(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.parse(**CHAT, response_format=River)
    assert answer.choices[0].message.parsed == River(name="Rhine")


async def completion(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt=["hi", "ho"], logprobs=2, max_tokens=4)
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 2


async def embeddings(client: AsyncOpenAI) -> None:
    # By itself the client asks for base64, which its own model of the answer does not know.
    vectors = await client.embeddings.create(model=MODEL, input=["a", "b"], encoding_format="float")
    assert [vector.index for vector in vectors.data] == [0, 1] and vectors.data[0].embedding


async def response(client: AsyncOpenAI) -> None:
    first = await client.responses.create(**RESPONSE)
    second = await client.responses.create(**RESPONSE, previous_response_id=first.id, reasoning={"effort": "low"})
    assert second.output_text == "one two." and second.previous_response_id == first.id
    assert (await client.responses.retrieve(second.id)).id == second.id
    assert [item.type async for item in client.responses.input_items.list(second.id)]
    assert (await client.responses.input_tokens.count(**RESPONSE)).input_tokens > 0
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as caught:
        await client.responses.retrieve(first.id)
    assert caught.value.code == "response_not_found"


async def response_stream(client: AsyncOpenAI) -> None:
    async with client.responses.stream(**RESPONSE) as stream:
        kinds = [event.type async for event in stream]
        answer = await stream.get_final_response()
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed") and answer.output_text == "one two."


async def response_calls(client: AsyncOpenAI) -> None:
    answer = await client.responses.create(**{**RESPONSE, "tools": [TOOL]})
    [call] = answer.output
    assert call.type == "function_call" and call.name == "clock"


async def response_in_channels(client: AsyncOpenAI) -> None:
    fields: Any = {**RESPONSE, "tools": [TOOL]}
    async with client.responses.stream(**fields) as stream:
        async for _ in stream:
            pass
        streamed = await stream.get_final_response()
    for answer in (await client.responses.create(**fields), streamed):
        assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
        assert answer.output_text == "I look."


async def response_parse(client: AsyncOpenAI) -> None:
    answer = await client.responses.parse(**RESPONSE, text_format=River)
    assert answer.output_parsed == River(name="Rhine")


async def response_in_background(client: AsyncOpenAI) -> None:
    queued = await client.responses.create(**RESPONSE, background=True)
    assert queued.status == "queued"
    assert (await client.responses.cancel(queued.id)).status in ("cancelled", "completed")


async def conversation(client: AsyncOpenAI) -> None:
    items: Any = [USER]
    begun = await client.conversations.create(items=items, metadata={"a": "b"})
    await client.responses.create(**RESPONSE, conversation=begun.id)
    assert [item.type async for item in client.conversations.items.list(begun.id)] == ["message"] * 3
    assert (await client.conversations.delete(begun.id)).deleted


async def openai_errors(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(**CHAT, temperature=-1)
    assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x" * 20_000}])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="none", messages=MESSAGES)
    assert missing.value.code == "model_not_found"


# Anthropic's


async def anthropic_models(client: AsyncAnthropic) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL


async def message(client: AsyncAnthropic) -> None:
    answer = await client.messages.create(**MESSAGE, system="be kind", stop_sequences=["two"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "two")
    assert answer._request_id is not None and answer._request_id.startswith("req_")
    assert (await client.messages.count_tokens(model=MODEL, messages=MESSAGES)).input_tokens > 0


async def message_stream(client: AsyncAnthropic) -> None:
    async with client.messages.stream(**MESSAGE) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        answer = await stream.get_final_message()
    assert text == "one two." and answer.stop_reason == "end_turn" and answer.usage.output_tokens > 0


async def message_calls(client: AsyncAnthropic) -> None:
    fields: Any = {**MESSAGE, "tools": [MESSAGES_TOOL]}
    whole = await client.messages.create(**fields)
    async with client.messages.stream(**fields) as stream:
        streamed = await stream.get_final_message()
    for answer in (whole, streamed):
        block: Any
        [block] = answer.content
        assert block.type == "tool_use" and (block.name, block.input) == ("clock", {"zone": "UTC"})
        assert answer.stop_reason == "tool_use"


async def message_in_channels(client: AsyncAnthropic) -> None:
    fields: Any = {**MESSAGE, "tools": [MESSAGES_TOOL]}
    whole = await client.messages.create(**fields)
    async with client.messages.stream(**fields) as stream:
        streamed = await stream.get_final_message()
    for answer in (whole, streamed):
        assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]


async def message_thinks(client: AsyncAnthropic) -> None:
    whole = await client.messages.create(**MESSAGE, thinking={"type": "adaptive"})
    async with client.messages.stream(**MESSAGE, thinking={"type": "adaptive"}) as stream:
        streamed = await stream.get_final_message()
    for answer in (whole, streamed):
        assert [block.type for block in answer.content] == ["thinking", "text"]


async def beta_message(client: AsyncAnthropic) -> None:
    edits: Any = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    fields: Any = {**MESSAGE, "betas": ["context-management-2025-06-27"], "context_management": edits}
    answer = await client.beta.messages.create(**fields)
    assert answer.context_management is not None and answer.context_management.applied_edits == []


async def anthropic_errors(client: AsyncAnthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > \d+ maximum"):
        await client.messages.create(model=MODEL, max_tokens=5, messages=[{"role": "user", "content": "x" * 20_000}])
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.messages.create(model="none", max_tokens=5, messages=MESSAGES)
    body: Any = missing.value.body
    assert body["error"]["type"] == "not_found_error"
    assert missing.value.request_id is not None


OF_OPENAI: list[tuple[Case, str | None]] = [
    (models, None),
    (chat, None),
    (chat_stream, None),
    (chat_calls, CALL),
    (chat_calls, CHANNELS),
    (chat_parse, JSON),
    (completion, None),
    (embeddings, None),
    (response, None),
    (response_stream, None),
    (response_calls, CALL),
    (response_in_channels, CHANNELS),
    (response_parse, JSON),
    (response_in_background, None),
    (conversation, None),
    (openai_errors, None),
]
OF_ANTHROPIC: list[tuple[Case, str | None]] = [
    (anthropic_models, None),
    (message, None),
    (message_stream, None),
    (message_calls, CALL),
    (message_in_channels, CHANNELS),
    (message_thinks, REASONED),
    (beta_message, None),
    (anthropic_errors, None),
]


def name_of(value: object) -> str | None:
    return getattr(value, "__name__", "")


@pytest.mark.parametrize(("case", "answer"), OF_OPENAI, ids=name_of)
def test_openai_s_client(served: Served, case: Case, answer: str | None) -> None:
    async def work() -> None:
        async with openai_client() as client:
            await case(client)

    served(replica_of(answer), work)


@pytest.mark.parametrize(("case", "answer"), OF_ANTHROPIC, ids=name_of)
def test_anthropic_s_client(served: Served, case: Case, answer: str | None) -> None:
    async def work() -> None:
        async with anthropic_client() as client:
            await case(client)

    served(replica_of(answer, reasons=answer == REASONED), work)
