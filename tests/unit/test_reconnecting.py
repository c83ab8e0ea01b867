"""A client's side of streams whose events have ids: which event came last, and when to try again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydix.engine.api.reconnecting import FIRST_PAUSE_S, LONGEST_PAUSE_S, TRY_FOR_S, Reconnecting

STREAM = b"id: a\ndata: 1\n\n: waiting\n\nid:b\nevent: x\ndata:2\n\ndata: [DONE]\n\n"


def lines_of(data: bytes) -> list[bytes]:
    return data.splitlines(keepends=True)


def taken(place: Reconnecting, data: bytes) -> list[bytes]:
    return [found for line in lines_of(data) if (found := place.take_line(line)) is not None]


@given(st.integers(0, len(STREAM)))
def test_an_event_counts_once_its_data_has_come(cut: int) -> None:
    place = Reconnecting()
    events = taken(place, STREAM[:cut])
    last = {0: "0", 1: "a"}.get(len(events), "b")
    assert place.headers == {"Last-Event-ID": last}
    assert events == [b"1", b"2", b"[DONE]"][: len(events)]
    assert place.can_go_on == bool(events)


def test_without_ids_nothing_is_held_back_and_nobody_asks_again() -> None:
    place = Reconnecting()
    assert taken(place, b"data: 1\n\ndata: [DONE]") == [b"1", b"[DONE]"]
    assert not place.can_go_on and place.pause_s(0.0) is None
    place.delivered(None)
    assert place.pause_s(0.0) is None and place.num_breaks == 0


def test_pauses_grow_until_the_client_gives_up() -> None:
    place = Reconnecting()
    place.delivered("a")
    now, pauses = 100.0, []
    while (pause_s := place.pause_s(now)) is not None:
        pauses.append(pause_s)
        now += pause_s
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert max(pauses) == LONGEST_PAUSE_S
    assert now - 100.0 == pytest.approx(TRY_FOR_S, abs=LONGEST_PAUSE_S)
    assert place.num_breaks == len(pauses)


def test_an_event_ends_the_wait() -> None:
    place = Reconnecting()
    place.delivered("a")
    assert [place.pause_s(0.0), place.pause_s(1.0)] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S]
    place.delivered("b")
    assert place.pause_s(TRY_FOR_S) == FIRST_PAUSE_S
