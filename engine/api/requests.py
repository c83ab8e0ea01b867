"""Bodies of `/v1/completions` and `/v1/chat/completions`.

A field is supported, or harmless and ignored, or refused by name: nothing that would change the answer is dropped
silently. Beside OpenAI's fields some of vLLM's are known, under vLLM's names.
"""

from typing import Annotated, Any, TypeVar

from pydantic import FailFast, Field, ValidationError

from engine.api.fields import Label, Message, Prompts, SamplingFields, build_spec
from engine.api.spec import GenerationSpec
from engine.api.validation import StrictModel, only, request_error
from engine.core.errors import RequestError

Unsupported = Annotated[Any, only()]
UnlessEmpty = Annotated[Any, only("", [], {})]
UnlessTrue = Annotated[Any, only(True)]
UnlessFalse = Annotated[Any, only(False)]
Ignored = Any


class StreamOptions(StrictModel):
    """What a stream carries beside the text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: UnlessFalse = None


class HttpFields(SamplingFields):
    """Fields of both routes."""

    model: Label
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Newer name of max_tokens."
    )
    n: Annotated[int, Field(ge=1, le=128)] | None = Field(default=None, description="Answers per prompt.")
    stream: bool | None = Field(
        default=None, description="Send the answer as server-sent events while it is generated."
    )
    stream_options: StreamOptions | None = None

    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Label | None = Field(default=None, description="OpenAI's routing hint; stands in for session_id.")
    prompt_cache_retention: Ignored = None

    response_format: Annotated[Any, only({"type": "text"})] = None
    structured_outputs: Unsupported = None
    guided_json: Unsupported = None
    guided_regex: Unsupported = None
    guided_choice: Unsupported = None
    guided_grammar: Unsupported = None
    truncate_prompt_tokens: Unsupported = None
    bad_words: UnlessEmpty = None
    use_beam_search: UnlessFalse = None
    early_stopping: UnlessFalse = None
    length_penalty: Annotated[Any, only(1)] = None
    skip_special_tokens: UnlessTrue = None
    spaces_between_special_tokens: UnlessTrue = None

    def token_limit(self) -> int | None:
        """`max_tokens` under either of its names."""
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise RequestError(
                f"'max_tokens' ({old}) and 'max_completion_tokens' ({new}) differ; give one of them.",
                param="max_completion_tokens",
            )
        return old if new is None else new

    def streams(self) -> bool:
        """Whether the answer is a stream, which as at vLLM has no place for `prompt_logprobs`."""
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("'prompt_logprobs' is only allowed when 'stream' is false.", param="prompt_logprobs")
        return bool(self.stream)

    def usage_in_stream(self) -> bool:
        """Whether the stream ends with the usage."""
        if self.stream_options is None:
            return False
        if not self.stream:
            raise RequestError("'stream_options' is only allowed when 'stream' is true.", param="stream_options")
        return bool(self.stream_options.include_usage)


class CompletionRequest(HttpFields):
    """Body of `/v1/completions`."""

    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        default=None, description="Report log-probabilities of the tokens and of this many likeliest ones."
    )
    echo: bool | None = Field(default=None, description="The text begins with the prompt, and so do the logprobs.")
    suffix: UnlessEmpty = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    add_special_tokens: UnlessTrue = None

    def spec(self) -> GenerationSpec:
        """The request in normal form."""
        n = self.n or 1
        if self.best_of not in (None, n):
            raise RequestError("'best_of' other than 'n' is not supported yet.", param="best_of")
        return build_spec(
            self,
            kind="completion",
            model=self.model,
            prompts=self.prompt,
            max_tokens=self.token_limit(),
            logprobs=self.logprobs,
            echo=bool(self.echo),
            n=n,
            stream=self.streams(),
            include_usage=self.usage_in_stream(),
            session_id=self.session_id or self.prompt_cache_key,
        )


class ChatCompletionRequest(HttpFields):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1), FailFast()]
    logprobs: bool | None = Field(default=None, description="Report log-probabilities of the tokens.")
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        default=None, description="Report this many likeliest tokens at each position."
    )

    tools: UnlessEmpty = None
    tool_choice: Annotated[Any, only("none", "auto")] = None
    parallel_tool_calls: Ignored = None
    functions: UnlessEmpty = None
    function_call: Annotated[Any, only("none", "auto")] = None
    modalities: Annotated[Any, only(["text"])] = None
    audio: Unsupported = None
    prediction: Unsupported = None
    reasoning_effort: Annotated[Any, only("none")] = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None
    chat_template: Unsupported = None
    chat_template_kwargs: UnlessEmpty = None
    documents: UnlessEmpty = None
    add_generation_prompt: UnlessTrue = None
    continue_final_message: UnlessFalse = None
    add_special_tokens: UnlessFalse = None

    def spec(self) -> GenerationSpec:
        """The request in normal form."""
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("'top_logprobs' is only allowed when 'logprobs' is true.", param="top_logprobs")
        return build_spec(
            self,
            kind="chat",
            model=self.model,
            messages=self.messages,
            max_tokens=self.token_limit(),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            n=self.n or 1,
            stream=self.streams(),
            include_usage=self.usage_in_stream(),
            session_id=self.session_id or self.prompt_cache_key,
        )


_Request = TypeVar("_Request", CompletionRequest, ChatCompletionRequest)


def parse_completion(body: bytes) -> GenerationSpec:
    """A body of `/v1/completions` in normal form. Raises RequestError naming the field at fault."""
    return _parse(CompletionRequest, body).spec()


def parse_chat(body: bytes) -> GenerationSpec:
    """A body of `/v1/chat/completions` in normal form. Raises RequestError naming the field at fault."""
    return _parse(ChatCompletionRequest, body).spec()


def _parse(model: type[_Request], body: bytes) -> _Request:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise request_error(error, model) from None
