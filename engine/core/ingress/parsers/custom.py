"""Inputs of custom tools: texts, which a model writes as the one argument of a function.

{"name": "apply_patch", "arguments": {"input": "*** Begin Patch\\n..."}}
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from raydix.engine.core.ingress.parsers.events import (
    AnswerEvent,
    ArgumentsPart,
    CallBegins,
    CallEnds,
    CallParser,
    InputPart,
)

INPUT_KEY = "input"
_OPENING = re.compile(rf'\s*\{{\s*"{INPUT_KEY}"\s*:\s*"')
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPES: Mapping[str, str] = MappingProxyType(
    {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
)


def arguments_of(text: str) -> str:
    """Return the arguments of a call with this input."""
    return json.dumps({INPUT_KEY: text}, ensure_ascii=False)


class InputText:
    """The input in arguments that come in pieces. Arguments of another form are the input themselves, as a whole."""

    def __init__(self) -> None:
        self._held = ""  # arguments before the text, or the beginning of an escape
        self._is_inside = False
        self._is_over = False

    def push(self, arguments: str) -> str:
        """Take the next part of the arguments; return the next part of the input."""
        if self._is_over:
            return ""
        self._held += arguments
        if not self._is_inside:
            opening = _OPENING.match(self._held)
            if opening is None:
                return ""
            self._is_inside, self._held = True, self._held[opening.end() :]
        return self._decoded()

    def finish(self) -> str:
        """Return the rest of the input at the end of the arguments."""
        rest, self._held = self._held, ""
        # What is held of an escape that never ended is no text.
        if self._is_inside or self._is_over:
            return ""
        try:
            # The one argument may stand behind white space or other keys than expected; read whole, it is still found.
            value = json.loads(rest)
        except (ValueError, RecursionError):
            return rest
        text = value.get(INPUT_KEY) if isinstance(value, dict) else None
        return _valid(text) if isinstance(text, str) else rest

    def _decoded(self) -> str:
        """Return the text of the held characters, as far as it is certain."""
        text, at, held = [], 0, self._held
        while at < len(held):
            plain = _PLAIN.match(held, at)
            if plain is not None:
                text.append(plain[0])
                at = plain.end()
            elif held[at] == '"':
                self._is_over, at = True, len(held)
            elif (length := _escape_len(held, at)) is not None:
                text.append(_unescaped(held[at : at + length]))
                at += length
            else:
                break
        self._held = held[at:]
        return "".join(text)


def _escape_len(text: str, at: int) -> int | None:
    """Return the length of the escape at a place, both halves of a character together; None if more must come."""
    if at + 1 >= len(text):
        return None
    if text[at + 1] != "u":
        return 2
    if at + 6 > len(text):
        return None
    if not 0xD800 <= int(text[at + 2 : at + 6], 16) < 0xDC00:
        return 6
    # A character beyond U+FFFF is two escapes; the first half alone cannot be sent.
    following = text[at + 6 : at + 12]
    if not "\\u".startswith(following[:2]):
        return 6
    if len(following) < 6:
        return None
    return 12 if 0xDC00 <= int(following[2:], 16) < 0xE000 else 6


def _unescaped(escape: str) -> str:
    if escape[1] != "u":
        # What JSON does not know stays as the model wrote it: it is text of a patch or a program.
        return _ESCAPES.get(escape[1], escape)
    return _valid(str(json.loads(f'"{escape}"')))


def _valid(text: str) -> str:
    """Return a text with half characters, which no encoding has, replaced."""
    return text.encode("utf-8", "replace").decode()


class CustomCalls:
    """A parser whose events of calls of custom tools have the inputs, too."""

    def __init__(self, calls: CallParser, names: Collection[str]) -> None:
        self._calls = calls
        self._names = names
        self._inputs: dict[int, InputText] = {}  # inputs of the calls of custom tools that have begun, by index

    def push(self, text: str) -> Sequence[AnswerEvent]:
        return self._with_inputs(self._calls.push(text))

    def finish(self) -> Sequence[AnswerEvent]:
        return self._with_inputs(self._calls.finish())

    def _with_inputs(self, events: Sequence[AnswerEvent]) -> Sequence[AnswerEvent]:
        found: list[AnswerEvent] = []
        for event in events:
            text = ""
            match event:
                case CallBegins(index, name) if name in self._names:
                    self._inputs[index] = InputText()
                case ArgumentsPart(index, part) if index in self._inputs:
                    text = self._inputs[index].push(part)
                case CallEnds(index, None) if index in self._inputs:
                    if rest := self._inputs.pop(index).finish():
                        found.append(InputPart(index, rest))
            found.append(event)
            if text and isinstance(event, ArgumentsPart):
                found.append(InputPart(event.index, text))
        return found
