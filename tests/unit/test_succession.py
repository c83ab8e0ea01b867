"""A manager takes over from another one that lives: the terms, the order, the stores, and the actors of both."""

from array import array
from collections.abc import Iterable

import pytest

from raydix.engine.core.answers.continuations import packed
from raydix.engine.core.manager.block_index import BlockIndex, Segment
from raydix.engine.core.manager.cache_statistics import CacheStatistics
from raydix.engine.core.manager.segment_store import SegmentStore
from raydix.engine.core.manager.succession import MAX_BATCH_BYTES, Offer, batches, chosen, disagreement, terms
from raydix.engine.core.memory.answer_store import AnswerStore
from raydix.engine.core.memory.response_store import ResponseStore
from raydix.engine.core.memory.transcript_store import TranscriptStore
from raydix.engine.core.types import BlockHash, CacheHints, Retention, SegmentHeader


def offer(*hashes: BlockHash, num_bytes: int = 10, model: str = "m", expires_at: float | None = None) -> Offer:
    retention = Retention(expires_at=expires_at)
    return Offer(hashes[0][0], SegmentHeader(model, hashes, num_bytes, 0, retention=retention), "head")


def choose(offers: Iterable[Offer], *known: BlockHash, model: str | None = "m", room_bytes: int = 100) -> list[Offer]:
    return chosen(offers, lambda block_hash: block_hash not in known, model, room_bytes, 10.0)


def test_managers_agree_on_their_terms_or_say_why_not() -> None:
    assert disagreement(terms(16, True), terms(16, True)) is None
    assert disagreement(terms(16, True), terms(32, True)) == "block_size is 32 there and 16 here"
    assert disagreement(terms(16, True), {**terms(16, True), "schema": 0}) == "schema is 0 there and 2 here"
    assert disagreement(terms(16, True), {**terms(16, True), "new": 1}) == "new is 1 there and None here"


def test_the_first_segments_that_fit_and_are_of_use_are_chosen() -> None:
    a, b, big, c = offer(b"a"), offer(b"b", b"c"), offer(b"d", num_bytes=90), offer(b"e")
    assert choose([a, b, big, c]) == [a, b, c], "a smaller one takes the room that a large one has not"
    assert choose([a, b], b"a", b"b") == [b], "one of its blocks is lacking"
    assert choose([a, b], b"a", b"b", b"c") == []
    assert choose([offer(b"a", expires_at=10.0), offer(b"b", expires_at=10.5)]) == [offer(b"b", expires_at=10.5)]
    other = offer(b"a", model="other")
    assert choose([other]) == [] and choose([other], model=None) == [other]
    assert choose([a], room_bytes=9) == []


def test_batches_hold_so_many_bytes_or_one_segment() -> None:
    half, large = MAX_BATCH_BYTES // 2, 2 * MAX_BATCH_BYTES
    offers = [offer(bytes([number]), num_bytes=size) for number, size in enumerate((half, half, 1, large, 1))]
    assert [[each.segment_id for each in batch] for batch in batches(offers)] == [[0, 1], [2], [3], [4]]
    assert list(batches([])) == []


def test_transcripts_are_taken_over_in_their_order() -> None:
    old, new = TranscriptStore(10_000), TranscriptStore(600)
    for name in (b"a", b"b", b"c"):
        old.keep(name, array("i", [1, 2]))
    old.find(b"a")
    new.keep(b"c", array("i", [1, 2]))
    new.restore(old.entries())
    new.check_integrity()
    assert [name for name, _, _ in new.entries()] == [b"b", b"a"]
    assert new.find(b"a") == array("i", [1, 2])


def test_answers_are_taken_over_with_their_counts() -> None:
    old, new = AnswerStore(10_000), AnswerStore(10_000)
    for name, ids in ((b"q", [1]), (b"q", [2]), (b"q", [1]), (b"r", [3]), (b"s", [4])):
        old.keep(name, packed(ids))
    new.keep(b"r", packed([9]))
    new.restore(old.entries())
    new.check_integrity()
    assert new.continuations(b"q") == old.continuations(b"q")
    assert new.continuations(b"r") == (packed([9]),), "the newer ones stay"
    new.keep(b"q", packed([2]))
    new.keep(b"q", packed([2]))
    assert new.continuations(b"q")[-1] == packed([2])
    new.check_integrity()

    small = AnswerStore(600)
    small.restore(old.entries())
    small.check_integrity()
    assert [name for name, _ in small.entries()] == [b"q"], "asked for last"


def test_responses_are_taken_over() -> None:
    old, new = ResponseStore(10_000, 60.0), ResponseStore(10_000, 60.0)
    old.keep(b"a", None, b"1", 0.0)
    old.keep(b"b", b"a", b"2", 1.0)
    new.restore(old.entries(), 2.0)
    assert new.entries() == old.entries()
    assert new.find(b"b", 2.0, with_earlier=True) == [b"1", b"2"]


class TestSegments:
    """Segments of a store that has room for four."""

    @pytest.fixture
    def store(self) -> SegmentStore:
        blocks = BlockIndex(CacheStatistics(16))
        store = SegmentStore(blocks, 40, 0)
        for now, name in enumerate((b"a", b"b", b"c", b"d")):
            store.exported(SegmentHeader("m", (name,), 10, 0), name, float(now))
        return store

    @staticmethod
    def names(found: list[tuple[Segment, Retention]]) -> list[object]:
        return [segment.ref for segment, _ in found]

    def test_the_one_that_eviction_keeps_longest_comes_first(self, store: SegmentStore) -> None:
        hints = CacheHints(priority=5)
        store.released([], [b"b"], hints, 5.0)
        leased = store.get(2)
        assert leased is not None
        store.lease(leased, "worker")
        for _ in range(2):
            found = store.by_worth(6.0)
            assert self.names(found) == [b"c", b"b", b"d", b"a"]
            assert [retention.priority for _, retention in found] == [0, 5, 0, 0]
            store.check_integrity([leased])
        store.exported(SegmentHeader("m", (b"e",), 10, 0), b"e", 7.0)
        assert self.names(store.by_worth(8.0))[-1] == b"d", "the next one has gone"

    def test_a_copied_segment_is_dropped(self, store: SegmentStore) -> None:
        store.moved_away(1)
        store.moved_away(77)
        store.check_integrity([])
        assert self.names(store.by_worth(6.0)) == [b"d", b"c", b"a"] and store.store_bytes == 30

    def test_a_refreshed_segment_is_the_most_recent(self, store: SegmentStore) -> None:
        store.refresh(0, 6.0)
        store.refresh(77, 6.0)
        assert self.names(store.by_worth(6.0)) == [b"a", b"d", b"c", b"b"]
        store.check_integrity([])
