"""Guesses of tokens where a grammar allows a few: learnt from earlier answers of the same salt, never of another."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from raydix.engine.core.settings import DraftLimits
from raydix.engine.core.types import DraftSource, Grammar, GrammarKind, Salt
from raydix.engine.core.worker.drafts.draft import Draft
from raydix.engine.core.worker.drafts.drafter import Drafter
from raydix.engine.core.worker.drafts.form_guesser import MAX_COUNT, MAX_PLACES, FormGuesser, LearntChoices
from raydix.engine.core.worker.drafts.forms import Choose, FormToken, LikelyToken
from raydix.engine.core.worker.request import Request
from raydix.engine.core.worker.scheduler import Scheduler
from raydix.engine.model import grammars as grammars_module
from raydix.engine.model import matcher
from raydix.engine.model.grammars import CHOICE_SHARE, Grammars, TimeShare
from tests.unit.builders import submit
from tests.unit.test_drafts import CHEAP
from tests.unit.test_grammar_drafts import alone, compiled, step_masks
from tests.unit.test_grammars import ABC, EOS, LED, OTHER_EOS, allowed, ids, request, text

A, B = b"salt of Ann", b"salt of Bob"
STATES = Grammar(GrammarKind.REGEX, "(on|off|in) sale( now)?")
"""Allows `i` or `o`, and behind `o` an `f` or an `n`; the other tokens are forced, up to the end of `sale`."""


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices may take all the time: there is no model whose steps would pay for them."""
    monkeypatch.setattr(TimeShare, "has_time", lambda share: True)
    monkeypatch.setattr(grammars_module, "MAX_WALK_S", 60.0)
    monkeypatch.setattr(grammars_module, "HARD_S", 60.0)


# What was taken


def test_the_token_taken_most_often_is_the_likeliest() -> None:
    choices = LearntChoices()
    assert choices.likeliest(A, b"place") is None
    for token_id in (7, 5, 5, 7, 5):
        choices.took(A, b"place", token_id)
    assert choices.likeliest(A, b"place") == LikelyToken(5, 3 / 6)
    assert choices.likeliest(B, b"place") is None and choices.likeliest(A, b"other place") is None
    choices.clear()
    assert choices.likeliest(A, b"place") is None and choices.num_places == 0


def test_later_answers_count_more() -> None:
    choices = LearntChoices()
    for _ in range(10 * MAX_COUNT):
        choices.took(A, b"place", 5)
    choice = choices.likeliest(A, b"place")
    assert choice is not None and 0.95 < choice.chance < 1
    for _ in range(2 * MAX_COUNT):
        choices.took(A, b"place", 7)
    choice = choices.likeliest(A, b"place")
    assert choice is not None and choice.token_id == 7


def test_a_place_has_few_counts() -> None:
    choices = LearntChoices()
    for token_id in range(10 * MAX_COUNT):
        choices.took(A, b"place", token_id)
        choice = choices.likeliest(A, b"place")
        assert choice is not None and 0 < choice.chance < 1
        assert len(choices._counts[A, b"place"]) <= 2 * MAX_COUNT


def test_the_place_used_longest_ago_is_forgotten() -> None:
    choices, names = LearntChoices(), [b"%d" % number for number in range(MAX_PLACES)]
    for name in names:
        choices.took(A, name, 9)
    assert choices.likeliest(A, names[0]) is not None
    choices.took(A, names[1], 9)
    choices.took(B, b"place", 5)
    assert choices.num_places == MAX_PLACES and choices.likeliest(A, names[2]) is None
    assert choices.likeliest(A, names[0]) is not None and choices.likeliest(A, names[1]) is not None


@pytest.mark.parametrize(
    ("came", "first", "second"),
    [((1, 2, 3), 1, 2), ((1, 5, 3), 1, 5), ((4, 2, 3), 4, None), ((), None, None), ((1,), 1, None)],
)
def test_an_answer_teaches_up_to_its_first_difference(
    came: tuple[int, ...], first: int | None, second: int | None
) -> None:
    choices = LearntChoices()
    choices.learn(A, [FormToken(1, 0.5, b"first"), FormToken(2, 0.4, b"second"), FormToken(3, 0.4)], came)
    found = [choices.likeliest(A, place) for place in (b"first", b"second")]
    assert [None if each is None else each.token_id for each in found] == [first, second]
    assert choices.num_places == len([each for each in found if each is not None])


# Walks


def choosing(grammars: Grammars, wanted: str) -> Choose:
    """Chooses one of some characters wherever one is allowed, with a chance of 0.9."""

    def choose(place: bytes) -> LikelyToken | None:
        [(_, matcher)] = grammars._matchers.values()
        words = np.frombuffer(matcher.state.compute_bitmask(), np.int32)
        return next((LikelyToken(token_id, 0.9) for token_id in ids(wanted) if token_id in allowed(words)), None)

    return choose


@pytest.mark.parametrize(
    ("grammar", "answer", "wanted", "expected"),
    [
        (STATES, "", "", "?"),
        (STATES, "", "i", "in sale?"),
        (STATES, "", "of", "off sale?"),
        (STATES, "", "o", "o?"),
        (STATES, "o", "f", "ff sale?"),
        (STATES, "off sa", "", "le?"),
        (STATES, "off sa", " ", "le now"),
        (ABC, "", "cb", "accccccc"),
        (Grammar(GrammarKind.LARK, 'start: "yes" | "no"'), "", "n", "no"),
        (LED, "", "a", ""),
        (LED, "<t>x</t>", "c", "accccccc"),
    ],
)
@pytest.mark.usefixtures("unhurried")
def test_a_walk_has_forced_and_chosen_tokens(grammar: Grammar, answer: str, wanted: str, expected: str) -> None:
    grammars, own = compiled(grammar), request("r", grammar, answer)
    for _ in range(2):
        walk = grammars.walk(own, 8, 0.05, choosing(grammars, wanted))
        token_ids = [-1 if each.token_id is None else each.token_id for each in walk]
        assert token_ids == [-1 if each == "?" else ids(each)[0] for each in expected][: len(walk)]
        assert len(walk) == min(8, len(expected))
        for number, each in enumerate(walk):
            choices = alone(own, token_ids[:number])
            assert len(choices) > 1 if each.place else choices == {each.token_id}
    assert allowed(step_masks(grammars, [own]).bits[0]) == alone(own, ""), "the walk left nothing"


@pytest.mark.usefixtures("unhurried")
def test_a_walk_is_as_long_and_as_likely_as_asked() -> None:
    grammars, own = compiled(STATES), request("r", STATES)
    for longest in range(9):
        assert len(grammars.walk(own, longest, 0.05, choosing(grammars, "of"))) == longest
    walk = grammars.walk(own, 8, 0.05, choosing(grammars, "of"))
    assert [each.chance for each in walk] == pytest.approx([0.9, *[0.81] * 7])
    walk = grammars.walk(own, 8, 0.85, choosing(grammars, "of"))
    assert [each.token_id for each in walk] == [*ids("o"), None]
    assert grammars.walk(request("lost", STATES, "xy"), 8, 0.05, lambda place: None) == ()


@pytest.mark.usefixtures("unhurried")
def test_a_place_is_known_by_the_tokens_allowed() -> None:
    grammars, places = compiled(STATES, ABC), list[str]()
    for name, grammar, answer in (("a", ABC, "a"), ("b", ABC, "abc"), ("c", STATES, ""), ("d", STATES, "o")):
        [each] = grammars.walk(request(name, grammar, answer), 8, 0.05, lambda place: None)
        places.append(each.place.hex())
    assert places[0] == places[1] and len({*places}) == 3


@pytest.mark.usefixtures("unhurried")
def test_nothing_is_chosen_where_many_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, own = compiled(STATES), request("r", STATES)
    monkeypatch.setattr(matcher, "FEW", 1)
    assert grammars.walk(own, 8, 0.05, choosing(grammars, "i")) == []


@pytest.mark.usefixtures("unhurried")
def test_a_walk_goes_on_up_to_the_end_of_the_answer() -> None:
    grammars, own = compiled(STATES), request("r", STATES, "on sale")
    walk = grammars.walk(own, 8, 0.05, lambda place: LikelyToken(EOS, 0.9))
    assert [each.token_id for each in walk] == [EOS]
    assert allowed(step_masks(grammars, [own]).bits[0]) == {*ids(" "), EOS, OTHER_EOS}


@pytest.mark.usefixtures("unhurried")
def test_a_walk_that_fails_costs_its_matcher_alone() -> None:
    def fail(place: bytes) -> LikelyToken | None:
        raise RuntimeError

    grammars, own = compiled(STATES), request("r", STATES)
    assert grammars.walk(own, 8, 0.05, fail) == () and grammars.num_matchers == 0
    assert allowed(step_masks(grammars, [own]).bits[0]) == alone(own, "")


# Time


def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of both clocks, which stand still."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.thread_time", lambda: now[0])
    return now


def test_a_walk_chooses_no_more_when_it_has_taken_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, grammars = clock(monkeypatch), compiled(ABC)

    def slowly(place: bytes) -> LikelyToken:
        now[0] += 0.3e-3
        return LikelyToken(ids("c")[0], 0.9)

    walk = grammars.walk(request("r", ABC, "a"), 8, 0.05, slowly)
    assert [each.token_id for each in walk] == [*ids("cc"), None]


def test_choices_wait_until_their_time_is_paid_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now, grammars, own = clock(monkeypatch), compiled(STATES), request("r", STATES)

    def slowly(place: bytes) -> None:
        now[0] += 0.6e-3

    assert grammars.walk(own, 8, 0.05, slowly) and grammars.walk(own, 8, 0.05, slowly)
    assert not grammars.walk(own, 8, 0.05, slowly)
    forced = grammars.walk(request("s", STATES, "of"), 8, 0.05, slowly)
    assert [each.token_id for each in forced] == ids("f sale")
    now[0] += 0.1e-3 / CHOICE_SHARE
    assert not grammars.walk(own, 8, 0.05, slowly)
    now[0] += 0.1e-3 / CHOICE_SHARE
    assert grammars.walk(own, 8, 0.05, slowly)


@pytest.mark.parametrize("fault", ["slow", "broken"])
def test_nothing_more_is_chosen_in_a_hard_grammar(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    now, grammars, own = clock(monkeypatch), compiled(STATES, ABC), request("r", STATES)

    def choose(place: bytes) -> LikelyToken:
        if own.request_id in grammars._matchers and fault == "broken":
            grammars._matchers[own.request_id][1].state.consume_tokens(ids("!"))
        now[0] += 6e-3 if fault == "slow" else 0.0
        return LikelyToken(ids("o")[0], 0.9)

    assert bool(grammars.walk(own, 8, 0.05, choose)) == (fault == "slow")
    now[0] += 60.0
    for name in ("r", "s"):
        assert not grammars.walk(request(name, STATES), 8, 0.05, choosing(grammars, "o"))
        forced = grammars.walk(request(f"{name}f", STATES, "of"), 8, 0.05, choosing(grammars, "o"))
        assert [each.token_id for each in forced] == ids("f sale")
    assert grammars.walk(request("t", ABC, "a"), 8, 0.05, lambda place: None), "another grammar"


def test_walks_of_many_requests_share_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty requests, each in a step of 20 ms with a walk of 0.3 ms for each."""
    now, num_chosen = clock(monkeypatch), 0
    grammars = compiled(STATES)
    for _ in range(50):
        for number in range(30):
            begun_s = now[0]

            def slowly(place: bytes) -> LikelyToken | None:
                now[0] += 0.3e-3
                return None

            num_chosen += len(grammars.walk(request(f"r-{number}", STATES), 8, 0.05, slowly))
            assert now[0] - begun_s < 1e-3
        now[0] += 20e-3
    assert num_chosen * 0.3e-3 < 0.025 * now[0]


# Drafts

numbers = count()


def salted(salt: bytes, answer: str = "", **changes: object) -> Request:
    """Another request of a salt, perhaps with a part of its answer."""
    made = request(f"r-{next(numbers)}", STATES, answer, **changes)
    made.assignment = replace(made.assignment, salt=Salt(private=salt))
    return made


def answer_by(guesser: FormGuesser, salt: bytes, answer: str, **changes: object) -> list[str]:
    """Drafts for a request, made behind each token of its answer."""
    own, drafts = salted(salt, "", **changes), list[str]()
    for token_id in [*ids(answer), EOS]:
        guesser.follow([own])
        drafts.append(text(guesser.draft(own, None, 20, 0.05).token_ids))
        own.token_ids.append(token_id)
    guesser.ended(own)
    assert not guesser._walks
    return drafts


@pytest.mark.usefixtures("unhurried")
def test_a_salt_learns_from_its_own_answers_alone() -> None:
    guesser = FormGuesser(compiled(STATES), LearntChoices())
    assert answer_by(guesser, A, "off sale")[:3] == ["", "", "f sale"]
    assert answer_by(guesser, B, "on sale")[:3] == ["", "", " sale"]
    assert answer_by(guesser, A, "off sale")[0] == "off sale"
    assert answer_by(guesser, B, "on sale")[0] == "on sale"
    guesser.reset()
    assert answer_by(guesser, A, "off sale")[:2] == ["", ""]


@pytest.mark.usefixtures("unhurried")
def test_each_token_is_counted_once() -> None:
    choices = LearntChoices()
    guesser = FormGuesser(compiled(STATES), choices)
    for answer, total in (("off sale", 3), ("on sale now", 6), ("in sale", 8)):
        answer_by(guesser, A, answer)
        assert sum(sum(counts.values()) for counts in choices._counts.values()) == total


@pytest.mark.usefixtures("unhurried")
def test_the_end_of_an_answer_is_a_choice_too() -> None:
    """The last token is learnt when the answer has ended."""
    choices = LearntChoices()
    guesser = FormGuesser(compiled(STATES), choices)
    answer_by(guesser, A, "on sale")
    [end] = [each for counts in choices._counts.values() for each in counts if each not in ids("on")]
    assert end == EOS
    assert text(guesser.draft(salted(A, "on sal"), None, 20, 0.05).token_ids) == "e", "the end needs no draft"


@pytest.mark.usefixtures("unhurried")
def test_the_chance_of_a_draft_falls_with_each_choice() -> None:
    guesser = FormGuesser(compiled(STATES), LearntChoices())
    for answer in ("off sale", "off sale", "in sale"):
        answer_by(guesser, A, answer)
    own = salted(A)
    draft = guesser.draft(own, None, 20, 0.05)
    first, second = 2 / 4, 2 / 3
    assert text(draft.token_ids) == "off sale" and draft.source is DraftSource.GRAMMAR
    assert draft.chances == pytest.approx((first, *[first * second] * 7))
    assert text(guesser.draft(own, None, 20, 0.5).token_ids) == "o"
    assert guesser.draft(own, None, 20, 0.6).token_ids == ()
    assert text(guesser.draft(own, None, 3, 0.05).token_ids) == "off"


@pytest.mark.parametrize(
    ("chances", "source"),
    [((0.6, 0.6), DraftSource.GRAMMAR), ((0.98,) * 4, DraftSource.PAST), ((0.1,) * 8, DraftSource.GRAMMAR)],
)
@pytest.mark.usefixtures("unhurried")
def test_the_guess_counts_that_promises_more(chances: tuple[float, ...], source: DraftSource) -> None:
    """The grammar's own guess has a token with a chance of 1 / 2 and seven of 1 / 4."""
    guesser = FormGuesser(compiled(STATES), LearntChoices())
    answer_by(guesser, A, "off sale")
    guess = Draft("r", DraftSource.PAST, tuple(ids("off sale")[: len(chances)]), chances)
    draft = guesser.draft(salted(A), guess, 20, 0.05)
    assert draft.source is source and text(draft.token_ids) == ("off " if source is DraftSource.PAST else "off sale")


@pytest.mark.parametrize(
    "changes",
    [
        {"allowed_token_ids": tuple(ids("on sale"))},
        {"bad_words": (tuple(ids("of")),)},
        {"logit_bias": ((ids("o")[0], 3.0),)},
        {"min_tokens": 7},
        {"stop_token_ids": ()},
    ],
)
@pytest.mark.usefixtures("unhurried")
def test_a_request_that_may_not_choose_freely_neither_teaches_nor_learns(changes: dict[str, object]) -> None:
    guesser = FormGuesser(compiled(STATES), LearntChoices())
    assert answer_by(guesser, A, "on sale", **changes)[:3] == ["", "", " sale"]
    assert answer_by(guesser, A, "off sale")[:3] == ["", "", "f sale"]
    assert answer_by(guesser, A, "off sale", **changes)[:3] == ["", "", "f sale"]


@pytest.mark.usefixtures("unhurried")
def test_a_request_that_was_given_up_leaves_no_walk() -> None:
    guesser = FormGuesser(compiled(STATES), LearntChoices())
    given_up, other = salted(A), salted(A)
    guesser.draft(given_up, None, 20, 0.05)
    assert given_up.request_id in guesser._walks
    guesser.follow([other])
    assert not guesser._walks


# In a worker


def running(scheduler: Scheduler, **changes: object) -> Request:
    """Another request that has begun to decode."""
    asked = salted(A, "", **changes).assignment
    submit(scheduler, asked)
    scheduler.imports.grammar_settled(STATES.digest)
    scheduler.schedule(0.0)
    return scheduler.running[asked.request_id]


def answered(drafter: Drafter, scheduler: Scheduler, answer: str, **changes: object) -> str:
    """The first draft for another request, which then gets this answer."""
    own, found = running(scheduler, **changes), list[str]()
    for token_id in [*ids(answer), OTHER_EOS]:
        own.num_computed = len(own.token_ids) - 1
        found.append("".join(text(draft.token_ids) for draft in drafter.propose(scheduler)))
        own.token_ids.append(token_id)
    drafter.ended(own)
    scheduler.abort(own.request_id, 0.0)
    return found[0]


@pytest.mark.parametrize("sources", [(DraftSource.GRAMMAR, DraftSource.PAST), (DraftSource.GRAMMAR,)])
@pytest.mark.usefixtures("unhurried")
def test_nothing_is_learnt_where_no_answer_is_kept(
    make_scheduler: Callable[..., Scheduler], sources: tuple[DraftSource, ...]
) -> None:
    scheduler, drafter = make_scheduler(), Drafter(DraftLimits(sources=sources), compiled(STATES))
    scheduler.learn_costs(CHEAP)
    assert answered(drafter, scheduler, "in sale") == ""
    assert answered(drafter, scheduler, "in sale") == ("in sale" if DraftSource.PAST in sources else "")


def test_requests_choose_in_their_turn(
    make_scheduler: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is time for one walk in a step."""
    scheduler, drafter = make_scheduler(), Drafter(DraftLimits(), compiled(STATES))
    scheduler.learn_costs(CHEAP)
    for own in [running(scheduler) for _ in range(3)]:
        own.num_computed = len(own.token_ids) - 1
    left = [0]

    def has_time(share: TimeShare) -> bool:
        left[0] -= 1
        return left[0] >= 0

    monkeypatch.setattr(TimeShare, "has_time", has_time)
    walked = set[str]()
    for _ in range(3):
        left[0] = 1
        drafter.propose(scheduler)
        assert drafter._form_guesser is not None
        walked |= {*drafter._form_guesser._walks}
    assert walked == {*scheduler.running}
    for name in walked:
        scheduler.abort(name, 0.0)


@pytest.mark.usefixtures("unhurried")
def test_requests_without_drafts_neither_teach_nor_learn(make_scheduler: Callable[..., Scheduler]) -> None:
    scheduler, drafter = make_scheduler(), Drafter(DraftLimits(), compiled(STATES))
    scheduler.learn_costs(CHEAP)
    assert answered(drafter, scheduler, "in sale", speculation=False) == ""
    assert answered(drafter, scheduler, "in sale") == ""
    assert answered(drafter, scheduler, "in sale", speculation=False) == ""
    assert answered(drafter, scheduler, "in sale") == "in sale"


@pytest.mark.usefixtures("unhurried")
def test_a_reset_forgets_what_was_learnt_and_what_was_being_learnt(make_scheduler: Callable[..., Scheduler]) -> None:
    scheduler, drafter = make_scheduler(), Drafter(DraftLimits(), compiled(STATES))
    scheduler.learn_costs(CHEAP)
    answered(drafter, scheduler, "in sale")
    own = running(scheduler)
    own.num_computed = len(own.token_ids) - 1
    assert [text(draft.token_ids) for draft in drafter.propose(scheduler)] == ["in sale"]
    drafter.reset()
    own.token_ids += ids("in")
    drafter.ended(own)
    drafter.past.clear()
    scheduler.abort(own.request_id, 0.0)
    assert answered(drafter, scheduler, "in sale") == ""
