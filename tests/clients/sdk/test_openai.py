"""openai-python: chats, forms, functions, responses, files and batches as OpenAI's guides show them."""

import asyncio
import json
import time
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.clients.cases import (
    MAX_FORM_TOKENS,
    MAX_TOKENS,
    NEXT_QUESTION,
    QUESTION,
    REPORT,
    TIMEOUT_S,
    WEATHER_QUESTION,
    WEATHER_SCHEMA,
    River,
    WeatherQuery,
    assert_finish,
    assert_query,
)
from tests.clients.server import MODEL, Server

VERSION = version("openai")
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
ASKING: Any = [{"role": "user", "content": WEATHER_QUESTION}]
FUNCTION: dict[str, Any] = {"name": "weather", "description": "Ask for the weather.", "parameters": WEATHER_SCHEMA}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
RESPONSE_TOOLS: Any = [{"type": "function", **FUNCTION}]
BATCH_S = 300


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.openai_url, api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
        yield client


def chat(client: OpenAI, **fields: Any) -> Any:
    create: Any = client.chat.completions.create
    return create(**{"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": MAX_TOKENS} | fields)


def respond(client: OpenAI, **fields: Any) -> Any:
    create: Any = client.responses.create
    return create(**{"model": MODEL, "input": QUESTION, "temperature": 0, "max_output_tokens": MAX_TOKENS} | fields)


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_chat(client: OpenAI) -> None:
    answer = chat(client)
    [choice] = answer.choices
    assert choice.message.role == "assistant" and choice.message.content
    assert_finish(choice.finish_reason)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert 0 < answer.usage.completion_tokens <= MAX_TOKENS


def test_chat_stream(client: OpenAI) -> None:
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    deltas = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    whole = chat(client)
    assert "".join(deltas) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat_async(server: Server) -> None:
    async def ask() -> list[Any]:
        async with AsyncOpenAI(base_url=server.openai_url, api_key="none", timeout=TIMEOUT_S) as client:
            create: Any = client.chat.completions.create
            asked = [create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=MAX_TOKENS) for _ in range(3)]
            return await asyncio.gather(*asked)

    assert len({answer.choices[0].message.content for answer in asyncio.run(ask())}) == 1


def test_completion_with_logprobs(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="Rivers of Europe:", max_tokens=4, temperature=0, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs and logprobs.token_logprobs and logprobs.tokens
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert all(logprob is not None and logprob <= 0 for logprob in logprobs.token_logprobs)


def test_parse(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=River, temperature=0, max_tokens=MAX_FORM_TOKENS
    )
    assert isinstance(answer.choices[0].message.parsed, River)
    assert answer.choices[0].finish_reason == "stop"


def test_parse_stream(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, response_format=River, temperature=0, max_tokens=MAX_FORM_TOKENS
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, River)
    assert {"chunk", "content.delta", "content.done"} <= kinds


def test_tools_and_their_results(client: OpenAI) -> None:
    asking: Any = {"messages": ASKING, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    [choice] = chat(client, **asking, max_tokens=MAX_FORM_TOKENS).choices
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert_query(call.function.arguments)

    result = {"role": "tool", "tool_call_id": call.id, "content": REPORT}
    answer = chat(client, messages=[*ASKING, choice.message, result], tools=TOOLS, tool_choice="none")
    assert answer.choices[0].message.content and not answer.choices[0].message.tool_calls
    assert_finish(answer.choices[0].finish_reason)


def test_tools_stream(client: OpenAI) -> None:
    chosen = {"type": "function", "function": {"name": "weather"}}
    fields: Any = {"messages": ASKING, "tools": TOOLS, "tool_choice": chosen, "max_tokens": MAX_FORM_TOKENS}
    chunks = list(chat(client, **fields, stream=True))
    parts = [part for chunk in chunks for choice in chunk.choices for part in choice.delta.tool_calls or ()]
    assert [part.function.name for part in parts if part.id] == ["weather"]
    assert_query("".join(part.function.arguments or "" for part in parts))
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_tools_of_pydantic(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=ASKING,
        tools=[openai.pydantic_function_tool(WeatherQuery)],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=MAX_FORM_TOKENS,
    )
    [call] = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, WeatherQuery)


def test_errors(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        chat(client, model="other")
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, temperature=-1)
    assert refused.value.param == "temperature"


def test_response(client: OpenAI) -> None:
    response = respond(client, instructions="Be brief.")
    assert response.output_text and response.status in ("completed", "incomplete")
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert client.responses.retrieve(response.id).output_text == response.output_text
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_response_stream(client: OpenAI) -> None:
    events = list(respond(client, stream=True))
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == events[-1].response.output_text != ""


def test_response_goes_on(client: OpenAI) -> None:
    first = respond(client)
    second = respond(client, input=NEXT_QUESTION, previous_response_id=first.id)
    assert second.previous_response_id == first.id and second.output_text
    assert second.usage.input_tokens > first.usage.total_tokens


def test_response_parse(client: OpenAI) -> None:
    response = client.responses.parse(
        model=MODEL, input=QUESTION, text_format=River, temperature=0, max_output_tokens=MAX_FORM_TOKENS
    )
    assert isinstance(response.output_parsed, River) and response.status == "completed"


def test_response_with_tools(client: OpenAI) -> None:
    tools: Any = {"tools": RESPONSE_TOOLS, "max_output_tokens": MAX_FORM_TOKENS, "parallel_tool_calls": False}
    first = respond(client, input=WEATHER_QUESTION, **tools, tool_choice="required")
    [call] = [item for item in first.output if item.type == "function_call"]
    assert call.name == "weather"
    assert_query(call.arguments)

    result = {"type": "function_call_output", "call_id": call.call_id, "output": REPORT}
    second = respond(client, input=[result], previous_response_id=first.id, **tools, tool_choice="none")
    assert second.output_text


def ended(client: OpenAI, response_id: str) -> Any:
    """The response when it is not under way any more."""
    deadline = time.monotonic() + TIMEOUT_S
    while (response := client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline, response
        time.sleep(0.2)
    return response


def test_response_in_background(client: OpenAI) -> None:
    queued = respond(client, background=True)
    assert queued.status == "queued" and queued.background
    response = ended(client, queued.id)
    assert response.output_text and response.status in ("completed", "incomplete")
    assert client.responses.cancel(queued.id).status == response.status


def test_response_in_background_cancelled(client: OpenAI) -> None:
    queued = respond(client, background=True, max_output_tokens=1000, extra_body={"ignore_eos": True})
    assert client.responses.cancel(queued.id).status == "cancelled"
    assert ended(client, queued.id).status == "cancelled"


def test_response_in_background_streamed(client: OpenAI) -> None:
    stream = respond(client, background=True, stream=True, temperature=1)
    events = [event for event, _ in zip(stream, range(6), strict=False)]
    stream.close()
    response_id = events[0].response.id
    last = events[-1].sequence_number
    events += client.responses.retrieve(response_id, stream=True, starting_after=last)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == ended(client, response_id).output_text != ""


def test_conversation(client: OpenAI) -> None:
    conversation = client.conversations.create(metadata={"topic": "rivers"})
    first = respond(client, conversation=conversation.id)
    second = respond(client, conversation=conversation.id, input=NEXT_QUESTION)
    assert second.usage.input_tokens > first.usage.total_tokens
    items = list(client.conversations.items.list(conversation.id, order="asc", limit=2))
    assert [item.type for item in items] == ["message"] * 4
    note: Any = {"type": "message", "role": "user", "content": "Thanks."}
    [added] = client.conversations.items.create(conversation.id, items=[note]).data
    assert client.conversations.items.retrieve(str(added.id), conversation_id=conversation.id).type == "message"
    client.conversations.items.delete(str(added.id), conversation_id=conversation.id)
    assert client.conversations.update(conversation.id, metadata={"topic": "lakes"}).metadata == {"topic": "lakes"}
    assert client.conversations.retrieve(conversation.id).id == conversation.id
    assert client.conversations.delete(conversation.id).deleted


def test_compaction(client: OpenAI) -> None:
    """A small model may write no end: then the client's limit is named."""
    turns: Any = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": REPORT}]
    try:
        compacted = client.responses.compact(model=MODEL, input=turns, extra_body={"temperature": 0})
    except openai.APIStatusError as error:
        assert "cut at" in error.message
        return
    assert compacted.object == "response.compaction" and compacted.output[-1].type == "compaction"
    later: Any = [*[item.to_dict() for item in compacted.output], {"role": "user", "content": NEXT_QUESTION}]
    assert respond(client, input=later).output_text


def test_limits_in_headers(client: OpenAI) -> None:
    reply = client.chat.completions.with_raw_response.create(model=MODEL, messages=MESSAGES, max_tokens=8)
    assert 0 < int(reply.headers["x-ratelimit-remaining-requests"]) <= int(reply.headers["x-ratelimit-limit-requests"])


def test_embeddings(client: OpenAI) -> None:
    answer = client.embeddings.create(model=MODEL, input=[QUESTION, NEXT_QUESTION])
    assert [item.index for item in answer.data] == [0, 1]
    assert all(isinstance(value, float) for item in answer.data for value in item.embedding)


def batch_line(custom_id: str, question: str) -> str:
    body = {"model": MODEL, "messages": [{"role": "user", "content": question}], "max_tokens": 8}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body})


@pytest.mark.slow
def test_files_and_batches(client: OpenAI) -> None:
    lines = "\n".join(batch_line(name, question) for name, question in (("a", QUESTION), ("b", NEXT_QUESTION)))
    file = client.files.create(file=("requests.jsonl", lines.encode()), purpose="batch")
    assert file.id in {each.id for each in client.files.list()}
    assert client.files.content(file.id).text == lines

    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    deadline = time.monotonic() + BATCH_S
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.5)
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed" and batch.output_file_id
    assert batch.request_counts and batch.request_counts.completed == 2

    answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert {answer["custom_id"] for answer in answers} == {"a", "b"}
    assert all(answer["response"]["body"]["choices"][0]["message"]["content"] for answer in answers)
    for name in (file.id, batch.output_file_id):
        assert client.files.delete(name).deleted
