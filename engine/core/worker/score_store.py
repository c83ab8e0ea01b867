"""Prompt log-probabilities of scored blocks, so that a shared prefix is scored once.

A block's hash names its tokens and all tokens before them, and the log-probabilities of its tokens, its first included,
depend on nothing else. So the entry under a hash is right for every sequence with this block, whatever follows and
whether or not the KV is still in the pool.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile

from raydix.engine.core.types import BlockHash, TokenLogprobs

CAPACITY = 1 << 19
"""Limit of log-probabilities: 40 to 85 MB, the less the more alternatives each token has."""


class ScoreStore:
    """A store of at most `capacity` log-probabilities; the least recently used go first."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._size = 0
        self._scores: OrderedDict[tuple[BlockHash, int], tuple[TokenLogprobs, ...]] = OrderedDict()

    def clear(self) -> None:
        """Forget everything."""
        self._scores.clear()
        self._size = 0

    def match(self, hashes: Iterable[BlockHash], num_top: int) -> list[TokenLogprobs]:
        """The scores, with `num_top` alternatives each, of the longest stored prefix of blocks.

        The first block's scores begin with its second token: nothing precedes the first.
        """
        keys = list(takewhile(self._scores.__contains__, ((block_hash, num_top) for block_hash in hashes)))
        for key in reversed(keys):  # a block is of no use without its predecessors, so they are evicted later
            self._scores.move_to_end(key)
        return [score for key in keys for score in self._scores[key]]

    def put(self, block_hash: BlockHash, num_top: int, scores: Sequence[TokenLogprobs]) -> None:
        """Keep one block's scores."""
        if (block_hash, num_top) in self._scores:
            return
        self._scores[block_hash, num_top] = tuple(scores)
        self._size += len(scores) * (num_top + 1)
        while self._size > self._capacity:
            (_, oldest_top), oldest = self._scores.popitem(last=False)
            self._size -= len(oldest) * (oldest_top + 1)

    def check_integrity(self) -> None:
        """Assert that the entries are counted and within the limit."""
        assert self._size == sum(len(scores) * (num_top + 1) for (_, num_top), scores in self._scores.items())
        assert self._size <= self._capacity
