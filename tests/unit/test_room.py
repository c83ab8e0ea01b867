"""Who is let in, and when there is room again."""

import random
from collections.abc import Iterator

import pytest

from raydix.engine.core.errors import OverloadedError, RequestError
from raydix.engine.core.ingress.room import Allowance, Permit, Room
from raydix.engine.core.tenants import Tenant, Tenants

ANYONE = Tenant("anyone")


@pytest.fixture
def room() -> Iterator[Room]:
    """A room for three, into which everybody has released what was acquired when the test is over."""
    room = Room(3)
    yield room
    room.check_integrity()
    assert room.num_held == 0


def has_room(room: Room, count: int, tenant: Tenant = ANYONE) -> bool:
    try:
        with room.reserve(count, tenant):
            return True
    except OverloadedError:
        return False


def test_what_is_being_made_counts(room: Room) -> None:
    with room.reserve(2, ANYONE):
        assert has_room(room, 1) and not has_room(room, 2)
    assert has_room(room, 3)


def test_what_no_room_could_hold_is_the_callers_error(room: Room) -> None:
    with room.reserve(3, ANYONE), pytest.raises(RequestError, match="needs 4 answers, but at most 3"):
        room.acquire(4, ANYONE)


def test_what_cannot_be_made_gives_its_room_back(room: Room) -> None:
    with pytest.raises(RequestError), room.reserve(3, ANYONE):
        raise RequestError("too long")
    assert has_room(room, 3)


def test_a_permit_that_is_taken_counts_without_a_gap_until_it_is_released(room: Room) -> None:
    with room.reserve(3, ANYONE) as permits:
        taken = permits.pop()
    assert has_room(room, 2) and not has_room(room, 3)
    taken.release()
    assert has_room(room, 3)


def test_permits_that_are_handed_over_count_among_those_of_the_new_owner(room: Room) -> None:
    handed = room.acquire(2, ANYONE)
    with room.reserve(3, ANYONE, handed) as permits:
        assert len(permits) == room.num_held == 3
    with pytest.raises(OverloadedError), room.reserve(4, ANYONE, room.acquire(3, ANYONE)):
        pass


def test_a_permit_is_released_once(room: Room) -> None:
    (permit,) = room.acquire(1, ANYONE)
    permit.release()
    with pytest.raises(AssertionError, match="released once"):
        permit.release()
    assert room.num_held == 0


def test_a_permit_that_nobody_can_release_is_an_error_and_takes_no_room_for_good() -> None:
    """Warnings are errors in tests."""
    room = Room(3)
    permits = room.acquire(1, ANYONE)
    with pytest.warns(ResourceWarning, match="a permit of 'anyone' was never released"):
        del permits
    assert room.num_held == 0


def test_a_tenant_has_room_of_its_own() -> None:
    room, small = Room(10), Tenant("small", max_requests=2)
    (permit,) = room.acquire(1, small)
    assert has_room(room, 1, small) and not has_room(room, 2, small) and has_room(room, 9)
    with pytest.raises(RequestError, match="needs 3 answers, but at most 2"):
        room.acquire(3, small)
    permit.release()
    assert has_room(room, 2, small)


def test_what_is_let_in_never_exceeds_a_limit(room: Room) -> None:
    rng = random.Random(1)
    tenants = [ANYONE, Tenant("small", max_requests=2)]
    held: list[Permit] = []
    for _ in range(2000):
        if held and rng.random() < 0.5:
            held.pop(rng.randrange(len(held))).release()
        else:
            tenant, count = rng.choice(tenants), rng.randint(1, 2)
            num_own = sum(permit.tenant == tenant.name for permit in held)
            fits = len(held) + count <= 3 and num_own + count <= (tenant.max_requests or 3)
            assert has_room(room, count, tenant) == fits
            held += room.acquire(count, tenant) if fits else []
        room.check_integrity()
        assert room.num_held == len(held)
    for permit in held:
        permit.release()


def test_a_lower_limit_leaves_those_who_are_in(room: Room) -> None:
    permits = room.acquire(3, ANYONE)
    room.limit(1)
    room.check_integrity()
    assert not has_room(room, 1)
    for permit in permits:
        permit.release()
    assert has_room(room, 1)
    with pytest.raises(RequestError, match="needs 2 answers, but at most 1"):
        room.acquire(2, ANYONE)
    room.limit(5)
    assert has_room(room, 5)


def test_what_is_left_is_what_could_be_acquired() -> None:
    """For one tenant and for several, whatever others hold, up to the tenant's own limit."""
    limited = Tenant("limited", max_requests=3)
    others = [Tenant(name) for name in ("a", "b")]
    chance = random.Random(7)
    for tenants in (None, Tenants([limited, *others])):
        room = Room(8, tenants)
        held: list[Permit] = []
        for _ in range(300):
            tenant = chance.choice([limited, *others])
            allowance = room.allowance(tenant)
            assert allowance.limit == room.most(tenant)
            assert allowance.remaining == max(
                (n for n in range(1, allowance.limit + 1) if has_room(room, n, tenant)), default=0
            )
            if chance.random() < 0.6 and allowance.remaining:
                held += room.acquire(chance.randint(1, allowance.remaining), tenant)
            elif held:
                held.pop(chance.randrange(len(held))).release()
        for permit in held:
            permit.release()


def test_a_lowered_limit_leaves_nothing() -> None:
    room = Room(3)
    permits = room.acquire(3, ANYONE)
    room.limit(1)
    assert room.allowance(ANYONE) == Allowance(1, 0)
    for permit in permits:
        permit.release()
