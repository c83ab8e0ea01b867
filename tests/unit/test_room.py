"""Who is let in, and when there is room again."""

import pytest

from engine.core.errors import OverloadedError, RequestError
from engine.core.generation import Generation
from engine.core.room import Room
from engine.core.tenants import Tenant
from engine.core.types import CacheWish, Salt, SamplingParams

ANYONE = Tenant("anyone")


def make_generation(tenant: Tenant = ANYONE) -> Generation:
    return Generation("r", (1, 2, 3), SamplingParams(1), Salt(), CacheWish(tenant.name))


def has_room(room: Room, count: int, tenant: Tenant = ANYONE) -> bool:
    try:
        with room.reserve(count, tenant):
            return True
    except OverloadedError:
        return False


def test_what_is_being_made_counts() -> None:
    room = Room(3)
    with room.reserve(2, ANYONE):
        assert has_room(room, 1) and not has_room(room, 2)
    assert has_room(room, 3) and not has_room(room, 4)


def test_what_cannot_be_made_gives_its_room_back() -> None:
    room = Room(1)
    with pytest.raises(RequestError), room.reserve(1, ANYONE):
        raise RequestError("too long")
    assert has_room(room, 1)


def test_a_request_counts_once_and_without_a_gap_up_to_its_end() -> None:
    room, generation = Room(1), make_generation()
    with room.reserve(1, ANYONE):
        room.expect([generation])
    assert not has_room(room, 1)
    room.begin(generation)
    assert not has_room(room, 1)
    room.end(generation)
    assert has_room(room, 1)


def test_a_request_that_never_begins_is_forgotten() -> None:
    room, generation = Room(1), make_generation()
    room.expect([generation])
    assert not has_room(room, 1)
    del generation
    assert has_room(room, 1)


def test_a_tenant_has_room_of_its_own() -> None:
    room, small = Room(10), Tenant("small", max_requests=2)
    generation = make_generation(small)
    room.expect([generation])
    assert has_room(room, 1, small) and not has_room(room, 2, small) and has_room(room, 9)
    room.begin(generation)
    assert has_room(room, 1, small) and not has_room(room, 2, small)
    with pytest.raises(RequestError, match="3 answers are more than the 2"), room.reserve(3, small):
        pass
