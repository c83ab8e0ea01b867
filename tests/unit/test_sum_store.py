"""What is kept of pooled prompts, and what goes first."""

from raydix.engine.core.worker.sum_store import SumStore


def test_the_longest_prefix_is_found() -> None:
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


def test_what_is_here_stays_as_it_is() -> None:
    store = SumStore()
    store.put(b"a", b"one")
    store.put(b"a", b"other")
    assert store.match([b"a"]) == (1, b"one")
    store.check_integrity()


def test_the_least_recently_used_goes_first() -> None:
    store = SumStore(capacity=8)
    store.put(b"a", b"1234")
    store.put(b"b", b"1234")
    store.match([b"a"])
    store.put(b"c", b"1234")
    assert store.match([b"b"]) == (0, b"")
    assert store.match([b"a"]) == store.match([b"c"]) == (1, b"1234")
    store.check_integrity()
