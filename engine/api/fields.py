"""Fields shared by HTTP requests and the Python handle, each with its bounds.

null always means the default.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    StringConstraints,
    WithJsonSchema,
)

from raydix.engine.api.formats import FormatFields
from raydix.engine.api.prompts import (
    MAX_TOKEN_ID,
    GivenPrompt,
    Label,
    Message,
    TextPart,
    chat_end,
    join_content,
    require_unicode,
)
from raydix.engine.api.spec import (
    DEFAULT_SAMPLING,
    MAX_OBJECTIVE_MS,
    FormSpec,
    RetentionSpec,
    ServiceSpec,
    Truncation,
)
from raydix.engine.api.validation import INTEGRAL, StrictModel, describe, name_all, problem
from raydix.engine.core.answers.prompt_form import MODEL_TEMPLATE, ChatEnd, ChatTemplate
from raydix.engine.core.errors import RequestError
from raydix.engine.core.objectives import Objectives
from raydix.engine.core.types import Grammar, Sampling

T = TypeVar("T")

MAX_STOPS = 16
MAX_STOP_LEN = 1024  # characters of a stop string
MAX_BIASES = 1024
MAX_TOKEN_LIST = 2**20
MAX_BAD_WORDS = 128
MAX_PRIORITY = 10
MAX_TEMPLATE_LEN = 65_536  # characters of a chat template, and of its arguments as JSON
MAX_TEMPLATE_ARGUMENTS = 64
MAX_TTL_S = 366 * 86_400

REQUEST_ID_PATTERN = r"^[A-Za-z0-9._:-]{1,128}$"
RequestId = Annotated[str, StringConstraints(pattern=REQUEST_ID_PATTERN)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID), INTEGRAL]


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
        require_unicode(stop)

    return tuple(value)


Stops = Annotated[
    Sequence[str],
    PlainValidator(_parse_stops, json_schema_input_type=str | list[str]),
    PlainSerializer(list, return_type=list[str]),
]


def _parse_bad_words(value: object) -> tuple[str, ...]:
    """A list of words, each with more than spaces."""
    if not isinstance(value, list | tuple):
        raise problem(f"must be a list of strings, got {describe(value)}")
    if len(value) > MAX_BAD_WORDS:
        raise problem(f"must have at most {MAX_BAD_WORDS} strings, got {len(value)}")
    for word in value:
        if not isinstance(word, str) or not word.strip() or len(word) > MAX_STOP_LEN:
            raise problem(f"must have strings of 1 to {MAX_STOP_LEN} characters, not all spaces")
        require_unicode(word)

    return tuple(dict.fromkeys(value))


BadWords = Annotated[
    Sequence[str],
    PlainValidator(_parse_bad_words, json_schema_input_type=list[str]),
    PlainSerializer(list, return_type=list[str]),
]


def _few_biases(value: object) -> object:
    """A few biases with ids as keys: as strings in JSON, and Python callers may use integers."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_BIASES:
        raise problem(f"must have at most {MAX_BIASES} elements, got {len(value)}")
    wrong = [key for key in value if not _is_token_id(key)]
    if wrong:
        raise problem(f"must have token ids as keys, got {name_all(wrong)}")
    return value


def _is_token_id(key: object) -> bool:
    """True for an integer that may be an id, or its digits."""
    if isinstance(key, str):
        # The length first: `int` of a megabyte of digits takes seconds. `isdigit` alone accepts digits of other
        # scripts.
        return key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= MAX_TOKEN_ID
    # `isinstance` would take True for the token 1.
    return type(key) is int and 0 <= key <= MAX_TOKEN_ID


def _not_zero(value: int) -> int:
    if value == 0:
        raise problem("must be at least 1, or -1, got 0")
    return value


def _template_arguments(value: dict[str, object]) -> dict[str, object]:
    """Few and short arguments with names that a template can use."""
    if len(value) > MAX_TEMPLATE_ARGUMENTS:
        raise problem(f"must have at most {MAX_TEMPLATE_ARGUMENTS} elements, got {len(value)}")
    wrong = next((name for name in value if not name.isidentifier()), None)
    if wrong is not None:
        raise problem(f"must have names of variables as keys, got {describe(wrong)}")

    try:
        # Written once here, so that nothing which cannot be JSON reaches the template's process.
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise problem("must hold values of JSON") from None
    require_unicode(text)
    if len(text) > MAX_TEMPLATE_LEN:
        raise problem(f"must have at most {MAX_TEMPLATE_LEN} characters")
    return value


TemplateArguments = Annotated[
    dict[str, object],
    AfterValidator(_template_arguments),
    WithJsonSchema({"type": "object", "additionalProperties": {"description": "Any JSON."}}),
]


def _given(value: T | None, default: T) -> T:
    return default if value is None else value


Milliseconds = Annotated[float, Field(gt=0, le=MAX_OBJECTIVE_MS)]


class PromptFields(StrictModel):
    """Fields of every request that say nothing of an answer: part of the prompt, place in the queue, use of caches."""

    truncate_prompt_tokens: Annotated[int, Field(ge=-1), AfterValidator(_not_zero), INTEGRAL] | None = Field(
        default=None,
        description="Keep so many of the prompt's tokens; -1 as many as leave room for `max_tokens`, or for one token.",
    )
    truncation_side: Literal["left", "right"] | None = Field(
        default=None, description="Side of the prompt that `truncate_prompt_tokens` cuts off; left."
    )
    user: Annotated[str, StringConstraints(max_length=512)] | None = Field(default=None, description="Who asks.")
    session_id: Label | None = Field(default=None, description="Requests of one session prefer one worker.")
    priority: Annotated[int, Field(ge=-(2**63), lt=2**63), INTEGRAL] | None = Field(
        default=None, description="Requests of a lower priority start before, and are preempted after, others; 0."
    )
    slo_ttft_ms: Milliseconds | None = Field(
        default=None, description="Objective for the time to the first token; the server's `slo.ttft_ms`."
    )
    slo_tpot_ms: Milliseconds | None = Field(
        default=None, description="Objective for the mean time of each further token; the server's `slo.tpot_ms`."
    )
    slo_when_late: Literal["wait", "refuse", "give_way"] | None = Field(
        default=None,
        description="If no worker can meet the objective for the first token: wait, answer 429, or go behind all "
        "requests that are in time; the server's `slo.when_late`.",
    )
    cache_salt: Label | None = Field(
        default=None, description="Share cached prefixes only with requests of the same salt."
    )
    cache_priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY), INTEGRAL] | None = Field(
        default=None, description="The tenant's KV of lower priorities is evicted before that of higher ones; 0."
    )
    cache_ttl_s: Annotated[float, Field(gt=0, le=MAX_TTL_S)] | None = Field(
        default=None, description="So many seconds after the request its KV is evicted before any other."
    )

    def service(self, asked: ServiceSpec) -> ServiceSpec:
        """Complete the part `service` of a request, of which the route has `asked`."""
        return replace(
            asked,
            user=self.user or None,
            session_id=self.session_id or asked.session_id,
            priority=self.priority or 0,
            objectives=Objectives.of_ms(self.slo_ttft_ms, self.slo_tpot_ms, self.slo_when_late),
        )

    def retention(self, asked: RetentionSpec) -> RetentionSpec:
        """Complete the part `retention` of a request, of which the route has `asked`."""
        return replace(asked, salt=self.cache_salt, priority=self.cache_priority or 0, ttl_s=self.cache_ttl_s)

    def truncated_to(self) -> Truncation | None:
        """Part of the prompt to keep; None for all of the prompt."""
        if self.truncate_prompt_tokens is None:
            return None
        # -1 is vLLM's word for what fits; how much that is depends on the model's context, which is not known here.
        num_tokens = None if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens
        return Truncation(num_tokens, keeps_end=self.truncation_side != "right")


class SamplingFields(FormatFields, PromptFields):
    """Fields of every request, over HTTP and through the Python handle."""

    max_tokens: Annotated[int, Field(ge=0), INTEGRAL] | None = Field(
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
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID), INTEGRAL] | None = Field(
        default=None, description="Draw from this many likeliest tokens; 0 and -1 mean all."
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, description="Draw from tokens at least this likely, relative to the likeliest."
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), INTEGRAL] | None = Field(
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
            dict[Annotated[TokenId, BeforeValidator(int)], Annotated[float, Field(ge=-100, le=100)]],
            BeforeValidator(_few_biases),
        ]
        | None
    ) = Field(default=None, description="Added to the logits of these token ids.")
    min_tokens: Annotated[int, Field(ge=0), INTEGRAL] | None = Field(
        default=None, description="No stop before this many tokens are generated."
    )
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKEN_LIST)] | None = Field(
        default=None, description="Generate these tokens only; the end of the answer is one of them or none."
    )
    bad_words: BadWords | None = Field(
        default=None,
        description="Words whose last token is not generated where the tokens before it stand; up to 128. Where "
        "`allowed_token_ids` leaves nothing else, the word is generated.",
    )
    logprob_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = Field(
        default=None, description="With `logprobs`: report these tokens in place of the likeliest ones."
    )
    stop: Stops | None = Field(default=None, description="Text that ends the answer: a string or up to 16.")
    include_stop_str_in_output: bool | None = Field(default=None, description="The stop string stays in the text.")
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = Field(
        default=None, description="Tokens that end the answer, besides the model's own."
    )
    ignore_eos: bool | None = Field(default=None, description="Go on after the model's end-of-sequence token.")
    skip_special_tokens: bool | None = Field(
        default=None, description="Leave special tokens out of the text; true. Not false with `store`."
    )
    spaces_between_special_tokens: bool | None = Field(
        default=None,
        description="Spaces between special tokens shown; true. Without them only where the tokenizer puts none.",
    )
    prompt_logprobs: Annotated[int, Field(ge=-1, le=20), INTEGRAL] | None = Field(
        default=None,
        description="Report log-probabilities of the prompt's tokens and of this many likeliest ones; -1: of all.",
    )
    speculation: bool | None = Field(
        default=None, description="false: no drafts for this request; they change its pace, never the answer."
    )
    return_token_ids: bool | None = Field(default=None, description="Return token ids of prompt and answer.")

    def form(self, asked: FormSpec) -> FormSpec:
        """Complete the part `form` of a request, of which the route has `asked`."""
        return replace(
            asked,
            include_stop=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
            spaces_between_special_tokens=self.spaces_between_special_tokens is not False,
            return_token_ids=bool(self.return_token_ids),
        )

    def sampling(self, logprobs: int | None, grammar: Grammar | None = None) -> Sampling:
        """Return the sampling parameters as asked for, with `logprobs` as the route understands that field and the
        grammar of `constraint`."""
        return replace(
            DEFAULT_SAMPLING,
            temperature=_given(self.temperature, DEFAULT_SAMPLING.temperature),
            top_p=_given(self.top_p, DEFAULT_SAMPLING.top_p),
            # 0 and -1 both mean all tokens, by different clients' habit; the sampler knows only None.
            top_k=self.top_k if self.top_k is not None and self.top_k > 0 else None,
            min_p=_given(self.min_p, DEFAULT_SAMPLING.min_p),
            presence_penalty=_given(self.presence_penalty, DEFAULT_SAMPLING.presence_penalty),
            frequency_penalty=_given(self.frequency_penalty, DEFAULT_SAMPLING.frequency_penalty),
            repetition_penalty=_given(self.repetition_penalty, DEFAULT_SAMPLING.repetition_penalty),
            # Sorted, so that equal requests are equal values, whatever the order of their keys.
            logit_bias=tuple(sorted((self.logit_bias or {}).items())),
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(sorted(set(self.allowed_token_ids))),
            logprob_token_ids=tuple(dict.fromkeys(self.logprob_token_ids or ())),
            stop_token_ids=tuple(dict.fromkeys(self.stop_token_ids or ())),
            min_tokens=_given(self.min_tokens, DEFAULT_SAMPLING.min_tokens),
            logprobs=logprobs,
            # Of -1 the number is known with the vocabulary; until then the prompt's own tokens are asked for.
            prompt_logprobs=0 if self.prompt_logprobs == -1 else self.prompt_logprobs,
            grammar=grammar,
            speculation=self.speculation is not False,
        )


class TemplateFields(StrictModel):
    """Wishes for the template of a chat."""

    chat_template: Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEMPLATE_LEN)] | None = Field(
        default=None,
        description="Jinja template in place of the model's; refused unless `model.chat_templates_in_requests` allows.",
    )
    chat_template_kwargs: TemplateArguments | None = Field(
        default=None, description="Further variables of the chat template, such as `enable_thinking`."
    )

    def template(self) -> ChatTemplate:
        """The wishes for the chat's template."""
        if self.chat_template is None and not self.chat_template_kwargs:
            return MODEL_TEMPLATE
        return ChatTemplate(self.chat_template, self.chat_template_kwargs or {})


class ChatFields(TemplateFields):
    """Fields of every chat, over HTTP and through the Python handle."""

    store: bool | None = Field(
        default=None,
        description="Keep the answer's token ids; its message gets an 'id' by which a later chat goes on from them.",
    )
    continue_from_missing: Literal["error", "text"] | None = Field(
        default=None,
        description="What a message with an 'id' comes to that is not kept (any more): an error, which is the default, "
        "or its text.",
    )


class Prediction(StrictModel):
    """The client's guess of an answer."""

    type: Literal["content"] = Field(description="Kind of guess.")
    content: Annotated[str, BeforeValidator(join_content, json_schema_input_type=str | list[TextPart])] = Field(
        description="The guessed text, or a list of text parts."
    )


class ChatPromptFields(ChatFields):
    """Fields of a chat over HTTP and through the Python handle."""

    add_generation_prompt: bool | None = Field(
        default=None, description="The prompt ends with the beginning of an answer; true."
    )
    continue_final_message: bool | None = Field(
        default=None,
        description="Go on with the last message instead of beginning an answer; not with "
        "`add_generation_prompt: true`.",
    )
    echo: bool | None = Field(
        default=None, description="The answer begins with the last message's text where that is of the answer's role."
    )

    input_ids: GivenPrompt | None = Field(
        default=None,
        description="Ids of the whole prompt, in place of what the messages would be rendered to: where a router has "
        "tokenized the chat before. `messages` is still required.",
    )
    prediction: Prediction | None = Field(
        default=None,
        description="A guess of the answer, such as a file before an edit: makes the answer quicker where drafts are "
        "on and the guess is right, and changes no token.",
    )

    def end_of(self, messages: Sequence[Message]) -> ChatEnd:
        """End of the prompt. Raises RequestError where fields or the last message contradict."""
        end = chat_end(self.add_generation_prompt, self.continue_final_message)
        if end is not ChatEnd.ANSWER and self.store:
            name = "continue_final_message" if end is ChatEnd.OPEN else "add_generation_prompt"
            raise RequestError(f"'{name}' is not supported together with 'store'.", param=name)
        last = messages[-1]
        if end is ChatEnd.OPEN and (last.tool_calls or last.is_continued):
            raise RequestError(
                "'continue_final_message' is not supported where the last message has 'tool_calls', 'id' or "
                "'token_ids'.",
                param="continue_final_message",
            )
        return end

    def given_ids(self, messages: Sequence[Message], forwarded: Sequence[int] | None = None) -> tuple[int, ...] | None:
        """The prompt's ids where they are given here or were `forwarded`. Raises RequestError where fields
        contradict."""
        given = self.input_ids if forwarded is None else forwarded
        if given is None:
            return None
        if self.input_ids is not None and tuple(self.input_ids) != tuple(given):
            raise RequestError(
                "'input_ids' and 'kv_transfer_params.prompt_token_ids' differ; give one of them.", param="input_ids"
            )
        if self.store or any(message.is_continued for message in messages):
            name = "store" if self.store else "messages"
            raise RequestError(
                "'input_ids', or 'kv_transfer_params.prompt_token_ids', is not supported together with 'store' or with "
                "messages that have 'id' or 'token_ids'.",
                param=name,
            )
        return tuple(given)
