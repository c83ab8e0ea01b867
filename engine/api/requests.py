"""Bodies of `/v1/completions` and `/v1/chat/completions`.

A field is supported, or harmless and ignored, or refused by name: nothing that would change the answer is dropped
silently. Beside OpenAI's fields some of vLLM's are supported, under vLLM's names; `raydix.engine.api.known` has the
others.
"""

from dataclasses import replace
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, FailFast, Field

from raydix.engine.api.fields import ChatPromptFields, RequestId, SamplingFields
from raydix.engine.api.known import (
    KnownChatFields,
    KnownCompletionFields,
    KnownFields,
    UnlessEmpty,
    UnlessFalse,
    Unsupported,
)
from raydix.engine.api.normal_form import normal_form
from raydix.engine.api.prompts import GivenPrompt, Label, Message, Prompts, few_messages, unicode_text
from raydix.engine.api.reasoning import ReasoningFields
from raydix.engine.api.spec import FormSpec, GenerationSpec, RetentionSpec, ServiceSpec
from raydix.engine.api.tools import ToolFields
from raydix.engine.api.validation import INTEGRAL, NO_RULES, BodyRules, StrictModel, only, parse_body
from raydix.engine.core.errors import RequestError


class StreamOptions(StrictModel):
    """Contents of a stream beside the text."""

    include_usage: bool | None = Field(default=None, description="The stream ends with the usage.")
    include_obfuscation: bool | None = Field(default=None, description="Without effect: nothing is padded.")
    continuous_usage_stats: bool | None = Field(default=None, description="Each chunk has the usage so far.")


class HttpFields(SamplingFields, KnownFields):
    """Fields of both routes."""

    model: Label | None = Field(default=None, description="Name of the served model; may be left out.")
    max_completion_tokens: Annotated[int, Field(ge=1), INTEGRAL] | None = Field(
        default=None, description="Newer name of max_tokens."
    )
    n: Annotated[int, Field(ge=1, le=128), INTEGRAL] | None = Field(default=None, description="Answers per prompt.")
    stream: bool | None = Field(
        default=None, description="Send the answer as server-sent events while it is generated."
    )
    stream_options: StreamOptions | None = Field(
        default=None,
        description="With `include_usage` a stream ends with a chunk that has the usage; with `continuous_usage_stats` "
        "beside it each chunk has the usage of its choice so far.",
    )

    request_id: RequestId | None = Field(
        default=None, description="Name of the request, in `id` and logs; it goes before the header `x-request-id`."
    )
    return_tokens_as_token_ids: bool | None = Field(
        default=None, description="Log-probabilities name tokens as `token_id:<id>`."
    )
    prompt_cache_key: Label | None = Field(default=None, description="OpenAI's routing hint; stands in for session_id.")

    def token_limit(self) -> int | None:
        """Value of `max_tokens` under either of its names."""
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise RequestError(
                f"'max_tokens' ({old}) and 'max_completion_tokens' ({new}) differ; give one of them.",
                param="max_completion_tokens",
            )
        return old if new is None else new

    def form(self, asked: FormSpec) -> FormSpec:
        """Complete the part `form` of a request. Raises RequestError for fields that contradict `stream`."""
        # As at vLLM, a stream has no place for the prompt's log-probabilities.
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("'prompt_logprobs' is only allowed when 'stream' is false.", param="prompt_logprobs")
        if self.stream_options is not None and not self.stream:
            raise RequestError("'stream_options' is only allowed when 'stream' is true.", param="stream_options")

        options = self.stream_options or StreamOptions()
        return replace(
            super().form(asked),
            stream=bool(self.stream),
            include_usage=bool(options.include_usage),
            # As at vLLM, usage in each chunk needs `include_usage`, too.
            continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
            tokens_as_ids=bool(self.return_tokens_as_token_ids),
        )

    def service(self, asked: ServiceSpec) -> ServiceSpec:
        """Complete the part `service` of a request."""
        return super().service(replace(asked, session_id=self.prompt_cache_key, request_id=self.request_id))


class CompletionRequest(HttpFields, KnownCompletionFields):
    """Body of `/v1/completions`."""

    prompt: Prompts = Field(description="A text, token ids, or a list of either: the whole prompt.")
    logprobs: Annotated[int, Field(ge=-1, le=20), INTEGRAL] | None = Field(
        default=None, description="Report log-probabilities of the tokens and of this many likeliest ones; -1: of all."
    )
    echo: bool | None = Field(default=None, description="The text begins with the prompt, and so do the logprobs.")
    suffix: Annotated[str, AfterValidator(unicode_text)] | None = Field(
        default=None,
        description="Text behind the answer, for models whose tokenizer has tokens for filling in; not with `echo`.",
    )
    add_special_tokens: bool | None = Field(
        default=None, description="A text begins with the special tokens that the model wants before it; true."
    )
    best_of: Annotated[int, Field(ge=1, le=128), INTEGRAL] | None = Field(
        default=None,
        description="Generate so many answers per prompt and return the `n` with the highest mean log-probability of "
        "their tokens, best first; not in a stream. All of them count as completion tokens.",
    )

    def spec(self) -> GenerationSpec:
        """The request in normal form."""
        asked = GenerationSpec(
            kind="completion",
            model=self.model,
            prompts=self.prompt,
            max_tokens=self.token_limit(),
            suffix=self._suffix(),
            add_special_tokens=self.add_special_tokens is not False,
            n=self.n or 1,
            best_of=self.best_of,
            form=FormSpec(echo=bool(self.echo)),
        )
        return normal_form(self, asked, logprobs=self.logprobs)

    def _suffix(self) -> str | None:
        """Text behind the answer, which needs texts before the answer. Raises RequestError."""
        if not self.suffix:
            return None
        if self.echo or not all(isinstance(prompt, str) for prompt in self.prompt):
            raise RequestError("'suffix' is only allowed with a text as 'prompt', without 'echo'.", param="suffix")
        return self.suffix


class TransferParameters(StrictModel):
    """vLLM's parameters of a transfer of KV between servers. raydix moves KV between its own workers, so only the ids
    of the prompt have a meaning."""

    prompt_token_ids: GivenPrompt | None = Field(default=None, description="As `input_ids`.")

    do_remote_prefill: UnlessFalse = None
    do_remote_decode: UnlessFalse = None
    remote_engine_id: Unsupported = None
    remote_request_id: Unsupported = None
    remote_block_ids: UnlessEmpty = None
    remote_host: Unsupported = None
    remote_port: Unsupported = None
    tp_size: Annotated[Any, only(1)] = None


class ChatCompletionRequest(HttpFields, ChatPromptFields, ToolFields, ReasoningFields, KnownChatFields):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1), FailFast(), BeforeValidator(few_messages)] = Field(
        description="The chat so far, rendered with the model's template."
    )
    logprobs: bool | None = Field(default=None, description="Report log-probabilities of the tokens.")
    top_logprobs: Annotated[int, Field(ge=-1, le=20), INTEGRAL] | None = Field(
        default=None, description="Report this many likeliest tokens at each position; -1: all."
    )

    kv_transfer_params: TransferParameters | None = Field(
        default=None, description="As at vLLM; `prompt_token_ids` is another name of `input_ids`."
    )

    def spec(self) -> GenerationSpec:
        """The request in normal form."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError("'top_logprobs' is only allowed when 'logprobs' is true.", param="top_logprobs")

        forwarded = None if self.kv_transfer_params is None else self.kv_transfer_params.prompt_token_ids
        asked = GenerationSpec(
            kind="chat",
            model=self.model,
            given_prompt=self.given_ids(self.messages, forwarded),
            tools=self.tool_use(),
            reasoning=self.reasoning_use(),
            max_tokens=self.token_limit(),
            n=self.n or 1,
            chat_end=self.end_of(self.messages),
            template=self.template(),
            prediction=None if self.prediction is None else self.prediction.content,
            text_if_missing=self.continue_from_missing == "text",
            form=FormSpec(echo=bool(self.echo)),
            retention=RetentionSpec(store=bool(self.store)),
        )
        # A chat asks twice: whether, and for how many. 0 is the token's own log-probability alone.
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return normal_form(self, asked, messages=self.messages, logprobs=logprobs)


def parse_completion(body: bytes, rules: BodyRules = NO_RULES) -> GenerationSpec:
    """A body of `/v1/completions` in normal form. Raises RequestError naming the field at fault."""
    return parse_body(CompletionRequest, body, takes_unknown=rules.takes_unknown).spec()


def parse_chat(body: bytes, rules: BodyRules = NO_RULES) -> GenerationSpec:
    """A body of `/v1/chat/completions` in normal form. Raises RequestError naming the field at fault."""
    return parse_body(ChatCompletionRequest, body, takes_unknown=rules.takes_unknown).spec()
