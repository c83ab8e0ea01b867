"""Calls without the tags of the model's format: JSON objects at the beginning of an answer.

{"name": "clock", "arguments": {"zone": "UTC"}}

Small models leave the tags out. Such an object is a call if it has nothing but the name of an offered function and
arguments that fit the function's schema; any other answer goes to the parser of the model's format unchanged.
"""

import json
from collections.abc import Mapping, Sequence

from raydix.engine.core.ingress.parsers.events import (
    WHITESPACE,
    AnswerEvent,
    ArgumentsPart,
    CallBegins,
    CallEnds,
    CallParser,
    Collector,
)
from raydix.engine.core.ingress.parsers.fits import Schema, fits
from raydix.engine.core.ingress.parsers.json_call import ARGUMENTS_KEYS, NAME_KEYS, JsonCall
from raydix.engine.core.ingress.parsers.json_value import Step

KEYS = NAME_KEYS | ARGUMENTS_KEYS | {"type", "id"}  # keys of such an object; one with any other key is data


class BareCalls:
    """A parser that looks for such objects first, and has `tagged` parse what follows them.

    The text of an object is held back until the object is whole or turns out to be none, since its arguments can be
    compared with the schema only as a whole.
    """

    def __init__(self, tagged: CallParser, functions: Mapping[str, Schema]) -> None:
        self._tagged = tagged
        self._functions = functions
        self._is_over = False  # true when all text belongs to `tagged`
        self._held: list[str] = []  # text of the object so far, and of the white space before it
        self._call: JsonCall | None = None
        self._out = Collector()
        self._num_calls = 0

    def push(self, text: str) -> Sequence[AnswerEvent]:
        events: list[AnswerEvent] = []
        while text and not self._is_over:
            if self._call is None:
                text = self._look(text)
                continue
            step, rest = self._call.feed(text)
            # Kept as it came: if this is no call, the format's own parser gets exactly this text.
            self._held.append(text[: len(text) - len(rest)])
            if step is Step.DONE:
                events += self._found()
            elif step is Step.BROKEN:
                self._give_up()
            text = rest
        return [*events, *self._of_tagged(text)] if self._is_over else events

    def finish(self) -> Sequence[AnswerEvent]:
        self._give_up()
        return [*self._of_tagged(""), *self._numbered(self._tagged.finish())]

    def _look(self, text: str) -> str:
        """Look for the beginning of an object behind white space; returns the text from there on."""
        rest = text.lstrip(WHITESPACE)
        self._held.append(text[: len(text) - len(rest)])
        if rest.startswith("{"):
            self._call = JsonCall(self._out, names=self._functions, keys=KEYS)
        elif rest:
            self._give_up()
        return rest

    def _found(self) -> Sequence[AnswerEvent]:
        """Return the events of the object that is whole now, if it is a call."""
        self._call = None
        name, arguments = "", ""
        for event in self._out.take():
            match event:
                case CallBegins(_, name):
                    pass
                case ArgumentsPart(_, part):
                    arguments += part
        if not self._is_call(name, arguments):
            self._give_up()
            return []
        self._held.clear()
        index, self._num_calls = self._num_calls, self._num_calls + 1
        return [CallBegins(index, name), ArgumentsPart(index, arguments), CallEnds(index)]

    def _is_call(self, name: str, arguments: str) -> bool:
        found = json.loads("".join(self._held))
        # A name alone may be any object with a name.
        has_arguments = any(key in found for key in ARGUMENTS_KEYS)
        return has_arguments and fits(json.loads(arguments), self._functions[name])

    def _give_up(self) -> None:
        self._is_over = True

    def _of_tagged(self, text: str) -> Sequence[AnswerEvent]:
        """Return the events of the held text and of this text behind it."""
        held, self._held = "".join(self._held), []
        if self._num_calls:  # white space behind a call is no text
            held = held.lstrip(WHITESPACE)
        return self._numbered(self._tagged.push(held + text)) if held or text else ()

    def _numbered(self, events: Sequence[AnswerEvent]) -> Sequence[AnswerEvent]:
        """Count calls of `tagged` behind the ones that were found here."""
        return [self._moved(event) for event in events] if self._num_calls else events

    def _moved(self, event: AnswerEvent) -> AnswerEvent:
        match event:
            case CallBegins(index, name):
                return CallBegins(index + self._num_calls, name)
            case ArgumentsPart(index, text):
                return ArgumentsPart(index + self._num_calls, text)
            case CallEnds(index, broken):
                return CallEnds(index + self._num_calls, broken)
        return event
