"""Sums of hidden states up to the ends of blocks (`raydix.engine.core.worker.pooling`): a shared prefix is pooled once.

A block's hash names its tokens and all tokens before them, and their hidden states depend on nothing else. So the sum
under a hash is right for every sequence with this block.
"""

from collections import OrderedDict
from collections.abc import Sequence

from raydix.engine.core.types import BlockHash

CAPACITY = 64 << 20
"""Limit of bytes: of a model with hidden states of 1,024 values some 8,000 blocks."""


class SumStore:
    """A store of at most `capacity` bytes of sums; the least recently used go first."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._size = 0
        self._sums: OrderedDict[BlockHash, bytes] = OrderedDict()

    def clear(self) -> None:
        """Forget everything."""
        self._sums.clear()
        self._size = 0

    def match(self, hashes: Sequence[BlockHash]) -> tuple[int, bytes]:
        """The number of blocks of the longest prefix whose sum is stored, and the sum; zero blocks without one."""
        for num_blocks in range(len(hashes), 0, -1):
            block_hash = hashes[num_blocks - 1]
            if block_hash in self._sums:
                self._sums.move_to_end(block_hash)
                return num_blocks, self._sums[block_hash]
        return 0, b""

    def put(self, block_hash: BlockHash, total: bytes) -> None:
        """Keep the sum up to the end of a block."""
        if block_hash in self._sums:
            return
        self._sums[block_hash] = total
        self._size += len(total)
        while self._size > self._capacity:
            self._size -= len(self._sums.popitem(last=False)[1])

    def check_integrity(self) -> None:
        """Assert that the sums are counted and within the limit."""
        assert self._size == sum(map(len, self._sums.values())) <= self._capacity
