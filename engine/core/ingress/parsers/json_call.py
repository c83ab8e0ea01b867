"""A call as a JSON object: `{"name": "f", "arguments": {...}}`, in a text that comes in pieces."""

import json
from collections.abc import Collection
from enum import Enum

from raydix.engine.core.ingress.parsers.events import WHITESPACE, Collector
from raydix.engine.core.ingress.parsers.json_value import JsonValue, Step

NAME_KEYS = frozenset(("name",))
ARGUMENTS_KEYS = frozenset(("arguments", "parameters"))
MAX_NAME = 256  # characters of a function's name; a longer one is none


class _Expects(Enum):
    OPEN = "the object"
    KEY_OR_END = "a key, or the object's end"
    KEY = "a key"
    COLON = "a colon"
    VALUE = "a value"
    COMMA_OR_END = "a comma, or the object's end"


class JsonCall:
    """Parser of a call. Its arguments are passed on once its name is known; until then its text is held.

    `before` is text that belongs to the call and stands before it: if there is no call, it is text again. With `names`
    only functions of these names are called, with `keys` the object has no other ones.
    """

    def __init__(
        self,
        out: Collector,
        before: str = "",
        names: Collection[str] | None = None,
        keys: Collection[str] | None = None,
    ) -> None:
        self._out = out
        self._names = names
        self._keys = keys
        self._raw = [before]
        self._expects = _Expects.OPEN
        self._value = JsonValue()
        self._held: list[str] = []  # key or value so far
        self._key = ""
        self._name: str | None = None
        self._arguments: str | None = None  # whole arguments that came before the name
        self._has_begun = False
        self._passes_on = False  # true while the value is the arguments of a call that has begun

    def feed(self, text: str) -> tuple[Step, str]:
        """Take the next text. Returns DONE with the rest behind the call, BROKEN with the rest from the faulty
        character on, or MORE."""
        for index, character in enumerate(text):
            step = self._take(character)
            if step is not Step.MORE:
                end = index + (step is Step.DONE)
                self._raw.append(text[:end])
                if step is Step.BROKEN:
                    self.give_up()
                return step, text[end:]
        self._raw.append(text)
        return Step.MORE, ""

    def give_up(self) -> None:
        """End a call that is not whole: what has not been passed on is text."""
        raw = "".join(self._raw)
        if self._has_begun:
            self._out.end(broken=raw)
        else:
            self._out.text(raw)

    def _take(self, character: str) -> Step:
        # White space inside a key or a value is its own; between parts of the object it says nothing.
        if self._expects is _Expects.VALUE or self._held:
            return self._in_value(character)
        if character in WHITESPACE:
            return Step.MORE

        match self._expects, character:
            case _Expects.OPEN, "{":
                self._expects = _Expects.KEY_OR_END
            case ((_Expects.KEY | _Expects.KEY_OR_END), '"'):
                self._value = JsonValue()
                self._value.feed(character)
                self._held.append(character)
            case _Expects.COLON, ":":
                self._expects, self._value = _Expects.VALUE, JsonValue()
            case _Expects.COMMA_OR_END, ",":
                self._expects = _Expects.KEY
            case ((_Expects.COMMA_OR_END | _Expects.KEY_OR_END), "}"):
                return self._end()
            case _:
                return Step.BROKEN
        return Step.MORE

    def _in_value(self, character: str) -> Step:
        """Take a character of a key or a value."""
        is_key = self._expects is not _Expects.VALUE
        if not is_key and not self._held and character not in WHITESPACE and not self._begin_value(character):
            return Step.BROKEN
        step = self._value.feed(character)
        if step in (Step.MORE, Step.DONE):
            if self._held or character not in WHITESPACE:
                self._held.append(character)
            if self._passes_on:
                self._out.arguments(character)
        if step in (Step.DONE, Step.PAST):
            held, self._held = "".join(self._held), []
            if is_key:
                self._key, self._expects = json.loads(held), _Expects.COLON
                # A bare object in an answer is taken for a call only while it has the keys of one: the first other key
                # makes it text.
                is_known = self._keys is None or self._key in self._keys
                return Step.MORE if is_known else Step.BROKEN
            self._expects = _Expects.COMMA_OR_END
            if not self._end_value(held):
                return Step.BROKEN
            # A number or word ends with the character behind it, which belongs to the object again.
            return self._take(character) if step is Step.PAST else Step.MORE
        return step

    def _begin_value(self, character: str) -> bool:
        """Look at a value's first character; False if no call has such a value."""
        if self._key in NAME_KEYS:
            # A second name would come too late: the first one may have been sent to the client.
            return character == '"' and self._name is None
        if self._key not in ARGUMENTS_KEYS:
            return True
        # Arguments are an object, an object in a string, or null, and come once; whatever else begins there is no call.
        if self._has_begun or self._arguments is not None or character not in '{"n':
            return False
        # Only behind the name can arguments be streamed; before it they are held until the call may begin.
        if character == "{" and self._name is not None:
            self._begin()
            self._passes_on = True
        return True

    def _end_value(self, value: str) -> bool:
        """Look at a whole value; False if no call has it."""
        if self._key in NAME_KEYS:
            self._name = name_in(json.loads(value), self._names)
            return self._name is not None
        if self._passes_on:
            self._passes_on = False
        elif self._key in ARGUMENTS_KEYS:
            self._arguments = _object_in(value)
            return self._arguments is not None
        return True

    def _end(self) -> Step:
        if self._name is None:
            return Step.BROKEN
        if not self._has_begun:
            self._begin()
            # A call without arguments has the empty object: clients parse what they get as JSON.
            self._out.arguments(self._arguments or "{}")
        self._out.end()
        return Step.DONE

    def _begin(self) -> None:
        assert self._name is not None
        self._has_begun = True
        self._out.begin(self._name)


def name_in(name: str, names: Collection[str] | None) -> str | None:
    """`name` if a function can have it, else None."""
    is_known = names is None or name in names
    return name if is_known and 0 < len(name) <= MAX_NAME and is_unicode(name) else None


def is_unicode(text: str) -> bool:
    """True unless the text has half a character, as JSON's escapes can write."""
    # Surrogates cannot be encoded in UTF-8, so they could not be sent in any response.
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _object_in(value: str) -> str | None:
    """The JSON object that a value is, or that stands in it as a string; null is the empty one."""
    if value == "null":
        return "{}"
    if value.startswith("{"):
        return value
    inner: str = json.loads(value)
    return inner if inner.lstrip(WHITESPACE).startswith("{") and is_json(inner) and is_unicode(inner) else None


def is_json(text: str) -> bool:
    """True if a text is one JSON value that is no bare number or word, with white space around it."""
    value, text = JsonValue(), text.rstrip(WHITESPACE)
    for index, character in enumerate(text, start=1):
        step = value.feed(character)
        if step is not Step.MORE:
            return step is Step.DONE and index == len(text)
    return False


class JsonArguments:
    """The arguments of a call whose name stands before them: a JSON object. `before` is the call's text so far."""

    def __init__(self, out: Collector, before: str, name: str) -> None:
        self._out = out
        self._raw = [before]
        self._value = JsonValue()
        self._out.begin(name)

    def feed(self, text: str) -> tuple[Step, str]:
        """Take the next text; returns as `JsonCall.feed`."""
        for index, character in enumerate(text):
            step = self._value.feed(character)
            if step is not Step.MORE:
                end = index + (step is Step.DONE)
                self._pass_on(text[:end])
                if step is Step.DONE:
                    self._out.end()
                    return Step.DONE, text[end:]
                self.give_up()
                return Step.BROKEN, text[end:]
        self._pass_on(text)
        return Step.MORE, ""

    def give_up(self) -> None:
        """End a call that is not whole."""
        self._out.end(broken="".join(self._raw))

    def _pass_on(self, text: str) -> None:
        self._raw.append(text)
        self._out.arguments(text)
