"""What came into the cluster's cache and what left it, in order, for those outside who follow it."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from engine.core.types import BlockHash

CAPACITY = 1 << 16


class CacheEvent(NamedTuple):
    """A block came to be somewhere (`is_stored`), or is nowhere any more."""

    sequence: int
    is_stored: bool
    block_hash: BlockHash


@dataclass(frozen=True, slots=True)
class CacheUpdate:
    """What a follower who has seen everything before some number has to know."""

    next_sequence: int
    """The number to ask for the next time."""
    events: tuple[CacheEvent, ...]
    snapshot: tuple[BlockHash, ...] | None
    """All blocks that are stored, in place of events that are not known any more."""


class CacheEvents:
    """The last `capacity` events, numbered without gaps."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._events: deque[CacheEvent] = deque(maxlen=capacity)
        self.next_sequence = 0

    def add(self, is_stored: bool, block_hash: BlockHash) -> None:
        self._events.append(CacheEvent(self.next_sequence, is_stored, block_hash))
        self.next_sequence += 1

    def since(self, sequence: int | None, stored: Iterable[BlockHash]) -> CacheUpdate:
        """The events from `sequence` on; or a snapshot of what is `stored` if some of these are forgotten, if
        `sequence` lies in the future (of another manager), or if it is None."""
        first = self.next_sequence - len(self._events)
        if sequence is None or not first <= sequence <= self.next_sequence:
            return CacheUpdate(self.next_sequence, (), tuple(stored))
        events = [self._events[index] for index in range(sequence - first, len(self._events))]
        return CacheUpdate(self.next_sequence, tuple(events), None)
