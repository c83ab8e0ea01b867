"""Bodies of `/v1/responses`.

A field is supported, or a hint without effect, or refused by name; unknown fields, such as next month's client may
send, have no effect either. Beside OpenAI's fields those of `SamplingFields` are supported that need no place in the
response.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field, StringConstraints

from raydix.engine.api.compaction import BY_ROUTE, SUMMARY_TOKENS, asking
from raydix.engine.api.fields import RequestId, SamplingFields, TemplateFields
from raydix.engine.api.formats import Constraint
from raydix.engine.api.grammars import schema_grammar
from raydix.engine.api.known import (
    Ignored,
    KnownEngineFields,
    ServiceTier,
    UnlessEmpty,
    UnlessFalse,
    UnlessTrue,
    Unsupported,
    Verbosity,
)
from raydix.engine.api.normal_form import normal_form
from raydix.engine.api.openai_responses.compaction import CompactionRule
from raydix.engine.api.openai_responses.conversations import ConversationName, Metadata
from raydix.engine.api.openai_responses.items import Item, as_items, messages_of
from raydix.engine.api.openai_responses.tools import ResponseTool, ToolChoice, namespaces_of, server_tools, tool_use
from raydix.engine.api.prompts import Label, Message
from raydix.engine.api.reasoning import Effort
from raydix.engine.api.responses import ID_PREFIXES, Json
from raydix.engine.api.spec import CompactionUse, FormSpec, GenerationSpec, ReasoningUse, ResponseTurn, ServiceSpec
from raydix.engine.api.tools import few_tools
from raydix.engine.api.validation import (
    INTEGRAL,
    MAX_IGNORED,
    NO_RULES,
    BodyRules,
    LenientModel,
    StrictModel,
    hint,
    only,
    parse_body,
)
from raydix.engine.core.errors import RequestError

LOGPROBS = "message.output_text.logprobs"
COMPACTION = "compaction"

ResponseId = Annotated[Label, StringConstraints(pattern=f"^{ID_PREFIXES['responses']}")]


class TextFormat(StrictModel):
    """Form of the text."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="Kind of form.")
    name: str | None = Field(default=None, description="Name of the form.")
    description: str | None = Field(default=None, description="Purpose of the form.")
    schema_: dict[str, Any] | None = Field(default=None, alias="schema", description="Of `json_schema`.")
    strict: bool | None = Field(default=None, description="Hold the schema to OpenAI's rules; false.")


class TextOptions(LenientModel):
    """Form of the text."""

    format: TextFormat | None = Field(default=None, description="The form.")
    verbosity: Verbosity = None


class ResponseStreamOptions(StrictModel):
    """Contents of a stream beside the text."""

    include_obfuscation: Ignored = None


class ReasoningOptions(StrictModel):
    """Wishes for the reasoning before an answer. There is no summary of it."""

    effort: Effort | None = Field(
        default=None,
        description="A hint for chat templates that know it; `none` is kept by all.",
    )
    context: Annotated[Any, hint("auto")] = None
    mode: Annotated[Any, hint("standard")] = None
    summary: Ignored = None
    generate_summary: Ignored = None


class ResponsesRequest(SamplingFields, TemplateFields, KnownEngineFields):
    """Body of `/v1/responses`."""

    model: Label | None = Field(default=None, description="Name of the served model; may be left out.")
    input: Annotated[
        list[Item], Field(min_length=1), FailFast(), BeforeValidator(as_items, json_schema_input_type=str | list[Item])
    ] = Field(description="A text, or a list of messages.")
    instructions: str | None = Field(
        default=None, description="A system message before all others; a later response does not have it."
    )
    previous_response_id: ResponseId | None = Field(
        default=None, description="Of a stored response: go on from exactly its token ids."
    )
    conversation: ConversationName | None = Field(
        default=None,
        description="Of a kept conversation: its items come before the input, and input and answer are added to it.",
    )
    store: bool | None = Field(default=None, description="Store the response; true.")
    max_output_tokens: Annotated[int, Field(ge=1), INTEGRAL] | None = Field(
        default=None, description="Most tokens to generate; the context may end the answer earlier."
    )
    stream: bool | None = Field(
        default=None, description="Send the response as server-sent events while it is generated."
    )
    stream_options: ResponseStreamOptions | None = Field(
        default=None, description="Contents of a stream beside the text."
    )
    include: Annotated[list[str], Field(max_length=32)] | None = Field(
        default=None,
        description=f"`{LOGPROBS}`: log-probabilities of the tokens. Other parts are of tools that no response here "
        "has, and left out.",
    )
    top_logprobs: Annotated[int, Field(ge=0, le=20), INTEGRAL] | None = Field(
        default=None, description="Report this many likeliest tokens at each position."
    )
    metadata: Metadata | None = Field(default=None, description="Up to 16 texts by name, which the response repeats.")
    text: TextOptions | None = Field(default=None, description="With `format`, the form of the answer.")
    tools: Annotated[list[ResponseTool], BeforeValidator(few_tools)] | None = Field(
        default=None,
        description="Functions and custom tools that the answer may call, functions alone or in a `namespace`. Tools "
        "that OpenAI's servers run (`web_search`, `code_interpreter`, ...) are left out, and named in the header "
        "`x-raydix-ignored`.",
    )
    tool_choice: ToolChoice | None = Field(
        default=None,
        description="`auto`, the default where there are tools, leaves calls to the model; `none` has it call nothing, "
        "`required` some function, and an object with a function's name that one.",
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="Whether an answer may have several calls; true. With false it ends with its first."
    )
    reasoning: ReasoningOptions | None = Field(
        default=None, description="Reasoning before the answer, where the model writes any."
    )
    prompt_cache_key: Label | None = Field(default=None, description="OpenAI's routing hint; stands in for session_id.")
    request_id: RequestId | None = Field(
        default=None, description="Name of the request in logs; it goes before the header `x-request-id`."
    )

    context_management: Annotated[list[CompactionRule], Field(max_length=16)] | None = Field(
        default=None,
        description="`compaction`: where the prompt has more than `compact_threshold` tokens, a summary takes the "
        "conversation's place, and stands as an item before the answer.",
    )
    background: bool | None = Field(
        default=None,
        description="Answer at once with a response that is `queued`, and generate it whether the client waits or not: "
        "`GET /v1/responses/{id}` has it. Needs `store`.",
    )
    enable_response_messages: bool | None = Field(
        default=None,
        description="The response has the text and the token ids of prompt and answer: `input_messages` and "
        "`output_messages`.",
    )

    access_programs: Unsupported = None
    background_options: UnlessEmpty = None
    client_metadata: Ignored = None
    image: UnlessEmpty = None
    max_tool_calls: Ignored = None
    moderation: Unsupported = None
    prompt: Unsupported = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    service_tier: ServiceTier = None
    truncation: Annotated[Any, hint("disabled")] = None

    extra_key: Unsupported = None
    include_reasoning: UnlessTrue = None
    media_io_kwargs: UnlessEmpty = None
    mm_processor_kwargs: UnlessEmpty = None
    ngram_corpus_id: Unsupported = None
    previous_input_messages: UnlessEmpty = None

    max_tokens: Unsupported = None
    prompt_logprobs: Unsupported = None
    return_token_ids: UnlessFalse = None
    truncate_prompt_tokens: Unsupported = None
    truncation_side: Unsupported = None
    logprob_token_ids: Unsupported = None
    skip_special_tokens: Annotated[Any, only(True)] = None

    def spec(self) -> GenerationSpec:
        """The request in normal form."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("'stream_options' is only allowed when 'stream' is true.", param="stream_options")

        if self.background and self.store is False:
            raise RequestError("'background' needs a stored response: leave 'store' out.", param="background")

        if self.conversation is not None and self.previous_response_id is not None:
            raise RequestError(
                "'conversation' and 'previous_response_id' cannot be given together.", param="previous_response_id"
            )

        instructions = [Message(role="system", content=self.instructions)] if self.instructions else []
        own = messages_of(self.input)
        turn = ResponseTurn(
            previous=self.previous_response_id,
            is_stored=self.store is not False,
            # Messages of the input alone: those of instructions are not kept for the response that goes on from this
            # one.
            num_own=len(own),
            items=tuple(item.listed() for item in self.input),
            repeated=self._repeated(),
            shows_messages=bool(self.enable_response_messages),
            namespaces=namespaces_of(self.tools or ()),
            num_instructions=len(instructions),
            conversation=self.conversation,
            in_background=bool(self.background),
        )
        asked = GenerationSpec(
            kind="chat",
            api="responses",
            model=self.model,
            tools=tool_use(self.tools or (), self.tool_choice, self.parallel_tool_calls),
            template=self.template(),
            reasoning=ReasoningUse(
                effort=None if self.reasoning is None else self.reasoning.effort,
                param="reasoning.effort",
                is_hint=True,
            ),
            max_tokens=self.max_output_tokens,
            # The API has no error for a limit above the context: the answer ends there as incomplete.
            is_capped=True,
            turn=turn,
            compaction=self._compaction(),
            form=FormSpec(stream=bool(self.stream)),
            # OpenAI's routing hint says what a session says here: these requests share a beginning.
            service=ServiceSpec(session_id=self.prompt_cache_key, request_id=self.request_id),
        )
        spec = normal_form(self, asked, messages=[*instructions, *own], logprobs=self._logprobs())
        return replace(spec, ignored=(*spec.ignored, *self._left_out())[:MAX_IGNORED])

    def form(self, asked: FormSpec) -> FormSpec:
        """Complete the part `form` of a request."""
        return replace(super().form(asked), return_token_ids=bool(self.enable_response_messages))

    def _left_out(self) -> Iterator[str]:
        """Elements of lists without effect: parts that no response has, and tools of OpenAI's servers."""
        for part in self.include or ():
            if part != LOGPROBS:
                yield f"include.{part[:100]}"
        yield from server_tools(self.tools or ())
        for rule in self.context_management or ():
            if rule.type != COMPACTION:
                yield f"context_management.{rule.type}"

    def _compaction(self) -> CompactionUse | None:
        """The way in which the conversation is compacted; None: it never is."""
        given = [rule.compact_threshold for rule in self.context_management or () if rule.type == COMPACTION]
        # Of several rules the first one to be reached decides.
        threshold = min((each for each in given if each is not None), default=None)
        return None if threshold is None else CompactionUse(threshold)

    def constraint(self) -> Constraint | None:
        """Return the grammar that the answer must follow; errors as `FormatFields.constraint`."""
        given, own = super().constraint(), self._constraint()
        if given is not None and own is not None:
            raise RequestError(f"'{given.param}' and 'text.format' cannot be given together.", param="text.format")
        return given or own

    def _constraint(self) -> Constraint | None:
        """The grammar of `text.format`."""
        form = None if self.text is None else self.text.format
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return Constraint(schema_grammar({"type": "object"}, "text.format"), "text.format")
        param = "text.format.schema"
        if form.schema_ is None:
            raise RequestError(f"Missing required parameter: '{param}'.", param=param)
        return Constraint(schema_grammar(form.schema_, param, strict=bool(form.strict)), param)

    def _format(self) -> Json:
        """Form of the text as the response repeats it."""
        if self.text is None or self.text.format is None:
            return {"type": "text"}
        return self.text.format.model_dump(by_alias=True, exclude_none=True)

    def _logprobs(self) -> int | None:
        """Number of alternatives to report; None: no log-probabilities."""
        asked = LOGPROBS in (self.include or ())
        # Text of a call is not text of the answer, and its tokens would have no place in the list.
        if asked and self.tools:
            raise RequestError(f"'include' of '{LOGPROBS}' is not supported together with 'tools'.", param="include")
        return self.top_logprobs or 0 if asked or self.top_logprobs else None

    def _repeated(self) -> Json:
        """Fields that the response repeats, with their defaults."""
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "text": {"format": self._format()},
            "tool_choice": self.tool_choice or "auto",
            "tools": [tool.repeated() for tool in self.tools or ()],
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_logprobs": self.top_logprobs or 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "user": self.user,
        }


class CompactRequest(ResponsesRequest):
    """Body of `/v1/responses/compact`. Send `instructions` and `tools` of the conversation along: its prompt begins
    with them, and what it begins with is found in the cache."""

    input: Annotated[
        list[Item],
        FailFast(),
        BeforeValidator(
            lambda value: [] if value is None else as_items(value), json_schema_input_type=str | list[Item]
        ),
    ] = Field(default=[], description="The conversation, or its part behind `previous_response_id`.")

    def spec(self) -> GenerationSpec:
        """The request for the summary in normal form."""
        if not self.input and self.previous_response_id is None:
            raise RequestError("Missing required parameter: 'input' or 'previous_response_id'.", param="input")
        spec = asking(super().spec(), BY_ROUTE)
        # A summary that is as long as the conversation would save nothing.
        return replace(spec, max_tokens=min(self.max_output_tokens or SUMMARY_TOKENS, SUMMARY_TOKENS))


def parse_compact(body: bytes, rules: BodyRules = NO_RULES) -> GenerationSpec:
    """A body of `/v1/responses/compact` in normal form: a request for the summary. Raises RequestError naming the field
    at fault."""
    return parse_body(CompactRequest, body, takes_unknown=True).spec()


def parse_input_tokens(body: bytes, rules: BodyRules = NO_RULES) -> GenerationSpec:
    """A body of `/v1/responses/input_tokens` in normal form. Raises RequestError naming the field at fault."""
    spec = parse_responses(body, rules)
    # Counting must not make a summary, which would be generated and change the number.
    return replace(spec, max_tokens=0, compaction=None)


def parse_responses(body: bytes, rules: BodyRules = NO_RULES) -> GenerationSpec:
    """A body of `/v1/responses` in normal form. Raises RequestError naming the field at fault."""
    return parse_body(ResponsesRequest, body, takes_unknown=True).spec()
