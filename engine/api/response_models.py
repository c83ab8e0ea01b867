"""Shapes of responses, for `/openapi.json`.

`raydix.engine.api.responses` and its neighbours write responses as bytes; a test holds those of the routes against the
shapes.
"""

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, RootModel

TokenIds: TypeAlias = list[int] | None


class Shape(BaseModel):
    """An object without other fields than these."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class PromptTokensDetails(Shape):
    """The prompt's tokens by their origin."""

    cached_tokens: int = Field(description="Found in the cache, not computed.")


class CompletionTokensDetails(Shape):
    """Some of the completion's tokens."""

    reasoning_tokens: int = Field(default=0, description="Of reasoning, where the answer tells it from the text.")
    accepted_prediction_tokens: int = Field(default=0, description="Guessed in drafts, where there were any.")
    rejected_prediction_tokens: int = Field(default=0, description="Of drafts, and not part of the completion.")


class Usage(Shape):
    """Tokens of a request."""

    prompt_tokens: int = Field(description="Of each prompt once.")
    completion_tokens: int = Field(description="Of all answers.")
    total_tokens: int = Field(description="Sum of both.")
    prompt_tokens_details: PromptTokensDetails = Field(description="Where the prompt's tokens came from.")
    completion_tokens_details: CompletionTokensDetails = Field(description="What the completion's tokens are.")


class Embedding(Shape):
    """The vector of one input."""

    object: Literal["embedding"] = Field(description="Kind of object.")
    index: int = Field(description="Number of the input, from 0.")
    embedding: list[float] | str = Field(
        description="float32 values, or their bytes in base64 where `encoding_format` asks for it."
    )


class EmbeddingList(Shape):
    """Response of `/v1/embeddings`."""

    id: str = Field(description="Name of the request.")
    object: Literal["list"] = Field(description="Kind of object.")
    created: int = Field(description="Seconds since 1970.")
    model: str = Field(description="Name of the served model.")
    data: list[Embedding] = Field(description="One for each input, in their order.")
    usage: Usage = Field(description="Tokens of all inputs.")


class Score(Shape):
    """The score of one item."""

    object: Literal["score"] = Field(description="Kind of object.")
    index: int = Field(description="Number of the item, from 0.")
    score: float = Field(description="Probability of the first label.")


class ScoreList(Shape):
    """Response of `/generative_scoring`."""

    id: str = Field(description="Name of the request.")
    object: Literal["list"] = Field(description="Kind of object.")
    created: int = Field(description="Seconds since 1970.")
    model: str = Field(description="Name of the served model.")
    data: list[Score] = Field(description="One for each item, in their order.")
    usage: Usage = Field(description="Tokens of all prompts, and one completion token for each.")


class LabelScores(Shape):
    """Response of `/v1/score`."""

    id: str = Field(description="Name of the request.")
    object: Literal["scoring"] = Field(description="Kind of object.")
    created: int = Field(description="Seconds since 1970.")
    model: str = Field(description="Name of the served model.")
    scores: list[list[float]] = Field(description="For each item the probability of each label, in their order.")
    usage: Usage = Field(description="Tokens of all prompts.")


class TokenLogprob(Shape):
    """A token with its log-probability."""

    token: str = Field(description="Its text, or `token_id:<id>` where the request wants ids.")
    logprob: float = Field(description="Natural logarithm; -9999 for probability 0.")
    bytes: list[int] = Field(description="Its bytes, which may be a part of a character.")


class ChatTokenLogprob(TokenLogprob):
    """A generated token with its likeliest alternatives."""

    top_logprobs: list[TokenLogprob] = Field(description="Likeliest first; the token itself is among them.")


class ChatLogprobs(Shape):
    """Log-probabilities of a chat's answer."""

    content: list[ChatTokenLogprob] = Field(description="One for each token.")
    refusal: None = Field(description="Always null.")


class CompletionLogprobs(Shape):
    """Log-probabilities of a completion, a list element for each token."""

    tokens: list[str] = Field(description="Texts; `bytes:\\xf0` for parts of characters.")
    token_logprobs: list[float | None] = Field(description="null for an echoed prompt's first token.")
    top_logprobs: list[dict[str, float] | None] = Field(description="By text, the token itself among them.")
    text_offset: list[int] = Field(description="Characters of the text before each token.")


class PromptLogprob(Shape):
    """A prompt token, or an alternative to it."""

    logprob: float = Field(description="Natural logarithm; -9999 for probability 0.")
    rank: int | None = Field(description="1 for the likeliest token.")
    decoded_token: str = Field(description="Its text.")


PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None] | None
"""Log-probabilities in vLLM's form: by token id; null for the first token."""

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]
Seconds = Annotated[float, Field(description="Seconds.")]


class _Answer(Shape):
    """Data of an answer's tokens and end."""

    index: int = Field(description="Number of the answer, prompt by prompt.")
    finish_reason: FinishReason = Field(description="`length` at max_tokens or the end of the context.")
    stop_reason: str | int | None = Field(description="vLLM: the stop string or stop token at the end.")
    matched_stop: str | int | None = Field(description="SGLang: the same.")
    token_ids: TokenIds = Field(description="vLLM: with `return_token_ids`.")


class CalledFunction(Shape):
    """The function of a call, or the next part of it."""

    name: str | None = Field(default=None, description="Its name.")
    arguments: str = Field(description="Its arguments, as JSON in a text.")


class CalledTool(Shape):
    """The custom tool of a call, or the next part of its input."""

    name: str | None = Field(default=None, description="Its name.")
    input: str = Field(description="Its input.")


class AnswerCall(Shape):
    """A call of a function or of a custom tool."""

    id: str = Field(description="Name of the call, for the message with its result.")
    type: Literal["function", "custom"] = Field(description="Kind of tool.")
    function: CalledFunction | None = Field(default=None, description="The function that is called.")
    custom: CalledTool | None = Field(default=None, description="The custom tool that is called.")


class CallDelta(Shape):
    """The next part of a call."""

    index: int = Field(description="Number of the call.")
    id: str | None = Field(default=None, description="In the call's first chunk.")
    type: Literal["function", "custom"] | None = Field(default=None, description="In the call's first chunk.")
    function: CalledFunction | None = Field(
        default=None, description="The name in the call's first chunk, and more of the arguments."
    )
    custom: CalledTool | None = Field(
        default=None, description="Of a custom tool: the name in the call's first chunk, and more of the input."
    )


class AnswerMessage(Shape):
    """The assistant's message."""

    role: Literal["assistant"] = Field(description="Always the assistant.")
    content: str | None = Field(description="The answer's text; null beside calls alone.")
    tool_calls: list[AnswerCall] | None = Field(default=None, description="Calls of functions.")
    refusal: None = Field(description="Always null.")
    id: str | None = Field(default=None, description="raydix: with `store`, to go on from the answer's token ids.")


class ChatChoice(_Answer):
    """One answer of a chat."""

    message: AnswerMessage = Field(description="The answer.")
    logprobs: ChatLogprobs | None = Field(description="With `logprobs`.")


class CompletionChoice(_Answer):
    """One answer to one prompt."""

    text: str = Field(description="The answer; with `echo` behind the prompt.")
    logprobs: CompletionLogprobs | None = Field(description="With `logprobs`.")
    prompt_token_ids: TokenIds = Field(description="vLLM: with `return_token_ids`.")
    prompt_logprobs: PromptLogprobs = Field(description="vLLM: with `prompt_logprobs`, by token id.")


class _Head(Shape):
    """Fields of every object of one response."""

    id: str = Field(description="Names the request in logs and for `/v1/requests/{id}/explain`.")
    created: int = Field(description="Seconds since 1970.")
    model: str = Field(description="Name of the model.")
    system_fingerprint: str | None = Field(description="Changes when the same request may have another answer.")


class ChatCompletion(_Head):
    """A chat's whole answer."""

    object: Literal["chat.completion"] = Field(description="Kind of the object.")
    choices: list[ChatChoice] = Field(description="`n` answers.")
    usage: Usage = Field(description="Tokens of the request.")
    prompt_token_ids: TokenIds = Field(description="vLLM: with `return_token_ids`.")
    prompt_logprobs: PromptLogprobs = Field(description="vLLM: with `prompt_logprobs`, by token id.")


class Completion(_Head):
    """A completion's whole answer."""

    object: Literal["text_completion"] = Field(description="Kind of the object.")
    choices: list[CompletionChoice] = Field(description="`n` answers to each prompt.")
    usage: Usage = Field(description="Tokens of the request.")


class _Piece(Shape):
    """Data of the next tokens of an answer."""

    index: int = Field(description="Number of the answer.")
    finish_reason: FinishReason | None = Field(description="In the answer's last chunk.")
    stop_reason: str | int | None = Field(default=None, description="vLLM: in the answer's last chunk.")
    matched_stop: str | int | None = Field(default=None, description="SGLang: the same.")
    token_ids: list[int] | None = Field(default=None, description="vLLM: with `return_token_ids`.")


class Delta(Shape):
    """The next part of a message."""

    role: Literal["assistant"] | None = Field(default=None, description="In the first chunk.")
    content: str | None = Field(default=None, description="More text.")
    tool_calls: list[CallDelta] | None = Field(default=None, description="The next part of a call.")
    id: str | None = Field(default=None, description="raydix: in the last chunk, with `store`.")


class ChatChunkChoice(_Piece):
    """The next piece of one answer."""

    delta: Delta = Field(description="What comes behind the pieces before.")
    logprobs: ChatLogprobs | None = Field(description="With `logprobs`.")


class CompletionChunkChoice(_Piece):
    """The next piece of one answer."""

    text: str = Field(description="What comes behind the pieces before.")
    logprobs: CompletionLogprobs | None = Field(description="With `logprobs`.")
    prompt_token_ids: list[int] | None = Field(default=None, description="vLLM: in the first, with return_token_ids.")


class ChatCompletionChunk(_Head):
    """An event of a streamed chat; `[DONE]` ends the stream, or an error object."""

    object: Literal["chat.completion.chunk"] = Field(description="Kind of the object.")
    choices: list[ChatChunkChoice] = Field(description="One, or none beside the usage.")
    usage: Usage | None = Field(default=None, description="With `stream_options`.")
    prompt_token_ids: list[int] | None = Field(default=None, description="vLLM: in the first, with return_token_ids.")


class CompletionChunk(_Head):
    """An event of a streamed completion; `[DONE]` ends the stream, or an error object."""

    object: Literal["text_completion"] = Field(description="Kind of the object.")
    choices: list[CompletionChunkChoice] = Field(description="One, or none beside the usage.")
    usage: Usage | None = Field(default=None, description="With `stream_options`.")


class Error(Shape):
    """The reason of a refusal or a failure."""

    message: str = Field(description="One sentence.")
    type: str = Field(description="OpenAI's kind of error.")
    param: str | None = Field(description="The field at fault.")
    code: str = Field(description="Stable name of the error.")


class ErrorResponse(Shape):
    """An error."""

    error: Error = Field(description="The error.")


class Model(Shape):
    """The model that is served, or an adapter of it."""

    id: str = Field(description="Its name in requests.")
    object: Literal["model"] = Field(description="Kind of the object.")
    created: int = Field(description="Seconds since 1970.")
    owned_by: str = Field(description="Always raydix.")
    root: str = Field(description="vLLM: the same as `id`.")
    parent: str | None = Field(description="vLLM: of an adapter the name of the model; null for the model itself.")
    max_model_len: int = Field(description="vLLM: longest prompt plus answer, in tokens.")
    type: Literal["model"] = Field(description="Anthropic: kind of the object.")
    display_name: str = Field(description="Anthropic: the name.")
    created_at: str = Field(description="Anthropic: `created` as a date and time.")
    lifecycle: Literal["active"] = Field(description="Anthropic: always active.")
    max_input_tokens: int = Field(description="Anthropic: the same as `max_model_len`.")


class ModelList(Shape):
    """The models that are served: one, and its adapters."""

    object: Literal["list"] = Field(description="Kind of the object.")
    data: list[Model] = Field(description="The models.")
    first_id: str = Field(description="Anthropic: the first model's name.")
    last_id: str = Field(description="Anthropic: the last model's name.")
    has_more: Literal[False] = Field(description="Anthropic: there is one page.")


class Tokenized(Shape):
    """Tokens of a text or a chat."""

    count: int = Field(description="Number of tokens.")
    max_model_len: int = Field(description="Longest prompt plus answer of the model, in tokens.")
    tokens: list[int] = Field(description="Token ids.")
    token_strs: list[str] | None = Field(description="With `return_token_strs`: names in the vocabulary.")


class AddedToken(Shape):
    """A token beside the vocabulary that was learnt."""

    content: str = Field(description="The text.")
    lstrip: bool = Field(description="Takes the white space before it along.")
    normalized: bool = Field(description="Is looked for in the normalized text.")
    rstrip: bool = Field(description="Takes the white space behind it along.")
    single_word: bool = Field(description="Is no part of a word.")
    special: bool = Field(description="Is no text.")


class TokenizerInfo(Shape):
    """The tokenizer, with fields of a `tokenizer_config.json`."""

    tokenizer_class: str = Field(description="Class in transformers.")
    vocab_size: int = Field(description="Number of ids that have text.")
    model_max_length: int = Field(description="Longest prompt plus answer of the model, in tokens.")
    bos_token: str | None = Field(description="Begins a text.")
    eos_token: str | None = Field(description="Ends a text.")
    pad_token: str | None = Field(description="Fills up.")
    unk_token: str | None = Field(description="Stands for unknown text.")
    additional_special_tokens: list[str] = Field(description="All special tokens.")
    added_tokens_decoder: dict[str, AddedToken] = Field(description="Added tokens by id, special ones among them.")
    chat_template: str | None = Field(description="Jinja template of chats.")


class Detokenized(Shape):
    """Text of tokens."""

    prompt: str = Field(description="The text.")


class Invoked(RootModel[ChatCompletion | Completion | EmbeddingList]):
    """Response of `/invocations`, by the kind of the body."""


class InvokedEvent(RootModel[ChatCompletionChunk | CompletionChunk]):
    """Data of an event of `/invocations`, by the kind of the body."""
