"""How likely evicted blocks are wanted again, as placement reckons."""

import pytest

from raydix.engine.core.manager.cache_statistics import NUM_PRIOR_BLOCKS, WINDOW
from raydix.engine.core.manager.directory import Directory
from raydix.engine.core.manager.placement import CostModel
from raydix.engine.core.types import AdmitRequest, BlockHash, EvictionReason, Role


def make_directory() -> Directory:
    directory = Directory(CostModel(block_size=16), segment_budget_bytes=1 << 20)
    directory.register("w", Role.MIXED, 1, 1000, ())
    return directory


def blocks(name: str, count: int) -> tuple[BlockHash, ...]:
    return tuple(f"{name} {index}".encode() for index in range(count))


def come_and_go(directory: Directory, hashes: tuple[BlockHash, ...], reason: EvictionReason) -> None:
    directory.blocks_changed("w", 1, hashes, ())
    directory.blocks_changed("w", 1, (), [(block_hash, reason) for block_hash in hashes])


def admit(directory: Directory, name: str, hashes: tuple[BlockHash, ...] = ()) -> None:
    directory.admit(AdmitRequest(name, 0, hashes, len(hashes) * 16 + 1, name), 0.0)
    directory.end_request(name, 0.0)


@pytest.mark.parametrize("reason", [EvictionReason.RESET, EvictionReason.TAKEN])
def test_blocks_that_made_no_room_do_not_count(reason: EvictionReason) -> None:
    directory = make_directory()
    come_and_go(directory, blocks("a", 1000), reason)
    assert directory.statistics.return_rate == 0.5
    admit(directory, "r", blocks("a", 1000))
    assert directory.statistics.return_rate == 0.5


def test_blocks_of_a_lost_worker_do_not_count() -> None:
    directory = make_directory()
    directory.blocks_changed("w", 1, blocks("a", 1000), ())
    directory.remove_worker("w")
    assert directory.statistics.return_rate == 0.5


@pytest.mark.parametrize("reason", [EvictionReason.FULL, EvictionReason.QUOTA, EvictionReason.EXPIRED])
def test_blocks_that_made_room_count_and_so_does_their_return(reason: EvictionReason) -> None:
    directory = make_directory()
    come_and_go(directory, blocks("a", 1000), reason)
    assert directory.statistics.return_rate == pytest.approx(NUM_PRIOR_BLOCKS / 2 / (1000 + NUM_PRIOR_BLOCKS))
    admit(directory, "r", blocks("a", 500))
    assert directory.statistics.return_rate == pytest.approx(0.5, abs=0.01)


def test_an_old_phase_counts_less_and_less() -> None:
    """Nothing of many evicted blocks came back once; now all do."""
    directory = make_directory()
    come_and_go(directory, blocks("old", 20_000), EvictionReason.FULL)
    assert directory.statistics.return_rate < 0.01
    for number in range(5 * WINDOW):
        hashes = blocks(str(number), 1)
        come_and_go(directory, hashes, EvictionReason.FULL)
        admit(directory, str(number), hashes)
    assert directory.statistics.return_rate > 0.8
