"""The place of a request in a trace, as W3C's Trace Context has it in headers.

https://www.w3.org/TR/trace-context-2/
"""

import re
from typing import NamedTuple, Self

PARENT, STATE = "traceparent", "tracestate"  # headers: the place, and what other tracing systems add to it

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
_MOST_STATE = 512  # characters of `tracestate` that are passed on; the recommendation asks for as many


class TraceContext(NamedTuple):
    """A span, as the parent of others."""

    trace_id: int
    """128 bits, not all zero."""
    span_id: int
    """64 bits, not all zero."""
    is_sampled: bool
    """True if the parent is recorded."""
    state: str = ""
    """The value of `tracestate`."""

    @classmethod
    def read(cls, parent: str | None, state: str | None = None) -> Self | None:
        """Parse the headers; None without a place or with an invalid one, for which a new trace is to begin."""
        match = None if parent is None else _FORM.fullmatch(parent.strip())
        if match is None:
            return None
        version, trace_id, span_id, flags, more = match.groups()
        # Later versions may have more fields, version 00 has none, and ff is no version.
        if version == "ff" or (version == "00" and more is not None):
            return None
        if not int(trace_id, 16) or not int(span_id, 16):
            return None
        kept = state.strip() if state is not None and len(state) <= _MOST_STATE else ""
        return cls(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & _SAMPLED), kept)

    @property
    def header(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.is_sampled):02x}"
