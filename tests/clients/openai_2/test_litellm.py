"""LiteLLM: turns, functions and forms by its OpenAI and its Anthropic routes."""

import os
from importlib.metadata import version
from typing import Any

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise the import asks another site for prices

import litellm

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
    assert_finish,
    assert_query,
)
from tests.clients.server import MODEL, Server

VERSION = version("litellm")
FIRST: Any = {"role": "user", "content": QUESTION}
NEXT: Any = {"role": "user", "content": NEXT_QUESTION}
ASKING: Any = {"role": "user", "content": WEATHER_QUESTION}
FUNCTION = {"name": "weather", "description": "Ask for the weather.", "parameters": WEATHER_SCHEMA}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
CHOSEN: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(params=["openai", "anthropic", "hosted_vllm"])
def route(request: pytest.FixtureRequest, server: Server) -> Any:
    """Fields of a request by one of LiteLLM's providers."""
    url = server.url if request.param == "anthropic" else server.openai_url
    return {"model": f"{request.param}/{MODEL}", "api_base": url, "api_key": "none"}


def ask(route: Any, messages: list[Any], **fields: Any) -> Any:
    common = {"temperature": 0, "max_tokens": MAX_TOKENS, "timeout": TIMEOUT_S, "num_retries": 0}
    return litellm.completion(messages=messages, **route, **{**common, **fields})


def test_two_turns(route: Any) -> None:
    """The second turn sends the first answer back as LiteLLM made it."""
    first = ask(route, [FIRST])
    message = first.choices[0].message
    assert message.content
    assert_finish(first.choices[0].finish_reason)
    second = ask(route, [FIRST, message, NEXT])
    assert second.choices[0].message.content
    assert second.usage.prompt_tokens > first.usage.total_tokens


def test_stream(route: Any) -> None:
    chunks = list(ask(route, [FIRST], stream=True))
    whole = litellm.stream_chunk_builder(chunks, messages=[FIRST])
    assert whole.choices[0].message.content == ask(route, [FIRST]).choices[0].message.content
    assert_finish(whole.choices[0].finish_reason)


def test_tools_and_their_results(route: Any) -> None:
    fields: Any = {"tools": TOOLS, "max_tokens": MAX_FORM_TOKENS}
    message = ask(route, [ASKING], **fields, tool_choice=CHOSEN).choices[0].message
    [call] = message.tool_calls
    assert call.function.name == "weather"
    assert_query(call.function.arguments)

    result = {"role": "tool", "tool_call_id": call.id, "content": REPORT}
    answer = ask(route, [ASKING, message, result], tools=TOOLS, tool_choice="none")
    assert answer.choices[0].message.content


def test_tools_stream(route: Any) -> None:
    fields: Any = {"tools": TOOLS, "tool_choice": CHOSEN, "max_tokens": MAX_FORM_TOKENS}
    chunks = list(ask(route, [ASKING], **fields, stream=True))
    [call] = litellm.stream_chunk_builder(chunks, messages=[ASKING]).choices[0].message.tool_calls
    assert_query(call.function.arguments)


def test_response_format(route: Any) -> None:
    answer = ask(route, [FIRST], response_format=River, max_tokens=MAX_FORM_TOKENS)
    River.model_validate_json(answer.choices[0].message.content)


def test_responses(server: Server) -> None:
    answer = litellm.responses(
        model=f"openai/{MODEL}",
        input=QUESTION,
        api_base=server.openai_url,
        api_key="none",
        max_output_tokens=MAX_TOKENS,
        timeout=TIMEOUT_S,
    )
    assert answer.status in ("completed", "incomplete") and answer.usage.output_tokens > 0


def test_text_completion(server: Server) -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}",
        prompt="Rivers of Europe:",
        api_base=server.openai_url,
        api_key="none",
        max_tokens=4,
        timeout=TIMEOUT_S,
    )
    assert answer.choices[0].text
