"""Requests to OpenAI's client and its answers, typed: optional parts that must be there, and fields OpenAI lacks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionMessageParam,
    ChatCompletionTokenLogprob,
    chat_completion,
    chat_completion_chunk,
)
from pydantic import BaseModel


class CompletionFields(TypedDict):
    """Fields that several completions of one test share."""

    model: str
    prompt: str | list[str]
    max_tokens: int
    temperature: NotRequired[float]
    seed: NotRequired[int]


class Limit(TypedDict, total=False):
    """Either name of the limit of a chat's tokens."""

    max_tokens: int
    max_completion_tokens: int


class ChatFields(Limit):
    """Fields that several chats of one test share."""

    model: str
    messages: list[ChatCompletionMessageParam]
    temperature: NotRequired[float]


class PromptLogprob(TypedDict):
    """One token in vLLM's `prompt_logprobs`."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True)
class Scores:
    """The logprobs of a completion; the first token of a prompt has none."""

    tokens: list[str]
    token_logprobs: Sequence[float | None]
    top_logprobs: Sequence[dict[str, float] | None]
    text_offset: list[int]


def usage_of(answer: Completion | ChatCompletion) -> CompletionUsage:
    assert answer.usage is not None
    return answer.usage


def num_cached(usage: CompletionUsage) -> int | None:
    """The number of prompt tokens that were found in the cache."""
    assert usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens


def content_of(answer: ChatCompletion) -> str:
    """The text of a chat's first choice."""
    content = answer.choices[0].message.content
    assert content is not None
    return content


def scores_of(choice: CompletionChoice) -> Scores:
    """The logprobs of a completion's choice, or of a piece of one."""
    found = choice.logprobs
    assert found is not None
    assert found.tokens is not None and found.text_offset is not None
    assert found.token_logprobs is not None and found.top_logprobs is not None
    return Scores(found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset)


def entries_of(
    logprobs: chat_completion.ChoiceLogprobs | chat_completion_chunk.ChoiceLogprobs | None,
) -> list[ChatCompletionTokenLogprob]:
    """The logprobs of a chat's choice, or of a piece of one."""
    assert logprobs is not None and logprobs.content is not None
    return logprobs.content


def token_ids(answer: BaseModel) -> list[int]:
    """`token_ids` of a choice."""
    assert answer.model_extra is not None
    ids: list[int] | None = answer.model_extra["token_ids"]
    assert ids is not None
    return ids


def streamed_token_ids(choices: Iterable[BaseModel]) -> list[int]:
    """`token_ids` of a stream's choices, one after the other; a choice may have none."""
    return [token for choice in choices if (choice.model_extra or {}).get("token_ids") for token in token_ids(choice)]


def prompt_token_ids(answer: BaseModel) -> list[int]:
    """`prompt_token_ids` of a completion's choice, of a chat, or of the first piece of either."""
    assert answer.model_extra is not None
    ids: list[int] | None = answer.model_extra["prompt_token_ids"]
    assert ids is not None
    return ids


def prompt_logprobs(answer: BaseModel) -> list[dict[str, PromptLogprob] | None]:
    """`prompt_logprobs` of a completion's choice or of a chat."""
    assert answer.model_extra is not None
    logprobs: list[dict[str, PromptLogprob] | None] | None = answer.model_extra["prompt_logprobs"]
    assert logprobs is not None
    return logprobs
