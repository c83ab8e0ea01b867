"""The token streams of one worker: events for each ingress replica, and the replicas that are still there."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field

from engine.core.signs_of_life import SignsOfLife
from engine.core.types import Assignment, PromptEvent, TokenEvent


@dataclass(slots=True)
class _Outbox:
    """Events that wait to be read by one ingress replica."""

    events: list[PromptEvent | TokenEvent] = field(default_factory=list)
    filled: asyncio.Event = field(default_factory=asyncio.Event)
    reader: int = 0
    is_over: bool = False
    """True once the replica is given up: its reader, if it comes back, gets what is here, and then the end."""


class TokenStreams:
    """Sorts events by the ingress replica that each request belongs to. Not thread-safe."""

    def __init__(self) -> None:
        self._outboxes: dict[str, _Outbox] = {}
        self._signs = SignsOfLife()
        """Of the replicas with an outbox."""
        self._reply_to: dict[str, tuple[int, str]] = {}
        """Attempt and ingress of each request of this worker."""

    def begin(self, assignments: Iterable[Assignment]) -> None:
        """Expect events of these attempts; nobody reads what is computed at idle priority."""
        for assignment in assignments:
            known, _ = self._reply_to.get(assignment.request_id, (assignment.attempt, ""))
            if not assignment.is_idle and assignment.attempt >= known:
                self._reply_to[assignment.request_id] = (assignment.attempt, assignment.reply_to)
                self.seen(assignment.reply_to)

    def forget(self, request_id: str, attempt: int) -> bool:
        """Drop the later events of a request, unless a later attempt than `attempt` has begun; returns False then."""
        if self._reply_to.get(request_id, (0, ""))[0] > attempt:
            return False
        self._reply_to.pop(request_id, None)
        return True

    def end(self, request_id: str, attempt: int) -> None:
        """An attempt has had its last event."""
        if self._reply_to.get(request_id, (None, ""))[0] == attempt:
            del self._reply_to[request_id]

    def put(self, events: Sequence[PromptEvent | TokenEvent]) -> None:
        """Hand events of present attempts to the readers of their replicas."""
        for event in events:
            attempt, ingress_id = self._reply_to.get(event.request_id, (None, ""))
            if attempt == event.attempt:
                outbox = self._outbox(ingress_id)
                outbox.events.append(event)
                outbox.filled.set()

    async def read(self, ingress_id: str) -> AsyncIterator[list[PromptEvent | TokenEvent]]:
        """Yield the events for one replica, a list for each wake-up; a later reader takes over from an earlier one."""
        outbox = self._outbox(ingress_id)
        outbox.reader += 1
        reader = outbox.reader
        while outbox.reader == reader:
            await outbox.filled.wait()
            if outbox.reader == reader:
                events, outbox.events = outbox.events, []
                is_over = outbox.is_over  # before the yield: events may come until the reader goes on
                outbox.filled.clear()
                if events:
                    yield events
                if is_over:
                    return

    # Replicas

    def seen(self, ingress_id: str) -> None:
        """A replica has shown that it is alive."""
        self._outbox(ingress_id)
        self._signs.heard(ingress_id, time.monotonic())

    def stood_still(self, late_s: float) -> None:
        """Extend all deadlines by `late_s`, for which this process was stopped and received nothing."""
        self._signs.stood_still(late_s)

    def drop_silent(self, silence_s: float) -> dict[str, list[tuple[str, int]]]:
        """End the streams of replicas that were not seen for so long, behind the events that wait there; returns the
        requests of each, with their attempts."""
        silent = self._signs.silent(time.monotonic(), silence_s)
        for ingress_id in silent:
            self._signs.forget(ingress_id)
            outbox = self._outboxes.pop(ingress_id)
            outbox.is_over = True
            outbox.filled.set()
        return {
            ingress_id: [
                (request, attempt) for request, (attempt, ingress) in self._reply_to.items() if ingress == ingress_id
            ]
            for ingress_id in silent
        }

    def _outbox(self, ingress_id: str) -> _Outbox:
        if ingress_id not in self._outboxes:
            self._outboxes[ingress_id] = _Outbox()
            self._signs.heard(ingress_id, time.monotonic())
        return self._outboxes[ingress_id]
