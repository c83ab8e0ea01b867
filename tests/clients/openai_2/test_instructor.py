"""Instructor: pydantic models by functions, by JSON and by a JSON schema."""

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import instructor
import pytest
from openai import OpenAI
from pydantic import BaseModel, ConfigDict

from tests.clients.cases import MAX_FORM_TOKENS, QUESTION, TIMEOUT_S, River
from tests.clients.server import MODEL, Server

VERSION = version("instructor")
SCHEMA_MODES = [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA]


class AnyObject(BaseModel):
    """Any object: in the mode `JSON` nothing but the prompt tells the model the fields."""

    model_config = ConfigDict(extra="allow")


@pytest.fixture
def openai_client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.openai_url, api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
        yield client


def ask(client: OpenAI, mode: Any, form: type[BaseModel], method: str = "create") -> Any:
    completions: Any = instructor.from_openai(client, mode=mode).chat.completions
    return getattr(completions, method)(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        response_model=form,
        max_retries=1,
        temperature=0,
        max_tokens=MAX_FORM_TOKENS,
    )


@pytest.mark.parametrize("mode", SCHEMA_MODES, ids=lambda mode: mode.name)
def test_create(openai_client: OpenAI, mode: Any) -> None:
    assert isinstance(ask(openai_client, mode, River), River)


@pytest.mark.parametrize("mode", SCHEMA_MODES, ids=lambda mode: mode.name)
def test_create_with_completion(openai_client: OpenAI, mode: Any) -> None:
    river, completion = ask(openai_client, mode, River, "create_with_completion")
    assert isinstance(river, River) and completion.usage.completion_tokens > 0


@pytest.mark.parametrize("mode", SCHEMA_MODES, ids=lambda mode: mode.name)
def test_create_partial(openai_client: OpenAI, mode: Any) -> None:
    *_, last = ask(openai_client, mode, River, "create_partial")
    River.model_validate(last.model_dump())


def test_json(openai_client: OpenAI) -> None:
    """The object is closed by the grammar; the words in it are the model's."""
    assert isinstance(ask(openai_client, instructor.Mode.JSON, AnyObject), AnyObject)


def test_from_provider(server: Server) -> None:
    client: Any = instructor.from_provider(f"openai/{MODEL}", base_url=server.openai_url, api_key="none")
    river = client.create(
        messages=[{"role": "user", "content": QUESTION}],
        response_model=River,
        max_retries=1,
        temperature=0,
        max_tokens=MAX_FORM_TOKENS,
        timeout=TIMEOUT_S,
    )
    assert isinstance(river, River)
