"""Shares of tenants in memory, places and running batches."""

from array import array

import pytest

from raydix.engine.core.batches.lines import LineAllowance
from raydix.engine.core.errors import OverloadedError
from raydix.engine.core.ingress.room import Room
from raydix.engine.core.memory import response_store, transcript_store
from raydix.engine.core.memory.response_store import ResponseStore
from raydix.engine.core.memory.transcript_store import TranscriptStore
from raydix.engine.core.shares import Shares, weights_of
from raydix.engine.core.tenants import Tenant, Tenants

COST = response_store.ENTRY_BYTES + 1
A, B = Tenant("a"), Tenant("b")


def name(tenant: str, number: int) -> bytes:
    return f"{tenant}{number}".encode()


def test_a_flood_of_one_tenant_s_responses_leaves_the_other_s() -> None:
    store = ResponseStore(10 * COST, 1e9)
    for number in range(4):
        assert store.keep(name("b", number), None, b".", 0.0, "b")
    for number in range(1000):
        assert store.keep(name("a", number), None, b".", 1.0 + number, "a")
        store.check_integrity()
    assert all(name("b", number) in store for number in range(4)), "below its half"
    assert sum(name("a", number) in store for number in range(1000)) == 6, "all that the other does not need"
    assert name("a", 999) in store

    # Who is above its share gives back as the other grows, and no further.
    for number in range(4, 20):
        assert store.keep(name("b", number), None, b".", 2000.0 + number, "b")
    assert sum(name("a", number) in store for number in range(1000)) == 5
    store.check_integrity()


def test_weights_divide_what_is_short() -> None:
    store = ResponseStore(12 * COST, 1e9)
    store.weigh({"a": 3.0})
    for number in range(40):
        store.keep(name("a", number), None, b".", number, "a")
        store.keep(name("b", number), None, b".", number, "b")
    kept = [each.tenant for each in store.entries()]
    assert abs(kept.count("a") - 9) <= 1 and abs(kept.count("b") - 3) <= 1
    store.check_integrity()


def test_responses_keep_their_tenants_at_a_hand_over() -> None:
    old, new = ResponseStore(10 * COST, 1e9), ResponseStore(4 * COST, 1e9)
    for number in range(2):
        old.keep(name("b", number), None, b".", 0.0, "b")
    for number in range(8):
        old.keep(name("a", number), None, b".", 1.0, "a")
    new.restore(old.entries(), 1.0)
    new.check_integrity()
    assert sorted(each.tenant for each in new.entries()) == ["a", "a", "b", "b"]


def test_a_flood_of_one_tenant_s_transcripts_leaves_the_other_s() -> None:
    ids = array("I", [1])
    store = TranscriptStore(10 * (transcript_store.ENTRY_BYTES + 4))
    for number in range(4):
        assert store.keep(name("b", number), ids, "b")
    for number in range(1000):
        assert store.keep(name("a", number), ids, "a")
        store.check_integrity()
    assert all(store.find(name("b", number)) is not None for number in range(4)) and len(store) == 10
    successor = TranscriptStore(8 * (transcript_store.ENTRY_BYTES + 4))
    successor.restore(store.entries())
    successor.check_integrity()
    assert sorted(tenant for _, _, tenant in successor.entries()) == ["a"] * 4 + ["b"] * 4


def test_places_are_left_for_tenants_that_come_later() -> None:
    shares, size = Shares(), 8
    assert shares.may_take("a", 8, size), "the first ones of a tenant are let in where there are so many"
    while shares.may_take("a", 1, size):
        shares.add("a", 1)
    assert shares.used("a") == 4
    while shares.may_take("b", 1, size):
        shares.add("b", 1)
    assert shares.used("b") == 2 and shares.may_take("c", 1, size)
    assert not shares.may_take("c", 3, size), "more than is free"
    shares.add("a", -4)
    assert shares.may_take("b", 1, size)
    with pytest.raises(AssertionError, match="more is given back"):
        shares.add("a", -1)


@pytest.mark.parametrize(("tenants", "most"), [((), 9), ((A,), 9), ((A, B), 4)])
def test_one_tenant_does_not_fill_the_room_of_several(tenants: tuple[Tenant, ...], most: int) -> None:
    room = Room(9, Tenants(tenants))
    taken = []
    with pytest.raises(OverloadedError):
        while True:
            taken += room.acquire(1, A)
    assert len(taken) == most
    if len(tenants) > 1:
        taken += room.acquire(1, B)
    for permit in taken:
        permit.release()
    room.check_integrity()
    assert room.num_held == 0


def test_lines_are_shared_by_tenant_and_then_by_batch() -> None:
    allowance = LineAllowance(12)
    for batch in ("a1", "a2", "a3"):
        allowance.join(batch, "a")
    assert allowance.free("a1", 0) == 4
    allowance.join("b1", "b")
    assert (allowance.free("a1", 0), allowance.free("b1", 0)) == (2, 6)
    for batch in ("a1", "a2", "a3"):
        allowance.leave(batch)
    assert allowance.free("b1", 0) == 12


def test_only_weights_other_than_1_are_told() -> None:
    assert weights_of([Tenant("a"), Tenant("b", weight=2.0), Tenant("c", weight=0.5)]) == {"b": 2.0, "c": 0.5}


def test_nothing_is_used_once_all_is_cleared() -> None:
    shares = Shares()
    shares.add("a", 3)
    shares.add("b", 4)
    shares.clear()
    assert (shares.total, shares.used("a"), shares.used("b")) == (0, 0, 0)
