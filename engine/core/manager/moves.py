"""KV that has moved from one worker to another, for people who look at the cluster."""

from collections import OrderedDict
from typing import NamedTuple

MOST_PAIRS = 200  # pairs of a source and a target that are remembered, those with the latest moves
DISK = "disk"  # the source of KV whose worker is not known: it came from the disk


class Moved(NamedTuple):
    """Segments that a target took from a source."""

    num_segments: int
    num_blocks: int
    num_bytes: int


class Moves:
    """Sums since the manager started, by source and target."""

    def __init__(self) -> None:
        self._moved: OrderedDict[tuple[str, str], Moved] = OrderedDict()

    def add(self, source: str, target: str, num_blocks: int, num_bytes: int) -> None:
        """Count a segment that `target` has taken."""
        pair = (source or DISK, target)
        before = self._moved.pop(pair, Moved(0, 0, 0))
        after = Moved(before.num_segments + 1, before.num_blocks + num_blocks, before.num_bytes + num_bytes)
        self._moved[pair] = after  # the last one from now on
        if len(self._moved) > MOST_PAIRS:
            self._moved.popitem(last=False)

    def latest(self) -> list[tuple[str, str, Moved]]:
        """Source, target and sums, those that moved last first."""
        return [(source, target, moved) for (source, target), moved in reversed(self._moved.items())]
