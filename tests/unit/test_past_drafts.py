"""Drafts from past answers and from predictions: found again, bounded, and never across salts."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from raydix.engine.core.answers.continuations import packed
from raydix.engine.core.settings import DraftLimits
from raydix.engine.core.types import Assignment, DraftSource, Salt, Stage
from raydix.engine.core.worker.drafts.drafter import Drafter
from raydix.engine.core.worker.drafts.suffix import MAX_MATCH, PRIORS, SourceRecord
from raydix.engine.core.worker.drafts.texts import (
    END,
    MAX_COMPARED,
    VOLUME_TOKENS,
    VOLUMES,
    Past,
    RunningText,
    Suffixes,
    TextMatch,
)
from raydix.engine.core.worker.scheduler import Scheduler
from raydix.engine.model.engine import Engine
from tests.unit.builders import answer_to, make_assignment, submit
from tests.unit.test_drafts import CHEAP, answers, drafting_engine

MINE, OTHERS = Salt(b"mine"), Salt(b"others")
QUESTION, ANSWER = list(range(100, 150)), list(range(500, 540))


def past_of(*answers: Sequence[int], max_tokens: int = 10_000, salt: bytes = b"") -> Past:
    past = Past(max_tokens)
    for answer in answers:
        past.add(salt, QUESTION, answer)
        past.check_integrity()
    past.index(max_tokens)
    return past


def matched(past: Past, token_ids: Sequence[int], salt: bytes = b"") -> TextMatch:
    match = TextMatch()
    match.follow(past.volumes(salt), token_ids, SourceRecord())
    return match


# Past answers


def test_the_question_asked_again_finds_its_answer() -> None:
    past = past_of(ANSWER)
    match = matched(past, QUESTION)
    assert match.length == MAX_MATCH and match.guess(4) == ANSWER[:4]
    assert match.guess(99) == ANSWER, "no guess goes beyond the answer"
    assert matched(past, [7, *ANSWER[10:13]]).length == 3
    assert matched(past, [7, *ANSWER[10:13]]).guess(2) == ANSWER[13:15]
    assert matched(past, [7, ANSWER[10]]).guess(2) == [] == matched(past, [7]).guess(2)


def test_of_several_answers_the_longest_match_counts_then_the_latest() -> None:
    past = past_of([1, 2, 3, 4], [9, 2, 3, 5], [8, 2, 3, 6])
    assert matched(past, [7, 2, 3]).guess(1) == [6]
    assert matched(past, [9, 2, 3]).guess(1) == [5]


def test_nothing_is_found_under_another_salt() -> None:
    past = past_of(ANSWER, salt=b"mine")
    assert matched(past, QUESTION, b"mine").length == MAX_MATCH
    assert matched(past, QUESTION, b"others").length == 0 and matched(past, QUESTION).length == 0


def test_each_guess_is_compared_and_a_new_match_is_looked_for() -> None:
    past, survival, match = past_of(ANSWER), SourceRecord(), TextMatch()
    token_ids = list(QUESTION)
    match.follow(past.volumes(b""), token_ids, survival)
    token_ids += ANSWER[:3]
    match.follow(past.volumes(b""), token_ids, survival)
    assert match.length == MAX_MATCH and match.guess(2) == ANSWER[3:5]
    assert survival.chance(MAX_MATCH) > PRIORS[-1]

    token_ids.append(9)
    match.follow(past.volumes(b""), token_ids, survival)
    assert match.length == 0 and survival.chance(MAX_MATCH) < PRIORS[-1]
    token_ids += ANSWER[20:22]
    match.follow(past.volumes(b""), token_ids, survival)
    assert match.length == 2 and match.guess(1) == ANSWER[22:23]

    token_ids += [1] * (MAX_COMPARED + 1)
    match.follow(past.volumes(b""), token_ids, survival)
    assert match.length == 0, "after a while without drafts the last tokens count alone"


def test_the_end_of_an_answer_is_no_wrong_guess() -> None:
    past, survival, match = past_of([1, 2, 3]), SourceRecord(), TextMatch()
    for token_ids in ([9, 1, 2], [9, 1, 2, 3], [9, 1, 2, 3, 4]):
        match.follow(past.volumes(b""), token_ids, survival)
    assert match.length == 0 and survival.chance(2) > PRIORS[0] and survival.chance(3) == PRIORS[1]


def test_answers_are_made_findable_a_bounded_number_of_tokens_at_a_time() -> None:
    past = Past(10_000)
    past.add(b"", QUESTION, ANSWER)
    past.add(b"other", (), ANSWER)
    assert matched(past, QUESTION).length == 0
    past.index(MAX_MATCH + 5)
    assert matched(past, QUESTION).length == MAX_MATCH and matched(past, ANSWER[10:12]).length == 0
    past.index(len(ANSWER))
    assert matched(past, ANSWER[10:12]).length == 2 and matched(past, ANSWER[-2:], b"other").length == 0
    past.index(len(ANSWER))
    assert matched(past, ANSWER[-2:], b"other").guess(9) == []


@pytest.mark.parametrize("seed", range(5))
def test_memory_is_bounded_and_what_was_written_least_recently_goes_first(seed: int) -> None:
    chance, past = random.Random(seed), Past(2_000)
    salts = [bytes([number]) for number in range(12)]
    for _ in range(400):
        salt = chance.choice(salts[: chance.randint(1, len(salts))])
        past.add(salt, QUESTION[: chance.randint(0, 50)], ANSWER * chance.randint(0, 12))
        past.index(chance.randint(0, 300))
        past.check_integrity()
    assert max(len(past.volumes(salt)) for salt in salts) in range(1, VOLUMES + 2)
    past.add(salts[5], (), ANSWER)
    for number in range(200):
        past.add(bytes([200, number]), (), ANSWER[:5])
        past.add(salts[5], (), ANSWER[:5])
    assert past.volumes(salts[5]) and not past.volumes(salts[1]), "the one that is written to stays"
    past.check_integrity()


def test_what_is_empty_or_far_too_long_is_not_kept() -> None:
    past = past_of([], ANSWER * 30, max_tokens=2_000)
    assert past.num_tokens == 0 and not past.volumes(b"")
    assert past_of(ANSWER, max_tokens=0).num_tokens == 0
    assert past_of(ANSWER).num_tokens == VOLUME_TOKENS + MAX_MATCH + len(ANSWER) + 1


def test_what_was_forgotten_is_drafted_no_more() -> None:
    past, survival, match = past_of(ANSWER), SourceRecord(), TextMatch()
    match.follow(past.volumes(b""), QUESTION, survival)
    assert match.guess(1) == ANSWER[:1]
    past.clear()
    past.check_integrity()
    assert past.num_tokens == 0 and match.guess(1) == [], "by a request that has found it, too"
    match.follow(past.volumes(b""), [*QUESTION, ANSWER[0]], survival)
    assert match.length == 0
    past.add(b"", QUESTION, ANSWER)
    past.index(99)
    past.check_integrity()
    assert matched(past, QUESTION).guess(1) == ANSWER[:1]


def test_a_text_that_grows_is_followed_as_far_as_it_is_written() -> None:
    other, own, mine = list(QUESTION), list(QUESTION), Suffixes(len(QUESTION))
    theirs, survival, match = Suffixes(len(QUESTION)), SourceRecord(), TextMatch()
    theirs.index.extend(other, len(other))
    text = theirs.text(other)
    assert isinstance(text, RunningText) and mine.text(own).places is not text.places
    match.follow([text], own, survival)
    assert match.length == MAX_MATCH and match.guess(3) == [], "both are at the same place"

    other += ANSWER[:3]
    theirs.index.follow(other, survival)
    assert match.guess(9) == ANSWER[:3]
    own += ANSWER[:4]
    match.follow([text], own, survival)
    assert match.length == 0 == len(match.guess(9)), "the request has overtaken the other one"
    other += ANSWER[3:6]
    theirs.index.follow(other, survival)
    match.follow([text], own, survival)
    assert match.guess(9) == ANSWER[4:6]


# Texts of a request's own


def predicting(prediction: Sequence[int], prompt: Sequence[int] = QUESTION) -> tuple[Suffixes, TextMatch]:
    suffixes = Suffixes(len(prompt), prompt, {DraftSource.PREDICTION: [prediction]})
    suffixes.index_volumes(10_000)
    return suffixes, suffixes.matches[DraftSource.PREDICTION]


def test_the_first_token_finds_the_prediction() -> None:
    suffixes, match = predicting(ANSWER)
    volume = suffixes.volumes[DraftSource.PREDICTION]
    assert volume.token_ids == [*QUESTION[-MAX_MATCH:], *ANSWER, END]
    assert suffixes.num_tokens == len(volume.token_ids) + len(QUESTION)
    match.follow([volume], QUESTION, SourceRecord())
    assert match.length == MAX_MATCH and match.guess(99) == ANSWER, "and no guess goes beyond it"


def test_an_answer_that_leaves_the_prediction_finds_it_again() -> None:
    (suffixes, match), token_ids = predicting(ANSWER), list(QUESTION)
    volumes, survival = [suffixes.volumes[DraftSource.PREDICTION]], SourceRecord()
    match.follow(volumes, token_ids, survival)
    for token_id in (*ANSWER[:5], 9, 9, *ANSWER[20:22]):
        token_ids.append(token_id)
        match.follow(volumes, token_ids, survival)
    assert match.guess(2) == ANSWER[22:24] and survival.chance(MAX_MATCH) != PRIORS[-1]


def test_behind_the_whole_prediction_nothing_is_counted_as_wrong() -> None:
    (suffixes, match), survival = predicting(ANSWER), SourceRecord()
    volumes = [suffixes.volumes[DraftSource.PREDICTION]]
    match.follow(volumes, QUESTION, survival)
    match.follow(volumes, [*QUESTION, *ANSWER, 3], survival)
    assert match.length == 0 and survival.chance(MAX_MATCH) > 0.98


# The drafter


def predicted(prediction: Sequence[int]) -> Assignment:
    return replace(make_assignment("a", QUESTION, max_tokens=99), prediction=tuple(prediction))


def proposed(make_scheduler: Callable[..., Scheduler], drafter: Drafter, assignment: Assignment) -> Sequence[object]:
    """Source and tokens of the draft of a request behind its prompt."""
    scheduler = make_scheduler(num_blocks=64)
    scheduler.learn_costs(CHEAP)
    submit(scheduler, assignment)
    scheduler.schedule(0.0)
    [request] = scheduler.running.values()
    request.num_computed = len(request.token_ids) - 1
    drafts = [(draft.source, list(draft.token_ids)) for draft in drafter.propose(scheduler)]
    scheduler.abort("a", 0.0)
    return drafts


def test_a_prediction_is_drafted_unless_its_source_is_off(make_scheduler: Callable[..., Scheduler]) -> None:
    drafter = Drafter(DraftLimits(depth=5))
    assert proposed(make_scheduler, drafter, predicted(ANSWER)) == [(DraftSource.PREDICTION, ANSWER[:5])]
    assert proposed(make_scheduler, drafter, predicted(())) == []
    without = Drafter(DraftLimits(depth=5, sources=(DraftSource.REQUEST, DraftSource.PAST)))
    assert proposed(make_scheduler, without, predicted(ANSWER)) == []


def test_no_match_in_the_own_text_hides_a_prediction(make_scheduler: Callable[..., Scheduler]) -> None:
    """The prompt has the prediction's beginning, with another end, at its own end, too."""
    again = [*QUESTION[-MAX_MATCH:], 7, 7, 7, *QUESTION[-MAX_MATCH:]]
    alone = Drafter(DraftLimits(depth=3, sources=(DraftSource.PREDICTION,)))
    assignment = replace(make_assignment("a", again, max_tokens=99), prediction=tuple(ANSWER))
    assert proposed(make_scheduler, alone, assignment) == [(DraftSource.PREDICTION, ANSWER[:3])]
    both = Drafter(DraftLimits(depth=3, sources=(DraftSource.PREDICTION, DraftSource.REQUEST)))
    assert proposed(make_scheduler, both, assignment) == [(DraftSource.REQUEST, [7, 7, 7])], "of two equal ones"


class Watched(list[int]):
    """Tokens that tell how many of them are copied."""

    num_copied = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.num_copied += len(found) if isinstance(place, slice) else 0
        return found


def test_no_prompt_is_copied_where_no_index_has_room_or_a_request_ends(
    make_scheduler: Callable[..., Scheduler],
) -> None:
    drafter = Drafter(DraftLimits(index_tokens=1_000))
    scheduler = make_scheduler(num_blocks=2_048, token_budget=8_192)
    scheduler.learn_costs(CHEAP)
    submit(scheduler, make_assignment("a", QUESTION * 60, max_tokens=9))
    scheduler.schedule(0.0)
    [request] = scheduler.running.values()
    request.token_ids = prompt = Watched(request.token_ids)
    request.num_computed = len(request.token_ids) - 1
    for _ in range(10):
        assert drafter.propose(scheduler) == [] and request.suffixes is None
    assert prompt.num_copied <= 10 * MAX_MATCH
    before = prompt.num_copied
    request.token_ids += [1, 2, 3]
    drafter.ended(request)
    assert prompt.num_copied - before <= MAX_MATCH + 3 and drafter.past.num_tokens > 0
    scheduler.abort("a", 0.0)


def test_a_prediction_counts_in_the_memory(make_scheduler: Callable[..., Scheduler]) -> None:
    num_tokens = MAX_MATCH + len(ANSWER) + 1 + len(QUESTION)
    for index_tokens, count in ((num_tokens, 1), (num_tokens - 1, 0)):
        drafter = Drafter(DraftLimits(depth=5, index_tokens=index_tokens))
        assert len(proposed(make_scheduler, drafter, predicted(ANSWER))) == count


def test_of_two_sources_the_one_that_promises_more_counts(make_scheduler: Callable[..., Scheduler]) -> None:
    drafter = Drafter(DraftLimits(depth=5))
    drafter.past.add(b"", QUESTION, [7, 8])
    assert proposed(make_scheduler, drafter, predicted(ANSWER)) == [(DraftSource.PREDICTION, ANSWER[:5])]
    assert proposed(make_scheduler, drafter, predicted([1])) == [(DraftSource.PAST, [7, 8])]
    assert proposed(make_scheduler, drafter, predicted(())) == [(DraftSource.PAST, [7, 8])]


def test_answers_of_the_cluster_are_drafted_unless_their_source_is_off(
    make_scheduler: Callable[..., Scheduler],
) -> None:
    told = replace(make_assignment("a", QUESTION, max_tokens=99), continuations=(packed([7, 8]), packed(ANSWER)))
    drafter = Drafter(DraftLimits(depth=5))
    assert proposed(make_scheduler, drafter, told) == [(DraftSource.CLUSTER, ANSWER[:5])], "the likeliest"
    begun = replace(told, token_ids=(*QUESTION, 7), attempt=1)
    assert proposed(make_scheduler, drafter, begun) == [(DraftSource.CLUSTER, [8])], "the one that began so"
    without = Drafter(DraftLimits(depth=5, sources=(DraftSource.REQUEST, DraftSource.PAST)))
    assert proposed(make_scheduler, without, told) == []
    for index_tokens, count in ((3 * (MAX_MATCH + 1) + len(QUESTION), 0), (10_000, 1)):
        drafter = Drafter(DraftLimits(depth=5, index_tokens=index_tokens))
        assert len(proposed(make_scheduler, drafter, told)) == count


def test_what_another_worker_answered_is_drafted_and_accepted() -> None:
    engine, other = drafting_engine(), replace(asked("a"), continuations=(packed(answer_to(asked("a"))),))
    engine.submit(other, 0.0)
    assert answers(engine)["a"] == answer_to(asked("a"))
    drafted, accepted = counts(engine, DraftSource.CLUSTER)
    assert accepted > 25 and drafted == accepted


@pytest.mark.parametrize("seed", range(5))
def test_no_answer_of_the_cluster_changes_a_token(seed: int) -> None:
    """Right, wrong, of other lengths, and without end."""
    chance, right = random.Random(seed), answer_to(asked("a"))

    def spoilt() -> list[int]:
        between = chance.choices(range(9), k=chance.randint(0, 9))
        return [*right[: chance.randint(0, 9)], *between, *right[chance.randint(0, 9) :]]

    some = [spoilt() for _ in range(4)]
    engine = drafting_engine()
    known: dict[str, list[list[int]]] = {"one": some[:1], "some": some, "long": [right * 6], "none": [[]]}
    for name, told in known.items():
        engine.submit(replace(asked(name), continuations=tuple(packed(each) for each in told)), 0.0)
    assert answers(engine) == dict.fromkeys(known, right)
    assert engine.pool.num_available == engine.pool.num_blocks


def asked(name: str, salt: Salt = MINE) -> Assignment:
    return make_assignment(name, [3, 1, 2] * 5, max_tokens=40, salt=salt)


def counts(engine: Engine, source: DraftSource) -> tuple[int, int]:
    found = engine.scheduler.drafting.counts[source]
    return found.num_drafted, found.num_accepted


def test_what_was_answered_before_is_drafted_and_accepted() -> None:
    """The fake model answers otherwise under another salt, and drafts of it would be seen in the counts."""
    engine = drafting_engine(DraftLimits(past_tokens=4_000))
    for name in ("first", "again"):
        engine.submit(asked(name), 0.0)
        assert answers(engine)[name] == answer_to(asked(name))
    drafted, accepted = counts(engine, DraftSource.PAST)
    assert accepted > 25 and drafted == accepted
    engine.submit(asked("others", OTHERS), 0.0)
    assert answers(engine)["others"] == answer_to(asked("others", OTHERS))
    assert counts(engine, DraftSource.PAST) == (drafted, accepted)


def test_an_answer_that_was_cut_off_is_kept_and_others_are_not() -> None:
    engine = drafting_engine(DraftLimits(past_tokens=4_000))
    assert engine.drafter is not None
    engine.submit(asked("cut"), 0.0)
    for _ in range(6):
        engine.step(0.0)
    engine.abort(["cut", "unknown"], 0.0, has_ended=True)
    assert engine.drafter.past.num_tokens > VOLUME_TOKENS

    before = engine.drafter.past.num_tokens
    silent = replace(asked("silent"), sampling=replace(asked("silent").sampling, speculation=False))
    for assignment in (silent, replace(asked("prefilled"), stage=Stage.PREFILL)):
        engine.submit(assignment, 0.0)
        answers(engine)
    assert engine.drafter.past.num_tokens == before
    engine.drafter.past.check_integrity()


def test_an_attempt_that_is_given_up_leaves_its_answer_to_the_next_one() -> None:
    engine = drafting_engine(DraftLimits(past_tokens=4_000))
    assert engine.drafter is not None
    engine.submit(asked("a"), 0.0)
    for _ in range(6):
        engine.step(0.0)
    request = engine.scheduler.requests.get("a")
    assert request is not None and request.num_output > 3
    again = replace(asked("a"), attempt=1, token_ids=tuple(request.token_ids))
    engine.abort(["a"], 0.0)
    assert engine.drafter.past.num_tokens == 0
    engine.submit(again, 0.0)
    engine.abort(["a"], 0.0)
    assert engine.drafter.past.num_tokens == 0, "before its first token"
    engine.submit(replace(again, attempt=2), 0.0)
    answers(engine)
    [volume] = engine.drafter.past.volumes(asked("a").salt.private)
    assert volume.token_ids == [*asked("a").token_ids, *answer_to(asked("a")), END], "once"


def test_a_reset_forgets_past_answers() -> None:
    engine = drafting_engine(DraftLimits(past_tokens=4_000))
    engine.submit(asked("first"), 0.0)
    answers(engine)
    assert engine.reset_cache() > 0
    engine.submit(asked("again"), 0.0)
    answers(engine)
    assert counts(engine, DraftSource.PAST) == (0, 0)
    engine.drafter = None
    assert engine.reset_cache() > 0


def test_samples_of_one_prompt_draft_from_each_other() -> None:
    """The second one begins when the first one is under way, and catches up with the first one."""
    engine = drafting_engine(DraftLimits(depth=8, past_tokens=4_000, sources=(DraftSource.PAST,)))
    engine.submit(asked("first"), 0.0)
    for _ in range(20):
        engine.step(0.0)
    assert counts(engine, DraftSource.PAST) == (0, 0)
    engine.submit(asked("second"), 0.0)
    engine.submit(asked("others", OTHERS), 0.0)
    for _ in range(10):
        engine.step(0.0)
    assert [each.num_output for each in engine.scheduler.requests.values()] == [30, 30, 10]
    drafted, accepted = counts(engine, DraftSource.PAST)
    assert drafted == accepted == 20
    found = answers(engine)
    assert found["second"] == answer_to(asked("second"))[30:]
    assert found["others"] == answer_to(asked("others", OTHERS))[10:]


def test_without_the_source_nothing_is_kept() -> None:
    engine = drafting_engine()
    engine.drafter = Drafter(DraftLimits(sources=(DraftSource.REQUEST,)))
    engine.submit(asked("a"), 0.0)
    answers(engine)
    assert engine.drafter.past.num_tokens == 0
