"""Requests and responses of the Python handle, for `generate` and `stream` in other Ray programs.

Fields, bounds and messages are the same as over HTTP. Constructing a `GenerateRequest` checks each field (pydantic's
ValidationError, in the caller's process); `spec` finds contradictions (RequestError, from the call).
"""

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from raydix.engine.api.fields import ChatPromptFields, RequestId, SamplingFields
from raydix.engine.api.normal_form import normal_form
from raydix.engine.api.prompts import Label, Messages, OnePrompt, unicode_text
from raydix.engine.api.reasoning import ReasoningFields
from raydix.engine.api.responses import TokenUsage
from raydix.engine.api.spec import FormSpec, GenerationSpec, RetentionSpec, ServiceSpec
from raydix.engine.api.tools import ToolFields
from raydix.engine.api.validation import INTEGRAL, describe, request_error
from raydix.engine.core.answers.prompt_form import ChatEnd
from raydix.engine.core.errors import RequestError
from raydix.engine.core.ingress.parsers.answer import AssembledMessage
from raydix.engine.core.ingress.parsers.events import AnswerEvent, AnswerText, ArgumentsPart, CallBegins, ReasoningPart
from raydix.engine.core.types import FinishReason, TokenLogprobs

# Fields of chats alone, each with its values without effect beside None.
_OF_CHATS: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("store", "continue_final_message", "echo"), (False,)),
    **dict.fromkeys(("chat_template", "input_ids", "prediction", "reasoning_effort"), ()),
    "tools": ([],),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "include_reasoning": (True,),
    "thinking_token_budget": (-1,),
}
_OF_PROMPTS: Mapping[str, tuple[object, ...]] = {"suffix": ("",), "add_special_tokens": (False,)}


class GenerateRequest(SamplingFields, ChatPromptFields, ToolFields, ReasoningFields):
    """One prompt, or one chat, and how to answer it: exactly one of `prompt` and `messages`."""

    prompt: OnePrompt | None = Field(default=None, description="A text or its token ids.")
    messages: Messages | None = Field(default=None, description="A chat.")
    model: Label | None = Field(default=None, description="May be left out: there is one model.")
    logprobs: Annotated[int, Field(ge=-1, le=20), INTEGRAL] | None = Field(
        default=None, description="Report log-probabilities of the tokens and of this many likeliest ones; -1: of all."
    )
    best_of: Annotated[int, Field(ge=1, le=128), INTEGRAL] | None = Field(
        default=None,
        description="Generate so many answers and return the one with the highest mean log-probability of its tokens; "
        "not in a stream.",
    )
    suffix: Annotated[str, AfterValidator(unicode_text)] | None = Field(
        default=None, description="With `prompt`, a text: text behind the answer, as over HTTP."
    )
    add_special_tokens: bool | None = Field(
        default=None,
        description="With `prompt`: a text begins with the special tokens that the model wants before it; true.",
    )
    tenant: Label | None = Field(
        default=None, description="On whose behalf: a configured tenant. Taken on trust, so not a field over HTTP."
    )
    request_id: RequestId | None = Field(
        default=None, description="The caller's name for the request, in answers and logs."
    )

    def spec(self, *, stream: bool = False) -> GenerationSpec:
        """Return the request in normal form. Raises RequestError for contradicting fields."""
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("Give exactly one of 'prompt' and 'messages'.", param="prompt")
        if self.messages is None:
            self._refuse(_OF_CHATS, "messages")
        else:
            self._refuse(_OF_PROMPTS, "prompt")
        if self.suffix and not isinstance(self.prompt, str):
            raise RequestError("'suffix' is only allowed with a text as 'prompt'.", param="suffix")

        prompt = self.prompt if isinstance(self.prompt, str) else tuple(self.prompt or ())
        is_chat = self.messages is not None
        asked = GenerationSpec(
            kind="chat" if is_chat else "completion",
            model=self.model,
            prompts=(prompt,) if prompt else (),
            given_prompt=None if self.messages is None else self.given_ids(self.messages),
            tools=self.tool_use(),
            reasoning=self.reasoning_use(),
            max_tokens=self.max_tokens,
            best_of=self.best_of,
            suffix=self.suffix or None,
            add_special_tokens=is_chat or self.add_special_tokens is not False,
            chat_end=ChatEnd.ANSWER if self.messages is None else self.end_of(self.messages),
            prediction=None if self.prediction is None else self.prediction.content,
            text_if_missing=self.continue_from_missing == "text",
            template=self.template(),
            form=FormSpec(stream=stream, include_usage=True, echo=bool(self.echo)),
            service=ServiceSpec(request_id=self.request_id),
            retention=RetentionSpec(store=bool(self.store)),
        )
        return normal_form(self, asked, messages=self.messages or (), logprobs=self.logprobs)

    def _refuse(self, fields: Mapping[str, tuple[object, ...]], only_with: str) -> None:
        """Raise RequestError naming the first of these fields that asks for something."""
        for name, harmless in fields.items():
            value = getattr(self, name)
            if value is not None and value not in harmless:
                raise RequestError(f"'{name}' is allowed with '{only_with}' only.", param=name)


def as_generate_request(value: GenerateRequest | Mapping[str, object]) -> GenerateRequest:
    """Return `value`, or the request with its fields. Raises RequestError naming the field at fault."""
    if isinstance(value, GenerateRequest):
        return value
    if not isinstance(value, Mapping):
        raise RequestError(f"The request must be a GenerateRequest or a mapping of its fields, not {describe(value)}.")
    try:
        return GenerateRequest.model_validate(dict(value))
    except ValidationError as error:
        raise request_error(error, GenerateRequest) from None


class HandleCall(BaseModel):
    """A call in an answer, or in a stream the next part of one: its beginning, or more of its arguments."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    index: int = Field(description="Number of the call in its answer, from 0.")
    id: str | None = Field(default=None, description="In a stream with the beginning only, and so is the name.")
    name: str | None = None
    arguments: str = Field(description="A JSON object, or a part of its text.")


def _made_here(value: object, check: ValidatorFunctionWrapHandler) -> object:
    """Log-probabilities as they are, where the server made them: there may be a million."""
    # Validating a tuple of tuples would copy each of them; what comes over a wire is no such tuple, and is checked.
    if isinstance(value, tuple) and all(at is None or isinstance(at, TokenLogprobs) for at in value):
        return value
    checked: Sequence[TokenLogprobs | None] | None = check(value)
    if checked is None:
        return None
    return tuple(at and at._replace(top_ids=tuple(at.top_ids), top_logprobs=tuple(at.top_logprobs)) for at in checked)


class _Result(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    request_id: str
    text: str
    reasoning: str | None = Field(
        default=None,
        description="Reasoning before the text; None where there is none or it is part of the text.",
    )
    tool_calls: tuple[HandleCall, ...] | None = Field(default=None, description="None where the request has no tools.")
    token_ids: tuple[int, ...]
    logprobs: Annotated[tuple[TokenLogprobs, ...] | None, WrapValidator(_made_here)] = Field(
        default=None, description="One for each of token_ids, if asked for."
    )
    prompt_logprobs: Annotated[tuple[TokenLogprobs | None, ...] | None, WrapValidator(_made_here)] = Field(
        default=None,
        description="One for each token of the prompt, None for the first, if asked for; in a stream with the first "
        "chunk.",
    )
    prompt_token_ids: tuple[int, ...] | None = Field(
        default=None, description="Where return_token_ids asked for them; in a stream with the first chunk."
    )
    stop_reason: str | int | None = Field(
        default=None,
        description="Stop string, or one of `stop_token_ids`, that ended the answer; in a stream with the last chunk.",
    )
    message_id: str | None = Field(
        default=None,
        description="Where `store` asked for it: the answer's `id` as a message, for a later chat to go on from these "
        "token ids; in a stream with the last chunk. None if the answer could not be kept.",
    )


class GenerateResponse(_Result):
    """A whole answer."""

    finish_reason: FinishReason
    usage: TokenUsage


class GenerateChunk(_Result):
    """The next piece of an answer. The last one alone has `finish_reason` and `usage`."""

    finish_reason: FinishReason | None = None
    usage: TokenUsage | None = None


def whole_calls(message: AssembledMessage) -> tuple[HandleCall, ...]:
    """The calls of a whole answer."""
    return tuple(
        HandleCall(index=index, id=call.id, name=call.name, arguments="".join(call.arguments))
        for index, call in enumerate(message.calls)
    )


def call_parts(events: Sequence[AnswerEvent], message: AssembledMessage) -> tuple[HandleCall, ...]:
    """The parts of calls among the events of a piece. `message` has all parts of the answer."""
    parts = []
    for event in events:
        match event:
            case CallBegins(index, name):
                parts.append(HandleCall(index=index, id=message.begun[index].id, name=name, arguments=""))
            case ArgumentsPart(index, text):
                parts.append(HandleCall(index=index, arguments=text))
    return tuple(parts)


def reasoning_of(events: Sequence[AnswerEvent]) -> str | None:
    """The reasoning among the events of a piece."""
    return "".join(event.text for event in events if isinstance(event, ReasoningPart)) or None


def text_of(events: Sequence[AnswerEvent]) -> str:
    """The text for the user among the events of a piece."""
    return "".join(event.text for event in events if isinstance(event, AnswerText))
