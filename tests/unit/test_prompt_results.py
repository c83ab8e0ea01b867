"""What is kept of scored and of pooled prompts, and what goes first."""

from raydix.engine.core.types import TokenLogprobs
from raydix.engine.core.worker.prompt_results import ScoreStore, SumStore


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


def test_a_block_of_nearly_all_the_room_drives_nobody_out() -> None:
    store = ScoreStore(capacity=16)
    store.put(b"a", 0, scores(0, 4))
    store.put(b"b", 3, scores(0, 4))
    assert store.match([b"a"], 0) == scores(0, 4) and store.match([b"b"], 3) == []
    store.check_integrity()


def test_the_longest_prefix_with_a_sum_is_found() -> None:
    store = SumStore()
    store.put(b"a", b"one")
    store.put(b"c", b"three")
    assert store.match([b"a", b"b"]) == (1, b"one")
    assert store.match([b"a", b"b", b"c", b"d"]) == (3, b"three"), "a sum needs no other before it"
    assert store.match([b"b"]) == store.match([]) == (0, b"")
    store.check_integrity()
    store.clear()
    assert store.match([b"a"]) == (0, b"")
    store.check_integrity()


def test_a_sum_that_is_here_stays_as_it_is() -> None:
    store = SumStore()
    store.put(b"a", b"one")
    store.put(b"a", b"other")
    assert store.match([b"a"]) == (1, b"one")
    store.check_integrity()


def test_the_least_recently_used_sum_goes_first() -> None:
    store = SumStore(capacity=8)
    store.put(b"a", b"1234")
    store.put(b"b", b"1234")
    store.match([b"a"])
    store.put(b"c", b"1234")
    assert store.match([b"b"]) == (0, b"")
    assert store.match([b"a"]) == store.match([b"c"]) == (1, b"1234")
    store.check_integrity()
