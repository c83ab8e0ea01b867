"""pydantic-ai: agents with words, functions and typed outputs, as its first pages show them."""

from importlib.metadata import version
from typing import Any

import pytest
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.messages import ToolCallPart, ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.cases import (
    MAX_FORM_TOKENS,
    MAX_TOKENS,
    NEXT_QUESTION,
    QUESTION,
    TIMEOUT_S,
    WEATHER_QUESTION,
    River,
    assert_query,
    weather,
)
from tests.clients.server import MODEL, Server

VERSION = version("pydantic-ai-slim")
WORDS: Any = {"temperature": 0, "max_tokens": MAX_TOKENS, "timeout": TIMEOUT_S}
FORMS: Any = {**WORDS, "max_tokens": MAX_FORM_TOKENS, "parallel_tool_calls": False}


@pytest.fixture
def provider(server: Server) -> Any:
    return OpenAIProvider(base_url=server.openai_url, api_key="none")


@pytest.fixture
def model(provider: Any) -> Any:
    return OpenAIChatModel(MODEL, provider=provider)


def require_the_first_call(context: Any) -> Any:
    """Let the model choose only once a result is there."""
    return {**FORMS, "tool_choice": "required"} if context.run_step <= 1 else FORMS


def parts(result: Any, kind: type[Any]) -> list[Any]:
    return [part for message in result.all_messages() for part in message.parts if isinstance(part, kind)]


def test_run(model: Any) -> None:
    agent = Agent(model, instructions="Be brief.", model_settings=WORDS)
    first = agent.run_sync(QUESTION)
    assert isinstance(first.output, str) and first.output
    assert first.usage.input_tokens > 0 and first.usage.output_tokens > 0
    second = agent.run_sync(NEXT_QUESTION, message_history=first.new_messages())
    assert second.usage.input_tokens > first.usage.input_tokens


def test_stream(model: Any) -> None:
    agent = Agent(model, model_settings=WORDS)
    with agent.run_stream_sync(QUESTION) as result:
        text = "".join(result.stream_text(delta=True))
    assert text == agent.run_sync(QUESTION).output


@pytest.mark.parametrize("output_type", [River, ToolOutput(River), NativeOutput(River)], ids=["type", "tool", "native"])
def test_output_type(model: Any, output_type: Any) -> None:
    agent = Agent(model, output_type=output_type, model_settings=FORMS)
    assert isinstance(agent.run_sync(QUESTION).output, River)


def test_output_type_stream(model: Any) -> None:
    agent = Agent(model, output_type=River, model_settings=FORMS)
    with agent.run_stream_sync(QUESTION) as result:
        assert isinstance(list(result.stream_output())[-1], River)


def test_tools(model: Any) -> None:
    """The first call is required, since the small model would rarely make one."""
    agent = Agent(model, tools=[weather], model_settings=require_the_first_call)
    result = agent.run_sync(WEATHER_QUESTION)
    calls, returned = parts(result, ToolCallPart), parts(result, ToolReturnPart)
    assert calls and {call.tool_name for call in calls} == {"weather"}
    assert_query(calls[0].args)
    assert returned and isinstance(result.output, str)


def test_responses_api(provider: Any) -> None:
    agent = Agent(OpenAIResponsesModel(MODEL, provider=provider), output_type=NativeOutput(River), model_settings=FORMS)
    assert isinstance(agent.run_sync(QUESTION).output, River)
