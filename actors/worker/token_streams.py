"""The token streams of one worker: events for each ingress replica, and the replicas that are still there."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from raydix.actors.calls import sleep
from raydix.actors.messages import INGRESS_SILENCE_S
from raydix.actors.processes import ProcessWatch
from raydix.engine.core.log_fields import about
from raydix.engine.core.signs_of_life import SignsOfLife
from raydix.engine.core.types import (
    Assignment,
    AttemptName,
    AttemptOver,
    ProcessName,
    PromptEvent,
    StreamEvent,
    TokenEvent,
)
from raydix.engine.core.worker.attempts import Attempts

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Outbox:
    """Events that wait to be read by one ingress replica."""

    events: list[StreamEvent] = field(default_factory=list)
    filled: asyncio.Event = field(default_factory=asyncio.Event)
    reader: int = 0
    is_over: bool = False
    """True once the replica is given up: its reader, if it comes back, gets what is here, and then the end."""


class TokenStreams:
    """Sorts events by the ingress replica that each request belongs to. Not thread-safe."""

    def __init__(self) -> None:
        self._outboxes: dict[str, _Outbox] = {}
        self._signs = SignsOfLife()  # signs of life of the replicas with an outbox
        self.processes: dict[str, ProcessName | None] = {}
        """Processes of the replicas whose pings have come."""
        self.attempts = Attempts()
        """The attempts whose events are expected."""

    def begin(self, assignments: Iterable[Assignment]) -> None:
        """Expect events of new attempts."""
        for ingress_id in self.attempts.begin(assignments):
            self.seen(ingress_id)

    def compare(
        self, ingress_id: str, taken: Sequence[AttemptName], sent: Sequence[AttemptName], now: float
    ) -> Sequence[AttemptName]:
        """Take a ping (`Attempts.compare`): tell the replica of attempts that are not here, behind all their events;
        returns the orphans."""
        self.seen(ingress_id)
        unknown, orphans = self.attempts.compare(ingress_id, taken, sent, now)
        if unknown:
            outbox = self._outbox(ingress_id)
            outbox.events += (AttemptOver(*name) for name in unknown)
            outbox.filled.set()
        return orphans

    def put(self, events: Sequence[PromptEvent | TokenEvent]) -> None:
        """Hand events of present attempts to the readers of their replicas."""
        for event in events:
            ingress_id = self.attempts.reader(event.request_id, event.attempt)
            if ingress_id is not None:
                outbox = self._outbox(ingress_id)
                outbox.events.append(event)
                outbox.filled.set()

    async def read(self, ingress_id: str) -> AsyncIterator[list[StreamEvent]]:
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

    async def watch(self, node: str, abort: Callable[[str, int], Awaitable[None]]) -> None:
        """Abort the attempts of replicas that are gone, for ever. `node`: the one that this process runs on; `abort` is
        called with a request's id and its attempt."""
        processes = ProcessWatch(node)
        while True:
            late_s = await sleep(INGRESS_SILENCE_S / 4)
            # While this process was stopped it received nothing: the time counts as nobody's silence.
            self._signs.stood_still(late_s)
            self.attempts.stood_still(late_s)
            # A replica that is quiet and computes is alive.
            processes.look_at_quiet(self._signs, self.processes, INGRESS_SILENCE_S / 4)
            for ingress_id, orphans in self.drop_silent(INGRESS_SILENCE_S).items():
                for orphan in orphans:
                    await abort(*orphan)
                logger.log(
                    logging.WARNING if orphans else logging.INFO,
                    "ingress %s is silent for %d s: %d requests aborted",
                    ingress_id,
                    INGRESS_SILENCE_S,
                    len(orphans),
                    extra=about("ingress_lost", ingress=ingress_id, requests=len(orphans)),
                )

    def drop_silent(self, silence_s: float) -> dict[str, list[AttemptName]]:
        """End the streams of replicas that were not seen for so long, behind the events that wait there; returns the
        attempts of each."""
        silent = self._signs.silent(time.monotonic(), silence_s)
        for ingress_id in silent:
            self._signs.forget(ingress_id)
            self.processes.pop(ingress_id, None)
            outbox = self._outboxes.pop(ingress_id)
            outbox.is_over = True
            outbox.filled.set()
        return {ingress_id: self.attempts.read_by(ingress_id) for ingress_id in silent}

    def _outbox(self, ingress_id: str) -> _Outbox:
        if ingress_id not in self._outboxes:
            self._outboxes[ingress_id] = _Outbox()
            self._signs.heard(ingress_id, time.monotonic())
        return self._outboxes[ingress_id]
