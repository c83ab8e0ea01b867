"""The fields that HTTP requests and the Python handle share, each with its bounds, and what they become.

null always means the default.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator, StringConstraints

from engine.api.spec import ChatMessage, GenerationSpec, Prompt
from engine.api.validation import StrictModel, describe, only, problem
from engine.core.errors import RequestError

MAX_TOKEN_ID = 2**31 - 1
MAX_STOPS = 16
MAX_STOP_LEN = 1024
"""Characters of a stop string."""
MAX_BIASES = 1024
MAX_PROMPTS = 1024
MAX_CHOICES = 1024
"""Choices of one response: prompts times `n`."""
MAX_PRIORITY = 10
MAX_TTL_S = 366 * 86_400

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Label = Annotated[str, StringConstraints(min_length=1, max_length=512)]


def _parse_stops(value: object) -> tuple[str, ...]:
    """A string or a few of them, none empty."""
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, list | tuple):
        raise problem(f"must be a string or a list of strings, got {describe(value)}")
    if len(value) > MAX_STOPS:
        raise problem(f"must have at most {MAX_STOPS} strings, got {len(value)}")
    for stop in value:
        if not isinstance(stop, str):
            raise problem(f"must be a string or a list of strings, got {describe(stop)} in the list")
        if not stop:
            raise problem("must not have an empty string")
        if len(stop) > MAX_STOP_LEN:
            raise problem(f"must have strings of at most {MAX_STOP_LEN} characters, got {len(stop)}")
        _require_unicode(stop)
    return tuple(value)


Stops = Annotated[
    Sequence[str],
    PlainValidator(_parse_stops, json_schema_input_type=str | list[str]),
    PlainSerializer(list, return_type=list[str]),
]


def _few_biases(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise problem(f"must have at most {MAX_BIASES} elements, got {len(value)}")
    return value


def _as_token_id(value: object) -> object:
    """JSON's keys are strings; Python callers may use integers."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 10:
        return int(value)
    if type(value) is int:
        return value
    raise problem("must have a token id as key")


def _parse_prompts(value: object) -> tuple[Prompt, ...]:
    """A string, a list of strings, token ids, or a list of token id lists; never empty."""
    if isinstance(value, str):
        return (_text_prompt(value),)
    if not isinstance(value, list | tuple):
        raise problem(f"must be a string, a list of strings or token ids, got {describe(value)}")
    if not value:
        raise problem("must not be empty")
    if type(value[0]) is int:
        return (_token_prompt(value),)
    if len(value) > MAX_PROMPTS:
        raise problem(f"must have at most {MAX_PROMPTS} prompts, got {len(value)}")
    if all(isinstance(prompt, str) for prompt in value):
        return tuple(map(_text_prompt, value))
    if all(isinstance(prompt, list | tuple) for prompt in value):
        return tuple(map(_token_prompt, value))
    raise problem("must be a string, a list of strings, a list of token ids or a list of token id lists")


def _text_prompt(value: str) -> str:
    if not value:
        raise problem("must not be empty")
    _require_unicode(value)
    return value


def _require_unicode(text: str) -> None:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise problem("must be valid Unicode") from None


def _token_prompt(value: list[Any] | tuple[Any, ...]) -> tuple[int, ...]:
    if not value:
        raise problem("must not be empty")
    if set(map(type, value)) != {int}:
        wrong = next(token for token in value if type(token) is not int)
        raise problem(f"must have integers as token ids, got {describe(wrong)}")
    if min(value) < 0 or max(value) > MAX_TOKEN_ID:
        raise problem(f"must have token ids from 0 to {MAX_TOKEN_ID}")
    return tuple(value)


def _parse_prompt(value: object) -> Prompt:
    """A string or token ids, not empty."""
    if isinstance(value, str):
        return _text_prompt(value)
    if isinstance(value, list | tuple):
        return _token_prompt(value)
    raise problem(f"must be a string or token ids, got {describe(value)}")


OnePrompt = Annotated[
    str | Sequence[int],
    PlainValidator(_parse_prompt, json_schema_input_type=str | list[int]),
    PlainSerializer(lambda prompt: prompt if isinstance(prompt, str) else list(prompt), return_type=str | list[int]),
]
Prompts = Annotated[
    tuple[Prompt, ...],
    PlainValidator(_parse_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    PlainSerializer(list, return_type=list[Any]),
]


def _join_content(value: object) -> object:
    """A list of text parts as one text, a line each."""
    if not isinstance(value, list):
        if value is None or isinstance(value, str):
            return value
        raise problem(f"must be a string or a list of parts, got {describe(value)}")
    texts = []
    for number, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise problem(f"must have objects with a 'type' as parts, but part {number} is {describe(part)}")
        if kind != "text":
            raise problem(f"has a part of type {describe(kind)} at {number}; only 'text' is supported")
        if not isinstance(part.get("text"), str) or set(part) > {"type", "text"}:
            raise problem(f"must have {{'type': 'text', 'text': a string}} as parts, but part {number} differs")
        texts.append(part["text"])
    return "\n".join(texts)


class FunctionCall(StrictModel):
    """What the assistant called, as it was returned in an earlier turn."""

    name: str
    arguments: str


class ToolCall(StrictModel):
    """One tool call of an assistant message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(StrictModel):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_join_content)] = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: Annotated[Any, only()] = None
    audio: Annotated[Any, only()] = None
    function_call: Annotated[Any, only()] = None
    annotations: Any = None

    def for_template(self) -> ChatMessage:
        """The message as chat templates know it: their name for a developer is system."""
        message: dict[str, object] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content or "",
        }
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        return message


class SamplingFields(StrictModel):
    """Fields of every request, whatever way it came."""

    max_tokens: Annotated[int, Field(ge=0)] | None = Field(
        default=None,
        description="Most tokens to generate; 0 only scores or echoes the prompt. A chat may fill the context, a "
        "completion has 16.",
    )
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(
        default=None, description="0 takes the likeliest token."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None, description="Draw from the likeliest tokens that hold this much probability together."
    )
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID)] | None = Field(
        default=None, description="Draw from this many likeliest tokens; 0 and -1 mean all."
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, description="Draw from tokens at least this likely, relative to the likeliest."
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = Field(
        default=None, description="The same seed and request give the same answer."
    )
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = Field(
        default=None, description="Subtracted from the logit of each token generated so far."
    )
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = Field(
        default=None, description="Subtracted from the logit of each token, times how often it was generated."
    )
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = Field(
        default=None,
        description="Divides the positive and multiplies the negative logits of tokens seen; 1 changes nothing.",
    )
    logit_bias: (
        Annotated[
            dict[Annotated[TokenId, BeforeValidator(_as_token_id)], Annotated[float, Field(ge=-100, le=100)]],
            BeforeValidator(_few_biases),
        ]
        | None
    ) = Field(default=None, description="Added to the logits of these token ids.")
    min_tokens: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="No stop before this many tokens are generated."
    )
    stop: Stops | None = Field(default=None, description="Text that ends the answer: a string or up to 16.")
    include_stop_str_in_output: bool | None = Field(default=None, description="The stop string stays in the text.")
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = Field(
        default=None, description="Tokens that end the answer, besides the model's own."
    )
    ignore_eos: bool | None = Field(default=None, description="Go on after the model's end-of-sequence token.")
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        default=None, description="Report log-probabilities of the prompt's tokens and of this many likeliest ones."
    )
    return_token_ids: bool | None = Field(default=None, description="Return token ids of prompt and answer.")
    user: Annotated[str, StringConstraints(max_length=512)] | None = Field(default=None, description="Who asks.")
    session_id: Label | None = Field(default=None, description="Requests of one session prefer one worker.")
    cache_salt: Label | None = Field(
        default=None, description="Share cached prefixes only with requests of the same salt."
    )
    cache_priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = Field(
        default=None, description="The tenant's KV of lower priorities is evicted before that of higher ones; 0."
    )
    cache_ttl_s: Annotated[float, Field(gt=0, le=MAX_TTL_S)] | None = Field(
        default=None, description="So many seconds after the request its KV is evicted before any other."
    )


def build_spec(
    fields: SamplingFields,
    *,
    kind: Literal["completion", "chat"],
    model: str | None,
    prompts: tuple[Prompt, ...] = (),
    messages: list[Message] | None = None,
    max_tokens: int | None,
    logprobs: int | None,
    echo: bool = False,
    n: int = 1,
    stream: bool = False,
    include_usage: bool = False,
    session_id: str | None = None,
    request_id: str | None = None,
) -> GenerationSpec:
    """The normal form of a request whose fields are each valid. Raises RequestError where they contradict."""

    def number(value: float | None, otherwise: float) -> float:
        return otherwise if value is None else value

    if n * len(prompts) > MAX_CHOICES:
        raise RequestError(
            f"'n' times the number of prompts must be at most {MAX_CHOICES}, got {n} x {len(prompts)}.", param="n"
        )
    for index, message in enumerate(messages or ()):
        if message.content is None and not message.tool_calls:
            param = f"messages[{index}].content"
            raise RequestError(f"'{param}' must be a string.", param=param)
    if max_tokens == 0 and not echo and fields.prompt_logprobs is None:
        raise RequestError(
            "'max_tokens' must be at least 1, got 0; with 'prompt_logprobs', or a completion's 'echo', it may be 0.",
            param="max_tokens",
        )
    return GenerationSpec(
        kind=kind,
        model=model,
        prompts=prompts,
        messages=tuple(message.for_template() for message in messages or ()),
        n=n,
        max_tokens=max_tokens,
        temperature=number(fields.temperature, 1.0),
        top_p=number(fields.top_p, 1.0),
        top_k=fields.top_k if fields.top_k is not None and fields.top_k > 0 else None,
        min_p=number(fields.min_p, 0.0),
        seed=fields.seed,
        presence_penalty=number(fields.presence_penalty, 0.0),
        frequency_penalty=number(fields.frequency_penalty, 0.0),
        repetition_penalty=number(fields.repetition_penalty, 1.0),
        logit_bias=tuple(sorted((fields.logit_bias or {}).items())),
        min_tokens=fields.min_tokens or 0,
        stop=tuple(dict.fromkeys(fields.stop or ())),
        include_stop=bool(fields.include_stop_str_in_output),
        stop_token_ids=tuple(dict.fromkeys(fields.stop_token_ids or ())),
        ignore_eos=bool(fields.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=fields.prompt_logprobs,
        echo=echo,
        stream=stream,
        include_usage=include_usage,
        return_token_ids=bool(fields.return_token_ids),
        user=fields.user or None,
        session_id=session_id or fields.session_id,
        cache_salt=fields.cache_salt,
        cache_priority=fields.cache_priority or 0,
        cache_ttl_s=fields.cache_ttl_s,
        request_id=request_id,
    )
