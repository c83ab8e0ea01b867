"""Blocks of messages: read, and as the messages that chat templates know."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from raydix.engine.api.prompts import MAX_PARTS, Message
from raydix.engine.api.spec import PromptMark
from raydix.engine.api.validation import LenientModel, describe, problem

TTLS = {"5m": 300.0, "1h": 3600.0}  # seconds by the name of a time to live
# Required fields by the type of a block.
FIELDS = {
    "text": ("text",),
    "thinking": ("thinking",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
    "compaction": (),
}
# Role of the only messages that may have a block of this type.
ROLES = {"thinking": "assistant", "tool_use": "assistant", "tool_result": "user"}
ERROR = "Error: "  # stands before the content of a result with `is_error`


def _as_blocks(value: object) -> object:
    """A text as one block; refuses too many blocks, and blocks of other types."""
    return _blocks(value, FIELDS)


def _as_texts(value: object) -> object:
    """Read a value as blocks of text alone, as `_as_blocks` reads blocks of any kind."""
    return _blocks(value, ("text",))


def _blocks(value: object, kinds: Collection[str]) -> object:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise problem(f"must be a string or a list of blocks, got {describe(value)}")
    # Before each block is looked at: a body of a few megabytes may have a million of them.
    if len(value) > MAX_PARTS:
        raise problem(f"must have at most {MAX_PARTS} blocks, got {len(value)}")

    for number, block in enumerate(value):
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str):
            raise problem(f"must have objects with a 'type' as blocks, but block {number} is {describe(block)}")
        if kind not in kinds:
            known = ", ".join(f"'{each}'" for each in kinds)
            raise problem(f"has a block of type {describe(kind)} at {number}; supported here: {known}")
        for name in FIELDS[kind]:
            if block.get(name) is None:
                raise problem(f"has no '{name}' in block {number}")
        if kind == "compaction":
            _require_summary(number, block.get("content"))

    return value


def _require_summary(number: int, content: object) -> None:
    """Refuse a block of a compaction whose content is no summary; null stands for one that failed."""
    if content is not None and not isinstance(content, str):
        raise problem(f"has a compaction in block {number} whose content is {describe(content)} and no text")
    if isinstance(content, str) and not content.strip():
        raise problem(f"has a compaction in block {number} whose summary is empty")


class CacheControl(LenientModel):
    """A mark: the prompt's KV up to here is to be kept."""

    type: Literal["ephemeral"] = Field(description="Kind of mark.")
    ttl: Literal["5m", "1h"] | None = Field(default=None, description="Time to live; 5 minutes.")

    @property
    def ttl_s(self) -> float:
        return TTLS[self.ttl or "5m"]


class Text(LenientModel):
    """A block of text."""

    type: Literal["text"] = Field(description="Kind of block.")
    text: str = Field(description="The text.")
    cache_control: CacheControl | None = Field(default=None, description="A mark at the end of the block.")


Texts = Annotated[list[Text], BeforeValidator(_as_texts, json_schema_input_type=str | list[Text])]


class Block(LenientModel):
    """Part of a message: a text, reasoning, a call of a function, a call's result, or the summary of all before it.
    Unknown fields are ignored: clients send back what other servers' messages had."""

    type: Literal["text", "thinking", "tool_use", "tool_result", "compaction"] = Field(description="Kind of block.")
    text: str = Field(default="", description="Of a text.")
    thinking: str = Field(default="", description="Of reasoning: its text, for templates that render it.")
    id: str = Field(default="", description="Of a call: its name, for the result.")
    name: str = Field(default="", description="Of a call: the function.")
    input: dict[str, Any] = Field(default_factory=dict, description="Of a call: the arguments.")
    tool_use_id: str = Field(default="", description="Of a result: the call's id.")
    content: Texts | None = Field(
        default=None,
        description="Of a result: a text, or a list of text blocks. Of a compaction: the text with which the chat "
        "begins anew; null where there is no summary, and the block has no effect.",
    )
    is_error: bool | None = Field(default=None, description="Of a result: the call failed.")
    cache_control: CacheControl | None = Field(default=None, description="A mark at the end of the block.")


Content = Annotated[list[Block], BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block])]


class Turn(LenientModel):
    """One message of a chat."""

    role: Literal["user", "assistant", "system"] = Field(description="Who speaks.")
    content: Content = Field(description="A text, or a list of blocks.")


def without_lines(texts: Sequence[Text], beginnings: tuple[str, ...]) -> tuple[list[Text], list[str]]:
    """The texts without the lines that begin with one of these words, and the words found. A text without any other
    line is left out with its mark: the text before has the same end."""
    kept, found = [], list[str]()
    for text in texts:
        lines = text.text.splitlines(keepends=True)
        begun = [next((each for each in beginnings if line.startswith(each)), None) for line in lines]
        found += [each for each in begun if each is not None]
        if not any(begun):
            kept.append(text)
        # A text that had nothing but such lines is left out: an empty part would change the prompt.
        elif rest := "".join(line for line, each in zip(lines, begun, strict=True) if each is None):
            kept.append(text.model_copy(update={"text": rest}))
    return kept, found


@dataclass(slots=True)
class _Draft:
    """A message for the chat template."""

    role: str
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    tool_call_id: str | None = None

    @property
    def content(self) -> str:
        return "\n".join(self.texts)

    def message(self) -> Message:
        fields: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            fields["reasoning_content"] = "\n".join(self.reasoning)
        if self.calls:
            fields["tool_calls"] = self.calls
        if self.tool_call_id is not None:
            fields["tool_call_id"] = self.tool_call_id
        return Message.model_validate(fields)


class Transcript:
    """The messages of a chat while they are made of blocks, and the marks among them."""

    def __init__(self) -> None:
        self._drafts: list[_Draft] = []
        self._marks: list[PromptMark] = []

    def add(self, role: str, content: Sequence[Block | Text]) -> None:
        """Add a message. Adjacent texts of one role become one message, with a line break between them."""
        # A message without blocks is one without text; its role counts for the order of the chat.
        if not content:
            self._draft(role)
        for block in content:
            self._add(role, block)
            if block.cache_control is not None:
                self.mark(block.cache_control)

    def mark(self, control: CacheControl) -> None:
        """Mark the end of what was added so far; before the first message there is nothing to keep."""
        if not self._drafts:
            return
        self._marks.append(PromptMark(len(self._drafts) - 1, len(self._drafts[-1].content), control.ttl_s))

    def mark_beginning(self, control: CacheControl) -> None:
        """Mark the beginning of the first message that is not the system's."""
        index = next((index for index, draft in enumerate(self._drafts) if draft.role != "system"), 0)
        self._marks.append(PromptMark(index, 0, control.ttl_s))

    @property
    def messages(self) -> list[Message]:
        return [draft.message() for draft in self._drafts]

    @property
    def marks(self) -> list[PromptMark]:
        """The marks in the order of the prompt."""
        return sorted(self._marks, key=lambda mark: (mark.index, mark.length))

    def _add(self, role: str, block: Block | Text) -> None:
        if isinstance(block, Block) and block.type == "tool_result":
            texts = [part.text for part in block.content or ()]
            if block.is_error:
                # Chat templates have no field for a failure, so the text tells of it.
                texts = [ERROR + "\n".join(texts)]
            # Each result is a message of its own for templates, though Anthropic has it inside a user's message.
            self._drafts.append(_Draft("tool", texts, tool_call_id=block.tool_use_id))
            return

        if isinstance(block, Block) and block.type == "compaction":
            if block.content:
                self._begin_anew(block.content[0].text)
            return

        draft = self._draft(role)
        if isinstance(block, Block) and block.type == "tool_use":
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            draft.calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, Block) and block.type == "thinking":
            draft.reasoning.append(block.thinking)
        else:
            draft.texts.append(block.text)

    def _begin_anew(self, text: str) -> None:
        """Leave out all that was added but the system's messages; `text` is the first message behind these."""
        kept = [index for index, draft in enumerate(self._drafts) if draft.role == "system"]
        places = {index: place for place, index in enumerate(kept)}
        self._drafts = [*(self._drafts[index] for index in kept), _Draft("user", [text])]
        self._marks = [replace(mark, index=places[mark.index]) for mark in self._marks if mark.index in places]

    def _draft(self, role: str) -> _Draft:
        """The last message, which is a new one if the last one has another role."""
        if not self._drafts or self._drafts[-1].role != role:
            self._drafts.append(_Draft(role))
        return self._drafts[-1]
