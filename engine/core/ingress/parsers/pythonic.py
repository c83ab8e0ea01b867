"""Calls in Python's syntax, of Llama 3.2, Llama 4 and others: the answer is a list of calls alone.

    [clock(zone="UTC"), weather(place="Kyiv", days=3)]

Nothing marks a call but its place at the beginning of the answer, so only functions that the request has are called.
Each argument becomes a member of a JSON object when it is whole.
"""

import json
from collections.abc import Collection, Sequence
from enum import Enum

from raydix.engine.core.ingress.parsers.events import WHITESPACE, AnswerEvent, Collector
from raydix.engine.core.ingress.parsers.json_call import MAX_NAME
from raydix.engine.core.ingress.parsers.markers import OneOfMarkers
from raydix.engine.core.ingress.parsers.python_literal import json_of

START, END = "<|python_start|>", "<|python_end|>"
_OPENING, _CLOSING = "([{", ")]}"


class _Place(Enum):
    START = "before the list"
    NAME = "before a call, or in its function's name"
    KEY = "before an argument, or in its name"
    VALUE = "in an argument's value"
    CALLED = "behind a call"
    END = "behind the list"
    TEXT = "in text, to its end"


class PythonicCalls:
    """A parser of such calls. Text that begins otherwise is text to its end."""

    def __init__(self, names: Collection[str]) -> None:
        self._out = Collector()
        self._names = names
        self._place = _Place.START
        self._raw = ""  # text since the last call
        self._tag = OneOfMarkers(START, END)
        self._part = ""  # name, key or value so far
        self._key = ""
        self._num_arguments = 0
        self._depth = 0  # open brackets of a value
        self._quote = ""  # quotation mark that ends an open string, and a backslash behind it where one has just come

    def push(self, text: str) -> Sequence[AnswerEvent]:
        for index, character in enumerate(text):
            if self._place is _Place.TEXT:
                self._out.text(text[index:])
                break
            self._raw += character
            if not self._take(character):
                # The character at fault is passed on by itself, behind the text before it: it must not appear twice.
                self._raw = self._raw[:-1]
                self._give_up()
                self._out.text(character)
        return self._out.take()

    def finish(self) -> Sequence[AnswerEvent]:
        if self._place is not _Place.TEXT:
            self._give_up()
        return self._out.finish()

    def _give_up(self) -> None:
        """Take all that is still to come for text."""
        # Here the call's beginning has been sent already: it can be ended as broken, and not be taken back.
        if self._place in (_Place.KEY, _Place.VALUE):
            self._out.end(broken=self._raw)
        elif self._place is not _Place.END or self._tag.is_open or self._raw.strip(WHITESPACE):
            self._out.text(self._raw)
        self._place, self._raw = _Place.TEXT, ""

    def _take(self, character: str) -> bool:
        """Take a character; False if no calls go on like this."""
        match self._place:
            case _Place.START | _Place.END:
                return self._outside(character)
            case _Place.NAME:
                return self._in_name(character)
            case _Place.KEY:
                return self._in_key(character)
            case _Place.VALUE:
                return self._in_value(character)
            case _:
                return self._behind_call(character)

    def _outside(self, character: str) -> bool:
        """Take a character before or behind the list."""
        is_start = self._place is _Place.START
        if self._tag.is_open or character == "<":
            found = self._tag.take(character)
            if found == (END if not is_start else START):
                self._raw = "" if not is_start else self._raw
                return True
            return found is None
        if character == "[" and is_start:
            self._place = _Place.NAME
            return True
        return character in WHITESPACE

    def _in_name(self, character: str) -> bool:
        if character == "(":
            name, self._part = self._part, ""
            # A list in brackets is common text; only the name of a function of the request makes it a call.
            if name not in self._names:
                return False
            self._out.begin(name)
            self._out.arguments("{")
            self._place, self._num_arguments = _Place.KEY, 0
            return True
        if character in WHITESPACE:
            # White space may stand before a name, and not within one.
            return not self._part
        self._part += character
        return len(self._part) <= MAX_NAME and (character.isalnum() or character in "_.-:")

    def _in_key(self, character: str) -> bool:
        if character == "=":
            self._key, self._part = self._part.strip(WHITESPACE), ""
            self._place = _Place.VALUE
            return self._key.isidentifier()
        if character == ")" and not self._part.strip(WHITESPACE):
            return self._end_call()
        self._part += character
        return len(self._part) <= MAX_NAME

    def _in_value(self, character: str) -> bool:
        if self._quote:
            self._in_string(character)
        elif self._depth == 0 and character in ",)":
            return self._end_value() and (character == "," or self._end_call())
        elif character in "'\"":
            self._quote = character
        else:
            self._depth += (character in _OPENING) - (character in _CLOSING)
        self._part += character
        # A closing bracket without an opening one ends no value of Python's.
        return self._depth >= 0

    def _in_string(self, character: str) -> None:
        # The character behind a backslash is part of the string, whatever it is.
        if len(self._quote) == 2:
            self._quote = self._quote[0]
        elif character == "\\":
            self._quote += character
        elif character == self._quote:
            self._quote = ""

    def _end_value(self) -> bool:
        value = json_of(self._part)
        if value is None:
            return False
        # Each argument is sent as soon as it is whole: half a literal of Python's has no JSON yet.
        comma = ", " if self._num_arguments else ""
        self._out.arguments(f"{comma}{json.dumps(self._key, ensure_ascii=False)}: {value}")
        self._num_arguments += 1
        self._part, self._place = "", _Place.KEY
        return True

    def _end_call(self) -> bool:
        self._out.arguments("}")
        self._out.end()
        self._place, self._raw, self._part = _Place.CALLED, "", ""
        return True

    def _behind_call(self, character: str) -> bool:
        if character == ",":
            self._place = _Place.NAME
        elif character == "]":
            self._place, self._raw = _Place.END, ""
        return character in (*WHITESPACE, ",", "]")
