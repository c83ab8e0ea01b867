"""OpenAI's response objects, as JSON bytes: whole answers, lists of models, errors.

All objects of one response share a `ResponseHead`; `raydix.engine.api.stream` renders the same response in pieces. As
vLLM's, each choice has a `stop_reason`, which is SGLang's `matched_stop`, and `token_ids`; `prompt_token_ids` and
`prompt_logprobs` are in each choice of a completion and at the top level of a chat. A whole answer has null in place of
what was not asked for.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, TypeAlias

import orjson

from raydix.engine.api.slices import Sliced, array_of, document, ids_of, whole
from raydix.engine.api.spec import GenerationSpec
from raydix.engine.core.errors import RaydixError
from raydix.engine.core.ingress.parsers.answer import AssembledMessage, Call
from raydix.engine.core.types import BlockHash, FinishReason

Json: TypeAlias = dict[str, object]

ID_PREFIXES = {
    "embedding": "embd-",
    "scoring": "generative-scoring-",
    "completion": "cmpl-",
    "chat": "chatcmpl-",
    "messages": "msg_",
    "responses": "resp_",
}
_FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.TOOL_CALLS: "tool_calls"}


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Fields of every object of one response. `created` is in seconds since 1970."""

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


def response_id(spec: GenerationSpec, request_id: str) -> str:
    """`request_id` with the prefix of its API."""
    # Embeddings and scores are made of completions' specs, so their kind does not tell them.
    if spec.embedding is not None:
        return ID_PREFIXES["embedding"] + request_id
    if spec.scoring is not None:
        return ID_PREFIXES["scoring"] + request_id
    return ID_PREFIXES[spec.kind if spec.api == "openai" else spec.api] + request_id


def name_in(response_id: str) -> str:
    """The request's name in an answer's id; the id itself where it is none."""
    return next((response_id.removeprefix(p) for p in ID_PREFIXES.values() if response_id.startswith(p)), response_id)


def system_fingerprint(root: BlockHash | None) -> str | None:
    """OpenAI's name of everything that an answer's bits depend on, from the root of the workers' block hashes: equal
    where model, dtype, quantisation, arithmetic and version are."""
    return None if root is None else f"fp_{root.hex()[:10]}"


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of a request. `cached_tokens` of the prompt were found in the cache, not computed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int | None = None
    """Tokens of reasoning in the completion; None where reasoning is not told from the text."""
    accepted_tokens: int = 0
    """Tokens of the completion that were in a draft."""
    rejected_tokens: int = 0
    """Draft tokens that did not become part of the completion."""

    @property
    def of_prompt(self) -> "TokenUsage":
        """The usage before the completion's first token."""
        return TokenUsage(
            self.prompt_tokens, 0, self.cached_tokens, reasoning_tokens=None if self.reasoning_tokens is None else 0
        )

    def object(self) -> Json:
        """OpenAI's usage object."""
        of_completion: Json = {"reasoning_tokens": self.reasoning_tokens or 0}
        # Left out where there was no draft: OpenAI's clients show these fields to people who asked for a prediction.
        if self.accepted_tokens or self.rejected_tokens:
            of_completion["accepted_prediction_tokens"] = self.accepted_tokens
            of_completion["rejected_prediction_tokens"] = self.rejected_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": of_completion,
        }


def total_reasoning(counts: Sequence[int | None]) -> int | None:
    """The sum of counts of reasoning tokens; None where there are none of these."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def total_usage(usages: Sequence[TokenUsage]) -> TokenUsage:
    """The usage of several prompts together. The `n` choices of one prompt are one usage: it is counted once."""
    if len(usages) == 1:
        return usages[0]
    return TokenUsage(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
        total_reasoning([usage.reasoning_tokens for usage in usages]),
        accepted_tokens=sum(usage.accepted_tokens for usage in usages),
        rejected_tokens=sum(usage.rejected_tokens for usage in usages),
    )


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished answer. `logprobs` is an object of `raydix.engine.api.logprobs`; ids are given where asked for."""

    index: int
    text: str
    finish_reason: FinishReason
    logprobs: Json | None = None
    token_ids: Sequence[int] | None = None
    prompt_token_ids: Sequence[int] | None = None
    prompt_logprobs: Sequence[Json | Sliced | None] | Sliced | None = None
    stop_reason: str | int | None = None
    """Stop string, or requested stop token, at the end of the answer."""
    message_id: str | None = None
    """Reference by which a later chat can go on from the answer's token ids, if the request asked for one."""
    message: AssembledMessage | None = None
    """Parts of the text, where it is parsed."""


def wire_finish_reason(reason: FinishReason) -> str:
    """OpenAI's word for `reason`. An abort or error has none (ValueError): send an error instead."""
    word = _FINISH_REASONS.get(reason)
    if word is None:
        raise ValueError(f"a response cannot finish with {reason}")
    return word


def response_body(head: ResponseHead, choices: Sequence[Choice], usage: TokenUsage) -> bytes:
    """A whole response: `chat.completion` or `text_completion`. A chat has one prompt: its ids come from choice 0."""
    render = _chat_choice if head.kind == "chat" else _completion_choice
    return whole(_response(head, [render(choice) for choice in choices], choices[0], usage))


def response_slices(
    head: ResponseHead, num_choices: int, choice_of: Callable[[int], Choice], usage: TokenUsage
) -> Iterator[bytes]:
    """Yield the response of `response_body` in slices. `choice_of` makes a choice, and is called when its turn
    comes."""
    render = _chat_choice if head.kind == "chat" else _completion_choice
    choices = array_of(lambda: map(render, map(choice_of, range(num_choices))))
    return document(_response(head, choices, choice_of(0), usage))


def _response(head: ResponseHead, choices: list[Json] | Sliced, first: Choice, usage: TokenUsage) -> Json:
    body = head.object()
    body["choices"] = choices
    body["usage"] = usage.object()
    if head.kind == "chat":
        body |= _of_prompt(first)
    return body


def _chat_choice(choice: Choice) -> Json:
    message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.message is not None:
        message |= message_parts(choice.message, call_object)
    if choice.message_id is not None:
        message["id"] = choice.message_id
    return {"index": choice.index, "message": message, **_of_answer(choice)}


def message_parts(message: AssembledMessage, object_of: Callable[[Call], Json]) -> Json:
    """The parts of a parsed answer as a message has them, the calls as `object_of` makes them."""
    reasoning: Json = {}
    if message.reasoning:
        # Clients of vLLM read one name, those of others the other.
        reasoning = {"reasoning": message.reasoning, "reasoning_content": message.reasoning}
    calls = [object_of(call) for call in message.calls]
    if not calls:
        return {"content": message.content, **reasoning}
    # Null beside calls and "" without: clients tell an answer that only calls by that.
    return {"content": message.content or None, "tool_calls": calls, **reasoning}


def call_object(call: Call) -> Json:
    """Make an element of a message's `tool_calls`."""
    if call.input is None:
        return function_call(call)
    return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": "".join(call.input)}}


def function_call(call: Call) -> Json:
    """A call, of a custom tool too, as chat templates know it."""
    function = {"name": call.name, "arguments": "".join(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _completion_choice(choice: Choice) -> Json:
    return {"index": choice.index, "text": choice.text, **_of_answer(choice), **_of_prompt(choice)}


def _of_answer(choice: Choice) -> Json:
    """Data of the answer's tokens and end."""
    return {
        "logprobs": choice.logprobs,
        "finish_reason": wire_finish_reason(choice.finish_reason),
        "stop_reason": choice.stop_reason,
        "matched_stop": choice.stop_reason,
        "token_ids": None if choice.token_ids is None else ids_of(choice.token_ids),
    }


def _of_prompt(choice: Choice) -> Json:
    """Data of the prompt's tokens."""
    return {
        "prompt_token_ids": None if choice.prompt_token_ids is None else ids_of(choice.prompt_token_ids),
        "prompt_logprobs": choice.prompt_logprobs,
    }


def model_object(model: str, *, created: int, max_model_len: int, adapter: str | None = None) -> Json:
    """Describe a model as `/v1/models/{model}` does, or an adapter of the model; `root`, `parent` and `max_model_len`
    (tokens) are vLLM's additions. From `type` on the fields are Anthropic's."""
    name = model if adapter is None else adapter
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "raydix",
        "root": name,
        "parent": None if adapter is None else model,
        "max_model_len": max_model_len,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": max_model_len,
    }


def model_body(model: Mapping[str, object]) -> bytes:
    return orjson.dumps(dict(model))


def models_body(models: Sequence[Mapping[str, object]]) -> bytes:
    """Body of `/v1/models`."""
    names = [model["id"] for model in models]
    page = {"first_id": names[0], "last_id": names[-1], "has_more": False}
    return orjson.dumps({"object": "list", "data": [dict(model) for model in models], **page})


def version_body(version: str) -> bytes:
    """Body of `/version`."""
    return orjson.dumps({"version": version})


def error_body(error: RaydixError) -> bytes:
    """OpenAI's error object; its status is `error.status`."""
    return orjson.dumps(
        {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}
    )
