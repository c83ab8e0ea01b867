"""Ordered journal of the blocks that entered and left the cluster's cache, for outside followers."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from raydix.engine.core.types import BlockHash

CAPACITY = 1 << 16


class CacheEvent(NamedTuple):
    """A block entered the cache (`is_stored`), or left its last place."""

    sequence: int
    is_stored: bool
    block_hash: BlockHash


@dataclass(frozen=True, slots=True)
class CacheUpdate:
    """Answer to a follower that has seen all events before some number."""

    next_sequence: int
    """The number to ask for the next time."""
    events: tuple[CacheEvent, ...]
    snapshot: tuple[BlockHash, ...] | None
    """All stored blocks, in place of events that are forgotten."""


class CacheEvents:
    """The last `capacity` events, numbered without gaps."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._events: deque[CacheEvent] = deque(maxlen=capacity)
        self.next_sequence = 0

    def add(self, is_stored: bool, block_hash: BlockHash) -> None:
        self._events.append(CacheEvent(self.next_sequence, is_stored, block_hash))
        self.next_sequence += 1

    def since(self, sequence: int | None, stored: Iterable[BlockHash]) -> CacheUpdate:
        """The events from `sequence` on, or a snapshot of all `stored` blocks.

        A snapshot if some of the events are forgotten, if `sequence` lies in the future (of another manager), or if
        `sequence` is None.
        """
        first = self.next_sequence - len(self._events)
        if sequence is None or not first <= sequence <= self.next_sequence:
            return CacheUpdate(self.next_sequence, (), tuple(stored))
        events = [self._events[index] for index in range(sequence - first, len(self._events))]
        return CacheUpdate(self.next_sequence, tuple(events), None)
