"""langchain-openai and LangChain's agents: as their first pages show them."""

from importlib.metadata import version
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI

from tests.clients.cases import (
    MAX_FORM_TOKENS,
    MAX_TOKENS,
    NEXT_QUESTION,
    QUESTION,
    REPORT,
    TIMEOUT_S,
    WEATHER_QUESTION,
    River,
    WeatherQuery,
    assert_finish,
    assert_query,
    weather,
)
from tests.clients.server import MODEL, Server

VERSION = version("langchain-openai")
MESSAGES = [SystemMessage("Be brief."), HumanMessage(QUESTION)]


def model(server: Server, **fields: Any) -> Any:
    settings = {"model": MODEL, "temperature": 0, "max_tokens": MAX_TOKENS, "timeout": TIMEOUT_S, "max_retries": 0}
    return ChatOpenAI(base_url=server.openai_url, api_key="none", **{**settings, **fields})


@pytest.fixture
def words(server: Server) -> Any:
    """A model that answers in words."""
    return model(server)


@pytest.fixture
def forms(server: Server) -> Any:
    """A model with room for a whole form or call."""
    return model(server, max_tokens=MAX_FORM_TOKENS)


@pytest.fixture
def tool() -> Any:
    return StructuredTool.from_function(weather)


def require_the_first_call(request: Any, handler: Any) -> Any:
    """Let the model choose only once a result is there."""
    is_asked = any(isinstance(message, ToolMessage) for message in request.messages)
    one_call = {"tool_choice": "required", "model_settings": {"parallel_tool_calls": False}}
    return handler(request if is_asked else request.override(**one_call))


def test_invoke(words: Any) -> None:
    answer = words.invoke(MESSAGES)
    assert isinstance(answer, AIMessage) and answer.content
    assert_finish(answer.response_metadata["finish_reason"])
    usage = answer.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]

    following = words.invoke([*MESSAGES, answer, HumanMessage(NEXT_QUESTION)])
    assert following.usage_metadata["input_tokens"] > usage["total_tokens"]


def test_stream(words: Any) -> None:
    chunks = list(words.stream(MESSAGES))
    assert "".join(chunk.content for chunk in chunks) == words.invoke(MESSAGES).content


def test_batch(words: Any) -> None:
    answers = words.batch([QUESTION, NEXT_QUESTION])
    assert [bool(answer.content) for answer in answers] == [True, True]


def test_bind_tools(forms: Any, tool: Any) -> None:
    bound = forms.bind_tools([tool], tool_choice="any", parallel_tool_calls=False)
    answer = bound.invoke(WEATHER_QUESTION)
    [call] = answer.tool_calls
    assert call["name"] == "weather" and not answer.invalid_tool_calls
    assert_query(call["args"])

    result = tool.invoke(call)
    assert isinstance(result, ToolMessage) and REPORT in result.content
    following = forms.bind_tools([tool], tool_choice="none").invoke([HumanMessage(WEATHER_QUESTION), answer, result])
    assert following.content and not following.tool_calls


def test_bind_tools_stream(forms: Any) -> None:
    bound = forms.bind_tools([WeatherQuery], tool_choice="WeatherQuery")
    first, *others = bound.stream(WEATHER_QUESTION)
    whole = first
    for chunk in others:
        whole += chunk
    [call] = whole.tool_calls
    assert call["name"] == "WeatherQuery"
    assert_query(call["args"])


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_with_structured_output(forms: Any, method: str) -> None:
    assert isinstance(forms.with_structured_output(River, method=method).invoke(QUESTION), River)


def test_with_structured_output_and_the_raw_message(forms: Any) -> None:
    found = forms.with_structured_output(River, include_raw=True).invoke(QUESTION)
    assert isinstance(found["parsed"], River) and found["parsing_error"] is None
    assert isinstance(found["raw"], AIMessage)


def test_create_agent(forms: Any, tool: Any) -> None:
    """The first call is required, since the small model would rarely make one."""
    agent = create_agent(
        forms, tools=[tool], system_prompt="You are a helper.", middleware=[wrap_model_call(require_the_first_call)]
    )
    state = agent.invoke({"messages": [HumanMessage(WEATHER_QUESTION)]}, {"recursion_limit": 20})
    messages = state["messages"]
    asked = [call for message in messages if isinstance(message, AIMessage) for call in message.tool_calls]
    results = [message for message in messages if isinstance(message, ToolMessage)]
    assert asked and len(results) == len(asked)
    for call in asked:
        assert_query(call["args"])
    assert isinstance(messages[-1], AIMessage) and not messages[-1].tool_calls


def call_once(request: Any, handler: Any) -> Any:
    """Let the model make one call at a time: the small one would fill the form in several times."""
    return handler(request.override(model_settings={"parallel_tool_calls": False}))


@pytest.mark.parametrize(("strategy", "middleware"), [(ProviderStrategy, ()), (ToolStrategy, (call_once,))])
def test_create_agent_with_a_form(forms: Any, strategy: Any, middleware: tuple[Any, ...]) -> None:
    around = [wrap_model_call(each) for each in middleware]
    agent = create_agent(forms, response_format=strategy(River), middleware=around)
    state = agent.invoke({"messages": [HumanMessage(QUESTION)]}, {"recursion_limit": 10})
    assert isinstance(state["structured_response"], River)


def test_responses_api(server: Server) -> None:
    answer = model(server, use_responses_api=True).invoke(MESSAGES)
    assert answer.text and answer.usage_metadata["output_tokens"] > 0
