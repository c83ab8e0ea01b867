"""The blocks of one worker's KV pool: holders, contents, and the order of reuse.

| state | holders | contents |
|---|---|---|
| held | `ref_count > 0`: running requests, requests waiting for imports, exports under way | any |
| cached | none | a sealed block: a later request can use it, the next allocation may evict it |
| free | none | none |

For a model with recurrent layers requests go on only where there is a snapshot of their states, too (`states`). A
snapshot goes with the first of its blocks, and other processes hear of both.

A block gets its hash (is *sealed*) only after the forward pass or the import that filled it. The eviction queue chooses
the cached block to evict: a leaf of the prefix tree, of the least worth by the queue's ranking.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from raydix.engine.core.eviction.policies import make_queue
from raydix.engine.core.eviction.queue import EvictionQueue, Quota
from raydix.engine.core.eviction.ranking import LeastRecent
from raydix.engine.core.settings import EngineSettings
from raydix.engine.core.tenants import quotas
from raydix.engine.core.types import DEFAULT_RETENTION, BlockHash, EvictionReason, FinishReason, Retention
from raydix.engine.core.worker.states import States


class OutOfBlocksError(Exception):
    """A request for more blocks than are free or cached."""


class BlockContent(NamedTuple):
    """The tokens of a full block, and the hash of the block before it."""

    parent: BlockHash
    token_ids: tuple[int, ...]


class BlockPool:
    """Reference counts and hashes of `num_blocks` blocks; holds no tensor. `queue`: LRU unless given.

    `now`, of all methods: monotonic seconds, the clock of the age and the expiry of cached blocks.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        queue: EvictionQueue[BlockHash] | None = None,
        *,
        keeps_blocks: bool = True,
        states: States | None = None,
    ) -> None:
        """`keeps_blocks`: False forgets the blocks of a request on release; names then serve hand-overs only, and are
        not reported. `states`: of a model with recurrent layers."""
        assert num_blocks > 0 and block_size > 0
        self.states = states
        self.keeps_blocks = keeps_blocks
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ref_counts = [0] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._by_hash: dict[BlockHash, int] = {}
        # Contents of blocks computed here; imported blocks are known by their hashes only.
        self._contents: list[BlockContent | None] = [None] * num_blocks
        # Hints of the request behind a block's contents, until its end, when the queue gets the hints.
        self._retentions = [DEFAULT_RETENTION] * num_blocks
        # The block sealed last, by preceding hash and first token.
        self._by_beginning: dict[tuple[BlockHash, int], int] = {}

        # A stack: the lowest number is the first to be taken.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._queue: EvictionQueue[BlockHash] = EvictionQueue(LeastRecent()) if queue is None else queue
        self._sealed_journal: list[BlockHash] = []
        self._evicted_journal: list[tuple[BlockHash, EvictionReason]] = []

    def limit(self, quotas: Mapping[str, Quota]) -> None:
        """Give tenants other shares of the cached blocks, from the next eviction on."""
        self._queue.limit(quotas)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now: free and cached ones."""
        return len(self._free) + len(self._queue)

    @property
    def num_cached(self) -> int:
        return len(self._queue)

    def lookup(self, block_hash: BlockHash) -> int | None:
        """The block with the contents of `block_hash`, or None. Takes no reference."""
        return self._by_hash.get(block_hash)

    def match(self, hashes: Iterable[BlockHash]) -> list[int]:
        """The blocks of the longest prefix of `hashes` that is here. Takes no reference."""
        blocks = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            # The prefix ends at the first missing block; what comes behind is of no use.
            if block is None:
                break
            blocks.append(block)
        return blocks

    def similar(self, parent: BlockHash, token_ids: Sequence[int]) -> tuple[int, int] | None:
        """A block after `parent` that begins with some of `token_ids`, and the number of equal tokens. Takes no
        reference."""
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
        """True if the block has no holder, so that holding it leaves one less to allocate."""
        return self._ref_counts[block] == 0

    def is_shared(self, block: int) -> bool:
        """True if the block has several holders, and so survives the release by one."""
        return self._ref_counts[block] > 1

    def hashes(self) -> list[BlockHash]:
        """Every hash in the pool, for a manager that knows nothing yet; those of snapshots last."""
        return [*self._by_hash, *(() if self.states is None else self.states.hashes())]

    def acquire(self, blocks: Iterable[int]) -> None:
        """Hold blocks that are held or cached already."""
        for block in blocks:
            # The first holder takes the block out of the queue of evictable ones.
            if self._ref_counts[block] == 0:
                self._queue.acquire(self._name(block))
            self._ref_counts[block] += 1

    def allocate(self, count: int, now: float) -> list[int]:
        """Take `count` empty blocks, evicting cached ones if need be.

        Raises:
            OutOfBlocksError: fewer than `count` blocks are available; nothing was taken.
        """
        if count > self.num_available:
            raise OutOfBlocksError(f"{count} blocks requested, {self.num_available} available")
        # Free blocks first: a cached one is evicted only where none is left.
        num_evicted = max(0, count - len(self._free))
        if num_evicted:
            for block_hash, reason in self._queue.evict_many(num_evicted, now):
                self._free.append(self._forget(self._by_hash[block_hash], reason))
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def release(self, blocks: Sequence[int], now: float) -> None:
        """Give back one reference to each block; `blocks` are in sequence order."""
        cached: list[BlockHash] = []
        counts, hashes = self._ref_counts, self._hashes
        try:
            for block in blocks:
                assert counts[block] > 0, f"block {block} released more often than held"
                counts[block] -= 1
                if counts[block] == 0:
                    block_hash = hashes[block]
                    if block_hash is None:
                        self._free.append(block)
                    else:
                        cached.append(block_hash)
        # Blocks that were counted as released must reach the queue, also where a later one fails.
        finally:
            self._queue.release(cached, now)

    def retire(
        self,
        blocks: Sequence[int],
        now: float,
        retention: Retention = DEFAULT_RETENTION,
        marked: Sequence[Retention] = (),
        stop: FinishReason | None = None,
    ) -> None:
        """Release the blocks of an ended request, from its first block on: eviction learns. `marked`: retention of the
        first blocks, where it is another; `stop`: the reason of the answer's end, where it is known."""
        # Without prefix caching nothing stays behind a request, so its blocks lose their names and become free.
        if self.keeps_blocks:
            self._queue.visit(self._path(blocks), now, retention, marked, stop)
        else:
            self._unname(blocks)
        self.release(blocks, now)

    def pause(
        self,
        blocks: Sequence[int],
        now: float,
        retention: Retention = DEFAULT_RETENTION,
        marked: Sequence[Retention] = (),
    ) -> None:
        """Release the blocks of an unfinished request, from its first block on: eviction learns nothing. `marked`: as
        `retire`."""
        if self.keeps_blocks:
            self._queue.pause(self._path(blocks), now, retention, marked)
        else:
            self._unname(blocks)
        self.release(blocks, now)

    def release_awaited(self, blocks: Sequence[int], now: float) -> None:
        """Release the blocks held for a waiting request. Without `keeps_blocks`, blocks without another holder are
        forgotten."""
        if not self.keeps_blocks:
            self._unname([block for block in blocks if not self.is_shared(block)])
        self.release(blocks, now)

    def protect(self, hashes: Iterable[BlockHash]) -> None:
        """A waiting request will use these blocks, in the pool or not: evict late until `unprotect`."""
        self._queue.protect(hashes)

    def unprotect(self, hashes: Iterable[BlockHash]) -> None:
        """End one request's protection."""
        self._queue.unprotect(hashes)

    def retention_of(self, block: int) -> Retention:
        return self._queue.retention_of(self._name(block)) or self._retentions[block]

    def seal(
        self,
        block: int,
        block_hash: BlockHash,
        content: BlockContent | None = None,
        retention: Retention = DEFAULT_RETENTION,
    ) -> None:
        """Name a held block by its contents. A second block of equal contents stays unnamed.

        `content` allows copies from the block to others with the same beginning. `retention` serves copies of the block
        leaving the pool before the end of its request.
        """
        assert self._ref_counts[block] > 0 and self._hashes[block] is None
        # Two requests may compute the same block side by side; the first one names it.
        if block_hash not in self._by_hash:
            self._hashes[block] = block_hash
            self._by_hash[block_hash] = block
            if self.keeps_blocks:
                self._sealed_journal.append(block_hash)

            self._contents[block] = content
            self._retentions[block] = retention
            if content is not None:
                self._by_beginning[content.parent, content.token_ids[0]] = block

    def take_over(self, block: int) -> bool:
        """Turn a cached block into a held, unnamed one for writing; False if the block has a holder."""
        # Somebody reads it: writing into it would change their KV.
        if self._ref_counts[block] > 0:
            return False
        self._queue.forget(self._name(block))
        self._forget(block, EvictionReason.TAKEN)
        self._ref_counts[block] = 1
        return True

    def reset(self) -> int:
        """Forget every cached block; returns the number of blocks."""
        cached = list(self._queue)
        for block_hash in cached:
            self._queue.forget(block_hash)
            self._free.append(self._forget(self._by_hash[block_hash], EvictionReason.RESET))
        if self.states is not None:
            self.states.reset()
        return len(cached)

    def drain_journal(self) -> tuple[list[BlockHash], list[tuple[BlockHash, EvictionReason]]]:
        """Hashes sealed and hashes evicted since the last call. A hash of both counts as evicted if it is absent
        now."""
        # A hash may have come, gone and come again: only where it is now counts.
        sealed = [block_hash for block_hash in self._sealed_journal if block_hash in self._by_hash]
        evicted = [gone for gone in self._evicted_journal if gone[0] not in self._by_hash]
        self._sealed_journal, self._evicted_journal = [], []
        if self.states is not None:
            came, gone = self.states.drain_journal()
            if self.keeps_blocks:
                return [*sealed, *came], [*evicted, *gone]
        return sealed, evicted

    def check_integrity(self, held: Iterable[int] | None = None, protected: Iterable[BlockHash] | None = None) -> None:
        """Assert that every block is in exactly one state; `held`: all references; `protected`: all protected
        hashes."""
        self._queue.check_integrity(protected)
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

    def _unname(self, blocks: Iterable[int]) -> None:
        """Forget the names of these blocks; holders, such as exports, keep the contents."""
        for block in blocks:
            block_hash = self._hashes[block]
            if block_hash is not None:
                self._queue.forget(block_hash)
                self._forget(block, EvictionReason.RESET)

    def _path(self, blocks: Iterable[int]) -> list[BlockHash]:
        """The hashes of the sealed blocks before the first unsealed one."""
        path: list[BlockHash] = []
        for block in blocks:
            block_hash = self._hashes[block]
            if block_hash is None:
                break
            path.append(block_hash)
        return path

    def _forget(self, block: int, reason: EvictionReason) -> int:
        block_hash = self._name(block)
        del self._by_hash[block_hash]
        self._hashes[block] = None
        if self.states is not None:
            self.states.block_gone(block_hash, reason)
        if self.keeps_blocks:
            self._evicted_journal.append((block_hash, reason))
        # Only its own entry: a block that was sealed later may stand there now.
        content, self._contents[block] = self._contents[block], None
        if content is not None and self._by_beginning.get(key := (content.parent, content.token_ids[0])) == block:
            del self._by_beginning[key]
        return block

    def _name(self, block: int) -> BlockHash:
        block_hash = self._hashes[block]
        assert block_hash is not None
        return block_hash


def pool_of(settings: EngineSettings, num_blocks: int, states: States | None = None) -> BlockPool:
    """The empty pool of an engine with these settings; `states` as `BlockPool` takes them."""
    queue: EvictionQueue[BlockHash] = make_queue(settings.eviction, quotas(settings.tenants, num_blocks), num_blocks)
    return BlockPool(num_blocks, settings.block_size, queue, keeps_blocks=settings.prefix_caching, states=states)
