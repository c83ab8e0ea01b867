"""LlamaIndex with `OpenAILike`: completions, chats, functions, forms and an agent."""

import asyncio
from importlib.metadata import version
from typing import Any

import pytest
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from tests.clients.cases import (
    MAX_FORM_TOKENS,
    MAX_TOKENS,
    QUESTION,
    TIMEOUT_S,
    WEATHER_QUESTION,
    River,
    assert_query,
    weather,
)
from tests.clients.server import MODEL, Server

VERSION = version("llama-index-llms-openai-like")


def model(server: Server, max_tokens: int) -> Any:
    return OpenAILike(
        model=MODEL,
        api_base=server.openai_url,
        api_key="none",
        context_window=4096,
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=0,
        max_tokens=max_tokens,
        timeout=TIMEOUT_S,
        max_retries=0,
    )


@pytest.fixture
def words(server: Server) -> Any:
    """A model that answers in words."""
    return model(server, MAX_TOKENS)


@pytest.fixture
def forms(server: Server) -> Any:
    """A model with room for a whole form or call."""
    return model(server, MAX_FORM_TOKENS)


@pytest.fixture
def tool() -> Any:
    return FunctionTool.from_defaults(weather)


def test_complete(words: Any) -> None:
    assert words.complete(QUESTION).text


def test_chat(words: Any) -> None:
    answer = words.chat([ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content=QUESTION)])
    assert answer.message.role == "assistant" and answer.message.content
    assert answer.raw.usage.completion_tokens > 0


def test_stream(words: Any) -> None:
    messages = [ChatMessage(role="user", content=QUESTION)]
    text = "".join(part.delta or "" for part in words.stream_chat(messages))
    assert text == words.chat(messages).message.content
    assert "".join(part.delta or "" for part in words.stream_complete(QUESTION)) == text


def test_tools(forms: Any, tool: Any) -> None:
    answer = forms.chat_with_tools([tool], WEATHER_QUESTION, tool_required=True, allow_parallel_tool_calls=False)
    [call] = forms.get_tool_calls_from_response(answer)
    assert call.tool_name == "weather"
    assert_query(call.tool_kwargs)


def test_predict_and_call(forms: Any, tool: Any) -> None:
    answer = forms.predict_and_call([tool], WEATHER_QUESTION, tool_required=True, allow_parallel_tool_calls=False)
    assert answer.response == weather(**answer.sources[0].raw_input["kwargs"])


def test_structured_predict(forms: Any) -> None:
    assert isinstance(forms.structured_predict(River, PromptTemplate(QUESTION)), River)


def test_structured_llm(forms: Any) -> None:
    answer = forms.as_structured_llm(River).chat([ChatMessage(role="user", content=QUESTION)])
    assert isinstance(answer.raw, River)


def test_function_agent(forms: Any, tool: Any) -> None:
    """The small model may answer without a call; the agent ends with an answer all the same."""

    async def run() -> Any:
        agent = FunctionAgent(tools=[tool], llm=forms, system_prompt="You are a helper.", timeout=TIMEOUT_S)
        return await agent.run(WEATHER_QUESTION)

    answer = asyncio.run(run())
    assert answer.response.role == "assistant"
    for call in answer.tool_calls:
        assert call.tool_name
