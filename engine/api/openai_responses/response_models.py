"""Shapes of the Responses API's responses, for `/openapi.json` (as `raydix.engine.api.response_models`)."""

from typing import Any, Literal

from pydantic import ConfigDict, Field

from raydix.engine.api.response_models import Shape


class ResponseUsage(Shape):
    """Tokens of a request."""

    input_tokens: int = Field(description="Of the prompt.")
    input_tokens_details: dict[str, int] = Field(
        description="`cached_tokens`: found in the cache; `cache_write_tokens`: the others, computed."
    )
    output_tokens: int = Field(description="Of the answer.")
    output_tokens_details: dict[str, int] = Field(description="`reasoning_tokens`: of reasoning.")
    total_tokens: int = Field(description="Sum of both.")


class RawMessage(Shape):
    """A prompt or an answer as it is, as at vLLM."""

    type: Literal["raw_message_tokens"] = Field(description="Kind of the message.")
    message: str = Field(description="The text, with special tokens by their names.")
    tokens: list[int] = Field(description="Its token ids.")


class ResponseObject(Shape):
    """A response."""

    id: str = Field(description="By which the response is found again, and gone on from.")
    object: Literal["response"] = Field(description="Kind of the object.")
    created_at: int = Field(description="Seconds since 1970.")
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"] = Field(
        description="`incomplete` at a limit; only one in the background is `queued`, `failed` or `cancelled`."
    )
    error: dict[str, str] | None = Field(description="Code and message of the error by which a response failed.")
    incomplete_details: dict[str, str] | None = Field(description="The reason why the response is incomplete.")
    model: str = Field(description="Name of the model.")
    output: list[dict[str, Any]] = Field(description="Items: reasoning, messages, and calls of functions.")
    background: bool = Field(description="As in the request.")
    conversation: dict[str, str] | None = Field(description="Id of the conversation that input and answer are in.")
    reasoning: dict[str, str | None] = Field(description="The effort as in the request; there is no summary.")
    service_tier: Literal["default"] = Field(description="Always the default.")
    truncation: Literal["disabled"] = Field(description="Always disabled.")
    usage: ResponseUsage | None = Field(description="Tokens of the request.")
    instructions: str | None = Field(description="As in the request.")
    max_output_tokens: int | None = Field(description="As in the request.")
    metadata: dict[str, str] = Field(description="As in the request.")
    parallel_tool_calls: bool = Field(description="As in the request.")
    previous_response_id: str | None = Field(description="As in the request.")
    prompt_cache_key: str | None = Field(description="As in the request.")
    text: dict[str, Any] = Field(description="Form of the text.")
    tool_choice: str | dict[str, Any] = Field(description="As in the request.")
    tools: list[dict[str, Any]] = Field(description="As in the request.")
    temperature: float = Field(description="As in the request.")
    top_logprobs: int = Field(description="As in the request.")
    top_p: float = Field(description="As in the request.")
    user: str | None = Field(description="As in the request.")
    store: bool = Field(description="True if the response is stored.")
    input_messages: list[RawMessage] | None = Field(
        default=None, description="With `enable_response_messages` the prompt, in a list of one."
    )
    output_messages: list[RawMessage] | None = Field(
        default=None, description="With `enable_response_messages` the answer, in a list of one."
    )


class ResponseEvent(Shape):
    """An event of a streamed response; its name is its type."""

    type: str = Field(description="Kind of the event.")
    sequence_number: int = Field(description="Number of the event, from 0.")
    response: ResponseObject | None = Field(default=None, description="The response so far, or as a whole.")
    item: dict[str, Any] | None = Field(default=None, description="An item that begins or ends.")
    item_id: str | None = Field(default=None, description="Id of the event's item.")
    output_index: int | None = Field(default=None, description="Number of the item.")
    content_index: int | None = Field(default=None, description="Number of the item's part.")
    part: dict[str, Any] | None = Field(default=None, description="A part of a message that begins or ends.")
    delta: str | None = Field(default=None, description="More of a text or of arguments.")
    text: str | None = Field(default=None, description="A whole text.")
    logprobs: list[dict[str, Any]] | None = Field(default=None, description="Log-probabilities of tokens.")
    name: str | None = Field(default=None, description="Name of a function.")
    arguments: str | None = Field(default=None, description="Whole arguments.")
    input: str | None = Field(default=None, description="Whole input of a custom tool.")
    code: str | None = Field(default=None, description="Of `error`: stable name of the error.")
    message: str | None = Field(default=None, description="Of `error`: one sentence.")
    param: str | None = Field(default=None, description="Of `error`: the field at fault.")


class ResponseItems(Shape):
    """A page of a response's input."""

    object: Literal["list"] = Field(description="Kind of the object.")
    data: list[dict[str, Any]] = Field(description="Items.")
    first_id: str | None = Field(description="Id of the first item.")
    last_id: str | None = Field(description="Id of the last item.")
    has_more: bool = Field(description="True if more items follow.")


class InputTokens(Shape):
    """Length of a response's prompt."""

    object: Literal["response.input_tokens"] = Field(description="Kind of the object.")
    input_tokens: int = Field(description="Tokens of the prompt.")


class CompactedResponse(Shape):
    """A conversation that a summary takes the place of."""

    id: str = Field(description="Names the request of the summary for `/v1/requests/{id}/explain`.")
    object: Literal["response.compaction"] = Field(description="Kind of the object.")
    created_at: int = Field(description="Seconds since 1970.")
    output: list[dict[str, Any]] = Field(
        description="The user's messages, and an item `compaction`, with which later requests go on."
    )
    usage: ResponseUsage = Field(description="Tokens of the summary's request.")


class ConversationObject(Shape):
    """A conversation."""

    id: str = Field(description="By which responses go on from it.")
    object: Literal["conversation"] = Field(description="Kind of the object.")
    created_at: int = Field(description="Seconds since 1970.")
    metadata: dict[str, str] = Field(description="As in the request.")


class ConversationDeleted(Shape):
    """A conversation that was deleted."""

    id: str = Field(description="Id of the conversation.")
    object: Literal["conversation.deleted"] = Field(description="Kind of the object.")
    deleted: Literal[True] = Field(description="Always true.")


class ConversationItem(Shape):
    """An item of a conversation: a message, reasoning, a call, a result or a compaction."""

    model_config = ConfigDict(extra="allow")

    id: str = Field(description="Id of the item.")
    type: str = Field(description="Kind of the item.")


class ResponseDeleted(Shape):
    """A response that was deleted."""

    id: str = Field(description="Id of the response.")
    object: Literal["response"] = Field(description="Kind of the object.")
    deleted: Literal[True] = Field(description="Always true.")
