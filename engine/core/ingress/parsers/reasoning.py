"""Reasoning before an answer, between `<think>` and `</think>`: Qwen 3, QwQ, DeepSeek-R1 and its distills.

Some chat templates end the prompt with the opening tag, so that the answer begins inside.
"""

from dataclasses import dataclass
from enum import Enum

from raydix.engine.core.ingress.parsers.events import WHITESPACE
from raydix.engine.core.ingress.parsers.markers import Marker, OneOfMarkers

OPEN, CLOSE = REASONING_TAGS = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """The next part of an answer: reasoning, and text behind the reasoning."""

    reasoning: str = ""
    text: str = ""


def begins_inside(prompt: str) -> bool:
    """True if the answer to a rendered prompt begins inside reasoning."""
    return prompt.rstrip(WHITESPACE).endswith(OPEN)


def ends_reasoning(prompt: str) -> bool:
    """True if a rendered prompt ends behind reasoning, so that the answer has none."""
    return prompt.rstrip(WHITESPACE).endswith(CLOSE)


class _Place(Enum):
    START = "where reasoning may begin"
    INSIDE = "in reasoning"
    BEHIND = "behind reasoning, before the text's first character"
    TEXT = "in text, to its end"


class ReasoningParser:
    """Finds the reasoning at the beginning of an answer, in a text that comes in pieces.

    White space around the reasoning and before the text behind it is left out; an answer without reasoning comes out as
    it went in. `is_inside`: the answer begins inside the reasoning.
    """

    def __init__(self, *, is_inside: bool = False) -> None:
        self._place = _Place.INSIDE if is_inside else _Place.START
        self._opening = OneOfMarkers(OPEN)
        self._closing = Marker(CLOSE)
        self._space = ""  # white space at the end of what has come: of the start, or of reasoning
        self._has_begun = False  # true if the reasoning has a character

    @property
    def is_inside(self) -> bool:
        return self._place is _Place.INSIDE

    def push(self, text: str) -> ReasoningPiece:
        """Take the next text."""
        if self._place is _Place.START:
            text = self._start(text)
        reasoning = ""
        if self._place is _Place.INSIDE:
            reasoning, text = self._inside(text)
        if self._place is _Place.BEHIND:
            text = text.lstrip(WHITESPACE)
            self._place = _Place.TEXT if text else _Place.BEHIND
        return ReasoningPiece(reasoning, text)

    def finish(self) -> ReasoningPiece:
        """End the text; return its held rest."""
        if self._place is _Place.START:
            return ReasoningPiece(text=self._space + self._opening.flush())
        return ReasoningPiece(reasoning=self._reasoning(self._closing.flush())) if self.is_inside else ReasoningPiece()

    def _start(self, text: str) -> str:
        """Look for the opening tag; returns the text behind it, or all of the text if there is none."""
        for index, character in enumerate(text):
            # White space may stand before the tag; it is held, and comes out again where no tag follows.
            if character in WHITESPACE and not self._opening.is_open:
                self._space += character
                continue
            found = self._opening.take(character)
            if found is not None:
                rest = text[index + 1 :]
                space, self._space = self._space, ""
                self._place = _Place.INSIDE if found == OPEN else _Place.TEXT
                return rest if found == OPEN else space + found + rest
        return ""

    def _inside(self, text: str) -> tuple[str, str]:
        """Look for the closing tag; returns reasoning, and the text behind the tag."""
        before, after = self._closing.split(text)
        reasoning = self._reasoning(before)
        if after is None:
            return reasoning, ""
        self._place = _Place.BEHIND
        return reasoning, after

    def _reasoning(self, text: str) -> str:
        """Reasoning as far as it is certain: without white space at its beginning, and at its end so far."""
        # White space at the end of the last piece is reasoning only if more reasoning follows.
        text = self._space + text
        if not self._has_begun:
            text = text.lstrip(WHITESPACE)
        shown = text.rstrip(WHITESPACE)
        self._space = text[len(shown) :]
        self._has_begun = self._has_begun or bool(shown)
        return shown
