"""Sample of a path's blocks for ghosts: the blocks whose digest is a multiple of a number.

A block is in the sample or not, in every path and at every time. So a cache of the sampled blocks alone, smaller by the
same factor, has the hit rate of the whole cache (spatial sampling: Waldspurger et al., "Efficient MRC Construction with
SHARDS", FAST '15). Blocks are sampled, not conversations: most paths leave some blocks, and a block shared by everyone
is a hit for all ghosts or for none, so the difference between ghosts is not affected.

A trunk outside the sample is worth to the cache its worth to the blocks before it, which are evicted later. So the
nearest sampled block before a trunk stands for the trunk.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic

from raydix.engine.core.eviction.ranking import Key, Visit
from raydix.engine.core.eviction.survival import MAX_VISITS, Survival


class Sample(Generic[Key]):
    """Sample of one in `one_in` blocks. 1 takes all, without asking for digests."""

    def __init__(self, survival: Survival[Key], one_in: int, digest: Callable[[Any], int]) -> None:
        assert one_in > 0
        self.one_in = one_in
        self._survival = survival
        self._digest = digest
        self._path: Sequence[Key] = ()  # the last path
        self._trunk_of: dict[Key, Key] = {}  # trunks by the sampled blocks that stand for them

    def take(self, path: Sequence[Key], visit: Visit[Key], queue: object) -> Sequence[Key]:
        """The sampled blocks of a visit's path; counts in `visit` the part used before. `queue`: the one that ranks by
        `rank`."""
        if self.one_in == 1:
            visit.num_again_sampled = visit.num_again
            return path
        self._path = path

        digest, one_in, trunks = self._digest, self.one_in, self._survival.trunks
        sampled: list[Key] = []
        num_again, num_standing = 0, 0
        for depth, key in enumerate(path):
            if not digest(key) % one_in:
                sampled.append(key)
                num_again += depth < visit.num_again
            if key in trunks and num_standing < len(sampled):
                num_standing = len(sampled)  # the first trunk is the most used
                self._stand(sampled[-1], trunks[key], queue)

        visit.num_again_sampled = num_again
        return sampled

    def branch(self, key: Key, queue: object) -> None:
        """Requests part after block `key` of the last path: a trunk from now on."""
        trunks = self._survival.trunks
        if self.one_in == 1 or key not in trunks:
            return
        before = self._path[: self._path.index(key) + 1]
        nearest = next((block for block in reversed(before) if not self._digest(block) % self.one_in), None)
        if nearest is not None and self._trunk_of.get(nearest, nearest) not in trunks:
            self._stand(nearest, trunks[key], queue)

    def rank(self, key: Key, depth: int, visit: Visit[Key]) -> float:
        """`Survival.rank`, of a sampled block."""
        return self._survival.rank(self._trunk_of.get(key, key), depth, visit)

    def _stand(self, block: Key, trunk: Visit[Key], queue: object) -> None:
        trunk.leaves[queue] = block
        self._trunk_of[block] = trunk.landmark
        if len(self._trunk_of) > 2 * MAX_VISITS:
            trunks = self._survival.trunks
            self._trunk_of = {block: key for block, key in self._trunk_of.items() if key in trunks}
