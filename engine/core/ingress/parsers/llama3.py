"""Calls of Llama 3.1, 3.2 and 3.3: the answer is JSON objects alone, with semicolons between them.

    {"name": "clock", "parameters": {"zone": "UTC"}}

Nothing marks a call but its place at the beginning of the answer, or `<|python_tag|>` there, so only functions that the
request has are called.
"""

from collections.abc import Collection, Sequence

from raydix.engine.core.ingress.parsers.events import WHITESPACE, AnswerEvent, Collector
from raydix.engine.core.ingress.parsers.json_call import JsonCall
from raydix.engine.core.ingress.parsers.json_value import Step
from raydix.engine.core.ingress.parsers.markers import OneOfMarkers

PYTHON_TAG = "<|python_tag|>"
SEPARATOR = ";"


class Llama3Calls:
    """A parser of such calls. Text that begins otherwise is text to its end."""

    def __init__(self, names: Collection[str]) -> None:
        self._out = Collector()
        self._names = names
        self._is_text = False  # true when no more calls can come
        self._has_called = False
        self._before = ""  # text between calls, or the tag before one: text again if no call follows
        self._tag = OneOfMarkers(PYTHON_TAG)
        self._call: JsonCall | None = None

    def push(self, text: str) -> Sequence[AnswerEvent]:
        while text:
            if self._is_text:
                self._out.text(text)
                text = ""
            elif self._call is not None:
                step, text = self._call.feed(text)
                if step is not Step.MORE:
                    self._call = None
                    # An object that is no call is data, and so is all behind it: nothing else tells data from calls.
                    self._has_called = step is Step.DONE
                    self._is_text = not self._has_called
            else:
                self._look(text[0])
                text = text[1:]
        return self._out.take()

    def finish(self) -> Sequence[AnswerEvent]:
        if self._call is not None:
            self._call.give_up()
        rest = self._before + self._tag.flush()
        # A semicolon behind the last call parts it from nothing, and is not shown.
        if not (self._has_called and rest.strip(WHITESPACE) == SEPARATOR):
            self._out.text(rest)
        return self._out.finish()

    def _look(self, character: str) -> None:
        """Take a character where a call may begin."""
        if self._tag.is_open:
            self._take_tag(character)
        elif character == "{":
            before, self._before = self._before, ""
            self._call = JsonCall(self._out, before, self._names)
            self._call.feed(character)
        elif character in WHITESPACE or (character == SEPARATOR and self._has_called and SEPARATOR not in self._before):
            self._before += character
        else:
            self._take_tag(character)

    def _take_tag(self, character: str) -> None:
        found = self._tag.take(character)
        if found == PYTHON_TAG and PYTHON_TAG not in self._before:
            self._before += found
        elif found is not None:
            self._out.text(self._before + found)
            self._before, self._is_text = "", True
