"""Bodies of `/v1/messages` and `/v1/messages/count_tokens`.

As for OpenAI's routes, a field is supported, or harmless and ignored, or refused by name. Beside Anthropic's fields
those of `SamplingFields` are supported that do not stand for one of Anthropic's and need no place in the answer.
"""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field, StringConstraints

from engine.api.anthropic.blocks import ROLES, CacheControl, Texts, Transcript, Turn
from engine.api.anthropic.tools import ToolChoice, ToolDefinition, few_tools, tool_use
from engine.api.fields import SamplingFields, Stops
from engine.api.formats import Constraint
from engine.api.grammars import schema_grammar
from engine.api.known import Ignored, KnownEngineFields, UnlessEmpty, UnlessFalse, Unsupported
from engine.api.normal_form import build_spec
from engine.api.prompts import Label, few_messages
from engine.api.spec import GenerationSpec, ReasoningUse
from engine.api.validation import INTEGRAL, LenientModel, StrictModel, only, parse_body
from engine.core.answers.prompt_form import ChatEnd
from engine.core.errors import RequestError

MAX_MARKS = 4


class Metadata(LenientModel):
    """Facts about a request."""

    user_id: Annotated[str, StringConstraints(max_length=512)] | None = Field(default=None, description="Who asks.")


class OutputFormat(LenientModel):
    """Form of the answer."""

    type: Literal["json_schema"] = Field(description="Kind of form.")
    schema_: dict[str, Any] = Field(alias="schema", description="The schema.")


class OutputConfig(StrictModel):
    """Demands on the answer."""

    format: OutputFormat | None = Field(default=None, description="Form of the answer.")
    effort: Unsupported = None
    task_budget: Unsupported = None


class Thinking(StrictModel):
    """Wishes for the reasoning before an answer."""

    type: Literal["enabled", "adaptive", "disabled"] = Field(
        description="`disabled`: none, where the chat template can be told; otherwise the model decides."
    )
    budget_tokens: Annotated[int, Field(ge=1), INTEGRAL] | None = Field(
        default=None, description="The end of the reasoning is forced behind so many tokens; by default never."
    )
    display: Annotated[Any, only("summarized")] = None

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


class ChatBody(SamplingFields, KnownEngineFields):
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
    output_format: Unsupported = None
    billing_policy: Ignored = None
    compaction: Unsupported = None
    context_management: Unsupported = None
    fallback_credit_token: Ignored = None
    fallbacks: UnlessEmpty = None
    mcp_servers: UnlessEmpty = None
    speed: Ignored = None

    chat_template_kwargs: UnlessEmpty = None
    truncate_prompt_tokens: Unsupported = None
    truncation_side: Unsupported = None
    logprob_token_ids: Unsupported = None

    def chat(self) -> GenerationSpec:
        """The chat in normal form, without a limit of its answer."""
        transcript = self._transcript()
        messages = transcript.messages
        continues = messages[-1].role == "assistant"
        if messages[-1].tool_calls:
            raise RequestError("'messages' ends with calls, and must go on with their results.", param="messages")
        spec = build_spec(
            self,
            kind="chat",
            model=self.model,
            messages=messages,
            tools=tool_use(self.tools or (), self.tool_choice),
            reasoning=None if self.thinking is None else self.thinking.use(),
            max_tokens=None,
            logprobs=None,
            chat_end=ChatEnd.OPEN if continues else ChatEnd.ANSWER,
        )
        return replace(spec, api="messages", marks=tuple(transcript.marks))

    def constraint(self) -> Constraint | None:
        """Return the grammar that the answer must follow; errors as `FormatFields.constraint`."""
        given = super().constraint()
        if self.output_config is None or self.output_config.format is None:
            return given
        param = "output_config.format.schema"
        if given is not None:
            raise RequestError(f"'{given.param}' and '{param}' cannot be given together.", param=param)
        return Constraint(schema_grammar(self.output_config.format.schema_, param), param)

    def _transcript(self) -> Transcript:
        """The messages as chat templates know them, with the marks. Raises RequestError for too many marks."""
        transcript = Transcript()
        if self.system is not None:
            transcript.add("system", self.system)
        for index, turn in enumerate(self.messages):
            _require_place(index, turn)
            transcript.add(turn.role, turn.content)

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
        return transcript


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

    service_tier: Ignored = None
    inference_geo: Ignored = None
    container: Unsupported = None
    diagnostics: Unsupported = None
    thread: Unsupported = None

    stop: Unsupported = None
    include_stop_str_in_output: UnlessFalse = None
    user: Unsupported = None
    prompt_logprobs: Unsupported = None
    return_token_ids: UnlessFalse = None

    def spec(self) -> GenerationSpec:
        """The request in normal form."""
        return replace(
            self.chat(),
            max_tokens=self.max_tokens,
            is_capped=True,
            stop=tuple(dict.fromkeys(self.stop_sequences or ())),
            stream=bool(self.stream),
            user=(self.metadata and self.metadata.user_id) or None,
        )


class CountRequest(ChatBody):
    """Body of `/v1/messages/count_tokens`."""

    def spec(self) -> GenerationSpec:
        """The chat in normal form."""
        return replace(self.chat(), max_tokens=0)


def parse_messages(body: bytes) -> GenerationSpec:
    """A body of `/v1/messages` in normal form. Raises RequestError naming the field at fault."""
    return parse_body(MessagesRequest, body).spec()


def parse_count(body: bytes) -> GenerationSpec:
    """A body of `/v1/messages/count_tokens` in normal form. Raises RequestError naming the field at fault."""
    return parse_body(CountRequest, body).spec()
