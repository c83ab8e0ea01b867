"""Calls of Mistral's models behind `[TOOL_CALLS]`, in the form of older templates or of newer ones.

[TOOL_CALLS] [{"name": "clock", "arguments": {"zone": "UTC"}}]
[TOOL_CALLS]clock[ARGS]{"zone": "UTC"}
"""

import re
from collections.abc import Collection, Sequence
from enum import Enum

from raydix.engine.core.ingress.parsers.events import WHITESPACE, AnswerEvent, Collector
from raydix.engine.core.ingress.parsers.json_call import MAX_NAME, JsonArguments, JsonCall
from raydix.engine.core.ingress.parsers.json_value import Step
from raydix.engine.core.ingress.parsers.markers import Marker

CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_HEAD = re.compile(rf"\s*([^\s\[\]{{}}]{{1,{MAX_NAME}}})\s*(\[CALL_ID\][^\[\]]*)?(\[ARGS\])?\s*")
MAX_HEAD = 2 * MAX_NAME  # characters between the marker and a call's arguments; more are no call


class _Place(Enum):
    TEXT = "text, until the marker"
    HEAD = "behind the marker"
    CALL = "in a call"
    LIST = "in the list of calls, behind a call"


class MistralCalls:
    """A parser of such calls, which may follow text."""

    def __init__(self, names: Collection[str]) -> None:
        """`names` of functions play no part: the marker alone makes a call."""
        self._out = Collector()
        self._marker = Marker(CALLS)
        self._place = _Place.TEXT
        self._before = ""  # text of a call that has not begun
        self._call: JsonCall | JsonArguments | None = None
        self._is_list = False

    def push(self, text: str) -> Sequence[AnswerEvent]:
        while text:
            if self._call is not None:
                text = self._in_call(self._call, text)
            elif self._place is _Place.TEXT:
                text = self._look(text)
            else:
                (self._in_head if self._place is _Place.HEAD else self._in_list)(text[0])
                text = text[1:]
        return self._out.take()

    def finish(self) -> Sequence[AnswerEvent]:
        if self._call is not None:
            self._call.give_up()
        self._out.text(self._before + self._marker.flush())
        return self._out.finish()

    def _look(self, text: str) -> str:
        before, after = self._marker.split(text)
        self._out.text(before)
        if after is None:
            return ""
        self._place, self._before, self._is_list = _Place.HEAD, CALLS, False
        return after

    def _in_call(self, call: JsonCall | JsonArguments, text: str) -> str:
        step, text = call.feed(text)
        if step is not Step.MORE:
            self._call = None
            self._place = _Place.LIST if step is Step.DONE and self._is_list else _Place.TEXT
        return text

    def _in_head(self, character: str) -> None:
        """Take a character between the marker and the arguments, or the list of calls."""
        head = self._before[len(CALLS) :]
        # Older templates: a list of calls right behind the marker.
        if character == "[" and not head.strip(WHITESPACE):
            self._place, self._is_list, self._before = _Place.LIST, True, self._before + character
        elif character == "{":
            self._begin(head)
        elif (character == "\n" and head.strip(WHITESPACE)) or len(head) == MAX_HEAD:
            self._give_up(character)
        else:
            self._before += character

    def _begin(self, head: str) -> None:
        found = _HEAD.fullmatch(head)
        # Newer templates: a name, perhaps with an id, then the arguments alone.
        if found is not None:
            before, self._before = self._before, ""
            self._call = JsonArguments(self._out, before, found[1])
            self._call.feed("{")
        elif not head.strip(WHITESPACE):
            before, self._before = self._before, ""
            self._call = JsonCall(self._out, before)
            self._call.feed("{")
        else:
            self._give_up("{")

    def _in_list(self, character: str) -> None:
        """Take a character between the calls of a list."""
        is_first = self._before.startswith(CALLS)
        if character == "{" and (is_first or "," in self._before):
            before, self._before = self._before, ""
            self._call = JsonCall(self._out, before)
            self._call.feed("{")
        elif character in WHITESPACE or (character == "," and not is_first and "," not in self._before):
            self._before += character
        elif character == "]" and "," not in self._before:
            self._before, self._place = "", _Place.TEXT
        else:
            self._give_up(character)

    def _give_up(self, character: str) -> None:
        # The character is looked at as text: it may begin the next marker.
        self._out.text(self._before)
        self._before, self._place = "", _Place.TEXT
        self._look(character)
