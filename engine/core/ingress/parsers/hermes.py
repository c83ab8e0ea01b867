"""Calls of Hermes, Qwen 2.5 and Qwen 3, and of the generic rendering of tools: JSON objects between tags.

<tool_call>
{"name": "clock", "arguments": {"zone": "UTC"}}
</tool_call>
"""

from collections.abc import Collection, Sequence

from raydix.engine.core.ingress.parsers.events import WHITESPACE, AnswerEvent, Collector
from raydix.engine.core.ingress.parsers.json_call import JsonCall
from raydix.engine.core.ingress.parsers.json_value import Step
from raydix.engine.core.ingress.parsers.markers import Marker

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesCalls:
    """A parser of such calls among text. A call whose closing tag is missing counts."""

    def __init__(self, names: Collection[str]) -> None:
        """`names` of functions play no part: tags alone make a call."""
        self._out = Collector()
        self._opening = Marker(OPEN)
        self._call: JsonCall | None = None
        # White space and the part of a closing tag that have come behind a call; None elsewhere.
        self._closing: str | None = None

    def push(self, text: str) -> Sequence[AnswerEvent]:
        while text:
            if self._closing is not None:
                text = self._close(self._closing + text)
            elif self._call is not None:
                step, text = self._call.feed(text)
                if step is not Step.MORE:
                    self._call = None
                    # A broken call has no closing tag to skip: its text is the user's.
                    self._closing = "" if step is Step.DONE else None
            else:
                text = self._look(text)
        return self._out.take()

    def finish(self) -> Sequence[AnswerEvent]:
        if self._call is not None:
            self._call.give_up()
        self._out.text((self._closing or "") + self._opening.flush())
        return self._out.finish()

    def _look(self, text: str) -> str:
        """Look for a call; returns the text behind its opening tag."""
        before, after = self._opening.split(text)
        self._out.text(before)
        if after is None:
            return ""
        self._call = JsonCall(self._out, OPEN)
        return after

    def _close(self, text: str) -> str:
        """Skip a closing tag; returns the text behind it."""
        tag = text.lstrip(WHITESPACE)
        # The tag may still be coming, and white space before it is held with it.
        if CLOSE.startswith(tag) and tag != CLOSE:
            self._closing = text
            return ""
        self._closing = None
        if tag.startswith(CLOSE):
            return tag[len(CLOSE) :]
        # The text goes on where a tag ought to be; the white space before it is no text (`Collector`).
        return tag
