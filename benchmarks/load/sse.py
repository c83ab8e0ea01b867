"""Server-sent events of an OpenAI stream, split by hand so that the generator costs little beside the server.

A read is cut at its last line end and its `data:` lines are counted, which is a search for bytes. JSON is parsed only
where a decision depends on it: up to the first token (a chat begins with an event that has a role and no token) and in
the last few reads (the end of the text, usage, errors and `[DONE]`). Every event between them counts as one token's;
the server's usage gives the true number of tokens, since one event may carry several.

No I/O and no clock: reads come with the time of their arrival.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import orjson

from raydix.engine.api.reconnecting import Reconnecting

# What follows the last token comes as at most three events (finish reason, usage, [DONE]), each perhaps its own read.
TAIL_READS = 4


class LineSplitter:
    """Gives out whole lines, whatever the cuts between reads; lines end in LF or CRLF. With an `end` of two LF it gives
    out whole events."""

    def __init__(self, end: bytes = b"\n") -> None:
        self._end = end
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """All lines completed by `data`; empty if none was."""
        if self._rest:
            data = self._rest + data
        end = data.rfind(self._end) + 1
        end += (len(self._end) - 1) * bool(end)
        self._rest = data[end:]
        return data[:end]

    def finish(self) -> bytes:
        """Bytes after the last line end."""
        rest, self._rest = self._rest, b""
        return rest


def count_events(lines: bytes) -> int:
    """The number of `data:` lines. JSON escapes line ends, so a generated text cannot look like one."""
    return lines.count(b"\ndata:") + lines.startswith(b"data:")


def last_id(lines: bytes) -> str | None:
    """The id of the last event that has one."""
    _, mark, rest = (b"\n" + lines).rpartition(b"\nid:")
    return rest.partition(b"\n")[0].strip().decode("latin-1") if mark else None


def payloads(lines: bytes) -> list[bytes]:
    """The contents of the `data:` lines."""
    return [line[5:].strip() for line in lines.split(b"\n") if line.startswith(b"data:")]


def token_text(event: dict[str, Any]) -> str | None:
    """Text of an event that carries a token (perhaps empty), or None for an event without one.

    A completion's event without a finish reason is a token even if its text is empty: the detokenizer may hold back
    half a character. A chat's event needs some content, since its first event carries only a role.
    """
    choices = event.get("choices")
    if not choices:
        return None
    choice = choices[0]
    if "delta" not in choice:
        text = choice.get("text") or ""
        return text if text or choice.get("finish_reason") is None else None
    delta = choice["delta"] or {}
    text = delta.get("content") or ""
    return text if text or any(delta.get(key) for key in ("reasoning_content", "reasoning", "tool_calls")) else None


@dataclass(slots=True)
class Stream:
    """Contents of one response stream so far; complete after `finish`.

    arrivals: time of each read that carried tokens; events: how many such events each read carried. `place`: where the
    stream goes on after a broken connection; None: it does not, and the server is asked for no ids.
    """

    keep_text: bool = False
    place: Reconnecting | None = None
    arrivals: array[float] = field(default_factory=lambda: array("d"))
    events: array[int] = field(default_factory=lambda: array("I"))
    usage: dict[str, Any] | None = None
    error: str | None = None
    done: bool = False
    _texts: list[str] = field(default_factory=list)
    _splitter: LineSplitter = field(default_factory=LineSplitter)
    _recent: deque[tuple[float, bytes]] = field(default_factory=deque)
    _first_choice: float | None = None

    def __post_init__(self) -> None:
        if self.place is not None:
            self._splitter = LineSplitter(b"\n\n")

    @property
    def text(self) -> str:
        """The generated text; only with `keep_text`."""
        return "".join(self._texts)

    @property
    def has_end(self) -> bool:
        """True if the last event has no id: `[DONE]`, or an error. For streams whose events have ids."""
        last = self._recent[-1][1] if self._recent else b""
        return last.rstrip(b"\n").rpartition(b"\n\n")[2].startswith(b"data:")

    def feed(self, data: bytes, now: float) -> None:
        """Take one network read that arrived at `now`."""
        lines = self._splitter.feed(data)
        if not lines:
            return
        if self.place is not None and (event_id := last_id(lines)) is not None:
            self.place.delivered(event_id)
        self._recent.append((now, lines))
        if len(self._recent) > TAIL_READS and not self.keep_text:
            now, lines = self._recent.popleft()
            self._note(now, count_events(lines) if self.arrivals else self._parse(now, lines))

    def broken(self) -> None:
        """Forget the part of an event that came last: the whole event comes again."""
        self._splitter.finish()

    def finish(self, now: float) -> None:
        """End the stream at `now`: parse the events that have only been counted so far."""
        if rest := self._splitter.finish():
            self._recent.append((now, rest))
        for then, lines in self._recent:
            self._note(then, self._parse(then, lines))
        self._recent.clear()
        if not self.arrivals and self._first_choice is not None and (self.usage or {}).get("completion_tokens"):
            self._note(self._first_choice, 1)

    def _note(self, now: float, num_events: int) -> None:
        if num_events:
            self.arrivals.append(now)
            self.events.append(num_events)

    def _parse(self, now: float, lines: bytes) -> int:
        """Read each event of `lines`; returns how many carry a token."""
        num_tokens = 0
        for payload in payloads(lines):
            if payload == b"[DONE]":
                self.done = True
                continue

            event = orjson.loads(payload)
            if event.get("choices") and self._first_choice is None:
                self._first_choice = now

            self.usage = event.get("usage") or self.usage
            if "error" in event:
                self.error = error_message(event)

            text = token_text(event)
            if text is not None:
                num_tokens += 1
                if self.keep_text:
                    self._texts.append(text)

        return num_tokens


def error_message(body: Any) -> str:
    """The sentence in an OpenAI error object, or the whole of a body that is none."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:300]
