"""The end of a JSON value (RFC 8259) in a text that comes character by character."""

import re
from enum import Enum

from raydix.engine.core.ingress.parsers.events import WHITESPACE

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = frozenset(("true", "false", "null"))
_SCALAR = frozenset("0123456789+-.eEtrufalsn")
_HEX = frozenset("0123456789abcdefABCDEF")
MAX_SCALAR = 400  # characters of a number; longer ones are refused
MAX_DEPTH = 200  # objects and lists in each other; readers of JSON refuse many more


class Step(Enum):
    """Outcome of a character."""

    MORE = "more"
    DONE = "done"
    """The value ends with this character."""
    PAST = "past"
    """The value ended before this character, which is not a part of it."""
    BROKEN = "broken"
    """No value goes on like this."""


class _Expects(Enum):
    VALUE = "a value"
    ELEMENT_OR_END = "a value, or the list's end"
    KEY_OR_END = "a key, or the object's end"
    KEY = "a key"
    COLON = "a colon"
    COMMA_OR_END = "a comma, or the end of the object or list"


class JsonValue:
    """Parser of a JSON value, which begins with the first character that is no white space."""

    __slots__ = ("_closers", "_escape", "_expects", "_is_key", "_is_string", "_scalar")

    def __init__(self) -> None:
        self._expects = _Expects.VALUE
        self._closers: list[str] = []  # ends of the objects and lists that are open, the innermost last
        self._is_string = False
        self._is_key = False  # true if the open string is a key
        self._escape = 0  # escape within a string: -1 behind a backslash, and the number of hexadecimal digits to come
        self._scalar = ""  # number or word so far

    def feed(self, character: str) -> Step:
        if self._is_string:
            return self._in_string(character)
        if self._scalar:
            if character in _SCALAR:
                self._scalar += character
                # Bounded, since the number is matched as a whole at its end: a model may write digits for ever.
                return Step.MORE if len(self._scalar) <= MAX_SCALAR else Step.BROKEN
            return self._after_scalar(character)
        if character in WHITESPACE:
            return Step.MORE

        match self._expects:
            case _Expects.COLON:
                self._expects = _Expects.VALUE
                return Step.MORE if character == ":" else Step.BROKEN
            case _Expects.COMMA_OR_END:
                return self._next(character)
            case _Expects.KEY | _Expects.KEY_OR_END:
                return self._key(character)
            case _:
                return self._value(character)

    def _in_string(self, character: str) -> Step:
        if self._escape > 0:
            self._escape -= 1
            return Step.MORE if character in _HEX else Step.BROKEN
        if self._escape < 0:
            self._escape = 4 if character == "u" else 0
            return Step.MORE if character in '"\\/bfnrtu' else Step.BROKEN
        if character == "\\":
            self._escape = -1
        elif character == '"':
            self._is_string = False
            if not self._is_key:
                return self._end_of_value()
            self._is_key, self._expects = False, _Expects.COLON
        # JSON has control characters as escapes only; a line break in a string ends the hope of a value.
        elif character < " ":
            return Step.BROKEN
        return Step.MORE

    def _after_scalar(self, character: str) -> Step:
        scalar, self._scalar = self._scalar, ""
        if scalar not in _WORDS and not _NUMBER.fullmatch(scalar):
            return Step.BROKEN
        # Only now is a number known to have ended, by a character that belongs to whatever comes behind.
        if self._end_of_value() is Step.DONE:
            return Step.PAST
        return Step.MORE if character in WHITESPACE else self._next(character)

    def _key(self, character: str) -> Step:
        if character == '"':
            self._is_string = self._is_key = True
            return Step.MORE
        return self._close(character) if self._expects is _Expects.KEY_OR_END else Step.BROKEN

    def _value(self, character: str) -> Step:
        if character == '"':
            self._is_string = True
        elif character in "{[":
            # Readers of JSON refuse more, and the client has to read what is passed on.
            if len(self._closers) == MAX_DEPTH:
                return Step.BROKEN
            self._closers.append("}" if character == "{" else "]")
            self._expects = _Expects.KEY_OR_END if character == "{" else _Expects.ELEMENT_OR_END
        elif character in _SCALAR:
            self._scalar = character
        else:
            return self._close(character) if self._expects is _Expects.ELEMENT_OR_END else Step.BROKEN
        return Step.MORE

    def _next(self, character: str) -> Step:
        if character == ",":
            self._expects = _Expects.KEY if self._closers[-1] == "}" else _Expects.VALUE
            return Step.MORE
        return self._close(character)

    def _close(self, character: str) -> Step:
        if character != self._closers[-1]:
            return Step.BROKEN
        self._closers.pop()
        return self._end_of_value()

    def _end_of_value(self) -> Step:
        self._expects = _Expects.COMMA_OR_END
        return Step.MORE if self._closers else Step.DONE
