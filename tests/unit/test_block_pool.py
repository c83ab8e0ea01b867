"""The block pool by example; `test_scheduler_machine` drives it into corners."""

from collections.abc import Iterator

import pytest

from raydix.engine.core.eviction.policies import EvictionPolicy, make_queue
from raydix.engine.core.eviction.queue import EvictionQueue
from raydix.engine.core.types import BlockHash, EvictionReason
from raydix.engine.core.worker.block_pool import BlockContent, BlockPool, OutOfBlocksError


@pytest.fixture
def pool() -> Iterator[BlockPool]:
    pool = BlockPool(num_blocks=4, block_size=2)
    yield pool
    pool.check_integrity()


def fill(pool: BlockPool, *hashes: bytes) -> list[int]:
    """Blocks of one sequence, sealed and still held."""
    blocks = pool.allocate(len(hashes), 0.0)
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.seal(block, block_hash)
    return blocks


def test_a_block_is_held_then_cached_then_taken_up(pool: BlockPool) -> None:
    blocks = fill(pool, b"a", b"b")
    assert (pool.num_available, pool.num_cached) == (2, 0)
    pool.release(blocks, 0.0)
    assert (pool.num_available, pool.num_cached) == (4, 2)
    assert pool.match([b"a", b"b", b"c"]) == blocks
    pool.acquire(blocks)
    assert (pool.num_available, pool.num_cached) == (2, 0)
    pool.check_integrity(blocks)
    pool.release(blocks, 0.0)


def test_a_block_without_a_hash_becomes_free(pool: BlockPool) -> None:
    pool.release(pool.allocate(3, 0.0), 0.0)
    assert (pool.num_available, pool.num_cached) == (4, 0)
    assert pool.drain_journal() == ([], [])


def test_eviction_takes_leaves_first(pool: BlockPool) -> None:
    pool.release(fill(pool, b"a", b"b", b"c"), 0.0)
    survivors = []
    for _ in range(3):
        pool.allocate(pool.num_available - pool.num_cached + 1, 0.0)
        survivors.append(sorted(pool.hashes()))
    assert survivors == [[b"a", b"b"], [b"a"], []]


def test_eviction_takes_the_least_recently_released_chain_first(pool: BlockPool) -> None:
    old, new = fill(pool, b"a", b"b"), fill(pool, b"c", b"d")
    pool.release(old, 0.0)
    pool.release(new, 0.0)
    pool.acquire(old)
    pool.release(old, 0.0)
    pool.allocate(2, 0.0)
    assert sorted(pool.hashes()) == [b"a", b"b"]


def test_the_queue_it_is_given_decides() -> None:
    queue: EvictionQueue[BlockHash] = make_queue(EvictionPolicy.ADAPTIVE)
    pool = BlockPool(4, 2, queue)
    pool.retire(fill(pool, b"a", b"b"), 0.0)
    assert set(queue) == {b"a", b"b"}
    pool.allocate(3, 0.0)
    assert set(queue) == {b"a"}


def test_match_stops_at_the_first_gap(pool: BlockPool) -> None:
    blocks = fill(pool, b"a", b"c")
    assert pool.match([b"a", b"b", b"c"]) == blocks[:1]
    assert pool.match([b"b", b"c"]) == []


def test_too_many_blocks_take_nothing(pool: BlockPool) -> None:
    held = fill(pool, b"a")
    with pytest.raises(OutOfBlocksError, match="4 blocks requested, 3 available"):
        pool.allocate(4, 0.0)
    assert pool.num_available == 3
    pool.check_integrity(held)
    assert pool.allocate(0, 0.0) == []


def test_an_eviction_that_fails_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    queue: EvictionQueue[BlockHash] = make_queue(EvictionPolicy.LRU)
    pool = BlockPool(4, 2, queue)
    pool.release(fill(pool, b"a", b"b"), 0.0)

    def fail(count: int, now: float) -> BlockHash:
        raise RuntimeError("no")

    monkeypatch.setattr(queue, "evict_many", fail)
    with pytest.raises(RuntimeError, match="no"):
        pool.allocate(3, 0.0)
    pool.check_integrity(())
    assert (pool.num_available, pool.num_cached) == (4, 2)


def test_equal_content_is_named_once(pool: BlockPool) -> None:
    first, second = fill(pool, b"a"), fill(pool, b"a")
    assert pool.lookup(b"a") == first[0]
    assert pool.hash_of(second[0]) is None
    pool.release(first, 0.0)
    pool.release(second, 0.0)
    assert pool.num_cached == 1


def test_a_shared_block_stays_until_its_last_holder_lets_go(pool: BlockPool) -> None:
    [block] = fill(pool, b"a")
    pool.acquire([block])
    pool.release([block], 0.0)
    assert not pool.is_cached(block)
    assert pool.reset() == 0
    pool.release([block], 0.0)
    assert pool.is_cached(block)


def test_take_over_makes_a_cached_block_private(pool: BlockPool) -> None:
    [block] = fill(pool, b"tail")
    assert not pool.take_over(block), "somebody holds it"
    pool.release([block], 0.0)
    assert pool.take_over(block)
    assert pool.lookup(b"tail") is None and pool.hash_of(block) is None
    pool.seal(block, b"full")
    pool.check_integrity([block])


def test_reset_forgets_what_nobody_holds(pool: BlockPool) -> None:
    held = fill(pool, b"a")
    pool.release(fill(pool, b"b", b"c"), 0.0)
    assert pool.reset() == 2
    assert pool.hashes() == [b"a"]
    pool.check_integrity(held)


def test_journal_tells_what_others_must_hear(pool: BlockPool) -> None:
    pool.release(fill(pool, b"a", b"b"), 0.0)
    assert pool.drain_journal() == ([b"a", b"b"], [])
    held = pool.allocate(3, 0.0)
    assert pool.drain_journal() == ([], [(b"b", EvictionReason.FULL)])
    pool.seal(held[0], b"b")
    pool.release(held, 0.0)
    pool.reset()
    gone = [(b"a", EvictionReason.RESET), (b"b", EvictionReason.RESET)]
    assert pool.drain_journal() == ([], gone), "sealed and gone again counts as gone"
    [block] = fill(pool, b"c")
    pool.release([block], 0.0)
    assert pool.take_over(block)
    pool.release([block], 0.0)
    assert pool.drain_journal() == ([], [(b"c", EvictionReason.TAKEN)])


def test_a_hash_that_comes_back_is_not_reported_as_gone(pool: BlockPool) -> None:
    pool.release(fill(pool, b"a"), 0.0)
    pool.reset()
    pool.release(fill(pool, b"a"), 0.0)
    assert pool.drain_journal() == ([b"a", b"a"], [])


def test_integrity_notices_a_wrong_holder(pool: BlockPool) -> None:
    held = fill(pool, b"a")
    with pytest.raises(AssertionError, match="holders"):
        pool.check_integrity([])
    with pytest.raises(AssertionError, match="released more often"):
        pool.release([*held, *held], 0.0)


def test_blocks_that_begin_alike_are_found_until_they_are_evicted(pool: BlockPool) -> None:
    one, other, stranger = pool.allocate(3, 0.0)
    pool.seal(one, b"one", BlockContent(b"parent", (7, 8)))
    assert pool.similar(b"parent", (7, 9)) == (one, 1)
    pool.seal(other, b"other", BlockContent(b"parent", (7, 9)))
    pool.seal(stranger, b"imported")
    assert pool.similar(b"parent", (7, 9)) == (other, 2), "the latest counts"
    assert pool.similar(b"parent", (7,)) == (other, 1)
    for parent, token_ids in ((b"another", (7, 9)), (b"parent", (9,)), (b"parent", ())):
        assert pool.similar(parent, token_ids) is None
    pool.release([stranger, other, one], 0.0)
    pool.check_integrity([])
    pool.allocate(2, 0.0)
    assert pool.similar(b"parent", (7, 9)) == (other, 2)
    pool.allocate(1, 0.0)
    assert pool.similar(b"parent", (7, 9)) is None
