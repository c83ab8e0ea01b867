"""The blocks of one worker's KV pool: who holds each, what it contains, and which may be overwritten next.

Every block is in exactly one of three states:

* held: `ref_count > 0`; its holders are running requests, requests waiting for imports, or exports under way;
* cached: nobody holds it but its hash is known, so a later request can take it up; the next allocation may evict it;
* free: nobody holds it and it contains nothing.

A block gets its hash (is *sealed*) only after the forward pass or the import that filled it. Which cached block is
evicted is the eviction queue's decision: a leaf of the prefix tree, the one least worth by the queue's ranking.
"""

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

from engine.core.eviction.queue import EvictionQueue
from engine.core.eviction.ranking import LeastRecent
from engine.core.types import DEFAULT_RETENTION, BlockHash, EvictionReason, Retention


class OutOfBlocksError(Exception):
    """More blocks were asked for than are free or cached."""


class BlockContent(NamedTuple):
    """The tokens of a full block, and the hash of what precedes it."""

    parent: BlockHash
    token_ids: tuple[int, ...]


class BlockPool:
    """Reference counts and hashes of `num_blocks` blocks; holds no tensor. `queue`: LRU unless another one is given."""

    def __init__(self, num_blocks: int, block_size: int, queue: EvictionQueue[BlockHash] | None = None) -> None:
        assert num_blocks > 0 and block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ref_counts = [0] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._by_hash: dict[BlockHash, int] = {}
        self._contents: list[BlockContent | None] = [None] * num_blocks
        """What is in the blocks that were computed here; imported ones are known by their hashes only."""
        self._retentions = [DEFAULT_RETENTION] * num_blocks
        """What the request that filled a block wishes for it, until it has ended and the queue knows."""
        self._by_beginning: dict[tuple[BlockHash, int], int] = {}
        """By the hash before it and its first token: the block sealed last of those that begin so."""
        self._free = list(range(num_blocks - 1, -1, -1))
        self._queue: EvictionQueue[BlockHash] = EvictionQueue(LeastRecent()) if queue is None else queue
        self.now = 0.0
        """Seconds; whoever has a clock sets it before a step. The age of cached blocks is measured with it."""
        self._sealed_journal: list[BlockHash] = []
        self._evicted_journal: list[tuple[BlockHash, EvictionReason]] = []

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now: free and cached ones."""
        return len(self._free) + len(self._queue)

    @property
    def num_cached(self) -> int:
        return len(self._queue)

    def lookup(self, block_hash: BlockHash) -> int | None:
        """The block that contains `block_hash`, or None. Takes no reference."""
        return self._by_hash.get(block_hash)

    def match(self, hashes: Iterable[BlockHash]) -> list[int]:
        """The blocks of the longest prefix of `hashes` that is here. Takes no reference."""
        blocks = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def similar(self, parent: BlockHash, token_ids: Sequence[int]) -> tuple[int, int] | None:
        """A block after `parent` that begins with some of `token_ids`, and with how many. Takes no reference."""
        block = self._by_beginning.get((parent, token_ids[0])) if token_ids else None
        if block is None:
            return None
        content = self._contents[block]
        assert content is not None
        pairs = zip(content.token_ids, token_ids, strict=False)
        return block, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def hash_of(self, block: int) -> BlockHash | None:
        return self._hashes[block]

    def is_cached(self, block: int) -> bool:
        """Whether nobody holds the block, so that taking it up leaves one less to allocate."""
        return self._ref_counts[block] == 0

    def is_shared(self, block: int) -> bool:
        """Whether more than one holds the block, so that it stays when one of them gives it back."""
        return self._ref_counts[block] > 1

    def hashes(self) -> list[BlockHash]:
        """Every hash that is here, for reporting the whole pool to a manager that knows nothing yet."""
        return list(self._by_hash)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Hold blocks that are held or cached already."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                self._queue.acquire(self._name(block))
            self._ref_counts[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` empty blocks, evicting cached ones if need be.

        Raises:
            OutOfBlocksError: fewer than `count` blocks are available; nothing was taken.
        """
        if count > self.num_available:
            raise OutOfBlocksError(f"{count} blocks wanted, {self.num_available} available")
        blocks: list[int] = []
        try:
            for _ in range(count):
                block = self._free.pop() if self._free else self._evict()
                self._ref_counts[block] = 1
                blocks.append(block)
        except BaseException:
            self.release(blocks)
            raise
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each block; `blocks` are in sequence order."""
        cached: list[BlockHash] = []
        try:
            for block in blocks:
                self._give_back(block, cached)
        finally:
            self._queue.release(cached, self.now)

    def retire(self, blocks: Sequence[int], retention: Retention = DEFAULT_RETENTION) -> None:
        """Release the blocks of a request that has used them, from its first block on: what eviction learns from."""
        self._queue.visit(self._path(blocks), self.now, retention)
        self.release(blocks)

    def pause(self, blocks: Sequence[int], retention: Retention = DEFAULT_RETENTION) -> None:
        """Release the blocks of a request, from its first block on, that has not ended: eviction learns nothing."""
        self._queue.pause(self._path(blocks), self.now, retention)
        self.release(blocks)

    def want(self, hashes: Iterable[BlockHash]) -> None:
        """A request waits for its turn to use these blocks, here or not: until `unwant` they are evicted late."""
        self._queue.want(hashes)

    def unwant(self, hashes: Iterable[BlockHash]) -> None:
        """It waits no longer."""
        self._queue.unwant(hashes)

    def retention_of(self, block: int) -> Retention:
        """What requests wish for a sealed block."""
        return self._queue.retention_of(self._name(block)) or self._retentions[block]

    def seal(
        self,
        block: int,
        block_hash: BlockHash,
        content: BlockContent | None = None,
        retention: Retention = DEFAULT_RETENTION,
    ) -> None:
        """Say what a held block contains, now that it does. A second block of equal content stays unnamed.

        With its `content`, blocks that begin alike can be copied from it. `retention` is for copies of the block that
        leave the pool before its request ends.
        """
        assert self._ref_counts[block] > 0 and self._hashes[block] is None
        if block_hash not in self._by_hash:
            self._hashes[block] = block_hash
            self._by_hash[block_hash] = block
            self._sealed_journal.append(block_hash)
            self._contents[block] = content
            self._retentions[block] = retention
            if content is not None:
                self._by_beginning[content.parent, content.token_ids[0]] = block

    def take_over(self, block: int) -> bool:
        """Turn a cached block into a held, unnamed one that its taker may write to; False if others hold it."""
        if self._ref_counts[block] > 0:
            return False
        self._queue.forget(self._name(block))
        self._forget(block, EvictionReason.TAKEN)
        self._ref_counts[block] = 1
        return True

    def reset(self) -> int:
        """Forget every cached block that nobody holds; returns how many."""
        cached = list(self._queue)
        for block_hash in cached:
            self._queue.forget(block_hash)
            self._free.append(self._forget(self._by_hash[block_hash], EvictionReason.RESET))
        return len(cached)

    def drain_journal(self) -> tuple[list[BlockHash], list[tuple[BlockHash, EvictionReason]]]:
        """Hashes sealed and hashes evicted since the last call. One that was both and is absent counts as evicted."""
        sealed = [block_hash for block_hash in self._sealed_journal if block_hash in self._by_hash]
        evicted = [gone for gone in self._evicted_journal if gone[0] not in self._by_hash]
        self._sealed_journal, self._evicted_journal = [], []
        return sealed, evicted

    def check_integrity(self, held: Iterable[int] | None = None, wanted: Iterable[BlockHash] | None = None) -> None:
        """Assert that every block is in exactly one state; with `held`, that those are all references there are, and
        with `wanted`, that requests wait for those."""
        self._queue.check_integrity(wanted)
        free, cached = set(self._free), {self._by_hash[block_hash] for block_hash in self._queue}
        assert len(free) == len(self._free), "a block is free twice"
        for block in range(self.num_blocks):
            states = (block in free) + (block in cached) + (self._ref_counts[block] > 0)
            assert states == 1, f"block {block} is in {states} states"
            assert block not in free or self._hashes[block] is None, f"free block {block} has a hash"
            assert block not in cached or self._hashes[block] is not None, f"cached block {block} has no hash"
        assert all(self._hashes[block] == block_hash for block_hash, block in self._by_hash.items())
        assert len(self._by_hash) == sum(block_hash is not None for block_hash in self._hashes)
        for (parent, token_id), block in self._by_beginning.items():
            content = self._contents[block]
            assert content is not None and (content.parent, content.token_ids[0]) == (parent, token_id)
        assert all(
            self._hashes[block] is not None for block, content in enumerate(self._contents) if content is not None
        ), "an empty block has a content"
        if held is not None:
            counts = [0] * self.num_blocks
            for block in held:
                counts[block] += 1
            assert counts == self._ref_counts, "reference counts differ from the holders"

    def _path(self, blocks: Iterable[int]) -> list[BlockHash]:
        """The hashes of the sealed blocks before the first that is not."""
        path: list[BlockHash] = []
        for block in blocks:
            block_hash = self._hashes[block]
            if block_hash is None:
                break
            path.append(block_hash)
        return path

    def _give_back(self, block: int, cached: list[BlockHash]) -> None:
        """Drop one reference; the hash of a block that is only cached now is added to `cached`."""
        assert self._ref_counts[block] > 0, f"block {block} released more often than held"
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            block_hash = self._hashes[block]
            if block_hash is None:
                self._free.append(block)
            else:
                cached.append(block_hash)

    def _evict(self) -> int:
        block_hash, reason = self._queue.evict_with_reason(self.now)
        return self._forget(self._by_hash[block_hash], reason)

    def _forget(self, block: int, reason: EvictionReason) -> int:
        block_hash = self._name(block)
        del self._by_hash[block_hash]
        self._hashes[block] = None
        self._evicted_journal.append((block_hash, reason))
        content, self._contents[block] = self._contents[block], None
        if content is not None and self._by_beginning.get(key := (content.parent, content.token_ids[0])) == block:
            del self._by_beginning[key]
        return block

    def _name(self, block: int) -> BlockHash:
        block_hash = self._hashes[block]
        assert block_hash is not None
        return block_hash
