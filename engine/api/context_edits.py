"""Edits of a chat before its prompt is made: results of old tool calls and old reasoning are left out.

The edits are a function of the chat as the client sends it, so that the same chat always comes to the same prompt. The
client goes on sending everything; `EditEffect` tells it what the model did not see.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

CLEARED = "[Old tool result content cleared]"  # stands in place of the result of a call
CLEARED_INPUT = "{}"  # stands in place of the arguments of a call

Messages: TypeAlias = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ClearToolUses:
    """Leaves out the results of all but the last calls, once the prompt is long."""

    trigger: Literal["input_tokens", "tool_uses"] = "input_tokens"
    above: int = 100_000
    """Tokens of the prompt, or calls in it, above which results are left out."""
    keep: int = 3
    """Last calls whose results stay."""
    clear_at_least: int = 0
    """Tokens; where fewer would be left out, all stay."""
    excluded: tuple[str, ...] = ()
    """Functions whose results stay."""
    cleared_inputs: bool | tuple[str, ...] = False
    """Whether the arguments of these calls are left out, too, or the functions of which they are."""

    name = "clear_tool_uses_20250919"
    counted = "cleared_tool_uses"


@dataclass(frozen=True, slots=True)
class ClearThinking:
    """Leaves out the reasoning of all but the last turns that have any."""

    keep: int | None = 1
    """None: that of all turns stays."""

    name = "clear_thinking_20251015"
    counted = "cleared_thinking_turns"


Edit: TypeAlias = ClearToolUses | ClearThinking


@dataclass(frozen=True, slots=True)
class EditEffect:
    """An edit that has left something out."""

    edit: Edit
    num_cleared: int
    """Calls, or turns with reasoning."""
    num_tokens: int

    def as_json(self) -> dict[str, object]:
        """The edit in Anthropic's form."""
        return {"type": self.edit.name, self.edit.counted: self.num_cleared, "cleared_input_tokens": self.num_tokens}


@dataclass(frozen=True, slots=True)
class ContextEdits:
    """The edits of a chat."""

    applied: tuple[EditEffect, ...] = ()
    original_tokens: int | None = None
    """Tokens of the prompt without edits; None where none could have left anything out."""
    original: tuple[Mapping[str, Any], ...] = ()
    """The chat as the client sent it, where something was left out."""


def edited(
    messages: Messages, edits: Sequence[Edit], num_tokens: Callable[[Messages], int]
) -> tuple[tuple[Mapping[str, Any], ...], ContextEdits]:
    """Return the messages that the model sees, and what was left out of `messages`. `num_tokens` counts the tokens of a
    prompt, and is only asked where an edit finds something to leave out."""
    applied: list[EditEffect] = []
    original = before = None
    now = tuple(messages)
    for edit in edits:
        found = _without_thinking(now, edit) if isinstance(edit, ClearThinking) else _without_results(now, edit)
        if found is None:
            continue
        # Each edit is judged by the prompt as the client sent it: otherwise one edit could hold back the next.
        if original is None or before is None:
            original = before = num_tokens(now)
        if isinstance(edit, ClearToolUses) and edit.trigger == "input_tokens" and original <= edit.above:
            continue
        shorter, num_cleared = found
        after = num_tokens(shorter)
        cleared = before - after
        if cleared <= 0 or (isinstance(edit, ClearToolUses) and cleared < edit.clear_at_least):
            continue
        now, before = shorter, after
        applied.append(EditEffect(edit, num_cleared, cleared))
    return now, ContextEdits(tuple(applied), original, tuple(messages) if applied else ())


def _without_results(messages: Messages, edit: ClearToolUses) -> tuple[tuple[Mapping[str, Any], ...], int] | None:
    """The messages without the results of old calls, and the number of these calls; None if all stay."""
    calls = {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls", ())}
    if edit.trigger == "tool_uses" and len(calls) <= edit.above:
        return None
    answered = [message["tool_call_id"] for message in messages if message["role"] == "tool"]
    # Results [0, border) are old, the others stay.
    border = max(0, len(answered) - edit.keep)
    # A client may give the same id again: a call whose result stays is no old one.
    old = set(answered[:border]) - set(answered[border:])
    old = {call_id for call_id in old if calls.get(call_id) not in edit.excluded}
    if not old:
        return None

    def shortened(call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = call["function"]
        is_cleared = edit.cleared_inputs if isinstance(edit.cleared_inputs, bool) else None
        if is_cleared is None:
            assert not isinstance(edit.cleared_inputs, bool)
            is_cleared = function["name"] in edit.cleared_inputs
        if call["id"] not in old or not is_cleared:
            return call
        return {**call, "function": {**function, "arguments": CLEARED_INPUT}}

    shorter: list[Mapping[str, Any]] = []
    for message in messages:
        if message["role"] == "tool" and message["tool_call_id"] in old:
            shorter.append({**message, "content": CLEARED})
        elif edit.cleared_inputs and "tool_calls" in message:
            shorter.append({**message, "tool_calls": [shortened(call) for call in message["tool_calls"]]})
        else:
            shorter.append(message)
    return tuple(shorter), len(old)


def _without_thinking(messages: Messages, edit: ClearThinking) -> tuple[tuple[Mapping[str, Any], ...], int] | None:
    """The messages without the reasoning of old turns, and the number of these turns; None if all stays. A turn is
    everything between two messages of the user: an answer goes on behind the results of its calls."""
    if edit.keep is None:
        return None
    turns, turn = [], 0
    for message in messages:
        # Answers of tools belong to the turn of the call, so only messages of the user begin one.
        turn += message["role"] == "user"
        turns.append(turn)
    with_reasoning = sorted({at for at, message in zip(turns, messages, strict=True) if "reasoning_content" in message})
    old = set(with_reasoning[: max(0, len(with_reasoning) - edit.keep)])
    if not old:
        return None
    return (
        tuple(
            {name: value for name, value in message.items() if name != "reasoning_content"} if at in old else message
            for at, message in zip(turns, messages, strict=True)
        ),
        len(old),
    )
