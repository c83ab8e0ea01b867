"""Stored responses: how long each is kept, and which go together."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydix.engine.core.memory.response_store import (
    CLAIM_S,
    ENTRY_BYTES,
    MOST_GIVEN,
    UNDER_WAY,
    KeptEntry,
    ResponseStore,
)

TTL_S = 10.0
COST = ENTRY_BYTES + 1


@pytest.fixture
def store() -> Iterator[ResponseStore]:
    """Room for three responses of one byte."""
    store = ResponseStore(3 * COST, TTL_S)
    yield store
    store.check_integrity()


def test_a_response_comes_with_those_before_it(store: ResponseStore) -> None:
    assert store.keep(b"a", None, b"1", 0.0) and store.keep(b"b", b"a", b"2", 0.0)
    assert store.find(b"b", 0.0) == [b"2"]
    assert store.find(b"b", 0.0, with_earlier=True) == [b"1", b"2"]
    assert store.find(b"a", 0.0, with_earlier=True) == [b"1"]
    assert store.find(b"c", 0.0) == store.find(b"c", 0.0, with_earlier=True) == []


def test_the_least_recently_used_goes_and_the_last_before_the_ones_it_goes_on_from(store: ResponseStore) -> None:
    store.keep(b"a", None, b"1", 0.0)
    store.keep(b"b", b"a", b"2", 0.0)
    store.keep(b"x", None, b"3", 0.0)
    store.keep(b"y", None, b"4", 0.0)
    assert (store.find(b"b", 0.0), store.find(b"a", 0.0)) == ([], [b"1"])
    store.keep(b"z", None, b"5", 0.0)
    assert (store.find(b"x", 0.0), store.find(b"a", 0.0)) == ([], [b"1"])


def test_what_exceeds_the_budget_is_not_kept(store: ResponseStore) -> None:
    store.keep(b"a", None, b"1", 0.0)
    assert not store.keep(b"b", None, bytes(3 * COST), 0.0)
    assert not ResponseStore(0, TTL_S).keep(b"b", None, b"", 0.0)
    assert store.find(b"a", 0.0) == [b"1"]


def test_nothing_goes_on_from_what_is_gone(store: ResponseStore) -> None:
    store.keep(b"a", None, b"1", 0.0)
    store.keep(b"b", b"a", b"2", 0.0)
    assert store.delete(b"a") and not store.delete(b"a")
    assert store.find(b"b", 0.0, with_earlier=True) == [b"2"]
    assert not store.keep(b"c", b"a", b"3", 0.0)


def test_a_response_that_nobody_used_for_the_time_to_live_is_forgotten(store: ResponseStore) -> None:
    store.keep(b"a", None, b"1", 0.0)
    store.keep(b"b", b"a", b"2", 5.0)
    store.keep(b"x", None, b"3", 5.0)
    store.find(b"x", 9.0)
    assert store.find(b"a", 14.9) == [b"1"]
    assert store.find(b"b", 15.0) == []
    assert (store.find(b"x", 18.9), store.find(b"a", 24.8)) == ([b"3"], [b"1"])
    assert store.find(b"a", 34.8) == [] and len(store) == 0


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(0, 3), st.integers(0, 40))))
def test_a_response_is_kept_no_longer_than_those_before_it(steps: list[tuple[int, int, int, int]]) -> None:
    store, now, parents = ResponseStore(5 * COST, TTL_S), 0.0, dict[bytes, bytes | None]()
    for number, (name, parent, action, size) in enumerate(steps):
        now += action
        key, before = bytes([name]), bytes([parent])
        if action == 0:
            key = bytes([name, number % 256, number // 256])
            known = next((each for each in reversed(parents) if each[:1] == before), None)
            if store.keep(key, known, bytes(size), now):
                parents[key] = known
        else:
            known = next((each for each in parents if each[:1] == key), None)
            if known is not None:
                store.find(known, now, with_earlier=action == 1)
        store.check_integrity()
        for each, first in parents.items():
            if store.find(each, now):
                assert first is None or store.find(first, now), "one before it is gone"


def test_an_earlier_stores_responses_are_taken_over_in_their_order() -> None:
    dropped: list[bytes] = []
    store = ResponseStore(3 * COST, TTL_S, dropped.append)
    store.keep(b"new", None, b"0", 9.0)
    old = [(b"x", None, b"1", -9.0), (b"a", None, b"2", 1.0), (b"b", b"a", b"3", 2.0), (b"y", None, b"4", 30.0)]
    store.restore([KeptEntry(*each) for each in old], 9.0)
    store.check_integrity()
    assert dropped == [b"x", b"b"], "expired, or the least recently used with the last before the ones it goes on from"
    assert store.find(b"a", 9.0) == [b"2"] and store.find(b"y", 9.0) == [b"4"] and store.find(b"new", 9.0) == [b"0"]
    assert store.delete(b"a") and dropped[-1] == b"a"
    store.forget_expired(40.0)
    assert dropped[-2:] == [b"y", b"new"] and len(store) == 0
    store.check_integrity()


def test_responses_in_a_circle_end() -> None:
    """No client can make one, but somebody who writes files can."""
    store = ResponseStore(10 * (ENTRY_BYTES + 10), 100.0)
    store.restore([KeptEntry(b"a", b"b", b"first", 1.0), KeptEntry(b"b", b"a", b"second", 1.0)], 2.0)
    assert store.find(b"a", 2.0, with_earlier=True) == [b"second", b"first"]
    store.check_integrity()


def test_other_data_takes_the_place_of_data_with_the_right_beginning(store: ResponseStore) -> None:
    store.keep(b"a", None, b"1", 0.0)
    store.keep(b"b", b"a", b"2", 0.0, "t")
    assert store.replace(b"b", b"1", b"3", 1.0) is None and store.replace(b"x", b"", b"3", 1.0) is None
    assert store.find(b"b", 1.0) == [b"2"], "somebody else has replaced it"
    assert store.replace(b"b", b"2", b"3", 1.0) == KeptEntry(b"b", b"a", b"3", 1.0, "t")
    assert store.find(b"b", 1.0, with_earlier=True) == [b"1", b"3"]


def test_larger_data_makes_room_as_a_new_response_does(store: ResponseStore) -> None:
    for name in (b"a", b"b", b"c"):
        store.keep(name, None, b"1", 0.0)
    assert store.replace(b"b", b"1", bytes(3 * COST), 0.0) is None, "more than there is room for in all"
    assert store.replace(b"b", b"1", b"22", 0.0) is not None
    assert (store.find(b"a", 0.0), store.find(b"b", 0.0), store.find(b"c", 0.0)) == ([], [b"22"], [b"1"])
    store.check_integrity()


def test_a_response_under_way_is_given_away_when_its_runner_is_gone(store: ResponseStore) -> None:
    data = UNDER_WAY + b"1"
    store = ResponseStore(3 * (COST + 1), 10 * CLAIM_S)
    store.keep(b"a", None, data, 0.0, "t")
    store.keep(b"b", None, b"2", 0.0)
    assert store.renew([(b"a", data), (b"a", UNDER_WAY + b"2"), (b"b", b"2"), (b"x", b"")], 1.0) == [
        True,
        False,
        False,
        False,
    ]
    assert store.abandoned(CLAIM_S) == [], "renewed at 1"
    assert store.abandoned(CLAIM_S + 1.0) == [(b"a", data, "t")]
    assert store.abandoned(CLAIM_S + 1.0) == [], "one runner alone gets it"
    assert store.renew([(b"a", data)], CLAIM_S + 2.0) == [True], "whoever renews first"
    assert store.replace(b"a", data, b"3", CLAIM_S + 2.0) is not None
    assert store.renew([(b"a", data)], CLAIM_S + 2.0) == [False] and store.abandoned(9 * CLAIM_S) == []
    store.check_integrity()


def test_a_successor_gives_every_runner_its_time(store: ResponseStore) -> None:
    store.restore([KeptEntry(b"a", None, UNDER_WAY, 1.0)], 5.0)
    assert store.abandoned(5.0) == [] and store.abandoned(5.0 + CLAIM_S) == [(b"a", UNDER_WAY, "anonymous")]
    assert store.delete(b"a") and store.abandoned(50.0) == []


def test_few_are_given_at_a_time() -> None:
    store = ResponseStore(1 << 20, 100.0)
    for number in range(MOST_GIVEN + 1):
        store.keep(b"%d" % number, None, UNDER_WAY, 0.0)
    assert [len(store.abandoned(CLAIM_S)) for _ in range(3)] == [MOST_GIVEN, 1, 0]


def test_what_is_being_generated_is_not_forgotten_for_being_old(store: ResponseStore) -> None:
    store.keep(b"a", None, UNDER_WAY, 0.0)
    store.renew([(b"a", UNDER_WAY)], TTL_S - 1.0)
    store.forget_expired(TTL_S + 1.0)
    assert b"a" in store
