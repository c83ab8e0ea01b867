"""Shapes of the Messages API's responses, for `/openapi.json` (as `raydix.engine.api.response_models`)."""

from typing import Any, Literal

from pydantic import Field

from raydix.engine.api.response_models import Shape


class ContentBlock(Shape):
    """Part of an answer."""

    type: Literal["text", "thinking", "tool_use", "compaction"] = Field(
        description="A text, reasoning, the call of a function, or a summary in place of the chat before it."
    )
    content: str | None = Field(
        default=None, description="Of a summary: the message with which the chat begins anew; null if there is none."
    )
    thinking: str | None = Field(default=None, description="Of reasoning: its text.")
    signature: str | None = Field(default=None, description="Of reasoning: always empty.")
    text: str | None = Field(default=None, description="Of a text.")
    id: str | None = Field(default=None, description="Of a call: its name, for the result.")
    name: str | None = Field(default=None, description="Of a call: the function.")
    input: dict[str, Any] | None = Field(default=None, description="Of a call: the arguments.")


class CacheCreation(Shape):
    """Tokens written to the cache before marks, by their time to live."""

    ephemeral_5m_input_tokens: int = Field(description="Before a mark of 5 minutes only.")
    ephemeral_1h_input_tokens: int = Field(description="Before a mark of an hour.")


class IterationTokens(Shape):
    """Tokens of one generation; the first three add up to its prompt."""

    input_tokens: int = Field(description="Neither found in the cache nor before a mark.")
    cache_creation_input_tokens: int = Field(description="Before the last mark, and not found in the cache.")
    cache_read_input_tokens: int = Field(description="Found in the cache.")
    cache_creation: CacheCreation = Field(description="Tokens before marks by their time to live.")
    output_tokens: int = Field(description="Of what was generated.")


class Iteration(IterationTokens):
    """One generation of a request."""

    type: Literal["compaction", "message"] = Field(description="A summary, or the answer behind it.")


class MessageUsage(IterationTokens):
    """Tokens of a request, without those of a summary."""

    iterations: list[Iteration] | None = Field(
        default=None, description="Where a summary was made: the generations in their order."
    )


class AppliedEdit(Shape):
    """An edit of the chat that left something out."""

    type: str = Field(description="Type of the edit.")
    cleared_input_tokens: int = Field(description="Tokens that the prompt is shorter.")
    cleared_tool_uses: int | None = Field(default=None, description="Calls whose results were left out.")
    cleared_thinking_turns: int | None = Field(default=None, description="Turns whose reasoning was left out.")


class AppliedEdits(Shape):
    """The edits of a chat."""

    applied_edits: list[AppliedEdit] = Field(description="Edits that left something out.")


class OriginalLength(Shape):
    """A prompt's length before its edits."""

    original_input_tokens: int = Field(description="Tokens of the prompt as the client sent it.")


class CacheMissReason(Shape):
    """Why a prompt was not hit up to the end of an earlier one: Anthropic's type, and raydix's reason."""

    type: str = Field(
        description="`system_changed`, `tools_changed`, `messages_changed`, `previous_message_not_found` or "
        "`unavailable`."
    )
    cache_missed_input_tokens: int | None = Field(
        default=None, description="Tokens that would have been found behind the place."
    )
    reason: str | None = Field(default=None, description="As `prefix.reason` of `/v1/requests/{id}/explain`.")
    token_index: int | None = Field(default=None, description="Of the first other token.")
    part: str | None = Field(default=None, description="The first other part: `system`, `tools[2]`, `messages[5]`.")
    text_before: str | None = Field(default=None, description="Text of both prompts before the place.")
    previous_text: str | None = Field(default=None, description="How the earlier prompt goes on.")
    text: str | None = Field(default=None, description="How this prompt goes on.")


class CacheDiagnostics(Shape):
    """The prompt beside an earlier one."""

    cache_miss_reason: CacheMissReason = Field(description="The reason.")


class MessageResponse(Shape):
    """A whole answer in Anthropic's form."""

    id: str = Field(description="Names the request in logs and for `/v1/requests/{id}/explain`.")
    type: Literal["message"] = Field(description="Kind of the object.")
    role: Literal["assistant"] = Field(description="Always the assistant.")
    model: str = Field(description="Name of the model.")
    content: list[ContentBlock] = Field(description="The answer, a block for each text and call.")
    stop_reason: str | None = Field(
        description="`end_turn`, `max_tokens`, `stop_sequence`, `tool_use`, `compaction` or "
        "`model_context_window_exceeded`."
    )
    stop_sequence: str | None = Field(description="The stop sequence at the end.")
    usage: MessageUsage = Field(description="Tokens of the request.")
    context_management: AppliedEdits | None = Field(
        default=None, description="Where the request has this field: the edits of the chat."
    )
    diagnostics: CacheDiagnostics | None = Field(
        default=None, description="Where the request names an earlier message: why its prompt was not hit, if so."
    )


class MessageErrorDetail(Shape):
    """The reason of a refusal or a failure."""

    type: str = Field(description="Anthropic's kind of error.")
    message: str = Field(description="One sentence.")
    details: dict[str, str | list[str]] | None = Field(
        default=None,
        description="For programs: `error_code`, and the `unsupported` parts of a request with a `thread`.",
    )


class MessageError(Shape):
    """An error in Anthropic's form."""

    type: Literal["error"] = Field(description="Kind of the object.")
    error: MessageErrorDetail = Field(description="The error.")


class MessageEvent(Shape):
    """An event of a streamed answer in Anthropic's form; its name is its type."""

    type: str = Field(description="Kind of the event.")
    message: MessageResponse | None = Field(default=None, description="Of `message_start`: without content.")
    index: int | None = Field(default=None, description="Number of the block.")
    content_block: ContentBlock | None = Field(default=None, description="Of `content_block_start`: the empty block.")
    delta: dict[str, Any] | None = Field(default=None, description="More of the block, or the reason of the end.")
    usage: MessageUsage | None = Field(default=None, description="Of `message_delta`.")
    context_management: AppliedEdits | None = Field(default=None, description="Of `message_delta`: the edits.")
    error: MessageErrorDetail | None = Field(default=None, description="Of `error`, which ends a stream that fails.")


class TokenCount(Shape):
    """Length of a chat's prompt."""

    input_tokens: int = Field(description="Tokens of the prompt.")
    context_management: OriginalLength | None = Field(
        default=None, description="Where the request has this field: the prompt's length before the edits."
    )
