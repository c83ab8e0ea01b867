"""Records what a process does for some seconds, when somebody asks. The rest of the time nothing is recorded: whoever
could record something looks at `Recorder.is_on` first."""

import time
from asyncio import sleep
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_SPANS = 20_000  # spans of one recording, some megabytes; those that come later are only counted


NUM_READINGS = 5


class Span(NamedTuple):
    """Something that took time."""

    row: str
    """Line of the picture: a request's id, or the kind of work."""
    name: str
    started_at: float
    """Monotonic time of the process; seconds since the epoch in `Recorded`."""
    seconds: float
    about: Mapping[str, object]
    transfer: str = ""
    """Name of what moves from one process to another; empty where nothing does."""
    is_arrival: bool = False
    """True at the end of the transfer, and not at its beginning."""


class Recorded(NamedTuple):
    """The spans that one process has recorded."""

    process: str
    kind: str
    spans: tuple[Span, ...]
    num_dropped: int
    """Spans beyond the limit."""


@dataclass(slots=True, eq=False)
class _Recording:
    spans: list[Span] = field(default_factory=list)
    num_dropped: int = 0


class Recorder:
    """The spans of one process. Not thread-safe: called in its event loop."""

    def __init__(self, process: str, kind: str) -> None:
        self._process, self._kind = process, kind
        self._recordings: list[_Recording] = []

    @property
    def is_on(self) -> bool:
        """True while a recording is under way."""
        return bool(self._recordings)

    @property
    def has_room(self) -> bool:
        """True while a recording can take more spans; where none can, `lost` saves making them."""
        return any(len(each.spans) < MAX_SPANS for each in self._recordings)

    def lost(self, num_spans: int) -> None:
        """Count spans that nobody made, since no recording has room."""
        for recording in self._recordings:
            recording.num_dropped += num_spans

    def add(self, spans: Iterable[Span]) -> None:
        """Have the spans in each recording under way."""
        for span in spans:
            for recording in self._recordings:
                if len(recording.spans) < MAX_SPANS:
                    recording.spans.append(span)
                else:
                    recording.num_dropped += 1

    async def record(self, seconds: float) -> Recorded:
        """Record for so long; returns the spans that ended meanwhile, with times that other processes know, too."""
        recording = _Recording()
        self._recordings.append(recording)
        try:
            await sleep(seconds)
        finally:
            self._recordings.remove(recording)
        ahead_s = ahead_of_monotonic()
        spans = tuple(span._replace(started_at=span.started_at + ahead_s) for span in recording.spans)
        return Recorded(self._process, self._kind, spans, recording.num_dropped)


def ahead_of_monotonic() -> float:
    """Seconds since the epoch minus monotonic seconds, by the quickest of a few readings: a process may be stopped
    between the two clocks of one."""
    readings = []
    for _ in range(NUM_READINGS):
        before, wall, behind = time.monotonic(), time.time(), time.monotonic()
        readings.append((behind - before, wall - (before + behind) / 2))
    return min(readings)[1]
