"""Interface of the eviction policies: the worth of a block by its last visit."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from raydix.engine.core.types import FinishReason

Key = TypeVar("Key", bound=Hashable)


class Visit(Generic[Key]):
    """Use of a path of blocks by a request, or one use of a trunk (see `survival`). Mutable; owned by a ranking.

    `leaves` belongs to the queues: for each queue, the block of the visit that it would evict first.
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
        "num_again_sampled",
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
        """Number of the visit or pause, in order."""
        self.num_again = 0
        """Number of leading blocks that other visits had used before, as far as known."""
        self.num_again_sampled = 0
        """`num_again`, counted in the blocks of the ghosts' sample."""
        self.leaves: dict[object, Key] = {}
        self.previous: Visit[Key] | None = None
        """The continued visit, until the queue has processed the end of that visit."""


class Ranking(Protocol[Key]):
    """A policy. Lower ranks are evicted first."""

    is_renewed_by_release: bool
    """True if a block counts as used at every last release, not only at the end of a request."""

    def visit(
        self, path: Sequence[Key], num_known: int, num_blocks: int, now: float, stop: FinishReason | None = None
    ) -> Visit[Key]:
        """A request has used `path`, from the root; its first `num_known` blocks were known before. The queue now knows
        `num_blocks`. `stop`: the reason of the answer's end, where it is known."""
        ...

    def pause(self, path: Sequence[Key], num_known: int, now: float) -> Visit[Key]:
        """A request releases `path` before its end: blocks are ranked by the pause until a visit; nothing is learnt."""
        ...

    def branch(self, key: Key, now: float) -> None:
        """Requests go different ways after block `key`."""
        ...

    def rank(self, key: Key, depth: int, visit: Visit[Key]) -> float:
        """The worth of a block last used by `visit`, with `depth` blocks before it."""
        ...

    def age(self, now: float) -> Iterable[Visit[Key]] | None:
        """Visits whose rank has changed since the last call because time has passed; None: any may have."""
        ...


class LeastRecent(Generic[Key]):
    """LRU: the order of use."""

    is_renewed_by_release = True

    def __init__(self) -> None:
        self._num_visits = 0

    def visit(
        self, path: Sequence[Key], num_known: int, num_blocks: int, now: float, stop: FinishReason | None = None
    ) -> Visit[Key]:
        return self.pause(path, num_known, now)

    def pause(self, path: Sequence[Key], num_known: int, now: float) -> Visit[Key]:
        self._num_visits += 1
        visit = Visit(kind=0, turn=0, length=len(path), born=now, landmark=path[-1], end=path[-1])
        visit.number = self._num_visits
        return visit

    def branch(self, key: Key, now: float) -> None:
        pass

    def rank(self, key: Key, depth: int, visit: Visit[Key]) -> float:
        return visit.number

    def age(self, now: float) -> Iterable[Visit[Key]]:
        return ()
