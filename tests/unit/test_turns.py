"""Turns of sessions: who goes on and who pauses while not all of them fit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydix.engine.core.manager.placement import SessionWorkers
from raydix.engine.core.manager.sessions import Session
from raydix.engine.core.manager.turns import PATIENCE_S, SILENT_S, STALE_S, TurnLimits, Turns
from raydix.engine.core.types import FinishReason, Paused

QUANTUM_S = 100.0
SIZES = {"w": 105}
"""Room for 99 blocks of places."""


class Scene:
    """Sessions that ask for their turns at given times."""

    def __init__(self, sizes: dict[str, int] | None = None, weights: dict[str, float] | None = None) -> None:
        self.turns = Turns(TurnLimits(QUANTUM_S), weights)
        self.sizes = SIZES if sizes is None else sizes
        self.sessions: dict[str, Session] = {}

    def ask(
        self, name: str, now: float, num_blocks: int = 30, *, tenant: str = "", idle: bool = False
    ) -> Paused | None:
        """One question; a session that may go on has a request under way from then on."""
        session = self.sessions.setdefault(name, Session(len(self.sessions), tenant, None, 0))
        workers = [*self.sizes] if idle else []
        answer = self.turns.ask(session, name, num_blocks, self.sizes, lambda _: workers, now)
        if answer is None:
            session.running.add(name)
            session.used_at = now
            place = self.turns.place_of(session)
            assert place is not None
            session.last_workers = SessionWorkers(place, place)
        self.turns.check_integrity()
        return answer

    def ask_again(self, *names: str, now: float, idle: bool = False) -> list[Paused | None]:
        """Questions by ids alone, which give nobody a place."""
        workers, places = [*self.sizes] if idle else [], self.turns.num_placed
        answers = self.turns.ask_again(names, self.sizes, lambda _: workers, now)
        self.turns.check_integrity()
        assert self.turns.num_placed == places
        return answers

    def end(self, name: str, now: float, stop: FinishReason | None = FinishReason.TOOL_CALLS) -> None:
        session = self.sessions[name]
        session.running.clear()
        session.used_at, session.last_stop = now, stop

    def full(self) -> None:
        """Three sessions fill the pool, each with a request under way."""
        for name in "abc":
            assert self.ask(name, 0.0) is None


def test_nobody_pauses_while_all_fit() -> None:
    scene = Scene()
    for now in range(0, 1000, 10):
        for name in "abc":
            assert scene.ask(name, float(now)) is None
            scene.end(name, now + 1.0)


def test_a_session_that_does_not_fit_pauses() -> None:
    scene = Scene()
    scene.full()
    assert scene.ask("d", 1.0) == Paused(0, 3, 30, 0.0)
    assert scene.ask("e", 2.0) == Paused(1, 3, 30, 0.0)
    assert scene.ask("d", 2.5) == Paused(0, 3, 30, 1.5)
    scene.end("b", 3.0)
    assert scene.ask("b", 3.5) is None, "those with a place go on"


def test_an_idle_worker_takes_the_next_session_in_place_of_the_longest_idle_one() -> None:
    scene = Scene()
    scene.full()
    assert scene.ask("d", 1.0, idle=True) is not None, "all have requests under way"
    scene.end("b", 2.0)
    scene.end("c", 3.0)
    assert scene.ask("d", 2.0 + PATIENCE_S - 0.5, idle=True) is not None, "its tool may be back at any moment"
    scene.sessions["d"].used_at = 0.0
    now = 2.0 + PATIENCE_S + 0.5
    assert scene.ask("d", now) is not None, "the worker has others to compute"
    assert scene.ask("d", now, idle=True) is None
    assert scene.ask("b", now) is not None and scene.ask("c", now) is None
    assert scene.sessions["d"].num_pauses == 1 and scene.sessions["d"].paused_s > 0


@pytest.mark.parametrize("stop", [FinishReason.STOP, None], ids=["ended", "the client left"])
def test_the_end_of_a_turn_frees_the_place_at_once(stop: FinishReason | None) -> None:
    scene = Scene()
    scene.full()
    scene.end("b", 2.0, stop)
    assert scene.ask("d", 2.1, idle=True) is None


def test_after_the_quantum_the_place_changes_hands() -> None:
    scene = Scene()
    scene.full()
    for tick in range(400):
        answer = scene.ask("d", 10.0 + tick / 4)
        assert answer is not None
    scene.end("a", 109.0)
    assert scene.ask("a", 110.0) is not None, "d has paused for as long as a has run"
    assert scene.ask("d", 110.25) is None
    assert scene.ask("a", 110.5) == Paused(0, 3, 30, 0.5)


def test_the_next_one_is_of_the_tenant_with_the_fewest_blocks() -> None:
    scene = Scene(weights={"crowd": 0.5})
    for name in "abc":
        assert scene.ask(name, 0.0, tenant="crowd") is None
    assert scene.ask("d", 1.0, tenant="crowd") == Paused(0, 3, 30, 0.0)
    assert scene.ask("e", 1.5, tenant="other") == Paused(0, 3, 30, 0.0)
    assert scene.ask("d", 1.75, tenant="crowd") == Paused(1, 3, 30, 0.75)


def test_who_asks_again_by_id_is_told_when_to_ask_in_full() -> None:
    scene = Scene()
    scene.full()
    assert scene.ask("d", 1.0) is not None and scene.ask("e", 1.0) is not None
    assert scene.ask_again("e", "d", now=1.5) == [Paused(1, 3, 30, 0.5), Paused(0, 3, 30, 0.5)]
    scene.end("b", 2.0, FinishReason.STOP)
    assert scene.ask_again("d", "e", now=2.5) == [Paused(0, 3, 30, 1.5), Paused(1, 3, 30, 1.5)], "no worker is idle"
    assert scene.ask_again("d", "e", now=2.5, idle=True) == [None, Paused(1, 3, 30, 1.5)]
    assert scene.ask("e", 2.5, idle=True) is not None, "the place is the next one's"
    assert scene.ask("d", 2.75, idle=True) is None
    assert scene.ask_again("d", "unknown", now=3.0) == [None, None], "who does not pause asks in full"


def test_a_question_by_id_keeps_the_place_in_the_queue() -> None:
    scene = Scene()
    scene.full()
    assert scene.ask("d", 0.0) is not None
    for tick in range(1, 30):
        [paused] = scene.ask_again("d", now=tick * SILENT_S / 2)
        assert paused is not None and paused.paused_s == tick * SILENT_S / 2


def test_a_pause_ends_with_its_last_request() -> None:
    scene = Scene()
    scene.full()
    scene.ask("d", 1.0)
    session = scene.sessions["d"]
    scene.turns.ask(session, "d2", 30, SIZES, lambda _: [], 1.0)
    assert {*scene.turns.paused(1.0)} == {"d", "d2"}
    scene.turns.gone("d")
    scene.turns.check_integrity()
    assert scene.ask_again("d", "d2", now=2.0) == [None, Paused(0, 3, 30, 1.0)]
    scene.turns.gone("d2")
    assert scene.turns.num_paused == 0 and not scene.turns.paused(2.0)


def test_a_request_that_turns_out_to_be_of_another_session_waits_with_that_one() -> None:
    scene = Scene()
    scene.full()
    scene.ask("d", 1.0)
    other = Session(77, "", None, 0)
    assert scene.turns.ask(other, "d", 30, SIZES, lambda _: [], 2.0) == Paused(0, 3, 30, 0.0)
    scene.turns.check_integrity()
    assert scene.turns.num_paused == 1


def test_a_session_whose_client_has_left_asks_no_more() -> None:
    scene = Scene()
    scene.full()
    assert scene.ask("d", 1.0) is not None
    assert scene.ask("e", 1.0 + SILENT_S) == Paused(0, 3, 30, 0.0)
    assert scene.turns.num_paused == 1
    assert [*scene.turns.paused(2.0 + SILENT_S)] == ["e"]
    assert [*scene.turns.paused(1.0 + 2 * SILENT_S)] == []


def test_a_place_that_is_not_used_is_free() -> None:
    scene = Scene()
    scene.full()
    for name in "abc":
        scene.end(name, 5.0)
    assert scene.ask("d", 5.0 + STALE_S) is None
    assert scene.turns.num_placed == 1


def test_a_long_answer_keeps_no_stale_place_of_others() -> None:
    scene = Scene()
    scene.full()
    for name in "bc":
        scene.end(name, 5.0)
    assert scene.ask("d", 5.0 + STALE_S) is None
    assert scene.turns.num_placed == 2, "a's answer is under way, and d has come"


def test_a_session_larger_than_the_pool_runs_alone() -> None:
    scene = Scene()
    assert scene.ask("a", 0.0, 400) is None
    assert scene.ask("b", 1.0, 400) is not None
    assert scene.ask("a", 2.0, 410) is None, "nobody has paused for long"
    scene.end("a", 3.0)
    assert all(scene.ask("b", 3.0 + tick / 4, 400) is not None for tick in range(400))
    assert scene.ask("a", 103.5, 410) is not None, "b has paused for as long as a has run"
    assert scene.ask("b", 103.75, 400) is None


def test_places_that_have_grown_beyond_the_pool_lose_the_oldest() -> None:
    scene = Scene()
    scene.full()
    assert scene.ask("c", 1.0, 50) is None, "not the oldest"
    assert scene.ask("a", 2.0, 50) == Paused(0, 2, 50, 0.0)


def test_a_place_moves_to_the_worker_with_room() -> None:
    scene = Scene({"v": 105, "w": 105})
    names = "abcdef"
    for name in names:
        assert scene.ask(name, 0.0) is None
    places = [scene.turns.place_of(scene.sessions[name]) for name in names]
    assert places.count("v") == places.count("w") == 3
    assert scene.ask("g", 1.0) is not None
    left = next(name for name in names if scene.turns.place_of(scene.sessions[name]) == "w")
    scene.sessions["g"].last_workers = SessionWorkers("v", "v")
    scene.end(left, 1.0, FinishReason.STOP)
    assert scene.ask("g", 1.5, idle=True) is None
    assert scene.turns.place_of(scene.sessions["g"]) == "w"


def test_a_place_follows_its_session_where_there_is_room() -> None:
    scene = Scene({"v": 105, "w": 65})
    for name in "abcd":
        assert scene.ask(name, 0.0) is None
    places = {name: scene.turns.place_of(scene.sessions[name]) for name in "abcd"}
    [first, *_] = [name for name in "abcd" if places[name] == "v"]
    [there] = [name for name in "abcd" if places[name] == "w"]
    scene.turns.moved(scene.sessions[first], "w", scene.sizes)
    scene.turns.check_integrity()
    assert scene.turns.place_of(scene.sessions[first]) == "w"
    scene.turns.moved(scene.sessions["d" if there != "d" else "c"], "w", scene.sizes)
    scene.turns.moved(scene.sessions[there], "of unknown size", scene.sizes)
    scene.turns.check_integrity()
    assert [scene.turns.place_of(scene.sessions[name]) for name in "abcd"].count("w") == 2, "w has no more room"


def test_the_places_on_a_worker_that_is_gone_are_gone() -> None:
    scene = Scene({"v": 105, "w": 105})
    for name in "abcdef":
        assert scene.ask(name, 0.0) is None
    scene.sizes = {"w": 105}
    lost = [name for name in "abcdef" if scene.turns.place_of(scene.sessions[name]) == "v"]
    assert scene.ask(lost[0], 1.0) is not None
    assert scene.turns.num_placed == 3 and scene.turns.place_of(scene.sessions[lost[0]]) is None


@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(1, 60), st.booleans(), st.booleans()), max_size=60),
    st.booleans(),
)
def test_everyone_gets_a_turn(events: list[tuple[int, int, bool, bool]], by_id: bool) -> None:
    """After any beginning: sessions that ask again and again, and end what they begin, all go on in the end. `by_id`:
    they ask in full only when they are told to."""
    scene = Scene({"v": 80, "w": 120})
    now = 0.0
    for number, num_blocks, ends, idle in events:
        now += 0.25
        scene.ask(str(number), now, num_blocks, tenant=str(number % 2), idle=idle)
        if ends:
            scene.end(str(number), now)
    waiting = {name for name in scene.sessions if scene.turns.place_of(scene.sessions[name]) is None}
    for _ in range(int(4 * 10 * QUANTUM_S)):
        now += 0.25
        for name in scene.sessions:
            if by_id and scene.ask_again(name, now=now) != [None]:
                continue
            if scene.ask(name, now, 40, tenant=str(int(name) % 2)) is None:
                scene.end(name, now)
                waiting.discard(name)
        if not waiting:
            return
    assert not waiting
