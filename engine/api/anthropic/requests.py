"""Bodies of `/v1/messages` and `/v1/messages/count_tokens`.

A field is supported, or a hint without effect, or refused by name; unknown fields, such as next month's client may
send, have no effect either. Beside Anthropic's fields those of `SamplingFields` are supported that do not stand for one
of Anthropic's and need no place in the answer.
"""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field, StringConstraints

from raydix.engine.api.anthropic.blocks import ROLES, CacheControl, Texts, Transcript, Turn, without_lines
from raydix.engine.api.anthropic.context_management import ContextManagement, WholeCompaction
from raydix.engine.api.anthropic.tools import ToolChoice, ToolDefinition, few_tools, server_tools, tool_use
from raydix.engine.api.fields import SamplingFields, Stops, TemplateFields
from raydix.engine.api.formats import Constraint
from raydix.engine.api.grammars import schema_grammar
from raydix.engine.api.known import Ignored, KnownEngineFields, ServiceTier, UnlessEmpty, UnlessFalse, Unsupported
from raydix.engine.api.normal_form import normal_form
from raydix.engine.api.prompts import Label, few_messages
from raydix.engine.api.spec import CompactionUse, FormSpec, GenerationSpec, ReasoningUse, RetentionSpec, ServiceSpec
from raydix.engine.api.validation import (
    INTEGRAL,
    MAX_IGNORED,
    NO_RULES,
    BodyRules,
    LenientModel,
    StrictModel,
    hint,
    parse_body,
)
from raydix.engine.core.answers.prompt_form import ChatEnd
from raydix.engine.core.errors import RequestError

MAX_MARKS = 4


class Metadata(LenientModel):
    """Facts about a request."""

    user_id: Annotated[str, StringConstraints(max_length=512)] | None = Field(default=None, description="Who asks.")


class Diagnostics(LenientModel):
    """A question about the cache."""

    previous_message_id: Annotated[str, StringConstraints(max_length=256)] | None = Field(
        default=None, description="Id of this client's message before."
    )


class OutputFormat(LenientModel):
    """Form of the answer."""

    type: Literal["json_schema"] = Field(description="Kind of form.")
    schema_: dict[str, Any] = Field(alias="schema", description="The schema.")


class OutputConfig(StrictModel):
    """Demands on the answer."""

    format: OutputFormat | None = Field(default=None, description="Form of the answer.")
    effort: Annotated[str, StringConstraints(max_length=32)] | None = Field(
        default=None,
        description="A hint: for chat templates with a variable `reasoning_effort`. Thinking that is `disabled` goes "
        "before it.",
    )
    task_budget: Ignored = None


class Thinking(StrictModel):
    """Wishes for the reasoning before an answer."""

    type: Literal["enabled", "adaptive", "disabled"] = Field(
        description="`disabled`: none, where the chat template can be told; otherwise the model decides."
    )
    budget_tokens: Annotated[int, Field(ge=1), INTEGRAL] | None = Field(
        default=None, description="The end of the reasoning is forced behind so many tokens; by default never."
    )
    display: Ignored = None

    def use(self) -> ReasoningUse:
        """Return the wishes in normal form."""
        is_off = self.type == "disabled"
        return ReasoningUse(
            is_shown=not is_off,
            effort="none" if is_off else None,
            param="thinking",
            max_tokens=self.budget_tokens,
            limit_param="thinking.budget_tokens",
        )


class ChatBody(SamplingFields, TemplateFields, KnownEngineFields):
    """Fields of both routes."""

    model: Label | None = Field(default=None, description="Name of the served model; may be left out.")
    messages: Annotated[list[Turn], Field(min_length=1), FailFast(), BeforeValidator(few_messages)] = Field(
        description="The chat so far. Adjacent messages of one role are one; an assistant's last one is gone on with."
    )
    system: Texts | None = Field(default=None, description="A system message before the chat.")
    cache_control: CacheControl | None = Field(default=None, description="A mark at the end of the last message.")

    tools: Annotated[list[ToolDefinition], BeforeValidator(few_tools)] | None = Field(
        default=None, description="Functions that the answer may call."
    )
    tool_choice: ToolChoice | None = Field(
        default=None,
        description="`auto`, the default where there are tools, leaves calls to the model; `none` has it call nothing, "
        "`any` some function, and `tool` the function of this `name`.",
    )
    thinking: Thinking | None = Field(
        default=None,
        description="Reasoning before the answer, where the model writes any.",
    )
    output_config: OutputConfig | None = Field(
        default=None, description="With `format`, a JSON schema that the answer follows."
    )
    context_management: ContextManagement | None = Field(
        default=None, description="Edits of the chat before the model sees it; the answer tells what they left out."
    )
    compaction: WholeCompaction | None = Field(
        default=None, description="The answer is a summary alone, which may stand in the chat's place."
    )
    output_format: Unsupported = None
    billing_policy: Ignored = None
    fallback_credit_token: Ignored = None
    fallbacks: UnlessEmpty = None
    mcp_servers: UnlessEmpty = None
    speed: Annotated[Any, hint("standard")] = None

    truncate_prompt_tokens: Unsupported = None
    truncation_side: Unsupported = None
    logprob_token_ids: Unsupported = None

    def chat(self, rules: BodyRules) -> GenerationSpec:
        """The chat in normal form, without a limit of its answer. Raises RequestError for messages that add nothing to
        the prompt, or that end with calls."""
        transcript, left_out = self._transcript(rules.volatile_lines)
        messages = transcript.messages
        # A block of a summary that failed adds nothing, and to a prompt of nothing there is no answer.
        if not messages:
            raise RequestError(
                "'messages' has nothing but blocks 'compaction' whose 'content' is null.", param="messages"
            )
        # A summary is an answer of its own, whoever has spoken last.
        continues = messages[-1].role == "assistant" and self.compaction is None
        # The API gives no sense to going on behind a call: its results come from the client, in the next message.
        if messages[-1].tool_calls:
            raise RequestError("'messages' ends with calls, and must go on with their results.", param="messages")
        editing = self.context_management
        asked = GenerationSpec(
            kind="chat",
            api="messages",
            model=self.model,
            tools=tool_use(self.tools or (), self.tool_choice),
            template=self.template(),
            reasoning=self._reasoning() or ReasoningUse(),
            chat_end=ChatEnd.OPEN if continues else ChatEnd.ANSWER,
            edits=None if editing is None else editing.normal(),
            compaction=self._compaction(),
            retention=RetentionSpec(marks=tuple(transcript.marks)),
        )
        spec = normal_form(self, asked, messages=messages)
        unused = [*server_tools(self.tools or ()), *left_out, *(() if editing is None else editing.left_out())]
        return replace(spec, ignored=(*spec.ignored, *unused)[:MAX_IGNORED])

    def _compaction(self) -> CompactionUse | None:
        """The way in which a summary takes the chat's place; None: it never does."""
        if self.compaction is None:
            return None if self.context_management is None else self.context_management.compaction()
        if self.context_management is not None:
            raise RequestError("'compaction' and 'context_management' cannot be given together.", param="compaction")
        return self.compaction.normal()

    def _reasoning(self) -> ReasoningUse | None:
        """The wishes for reasoning in normal form."""
        use = None if self.thinking is None else self.thinking.use()
        effort = None if self.output_config is None else self.output_config.effort
        # Thinking that is switched off wins over a wished effort: the two fields come from different parts of a client.
        if effort is None or (use is not None and use.effort is not None):
            return use
        return replace(use or ReasoningUse(), effort=effort, param="output_config.effort", is_hint=True)

    def constraint(self) -> Constraint | None:
        """Return the grammar that the answer must follow; errors as `FormatFields.constraint`."""
        given = super().constraint()
        if self.output_config is None or self.output_config.format is None:
            return given
        param = "output_config.format.schema"
        # Two grammars would have to be satisfied at once; which one the client means cannot be known.
        if given is not None:
            raise RequestError(f"'{given.param}' and '{param}' cannot be given together.", param=param)
        return Constraint(schema_grammar(self.output_config.format.schema_, param), param)

    def _transcript(self, volatile_lines: tuple[str, ...]) -> tuple[Transcript, list[str]]:
        """The messages as chat templates know them, with the marks, and the names of the system's lines that are left
        out. Raises RequestError for too many marks."""
        transcript = Transcript()
        system, lines = without_lines(self.system or (), volatile_lines)
        # A system message of which nothing is left is none; one that the client sent empty stays, as templates may
        # tell.
        if system or (self.system is not None and not lines):
            transcript.add("system", system)
        for index, turn in enumerate(self.messages):
            _require_place(index, turn)
            transcript.add(turn.role, turn.content)

        # Tools stand at the beginning of the prompt, so a mark on any of them is one there.
        for tool in self.tools or ():
            if tool.cache_control is not None:
                transcript.mark_beginning(tool.cache_control)
        if self.cache_control is not None:
            transcript.mark(self.cache_control)
        if len(transcript.marks) > MAX_MARKS:
            raise RequestError(
                f"At most {MAX_MARKS} blocks may have a 'cache_control', got {len(transcript.marks)}.",
                param="cache_control",
            )
        return transcript, [f"system.{line}" for line in lines]


def _require_place(index: int, turn: Turn) -> None:
    """Raise RequestError for a block that a message of this role cannot have."""
    for number, block in enumerate(turn.content):
        if ROLES.get(block.type, turn.role) != turn.role:
            param = f"messages[{index}].content[{number}]"
            raise RequestError(
                f"'{param}' is of type '{block.type}', which messages of role '{turn.role}' cannot have.", param=param
            )


class MessagesRequest(ChatBody):
    """Body of `/v1/messages`."""

    max_tokens: Annotated[int, Field(ge=0), INTEGRAL] = Field(
        description="Most tokens to generate; the context may end the answer earlier. 0 computes the prompt only."
    )
    stop_sequences: Stops | None = Field(default=None, description="Up to 16 texts, each of which ends the answer.")
    stream: bool | None = Field(
        default=None, description="Send the answer as server-sent events while it is generated."
    )
    metadata: Metadata | None = Field(default=None, description="With `user_id`, who asks.")
    diagnostics: Diagnostics | None = Field(
        default=None, description="The answer tells why the prompt did not hit all of an earlier message's."
    )

    service_tier: ServiceTier = None
    inference_geo: Ignored = None
    container: Unsupported = None
    thread: Unsupported = None

    stop: Unsupported = None
    include_stop_str_in_output: UnlessFalse = None
    user: Unsupported = None
    prompt_logprobs: Unsupported = None
    return_token_ids: UnlessFalse = None

    def form(self, asked: FormSpec) -> FormSpec:
        """Complete the part `form` of a request."""
        return replace(super().form(asked), stream=bool(self.stream))

    def service(self, asked: ServiceSpec) -> ServiceSpec:
        """Complete the part `service` of a request."""
        return replace(super().service(asked), user=(self.metadata and self.metadata.user_id) or None)

    def spec(self, rules: BodyRules = NO_RULES) -> GenerationSpec:
        """The request in normal form."""
        return replace(
            self.chat(rules),
            max_tokens=self.max_tokens,
            is_capped=True,
            stop=tuple(dict.fromkeys(self.stop_sequences or ())),
            previous_message=None if self.diagnostics is None else self.diagnostics.previous_message_id,
        )


class CountRequest(ChatBody):
    """Body of `/v1/messages/count_tokens`."""

    def spec(self, rules: BodyRules = NO_RULES) -> GenerationSpec:
        """The chat in normal form. Counting makes no summary."""
        return replace(self.chat(rules), max_tokens=0, compaction=None)


def parse_messages(body: bytes, rules: BodyRules = NO_RULES) -> GenerationSpec:
    """A body of `/v1/messages` in normal form. Raises RequestError naming the field at fault."""
    return parse_body(MessagesRequest, body, takes_unknown=True).spec(rules)


def parse_count(body: bytes, rules: BodyRules = NO_RULES) -> GenerationSpec:
    """A body of `/v1/messages/count_tokens` in normal form. Raises RequestError naming the field at fault."""
    return parse_body(CountRequest, body, takes_unknown=True).spec(rules)
