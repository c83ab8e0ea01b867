"""Routes with a prompt in their bodies, and how each body is read."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from pydantic import Field, RootModel

from raydix.engine.api.anthropic.requests import parse_count, parse_messages
from raydix.engine.api.embeddings import EmbeddingsRequest, parse_embeddings
from raydix.engine.api.openai_responses.requests import parse_compact, parse_input_tokens, parse_responses
from raydix.engine.api.requests import ChatCompletionRequest, CompletionRequest, parse_chat, parse_completion
from raydix.engine.api.scoring import parse_generative_scoring, parse_score
from raydix.engine.api.spec import GenerationSpec
from raydix.engine.api.validation import NO_RULES, BodyRules, LenientModel, parse_body
from raydix.engine.core.errors import RequestError

Route: TypeAlias = Literal[
    "completion",
    "chat",
    "messages",
    "count_tokens",
    "responses",
    "input_tokens",
    "compact",
    "embeddings",
    "generative_scoring",
    "score",
    "invocation",
]


class Invocation(RootModel[ChatCompletionRequest | CompletionRequest | EmbeddingsRequest]):
    """Body of `/invocations`: that of a chat, which has `messages`, of a completion, which has `prompt`, or of
    embeddings, which has `input`."""


class _Shape(LenientModel):
    """The fields by which bodies are told apart."""

    messages: Any = Field(default=None)
    prompt: Any = Field(default=None)
    input: Any = Field(default=None)


def parse_invocation(body: bytes, rules: BodyRules = NO_RULES) -> GenerationSpec:
    """A body of a chat, a completion or embeddings in normal form. Raises RequestError naming the field at fault."""
    shape = parse_body(_Shape, body)
    if shape.messages is not None:
        return parse_chat(body, rules)
    if shape.prompt is not None:
        return parse_completion(body, rules)
    if shape.input is not None:
        return parse_embeddings(body, rules)
    raise RequestError(
        "The request body must have 'messages' (a chat), 'prompt' (a completion) or 'input' (embeddings)."
    )


_PARSERS: Mapping[Route, Callable[[bytes, BodyRules], GenerationSpec]] = {
    "completion": parse_completion,
    "chat": parse_chat,
    "messages": parse_messages,
    "count_tokens": parse_count,
    "responses": parse_responses,
    "input_tokens": parse_input_tokens,
    "compact": parse_compact,
    "embeddings": parse_embeddings,
    "generative_scoring": parse_generative_scoring,
    "score": parse_score,
    "invocation": parse_invocation,
}


def parse(route: Route, body: bytes, rules: BodyRules = NO_RULES) -> GenerationSpec:
    """The request in a body. Raises RequestError naming the field at fault."""
    return _PARSERS[route](body, rules)
