"""Items of a request's input: read, as chat templates know them, and as the API lists them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import orjson
from pydantic import BeforeValidator, Field

from raydix.engine.api.openai_responses.compaction import text_of
from raydix.engine.api.openai_responses.tools import flat_name
from raydix.engine.api.prompts import MAX_MESSAGES, MAX_PARTS, Message
from raydix.engine.api.responses import Json
from raydix.engine.api.validation import LenientModel, describe, problem
from raydix.engine.core.ingress.parsers.custom import arguments_of

TEXT_PARTS = ("input_text", "output_text", "reasoning_text", "text")
# Required fields by the type of an item.
FIELDS: Mapping[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "reasoning": (),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
    "compaction": ("encrypted_content",),
}
RESULTS = ("function_call_output", "custom_tool_call_output")  # items with the results of calls


def as_items(value: object) -> object:
    """A text as one message; refuses too many items, and items of other types."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise problem(f"must be a string or a list of items, got {describe(value)}")
    if len(value) > MAX_MESSAGES:
        raise problem(f"must have at most {MAX_MESSAGES} items, got {len(value)}")

    # Checked before pydantic reads them: its errors would name fields of a union and not the item at fault.
    for number, item in enumerate(value):
        if not isinstance(item, dict):
            raise problem(f"must have objects as items, but item {number} is {describe(item)}")
        kind = item.get("type", "message")
        if not isinstance(kind, str) or kind not in FIELDS:
            known = ", ".join(f"'{each}'" for each in FIELDS)
            raise problem(f"has an item of type {describe(kind)} at {number}; supported are {known}")
        for name in FIELDS[kind]:
            if item.get(name) is None:
                raise problem(f"has no '{name}' in item {number}")
        # A summary of another server cannot be read here, and leaving it out would lose all that it stands for.
        if kind == "compaction" and text_of(str(item["encrypted_content"])) is None:
            raise problem(f"has a compaction in item {number} that no raydix server has made")

    return value


def _joined(value: object) -> object:
    """A list of text parts as one text, a line each."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise problem(f"must be a string or a list of parts, got {describe(value)}")
    if len(value) > MAX_PARTS:
        raise problem(f"must have at most {MAX_PARTS} parts, got {len(value)}")

    texts = []
    for number, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS:
            shown = describe(part) if kind is None else f"of type {describe(kind)}"
            raise problem(f"has a part at {number} that is {shown}; only texts are supported")
        if not isinstance(part.get("text"), str):
            raise problem(f"must have a 'text' in part {number}")
        texts.append(part["text"])

    return "\n".join(texts)


class ItemText(LenientModel):
    """A text of a message."""

    type: Literal["input_text", "output_text", "reasoning_text", "text"] = Field(description="Kind of part.")
    text: str = Field(description="The text.")


Content = Annotated[str, BeforeValidator(_joined, json_schema_input_type=str | list[ItemText])]


class Item(LenientModel):
    """Part of the input: a message, reasoning, a call of a function or custom tool, or a call's result. Unknown fields
    are ignored: clients send back what earlier responses had."""

    type: Literal[
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "compaction",
    ] = Field(default="message", description="Kind of item.")
    role: Literal["user", "assistant", "system", "developer"] | None = Field(
        default=None, description="Of a message: who speaks."
    )
    content: Content | None = Field(
        default="",
        description="Of a message, or of reasoning for templates that render it: a text, or its parts.",
    )
    call_id: str = Field(default="", description="Of a call and its result: the call's name.")
    name: str = Field(default="", description="Of a call: the function.")
    namespace: str = Field(default="", description="Of a call: the namespace of the function.")
    arguments: str = Field(default="", description="Of a call: its arguments, as JSON in a text.")
    input: str = Field(default="", description="Of a custom tool's call: its input.")
    encrypted_content: str | None = Field(
        default=None, description="Of a compaction: its content; the items before it but the system's are left out."
    )
    output: Content = Field(default="", description="Of a result: a text, or a list of text parts.")

    def listed(self) -> bytes:
        """The item as `/v1/responses/{id}/input_items` lists it, without an id, as JSON."""
        return orjson.dumps(self._listed())

    def _listed(self) -> Json:
        item: Json = {"type": self.type, "status": "completed"}
        if self.type == "compaction":
            return {"type": self.type, "encrypted_content": self.encrypted_content}
        if self.type == "function_call":
            namespace = {"namespace": self.namespace} if self.namespace else {}
            return item | {"call_id": self.call_id, "name": self.name, **namespace, "arguments": self.arguments}
        if self.type == "custom_tool_call":
            return item | {"call_id": self.call_id, "name": self.name, "input": self.input}
        if self.type in RESULTS:
            return item | {"call_id": self.call_id, "output": self.output}

        if self.type == "reasoning":
            return item | {"summary": [], "content": [{"type": "reasoning_text", "text": self.content or ""}]}

        is_answer = self.role == "assistant"
        part: Json = {"type": "output_text" if is_answer else "input_text", "text": self.content}
        if is_answer:
            part |= {"annotations": [], "logprobs": []}
        return item | {"role": self.role, "content": [part]}


def messages_of(items: Sequence[Item]) -> list[Message]:
    """The messages for the chat template: calls belong to the assistant's message before them, reasoning to the one
    behind. A compaction is a message of the user, and before the last one only the system's messages count."""
    last = max((index for index, item in enumerate(items) if item.type == "compaction"), default=None)
    if last is not None:
        items = [*(item for item in items[:last] if item.role in ("system", "developer")), *items[last:]]
    messages: list[dict[str, Any]] = []
    is_thought = False
    """True behind reasoning, with which the assistant's message has begun."""
    is_anew = False
    """True behind a compaction, with whose message the next one of the user is joined."""
    for item in items:
        was_anew, is_anew = is_anew, item.type == "compaction"
        if item.type == "compaction":
            messages.append({"role": "user", "content": text_of(item.encrypted_content or "")})
            continue
        # Templates may refuse two messages of the user in a row, so the summary and the next question are one message.
        if was_anew and item.type == "message" and item.role == "user":
            messages[-1]["content"] += f"\n\n{item.content}"
            continue
        begins, is_thought = not is_thought, False
        if item.type == "reasoning":
            if item.content:
                messages.append({"role": "assistant", "content": "", "reasoning_content": item.content})
                is_thought = True
        elif item.type in RESULTS:
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
        elif item.type == "message":
            # Reasoning has begun the assistant's message already: its text goes into the same one.
            if begins or item.role != "assistant":
                messages.append({"role": item.role})
            messages[-1]["content"] = item.content
        else:
            # A call without a text before it belongs to a message of its own, which has no text.
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            name = flat_name(item.namespace, item.name) if item.namespace else item.name
            is_custom = item.type == "custom_tool_call"
            function = {"name": name, "arguments": arguments_of(item.input) if is_custom else item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
    return [Message.model_validate(message) for message in messages]


# Items as they are kept


KeptItems: TypeAlias = Mapping[str, bytes]
"""Items as the API lists them, in their order: each as JSON, by its id. They are kept, listed and given back without
being read."""


def with_ids(items: Iterable[bytes], unique: str) -> dict[str, bytes]:
    """Items (`Item.listed`) with ids, of which `unique` is a part."""
    named = ((f"msg_{unique}_{number}", item) for number, item in enumerate(items))
    # The id goes before the other fields of the object.
    return {item_id: b'{"id":"%s",%s' % (item_id.encode(), item[1:]) for item_id, item in named}


def lines_of(items: KeptItems) -> list[bytes]:
    """A line for each item: its id, a space, and its JSON."""
    return [b"%s %s" % (item_id.encode(), data) for item_id, data in items.items()]


def items_of(lines: Iterable[bytes]) -> dict[str, bytes]:
    """The items that `lines_of` made the lines of."""
    return {item_id.decode(): data for item_id, _, data in (line.partition(b" ") for line in lines)}


def list_body(items: KeptItems, *, has_more: bool = False) -> bytes:
    """A list of the API with these items."""
    ids = [*items]
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    data = [orjson.Fragment(item) for item in items.values()]
    return orjson.dumps({"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": has_more})
