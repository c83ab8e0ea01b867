"""Routes with a prompt in their bodies, and how each body is read."""

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

from engine.api.anthropic.requests import parse_count, parse_messages
from engine.api.embeddings import parse_embeddings
from engine.api.openai_responses.requests import parse_responses
from engine.api.requests import parse_chat, parse_completion
from engine.api.spec import GenerationSpec

Route: TypeAlias = Literal["completion", "chat", "messages", "count_tokens", "responses", "embeddings"]

_PARSERS: Mapping[Route, Callable[[bytes], GenerationSpec]] = {
    "completion": parse_completion,
    "chat": parse_chat,
    "messages": parse_messages,
    "count_tokens": parse_count,
    "responses": parse_responses,
    "embeddings": parse_embeddings,
}


def parse(route: Route, body: bytes) -> GenerationSpec:
    """The request in a body. Raises RequestError naming the field at fault."""
    return _PARSERS[route](body)
