"""Prompts and messages of requests over HTTP and through the Python handle, each with its bounds."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator, StringConstraints

from raydix.engine.api.known import KnownMessageFields
from raydix.engine.api.spec import ChatMessage, ContinuedAnswer, Prompt
from raydix.engine.api.validation import LenientModel, describe, name_all, problem
from raydix.engine.core.answers.prompt_form import ChatEnd
from raydix.engine.core.answers.transcripts import REFERENCE_PREFIX
from raydix.engine.core.errors import RequestError
from raydix.engine.core.ingress.parsers.custom import arguments_of

MAX_TOKEN_ID = 2**31 - 1
MAX_PROMPTS = 1024
MAX_INPUTS = 2048  # inputs of a request for embeddings, as at OpenAI
MAX_MESSAGES = 8192
MAX_PARTS = 8192  # parts of a message's content

MAX_LABEL_LEN = 512
Label = Annotated[str, StringConstraints(min_length=1, max_length=MAX_LABEL_LEN)]

# Bounds in JSON schemas of prompts, which functions check.
_Id = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
_Ids = Annotated[list[_Id], Field(min_length=1)]
_Text = Annotated[str, Field(min_length=1)]
_Texts = Annotated[list[_Text], Field(min_length=1, max_length=MAX_PROMPTS)]
_IdLists = Annotated[list[_Ids], Field(min_length=1, max_length=MAX_PROMPTS)]
_InputTexts = Annotated[list[_Text], Field(min_length=1, max_length=MAX_INPUTS)]
_InputIdLists = Annotated[list[_Ids], Field(min_length=1, max_length=MAX_INPUTS)]


def _parse_prompts(value: object, most: int = MAX_PROMPTS, noun: str = "prompts") -> tuple[Prompt, ...]:
    """A string, a list of strings, token ids, or a list of token id lists; never empty."""
    if isinstance(value, str):
        return (_text_prompt(value),)
    if not isinstance(value, list | tuple):
        raise problem(f"must be a string, a list of strings or token ids, got {describe(value)}")
    if not value:
        raise problem("must not be empty")
    # A flat list of numbers is one prompt; its other elements are checked with it. `type`, as true is an int, too.
    if type(value[0]) is int:
        return (_token_prompt(value),)
    if len(value) > most:
        raise problem(f"must have at most {most} {noun}, got {len(value)}")
    if all(isinstance(prompt, str) for prompt in value):
        return tuple(map(_text_prompt, value))
    if all(isinstance(prompt, list | tuple) for prompt in value):
        return tuple(map(_token_prompt, value))

    raise problem("must be a string, a list of strings, a list of token ids or a list of token id lists")


def _text_prompt(value: str) -> str:
    if not value:
        raise problem("must not be empty")
    require_unicode(value)
    return value


def require_unicode(text: str) -> None:
    # Nearly all texts are ASCII, which is known without a look at each character.
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise problem("must be valid Unicode") from None


def unicode_text(text: str) -> str:
    """The text, if it is valid Unicode."""
    require_unicode(text)
    return text


def _token_prompt(value: list[Any] | tuple[Any, ...]) -> tuple[int, ...]:
    if not value:
        raise problem("must not be empty")
    return _token_ids(value)


def _token_ids(value: list[Any] | tuple[Any, ...]) -> tuple[int, ...]:
    # Over the whole list in C: a loop in Python over a million ids would hold the interpreter for long.
    if not set(map(type, value)) <= {int}:
        wrong = next(token for token in value if type(token) is not int)
        raise problem(f"must have integers as token ids, got {describe(wrong)}")
    if value and (min(value) < 0 or max(value) > MAX_TOKEN_ID):
        named = name_all(token for token in value if not 0 <= token <= MAX_TOKEN_ID)
        raise problem(f"must have token ids from 0 to {MAX_TOKEN_ID}, got {named}")
    return tuple(value)


def _parse_token_ids(value: object) -> tuple[int, ...]:
    """Token ids, possibly none."""
    if isinstance(value, list | tuple):
        return _token_ids(value)
    raise problem(f"must be a list of token ids, got {describe(value)}")


def _parse_given(value: object) -> tuple[int, ...]:
    """Token ids, at least one."""
    token_ids = _parse_token_ids(value)
    if not token_ids:
        raise problem("must not be empty")
    return token_ids


TokenIds = Annotated[
    Sequence[int],
    PlainValidator(_parse_token_ids, json_schema_input_type=list[_Id]),
    PlainSerializer(list, return_type=list[int]),
]


GivenPrompt = Annotated[
    Sequence[int],
    PlainValidator(_parse_given, json_schema_input_type=_Ids),
    PlainSerializer(list, return_type=list[int]),
]


def _parse_prompt(value: object) -> Prompt:
    """A string or token ids, not empty."""
    if isinstance(value, str):
        return _text_prompt(value)
    if isinstance(value, list | tuple):
        return _token_prompt(value)
    raise problem(f"must be a string or token ids, got {describe(value)}")


OnePrompt = Annotated[
    str | Sequence[int],
    PlainValidator(_parse_prompt, json_schema_input_type=_Text | _Ids),
    PlainSerializer(lambda prompt: prompt if isinstance(prompt, str) else list(prompt), return_type=str | list[int]),
]
Prompts = Annotated[
    tuple[Prompt, ...],
    PlainValidator(_parse_prompts, json_schema_input_type=_Text | _Texts | _Ids | _IdLists),
    PlainSerializer(list, return_type=list[Any]),
]


Inputs = Annotated[
    tuple[Prompt, ...],
    PlainValidator(
        lambda value: _parse_prompts(value, MAX_INPUTS, "inputs"),
        json_schema_input_type=_Text | _InputTexts | _Ids | _InputIdLists,
    ),
    PlainSerializer(list, return_type=list[Any]),
]


def join_content(value: object) -> object:
    """A list of text parts as one text, a line each."""
    if not isinstance(value, list):
        if value is None or isinstance(value, str):
            return value
        raise problem(f"must be a string or a list of parts, got {describe(value)}")

    if len(value) > MAX_PARTS:
        raise problem(f"must have at most {MAX_PARTS} parts, got {len(value)}")

    texts = []
    for number, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise problem(f"must have objects with a 'type' as parts, but part {number} is {describe(part)}")
        if kind != "text":
            raise problem(f"has a part of type {describe(kind)} at {number}; only 'text' is supported")
        if not isinstance(part.get("text"), str):
            raise problem(f"must have {{'type': 'text', 'text': a string}} as parts, but part {number} differs")
        texts.append(part["text"])

    return "\n".join(texts)


class TextPart(LenientModel):
    """A part of a message's content; parts become lines."""

    type: Literal["text"] = Field(description="Kind of part.")
    text: str = Field(description="The part's text.")


def _text_or_none(value: object) -> object:
    """A text; anything else, as some servers' messages have in the same place, counts as nothing."""
    return value if isinstance(value, str) else None


class FunctionCall(LenientModel):
    """Function called by the assistant, as returned in an earlier turn."""

    name: str = Field(description="Its name.")
    arguments: str = Field(description="Its arguments, as JSON in a text.")


class CustomCall(LenientModel):
    """Custom tool called by the assistant, as returned in an earlier turn."""

    name: str = Field(description="Its name.")
    input: str = Field(description="Its input.")


class ToolCall(LenientModel):
    """One tool call of an assistant message."""

    id: str = Field(description="Name of the call, for the message with its result.")
    type: Literal["function", "custom"] = Field(default="function", description="Kind of tool.")
    function: FunctionCall | None = Field(default=None, description="The function that was called.")
    custom: CustomCall | None = Field(default=None, description="The custom tool that was called.")

    def for_template(self) -> dict[str, object]:
        """Return the call as chat templates know it."""
        if self.type == "custom" and self.custom is not None:
            function: object = {"name": self.custom.name, "arguments": arguments_of(self.custom.input)}
        else:
            function = None if self.function is None else self.function.model_dump()
        return {"id": self.id, "type": "function", "function": function}


class Message(KnownMessageFields):
    """One turn of a chat. Unknown fields are ignored: clients send back what other servers' messages had."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(description="Who speaks.")
    content: Annotated[
        str | None, BeforeValidator(join_content, json_schema_input_type=str | list[TextPart] | None)
    ] = Field(default=None, description="A text, or a list of text parts.")
    name: str | None = Field(default=None, description="Of the speaker, where the chat template renders it.")
    tool_call_id: str | None = Field(default=None, description="The tool call that the message answers.")
    tool_calls: list[ToolCall] | None = Field(
        default=None, description="Calls by the assistant, where the chat template renders them."
    )
    reasoning_content: Annotated[str | None, BeforeValidator(_text_or_none)] = Field(
        default=None, description="Reasoning before the content, for templates that render it; `reasoning` is the same."
    )
    reasoning: Annotated[str | None, BeforeValidator(_text_or_none)] = Field(
        default=None, description="The same as `reasoning_content`."
    )
    id: Label | None = Field(
        default=None,
        description="Of an answer that was asked for with 'store': go on from it. An id of another server is ignored.",
    )
    token_ids: TokenIds | None = Field(default=None, description="The ids of an answer: go on from these.")

    def for_template(self) -> ChatMessage:
        """Return the message as chat templates know it: they call a developer's role system."""
        message: dict[str, object] = {
            # Templates of open models know no developer.
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content or "",
        }
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        reasoning = self.reasoning_content if self.reasoning_content is not None else self.reasoning
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message

    @property
    def reference(self) -> str | None:
        """The `id`, if this server may have given it."""
        return self.id if self.id is not None and self.id.startswith(REFERENCE_PREFIX) else None

    @property
    def is_continued(self) -> bool:
        """True if the message stands in the prompt as token ids."""
        return self.reference is not None or self.token_ids is not None

    def check(self, index: int) -> None:
        """Raise RequestError where the fields of message `index` contradict."""

        def refuse(name: str, predicate: str) -> RequestError:
            param = f"messages[{index}].{name}"
            return RequestError(f"'{param}' {predicate}.", param=param)

        if self.content is None and self.role != "assistant":
            raise refuse("content", "must be a string")
        for number, call in enumerate(self.tool_calls or ()):
            if (call.function if call.type == "function" else call.custom) is None:
                param = f"messages[{index}].tool_calls[{number}].{call.type}"
                raise RequestError(f"Missing required parameter: '{param}'.", param=param)
        if not self.is_continued:
            return

        name = "token_ids" if self.reference is None else "id"
        if self.role != "assistant":
            raise refuse(name, f"is allowed in messages of the assistant only, not of role '{self.role}'")
        if self.reference is not None and self.token_ids is not None:
            raise refuse("token_ids", "cannot be given together with 'id'; give one of them")
        if self.tool_calls:
            raise refuse(name, "is not supported together with 'tool_calls'")


def few_messages(value: object) -> object:
    """Refuse too many messages before each of them is looked at."""
    if isinstance(value, list | tuple) and len(value) > MAX_MESSAGES:
        raise problem(f"must have at most {MAX_MESSAGES} elements, got {len(value)}")
    return value


Messages = Annotated[list[Message], Field(min_length=1), BeforeValidator(few_messages)]


def chat_end(add_generation_prompt: bool | None, continue_final_message: bool | None) -> ChatEnd:
    """End of a chat's prompt. Raises RequestError if both fields are true."""
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "'continue_final_message' is only allowed when 'add_generation_prompt' is false.",
            param="continue_final_message",
        )
    if continue_final_message:
        return ChatEnd.OPEN
    return ChatEnd.CLOSED if add_generation_prompt is False else ChatEnd.ANSWER


def continued_answers(messages: Sequence[Message]) -> tuple[ContinuedAnswer, ...]:
    """Answers among the messages that stand in the prompt as token ids."""
    return tuple(
        ContinuedAnswer(
            index, message.content, message.reference, None if message.token_ids is None else tuple(message.token_ids)
        )
        for index, message in enumerate(messages)
        if message.is_continued
    )
