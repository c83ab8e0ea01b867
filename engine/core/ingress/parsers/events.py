"""Events of a parsed answer, and their collector."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

WHITESPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class AnswerText:
    """More of the text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """More of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A call of a function begins; `index` counts an answer's calls from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPart:
    """More of a call's arguments, which together are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class InputPart:
    """More of the input of a custom tool, which is what its arguments say."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnds:
    """The end of a call."""

    index: int
    broken: str | None = None
    """Text of a call that turned out not to be one, from its beginning up to the fault; None for a whole call."""


AnswerEvent: TypeAlias = AnswerText | ReasoningPart | CallBegins | ArgumentsPart | InputPart | CallEnds


class CallParser(Protocol):
    """Finds calls in a text that comes in pieces. The events, joined, are those of the whole text at once, however the
    text was cut."""

    def push(self, text: str) -> Sequence[AnswerEvent]:
        """Take the next piece; return the events that are certain now."""
        ...

    def finish(self) -> Sequence[AnswerEvent]:
        """End the text; return the events of its held rest."""
        ...


class Collector:
    """Collects the events of one answer's text, reasoning and calls. Adjacent parts of one kind become one.

    White space between a call and text is left out; all other text comes out as it went in.
    """

    def __init__(self) -> None:
        self._events: list[AnswerEvent] = []
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._arguments: list[str] = []
        # Pieces of white space at the text's end, which are text only if more text follows. A list: an answer of white
        # space alone would otherwise be copied with each of its tokens.
        self._space: list[str] = []
        self._is_after_call = False
        self._index = -1

    def text(self, text: str) -> None:
        """Take text outside calls."""
        shown = text.rstrip(WHITESPACE)
        if not shown:
            self._space += [text] if text else []
            return
        before, self._space = "".join(self._space), []
        if len(shown) < len(text):
            self._space.append(text[len(shown) :])
        if self._is_after_call:
            before, shown = "", shown.lstrip(WHITESPACE)
            self._is_after_call = False
        if self._reasoning:
            self._flush()
        self._text.append(before + shown)

    def reasoning(self, text: str) -> None:
        """Take a part of the reasoning."""
        if self._text:
            self._flush()
        if text:
            self._reasoning.append(text)

    def begin(self, name: str) -> None:
        self._flush()
        self._index += 1
        self._events.append(CallBegins(self._index, name))

    def arguments(self, text: str) -> None:
        """Take a part of the arguments of the call that was begun last."""
        if text:
            self._arguments.append(text)

    def end(self, broken: str | None = None) -> None:
        """End the call that was begun last; `broken` as in `CallEnds`."""
        self._flush()
        if broken is not None:
            broken = ("" if self._is_after_call else "".join(self._space)) + broken
        self._space, self._is_after_call = [], True
        self._events.append(CallEnds(self._index, broken))

    def take(self) -> Sequence[AnswerEvent]:
        """Return the events since the last time."""
        self._flush()
        events, self._events = self._events, []
        return events

    def finish(self) -> Sequence[AnswerEvent]:
        """Return the last events, at the end of the text."""
        if self._space and not self._is_after_call:
            if self._reasoning:
                self._flush()
            self._text += self._space
        return self.take()

    def _flush(self) -> None:
        if self._text:
            self._events.append(AnswerText("".join(self._text)))
            self._text.clear()
        if self._reasoning:
            self._events.append(ReasoningPart("".join(self._reasoning)))
            self._reasoning.clear()
        if self._arguments:
            self._events.append(ArgumentsPart(self._index, "".join(self._arguments)))
            self._arguments.clear()
