"""Bytes of bodies that are arriving: bounded, and the largest goes first."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydix.engine.core.errors import OverloadedError
from raydix.engine.core.ingress.room import BodyRoom


def test_the_largest_body_goes_and_a_short_one_finds_room() -> None:
    room = BodyRoom(100)
    large, small = room.begin(), room.begin()
    room.grow(large, b"x" * 95)
    room.grow(small, b"y" * 10)
    assert small.parts == [b"y" * 10]
    assert (large.is_refused, large.parts, room.num_bytes) == (True, [], 10)
    with pytest.raises(OverloadedError):
        room.grow(large, b"x")


def test_the_body_that_is_too_large_itself_is_told_at_once() -> None:
    room = BodyRoom(100)
    other, large = room.begin(), room.begin()
    room.grow(other, b"y" * 40)
    with pytest.raises(OverloadedError, match="100 bytes"):
        room.grow(large, b"x" * 80)
    assert not other.is_refused


def test_a_body_that_has_come_gives_its_room_back() -> None:
    room = BodyRoom(100)
    for _ in range(10):
        body = room.begin()
        room.grow(body, b"x" * 90)
        room.end(body)
    assert room.num_bytes == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60)), max_size=40))
def test_never_more_than_allowed(steps: list[tuple[int, int]]) -> None:
    room = BodyRoom(100)
    bodies = [room.begin() for _ in range(6)]
    for index, size in steps:
        if size == 0:
            room.end(bodies[index])
            bodies[index] = room.begin()
        else:
            with suppress(OverloadedError):
                room.grow(bodies[index], b"x" * size)
        room.check_integrity()


def test_a_lower_limit_refuses_the_largest() -> None:
    room = BodyRoom(100)
    large, small = room.begin(), room.begin()
    room.grow(large, b"x" * 60)
    room.grow(small, b"y" * 30)
    room.limit(50)
    room.check_integrity()
    assert large.is_refused and not small.is_refused
    room.limit(200)
    room.grow(small, b"y" * 100)
    with pytest.raises(OverloadedError):
        room.grow(large, b"x")
