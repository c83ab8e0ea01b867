"""OpenAI's response objects, as JSON bytes: answers that come in one piece, lists of models, errors.

`ResponseHead` is what all objects of one response share; `engine.api.stream` renders the same response in pieces.
vLLM's `return_token_ids` adds `token_ids` to each choice, and `prompt_token_ids` to each choice of a completion and to
the top level of a chat; `prompt_logprobs` goes to the same places.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import orjson

from engine.core.errors import RaydixError
from engine.core.types import FinishReason

Json: TypeAlias = dict[str, object]

_FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What every object of one response says. `created` is in seconds since 1970."""

    kind: Literal["completion", "chat"]
    id: str
    created: int
    model: str
    system_fingerprint: str | None = None

    def object(self, *, stream: bool = False) -> Json:
        """The response object without choices and usage."""
        name = "text_completion"
        if self.kind == "chat":
            name = "chat.completion.chunk" if stream else "chat.completion"
        return {
            "id": self.id,
            "object": name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


def response_id(kind: Literal["completion", "chat"], request_id: str) -> str:
    """`request_id` with OpenAI's prefix."""
    return f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{request_id}"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request. `cached_tokens` of the prompt were found in the cache, not computed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    def object(self) -> Json:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def total_usage(usages: Sequence[Usage]) -> Usage:
    """The usage of several prompts together. The `n` choices of one prompt are one usage: it is counted once."""
    return Usage(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
    )


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished answer. `logprobs` is an object of `engine.api.logprobs`; ids are given where asked for."""

    index: int
    text: str
    finish_reason: FinishReason
    logprobs: Json | None = None
    token_ids: Sequence[int] | None = None
    prompt_token_ids: Sequence[int] | None = None
    prompt_logprobs: Sequence[Json | None] | None = None


def wire_finish_reason(reason: FinishReason) -> str:
    """OpenAI's word for `reason`. An abort or error has none (ValueError): send an error instead."""
    word = _FINISH_REASONS.get(reason)
    if word is None:
        raise ValueError(f"a response cannot finish with {reason}")
    return word


def response_body(head: ResponseHead, choices: Sequence[Choice], usage: Usage) -> bytes:
    """A whole response: `chat.completion` or `text_completion`. A chat has one prompt: its ids come from choice 0."""
    body = head.object()
    render = _chat_choice if head.kind == "chat" else _completion_choice
    body["choices"] = [render(choice) for choice in choices]
    body["usage"] = usage.object()
    if head.kind == "chat" and choices[0].prompt_token_ids is not None:
        body["prompt_token_ids"] = list(choices[0].prompt_token_ids)
    if head.kind == "chat" and choices[0].prompt_logprobs is not None:
        body["prompt_logprobs"] = list(choices[0].prompt_logprobs)
    return orjson.dumps(body)


def _chat_choice(choice: Choice) -> Json:
    result: Json = {
        "index": choice.index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": choice.logprobs,
        "finish_reason": wire_finish_reason(choice.finish_reason),
    }
    if choice.token_ids is not None:
        result["token_ids"] = list(choice.token_ids)
    return result


def _completion_choice(choice: Choice) -> Json:
    result: Json = {
        "index": choice.index,
        "text": choice.text,
        "logprobs": choice.logprobs,
        "finish_reason": wire_finish_reason(choice.finish_reason),
    }
    if choice.token_ids is not None:
        result["token_ids"] = list(choice.token_ids)
    if choice.prompt_token_ids is not None:
        result["prompt_token_ids"] = list(choice.prompt_token_ids)
    if choice.prompt_logprobs is not None:
        result["prompt_logprobs"] = list(choice.prompt_logprobs)
    return result


def model_object(model: str, *, created: int, max_model_len: int) -> Json:
    """One model, as `/v1/models/{model}` describes it; `max_model_len` (tokens) is vLLM's addition."""
    return {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "raydix",
        "max_model_len": max_model_len,
    }


def model_body(model: Mapping[str, object]) -> bytes:
    """Body of `/v1/models/{model}`."""
    return orjson.dumps(dict(model))


def models_body(models: Sequence[Mapping[str, object]]) -> bytes:
    """Body of `/v1/models`."""
    return orjson.dumps({"object": "list", "data": [dict(model) for model in models]})


def version_body(version: str) -> bytes:
    """Body of `/version`."""
    return orjson.dumps({"version": version})


def error_body(error: RaydixError) -> bytes:
    """OpenAI's error object; its status is `error.status`."""
    return orjson.dumps(
        {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}
    )
