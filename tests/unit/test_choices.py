"""Guesses of tokens where a grammar allows a few: learnt from earlier answers of the same salt, never of another."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest

from engine.core.settings import DraftLimits
from engine.core.types import DraftSource, Grammar, GrammarKind, Salt
from engine.core.worker.drafts.choices import MAX_COUNT, MAX_PLACES, Choices
from engine.core.worker.drafts.draft import Draft
from engine.core.worker.drafts.drafter import Drafter
from engine.core.worker.drafts.form_guesser import SURE, FormGuesser
from engine.core.worker.drafts.forms import FormToken
from engine.core.worker.request import Request
from engine.core.worker.scheduler import Scheduler
from engine.model import matcher
from engine.model.matcher import SLOW_WALKS
from tests.unit.builders import submit
from tests.unit.test_drafts import CHEAP
from tests.unit.test_grammar_drafts import alone, compiled, step_masks
from tests.unit.test_grammars import ABC, EOS, LED, OTHER_EOS, allowed, ids, request, text

A, B = b"salt of Ann", b"salt of Bob"
STATES = Grammar(GrammarKind.REGEX, "(on|off|in) sale( now)?")
"""Allows `i` or `o`, and behind `o` an `f` or an `n`; the other tokens are forced, up to the end of `sale`."""
PLACE = tuple(ids("io"))


# What was taken


def test_the_token_taken_most_often_is_the_likeliest() -> None:
    choices = Choices()
    assert choices.likeliest(A, PLACE) is None and choices.chance(A, PLACE) == 0
    for taken in "oiioi":
        choices.took(A, PLACE, *ids(taken))
    assert choices.likeliest(A, PLACE) == ids("i")[0] and choices.chance(A, PLACE) == pytest.approx(3 / 5.5)
    assert choices.likeliest(B, PLACE) is None and choices.chance(B, PLACE) == 0
    assert choices.likeliest(A, (*PLACE, EOS)) is None, "another place"
    choices.clear()
    assert choices.likeliest(A, PLACE) is None and choices.num_places == 0


def test_later_answers_count_more() -> None:
    choices = Choices()
    for _ in range(10 * MAX_COUNT):
        choices.took(A, PLACE, PLACE[0])
    assert 0.95 < choices.chance(A, PLACE) < 1
    for _ in range(2 * MAX_COUNT):
        choices.took(A, PLACE, PLACE[1])
    assert choices.likeliest(A, PLACE) == PLACE[1]


def test_the_place_that_was_asked_for_longest_ago_is_forgotten() -> None:
    choices = Choices()
    for number in range(MAX_PLACES):
        choices.took(A, (number, 9999), 9999)
    assert choices.likeliest(A, (0, 9999)) == 9999
    choices.took(B, PLACE, PLACE[0])
    assert choices.num_places == MAX_PLACES
    assert choices.likeliest(A, (1, 9999)) is None and choices.likeliest(A, (0, 9999)) == 9999


@pytest.mark.parametrize(
    ("came", "first", "second"),
    [("ofx", "o", "f"), ("onx", "o", "n"), ("inx", "i", None), ("", None, None), ("o", "o", None), ("xf", None, None)],
)
def test_an_answer_teaches_up_to_its_first_difference(came: str, first: str | None, second: str | None) -> None:
    choices, other = Choices(), tuple(ids("fn"))
    choices.learn(A, [FormToken(PLACE[1], PLACE), FormToken(other[0], other), FormToken(ord("x"))], ids(came))
    expected = [None if each is None else ids(each)[0] for each in (first, second)]
    assert [choices.likeliest(A, PLACE), choices.likeliest(A, other)] == expected


# Walks


def choosing(wanted: str) -> Callable[[tuple[int, ...]], int | None]:
    return lambda among: next((token_id for token_id in ids(wanted) if token_id in among), None)


@pytest.mark.parametrize(
    ("grammar", "answer", "wanted", "expected"),
    [
        (STATES, "", "", "?"),
        (STATES, "", "i", "in sale?"),
        (STATES, "", "of", "off sale?"),
        (STATES, "", "o", "o?"),
        (STATES, "o", "f", "ff sale?"),
        (STATES, "off sa", "", "le?"),
        (STATES, "off sa", " ", "le now?"),
        (ABC, "", "cb", "accccccc"),
        (Grammar(GrammarKind.REGEX, "a[a-z]b"), "", "x", "a"),
        (LED, "", "a", ""),
        (LED, "<t>x</t>", "c", "accccccc"),
    ],
)
def test_a_walk_has_forced_and_chosen_tokens(grammar: Grammar, answer: str, wanted: str, expected: str) -> None:
    grammars, own = compiled(grammar), request("r", grammar, answer)
    for _ in range(2):
        walk = grammars.walk(own, 8, 4, choosing(wanted))
        token_ids = [-1 if each.token_id is None else each.token_id for each in walk]
        assert token_ids == [-1 if each == "?" else ids(each)[0] for each in expected][: len(walk)]
        assert len(walk) == min(8, len(expected))
        for place, each in enumerate(walk):
            assert alone(own, token_ids[:place]) == {*(each.allowed or (each.token_id,))}
    assert allowed(step_masks(grammars, [own]).bits[0]) == alone(own, ""), "the walk left nothing"


def test_a_walk_is_no_longer_than_asked_and_chooses_among_few() -> None:
    grammars, own = compiled(STATES, ABC), request("r", STATES)
    for longest in range(9):
        assert len(grammars.walk(own, longest, 4, choosing("i"))) == longest
    assert grammars.walk(own, 8, 1, choosing("i")) == []
    assert grammars.walk(request("other", ABC, "a"), 8, 3, choosing("c")) == [], "two go on and two end"
    assert grammars.walk(request("lost", STATES, "xy"), 8, 4, choosing("i")) == ()


def test_a_walk_of_which_nothing_is_left_when_it_fails() -> None:
    def fail(among: tuple[int, ...]) -> int | None:
        raise RuntimeError

    grammars, own = compiled(STATES), request("r", STATES)
    assert grammars.walk(own, 8, 4, fail) == () and grammars.num_matchers == 0
    assert allowed(step_masks(grammars, [own]).bits[0]) == alone(own, "")


def test_a_grammar_with_slow_masks_gets_forced_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, own = compiled(STATES), request("r", STATES)
    assert len(grammars.walk(own, 8, 4, choosing("of"))) == 8
    monkeypatch.setattr(matcher, "WALK_S", 0.0)
    for _ in range(SLOW_WALKS):
        assert len(grammars.walk(own, 8, 4, choosing("of"))) == 1, "ended by its first mask"
    assert grammars.walk(own, 8, 4, choosing("of")) == []
    behind = request("r", STATES, "of")
    assert [each.token_id for each in grammars.walk(behind, 8, 4, choosing(""))] == ids("f sale")


# Drafts

numbers = count()


def salted(salt: bytes, answer: str = "") -> Request:
    """Another request of a salt, perhaps with a part of its answer."""
    made = request(f"r-{next(numbers)}", STATES, answer)
    made.assignment = replace(made.assignment, salt=Salt(private=salt))
    return made


def answer_by(guesser: FormGuesser, salt: bytes, answer: str) -> list[str]:
    """Drafts for a request, made behind each token of its answer."""
    own, drafts = salted(salt), list[str]()
    for token_id in [*ids(answer), EOS]:
        guesser.follow([own])
        drafts.append(text(guesser.draft(own, None, 20, 0.05).token_ids))
        own.token_ids.append(token_id)
    guesser.ended(own)
    return drafts


def test_a_salt_learns_from_its_own_answers_alone() -> None:
    guesser = FormGuesser(compiled(STATES), Choices())
    assert answer_by(guesser, A, "off sale")[:3] == ["", "", "f sale"]
    assert answer_by(guesser, B, "on sale")[:3] == ["", "", " sale"]
    assert answer_by(guesser, A, "off sale")[0] == "off sale"
    assert answer_by(guesser, B, "on sale")[0] == "on sale"
    guesser.reset()
    assert answer_by(guesser, A, "off sale")[:2] == ["", ""]


def test_the_chance_of_a_draft_falls_with_each_choice() -> None:
    guesser = FormGuesser(compiled(STATES), Choices())
    for answer in ("off sale", "off sale", "in sale"):
        answer_by(guesser, A, answer)
    own = salted(A)
    draft = guesser.draft(own, None, 20, 0.05)
    first, second = 2 / 3.5, 2 / 2.5
    assert text(draft.token_ids) == "off sale" and draft.source is DraftSource.GRAMMAR
    assert draft.chances == pytest.approx((first, *[first * second] * 7))
    assert text(guesser.draft(own, None, 20, 0.5).token_ids) == "o"
    assert guesser.draft(own, None, 20, SURE).token_ids == ()
    assert text(guesser.draft(own, None, 3, 0.05).token_ids) == "off"


@pytest.mark.parametrize(
    ("chances", "source"),
    [((0.6, 0.6), DraftSource.GRAMMAR), ((0.98,) * 4, DraftSource.PAST), ((0.1,) * 8, DraftSource.GRAMMAR)],
)
def test_the_guess_counts_that_promises_more(chances: tuple[float, ...], source: DraftSource) -> None:
    """The grammar's own guess has a token with a chance of 2 / 3 and seven of 4 / 9."""
    guesser = FormGuesser(compiled(STATES), Choices())
    answer_by(guesser, A, "off sale")
    guess = Draft("r", DraftSource.PAST, tuple(ids("off sale")[: len(chances)]), chances)
    draft = guesser.draft(salted(A), guess, 20, 0.05)
    assert draft.source is source and text(draft.token_ids) == ("off " if source is DraftSource.PAST else "off sale")


@pytest.mark.parametrize("sources", [(DraftSource.GRAMMAR, DraftSource.PAST), (DraftSource.GRAMMAR,)])
def test_nothing_is_learnt_where_no_answer_is_kept(
    make_scheduler: Callable[..., Scheduler], sources: tuple[DraftSource, ...]
) -> None:
    """A scheduler's requests, the second of which asks as the first did."""
    scheduler = make_scheduler()
    scheduler.learn_costs(CHEAP)
    drafter, found = Drafter(DraftLimits(sources=sources), compiled(STATES)), list[str]()
    for asked in (salted(A).assignment, salted(A).assignment):
        submit(scheduler, asked)
        scheduler.grammar_settled(STATES.digest)
        scheduler.schedule(0.0)
        own = scheduler.running[asked.request_id]
        for token_id in [*ids("in sale"), OTHER_EOS]:
            own.num_computed = len(own.token_ids) - 1
            found += [text(draft.token_ids) for draft in drafter.propose(scheduler) if own.num_output == 0]
            own.token_ids.append(token_id)
        drafter.ended(own)
        scheduler.abort(own.request_id, 0.0)
    assert found == (["in sale"] if DraftSource.PAST in sources else [])


def test_requests_without_drafts_teach_nothing() -> None:
    guesser = FormGuesser(compiled(STATES), Choices())
    guesser.follow([salted(A, "off sale")])
    guesser.ended(salted(A, "off sale"))
    assert guesser.draft(salted(A), None, 20, 0.05).token_ids == ()
