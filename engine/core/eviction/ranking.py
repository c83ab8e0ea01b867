"""What the eviction queue asks: what is a block worth, seen from the last visit that used it?"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Visit(Generic[Key]):
    """One request's use of a path of blocks, or one use of a trunk (see `survival`). Mutable; owned by a ranking.

    `leaves` are the queues': for each that has any, the key of the block that it would evict first among this visit's.
    """

    __slots__ = (
        "age_bin",
        "born",
        "end",
        "is_over",
        "kind",
        "landmark",
        "leaves",
        "length",
        "num_again",
        "number",
        "previous",
        "turn",
    )

    def __init__(self, kind: int, turn: int, length: int, born: float, landmark: Key, end: Key) -> None:
        self.kind = kind
        self.turn = turn
        self.length = length
        self.born = born
        self.landmark = landmark
        self.end = end
        """The last block."""
        self.age_bin = 0
        self.is_over = False
        self.number = 0
        """Visits and pauses in their order."""
        self.num_again = 0
        """How many of the blocks, from the root on, other visits had used before, as far as is known."""
        self.leaves: dict[object, Key] = {}
        self.previous: Visit[Key] | None = None
        """The visit that this one continues, until the queue has taken note of its end."""


class Ranking(Protocol[Key]):
    """A policy. Lower ranks are evicted first."""

    is_renewed_by_release: bool
    """Whether a block counts as used whenever its last holder lets go, not only when a request ends."""

    def visit(self, path: Sequence[Key], num_known: int, num_blocks: int, now: float) -> Visit[Key]:
        """A request has used `path`, from the root; its first `num_known` blocks were here before.

        With it the queue knows `num_blocks`.
        """
        ...

    def pause(self, path: Sequence[Key], num_known: int, now: float) -> Visit[Key]:
        """A request lets go of `path` before its end. Blocks are ranked by it until a visit; nothing is learnt."""
        ...

    def branch(self, key: Key, now: float) -> None:
        """Requests go different ways after block `key`."""
        ...

    def rank(self, key: Key, depth: int, visit: Visit[Key]) -> float:
        """The worth of a block last used by `visit`, in which `depth` others came before it."""
        ...

    def age(self, now: float) -> Iterable[Visit[Key]] | None:
        """Visits whose rank differs from what it was at the last call because time has passed; None: all may."""
        ...


class LeastRecent(Generic[Key]):
    """LRU: the order of use."""

    is_renewed_by_release = True

    def __init__(self) -> None:
        self._num_visits = 0

    def visit(self, path: Sequence[Key], num_known: int, num_blocks: int, now: float) -> Visit[Key]:
        return self.pause(path, num_known, now)

    def pause(self, path: Sequence[Key], num_known: int, now: float) -> Visit[Key]:
        self._num_visits += 1
        visit = Visit(0, 0, len(path), now, path[-1], path[-1])
        visit.number = self._num_visits
        return visit

    def branch(self, key: Key, now: float) -> None:
        pass

    def rank(self, key: Key, depth: int, visit: Visit[Key]) -> float:
        return visit.number

    def age(self, now: float) -> Iterable[Visit[Key]]:
        return ()
