"""The lead of an answer: reasoning in front, which the answer's grammar does not bind, found in the bytes of tokens.

A place in the lead is a function of the bytes before it alone. As in texts
(`raydix.engine.core.ingress.parsers.reasoning`) white space may stand before the opening tag, and an answer that begins
otherwise has no lead.
"""

from dataclasses import dataclass

WHITESPACE = b" \t\r\n"


@dataclass(frozen=True, slots=True)
class Before:
    """A place where the lead may begin; `held` is the part of the opening tag that has come."""

    held: bytes = b""


@dataclass(frozen=True, slots=True)
class Inside:
    """A place in the lead; `held` is the part of the closing tag that has come."""

    held: bytes = b""


@dataclass(frozen=True, slots=True)
class Behind:
    """The place behind the lead; `rest` is what the token with the end of the closing tag has behind it."""

    rest: bytes = b""

    @property
    def is_clean(self) -> bool:
        """True if the rest is white space, which counts as the tag's."""
        return not self.rest.strip(WHITESPACE)


@dataclass(frozen=True, slots=True)
class Lead:
    """Tags of a lead. `is_open`: the prompt ends with the opening one."""

    opening: bytes
    closing: bytes
    is_open: bool = False

    @property
    def start(self) -> Before | Inside:
        """The place where an answer begins."""
        return Inside() if self.is_open else Before()

    def after(self, place: Before | Inside, token: bytes) -> Before | Inside | Behind | None:
        """Return the place behind the next token; None if there is no lead."""
        text = place.held + token
        if isinstance(place, Before):
            text = text.lstrip(WHITESPACE)
            if text != self.opening and self.opening.startswith(text):
                return Before(text)
            if not text.startswith(self.opening):
                return None
            text = text[len(self.opening) :]

        _, found, rest = text.partition(self.closing)
        if found:
            return Behind(rest)
        num_held = min(len(text), len(self.closing) - 1)
        while not self.closing.startswith(text[len(text) - num_held :]):
            num_held -= 1
        return Inside(text[len(text) - num_held :])
