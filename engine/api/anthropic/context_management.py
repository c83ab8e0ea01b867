"""`context_management`: edits of the chat that the client asks for, and what the answer says of them."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints

from raydix.engine.api.context_edits import ClearThinking, ClearToolUses, ContextEdits, Edit
from raydix.engine.api.responses import Json
from raydix.engine.api.spec import CompactionUse
from raydix.engine.api.validation import INTEGRAL, LenientModel, describe, problem

MAX_EDITS = 16
MAX_NAMES = 256
COMPACT = "compact_20260112"  # type of the edit by which a summary takes the chat's place
MIN_TRIGGER = 50_000  # Anthropic's lowest trigger of a compaction, in tokens

Count = Annotated[int, Field(ge=0), INTEGRAL]
FunctionNames = Annotated[list[Annotated[str, StringConstraints(max_length=128)]], Field(max_length=MAX_NAMES)]


class Trigger(LenientModel):
    """A size above which an edit begins."""

    type: Literal["input_tokens", "tool_uses"] = Field(description="Tokens of the prompt, or calls in it.")
    value: Count = Field(description="The size.")


class ToolUsesKept(LenientModel):
    """Number of last calls."""

    type: Literal["tool_uses"] = Field(description="Kind of number.")
    value: Count = Field(description="The number.")


class ClearedAtLeast(LenientModel):
    """Number of tokens."""

    type: Literal["input_tokens"] = Field(description="Kind of number.")
    value: Count = Field(description="The number.")


class TurnsKept(LenientModel):
    """Turns whose reasoning stays."""

    type: Literal["thinking_turns", "all"] = Field(description="A number of last turns, or all.")
    value: Annotated[int, Field(ge=1), INTEGRAL] | None = Field(default=None, description="Of `thinking_turns`.")


def _kept(value: object) -> object:
    """The word for all turns as an object."""
    return {"type": "all"} if value == "all" else value


class ContextEdit(LenientModel):
    """One edit. One of another type has no effect, and is named in the header `x-raydix-ignored`."""

    type: Annotated[str, StringConstraints(max_length=64)] = Field(
        description="`clear_tool_uses_20250919` leaves out the results of old calls, `clear_thinking_20251015` old "
        "reasoning, and with `compact_20260112` a summary takes the chat's place."
    )
    trigger: Trigger | None = Field(
        default=None,
        description="Of `clear_tool_uses`: the size above which it begins; 100,000 tokens. Of `compact`: tokens of the "
        "prompt, 50,000 at least; 150,000, or three quarters of the context where that is less.",
    )
    keep: Annotated[
        ToolUsesKept | TurnsKept | None,
        BeforeValidator(_kept, json_schema_input_type=ToolUsesKept | TurnsKept | Literal["all"] | None),
    ] = Field(default=None, description="The last calls whose results stay, 3; or turns whose reasoning stays, 1.")
    clear_at_least: ClearedAtLeast | None = Field(
        default=None, description="Of `clear_tool_uses`: where fewer tokens would be left out, all stay."
    )
    exclude_tools: FunctionNames | None = Field(
        default=None, description="Of `clear_tool_uses`: functions whose results stay."
    )
    clear_tool_inputs: bool | FunctionNames | None = Field(
        default=None,
        description="Of `clear_tool_uses`: the arguments are left out, too; or the functions of which they are.",
    )
    instructions: str | None = Field(
        default=None, description="Of `compact`: asks for the summary, in place of raydix's own words."
    )
    pause_after_compaction: bool | None = Field(
        default=None, description="Of `compact`: the answer ends behind the summary; false."
    )

    def compaction(self) -> CompactionUse | None:
        """The compaction in normal form; None for an edit of another type."""
        if self.type != COMPACT:
            return None
        threshold = None if self.trigger is None else self.trigger.value
        return compaction_use(threshold, self.instructions, ends_answer=bool(self.pause_after_compaction))

    def normal(self) -> Edit | None:
        """The edit in normal form; None for one of another type."""
        if self.type == ClearThinking.name:
            if self.keep is None:
                return ClearThinking()
            if isinstance(self.keep, ToolUsesKept):
                return None
            return ClearThinking(None if self.keep.type == "all" else self.keep.value or 1)
        if self.type != ClearToolUses.name:
            return None
        inputs = self.clear_tool_inputs
        trigger = self.trigger or Trigger(type="input_tokens", value=100_000)
        return ClearToolUses(
            trigger=trigger.type,
            above=trigger.value,
            keep=self.keep.value if isinstance(self.keep, ToolUsesKept) else 3,
            clear_at_least=0 if self.clear_at_least is None else self.clear_at_least.value,
            excluded=tuple(self.exclude_tools or ()),
            cleared_inputs=tuple(inputs) if isinstance(inputs, list) else bool(inputs),
        )


def _consistent(edits: list[ContextEdit]) -> list[ContextEdit]:
    """Refuse a `keep` of the other edit's kind, a compaction of short chats, and a second edit of a type: each edit has
    the prompt counted."""
    types = [edit.type for edit in edits if edit.type in (ClearThinking.name, ClearToolUses.name, COMPACT)]
    if len(types) > len(set(types)):
        raise problem("must have one edit of a type at most")
    for number, edit in enumerate(edits):
        wanted = {ClearThinking.name: TurnsKept, ClearToolUses.name: ToolUsesKept}.get(edit.type)
        if wanted is not None and edit.keep is not None and not isinstance(edit.keep, wanted):
            raise problem(f"has a 'keep' at {number} of type {describe(edit.keep.type)}, which '{edit.type}' has not")
        if edit.type != COMPACT or edit.trigger is None:
            continue
        if edit.trigger.type != "input_tokens" or edit.trigger.value < MIN_TRIGGER:
            raise problem(
                f"has a 'trigger' at {number} of {edit.trigger.value} {edit.trigger.type}, but '{COMPACT}' takes "
                f"{MIN_TRIGGER} input_tokens or more"
            )
    return edits


class ContextManagement(LenientModel):
    """Edits of the chat."""

    edits: Annotated[list[ContextEdit], Field(max_length=MAX_EDITS), AfterValidator(_consistent)] | None = Field(
        default=None, description="The edits in their order."
    )

    def normal(self) -> tuple[Edit, ...]:
        return tuple(edit for each in self.edits or () if (edit := each.normal()) is not None)

    def compaction(self) -> CompactionUse | None:
        """The compaction in normal form, if there is one."""
        return next((use for each in self.edits or () if (use := each.compaction()) is not None), None)

    def left_out(self) -> Iterator[str]:
        """Names, as paths in the body, of the edits without effect."""
        for each in self.edits or ():
            if each.normal() is None and each.type != COMPACT:
                yield f"context_management.edits.{each.type}"


class WholeCompaction(LenientModel):
    """A compaction for its own sake."""

    type: Literal["summarize"] = Field(description="Kind of compaction.")
    instructions: str | None = Field(default=None, description="Asks for the summary, in place of raydix's own words.")

    def normal(self) -> CompactionUse:
        """The compaction in normal form."""
        return compaction_use(0, self.instructions, ends_answer=True)


def compaction_use(threshold: int | None, instructions: str | None, *, ends_answer: bool) -> CompactionUse:
    """A compaction as Anthropic has it: of all but the system's messages. White space asks for nothing."""
    asked = instructions if instructions and not instructions.isspace() else None
    return CompactionUse(threshold, keeps_words=False, instructions=asked, ends_answer=ends_answer)


def edits_json(edits: ContextEdits) -> Json:
    """The edits as an answer reports them."""
    return {"applied_edits": [each.as_json() for each in edits.applied]}


def original_json(edits: ContextEdits, num_tokens: int) -> Json:
    """The edits as a count of tokens reports them."""
    return {"original_input_tokens": num_tokens if edits.original_tokens is None else edits.original_tokens}
