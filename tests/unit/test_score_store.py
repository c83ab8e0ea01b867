"""What is kept of scored prompts, and what goes first."""

from raydix.engine.core.types import TokenLogprobs
from raydix.engine.core.worker.score_store import ScoreStore


def scores(first: int, count: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(-float(first + index), (), ()) for index in range(count)]


def test_the_longest_prefix_is_found() -> None:
    store = ScoreStore()
    store.put(b"a", 0, scores(0, 3))
    store.put(b"b", 0, scores(3, 4))
    store.put(b"d", 0, scores(11, 4))
    assert store.match([b"a", b"b", b"c", b"d"], 0) == scores(0, 7)
    assert store.match([b"b"], 0) == scores(3, 4)
    assert store.match([b"c"], 0) == store.match([], 0) == []
    store.check_integrity()


def test_numbers_of_alternatives_are_kept_apart() -> None:
    store = ScoreStore()
    store.put(b"a", 2, scores(0, 3))
    assert store.match([b"a"], 1) == []
    assert store.match([b"a"], 2) == scores(0, 3)


def test_what_is_here_stays_as_it_is() -> None:
    store = ScoreStore()
    store.put(b"a", 0, scores(0, 3))
    store.put(b"a", 0, scores(5, 3))
    assert store.match([b"a"], 0) == scores(0, 3)
    store.check_integrity()


def test_the_least_recently_used_goes_first() -> None:
    store = ScoreStore(capacity=12)
    for name in (b"a", b"b", b"c"):
        store.put(name, 0, scores(0, 4))
    store.match([b"a"], 0)
    store.put(b"d", 1, scores(0, 4))
    assert store.match([b"b"], 0) == store.match([b"c"], 0) == []
    assert store.match([b"a"], 0) == store.match([b"d"], 1) == scores(0, 4)
    store.check_integrity()


def test_of_a_used_prefix_the_last_block_goes_first() -> None:
    store = ScoreStore(capacity=12)
    for name in (b"a", b"b", b"c"):
        store.put(name, 0, scores(0, 4))
    store.match([b"a", b"b", b"c"], 0)
    store.put(b"d", 0, scores(0, 4))
    assert store.match([b"a", b"b", b"c"], 0) == scores(0, 4) * 2


def test_one_block_larger_than_all_is_not_kept() -> None:
    store = ScoreStore(capacity=3)
    store.put(b"a", 0, scores(0, 4))
    assert store.match([b"a"], 0) == []
    store.check_integrity()
