"""Drafts: found in a request's own tokens, chosen by cost and chance, and never seen in an answer."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydix.engine.core.costs import CostFit, StepShape, WorkerCosts
from raydix.engine.core.settings import DraftLimits, SchedulerLimits
from raydix.engine.core.types import Assignment, DraftSource, FinishReason, Sampling, Stage
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.core.worker.drafts.draft import MAX_TOKENS, DecodeStep, Draft, DraftCandidate, share
from raydix.engine.core.worker.drafts.drafter import Drafter
from raydix.engine.core.worker.drafts.guesser import INDEXED_PER_STEP
from raydix.engine.core.worker.drafts.rows import DraftedRow, rows_of, sampled_by_request, up_to_difference, with_drafts
from raydix.engine.core.worker.drafts.suffix import (
    MAX_CANDIDATES,
    MAX_MATCH,
    MAX_WEIGHT,
    MIN_MATCH,
    PRIORS,
    SourceRecord,
    SuffixIndex,
)
from raydix.engine.core.worker.request import Request
from raydix.engine.core.worker.scheduler import Scheduler
from raydix.engine.core.worker.step import SampledToken, ScheduledChunk, SchedulerOutput, StepOutcome, chunk_of
from raydix.engine.model.engine import Engine
from tests.unit.builders import (
    FINGERPRINT,
    FakeModel,
    answer_to,
    chain_of,
    make_assignment,
    run_all,
    step,
    submit,
    tokens_of,
)

MakeScheduler = Callable[..., Scheduler]

CHEAP = WorkerCosts(step_s=8e-3, decode_token_s=3e-4, draft_token_s=3e-4)
"""As a CPU measures: sixteen rows take half as long again as one."""
DEFAULT_LIMITS = DraftLimits()


# The index


def indexed(token_ids: Sequence[int]) -> SuffixIndex:
    index = SuffixIndex()
    index.extend(token_ids, len(token_ids))
    return index


def longest_match(token_ids: Sequence[int]) -> int:
    """By comparing everything: how many of the last tokens stood before, among the latest places of the last two."""
    end, pair = len(token_ids), tuple(token_ids[-2:])
    places = [place for place in range(2, end) if tuple(token_ids[place - 2 : place]) == pair][-MAX_CANDIDATES:]

    def common(place: int) -> int:
        return next((n for n in range(place) if token_ids[place - 1 - n] != token_ids[end - 1 - n]), place)

    return min(MAX_MATCH, max((common(place) for place in places), default=0))


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60))
def test_the_match_is_the_longest_there_is(token_ids: list[int]) -> None:
    assert indexed(token_ids).length == longest_match(token_ids)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.lists(st.integers(0, 2), max_size=20))
def test_a_match_that_goes_on_is_no_shorter_than_one_that_is_looked_for(prompt: list[int], answer: list[int]) -> None:
    index, survival = indexed(prompt), SourceRecord()
    for end in range(len(prompt) + 1, len(prompt) + len(answer) + 1):
        sequence = [*prompt, *answer][:end]
        index.follow(sequence, survival)
        assert index.num_indexed == end
        assert index.length >= indexed(sequence).length
        place = index.next - index.length
        assert not index.length or sequence[place : index.next] == sequence[end - index.length :]


def test_the_guess_is_what_followed_there() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 9, 9, 2, 3, 4]
    index = indexed(text)
    assert index.length == 3
    assert index.guess(text, 4) == [5, 6, 7, 9]
    assert indexed([1, 2, 3]).guess([1, 2, 3], 4) == []
    assert indexed([5]).guess([5], 4) == []


def test_the_guess_of_a_sequence_that_repeats_goes_on_with_itself() -> None:
    text = [7, 1, 2, 3, 1, 2, 3, 1, 2]
    assert indexed(text).guess(text, 7) == [3, 1, 2, 3, 1, 2, 3]
    assert indexed([4, 4, 4]).guess([4, 4, 4], 3) == [4, 4, 4]


def test_of_equally_long_matches_the_latest_counts() -> None:
    text = [1, 2, 3, 0, 1, 2, 4, 0, 0, 1, 2]
    assert indexed(text).length == MIN_MATCH + 1
    assert indexed(text).guess(text, 1) == [4]


# Chances


def test_chances_are_learnt_by_the_length_of_the_match() -> None:
    survival = SourceRecord()
    assert survival.chances(2, 2, 0.0) == [PRIORS[0], PRIORS[0] * PRIORS[1]]
    for _ in range(200):
        survival.observe(2, is_right=False)
        survival.observe(30, is_right=True)
    assert survival.chance(2) < 0.05 and survival.chance(25) > 0.95
    assert survival.chance(3) == PRIORS[1]
    assert survival.chances(2, 4, 0.1) == [], "no guess is worth looking at"
    assert len(survival.chances(25, 4, 0.8)) == 4


def test_a_request_that_changes_its_ways_is_soon_known() -> None:
    survival = SourceRecord()
    for _ in range(1000):
        survival.observe(5, is_right=True)
    for _ in range(round(MAX_WEIGHT)):
        survival.observe(5, is_right=False)
    assert survival.chance(5) < 0.5


# The choice


def candidates(*chances: Sequence[float], cost_s: float = 1e-4, weight: float = 1.0) -> list[DraftCandidate]:
    tokens = [(0,) * len(each) for each in chances]
    drafts = [
        Draft(str(index), DraftSource.REQUEST, token_ids, tuple(each))
        for index, (token_ids, each) in enumerate(zip(tokens, chances, strict=True))
    ]
    return [DraftCandidate(draft, len(draft.token_ids), cost_s, weight) for draft in drafts]


def test_the_likeliest_tokens_are_taken_as_far_as_the_budget_goes() -> None:
    both = candidates([0.9, 0.8, 0.1], [0.85, 0.2])
    assert share(both, DecodeStep(1, 8e-3), 99) == [3, 2]
    assert share(both, DecodeStep(1, 8e-3), 3) == [2, 1]
    assert share(both, DecodeStep(1, 8e-3), 0) == [0, 0]
    assert share(candidates([0.9] * 9, weight=4.0), DecodeStep(1, 8e-3), 13) == [3]
    assert share(candidates([0.9] * 999), DecodeStep(1, 8e-3), 9999) == [MAX_TOKENS]


def test_beside_many_decodes_no_draft_is_worth_its_time() -> None:
    alone, among = DecodeStep(1, CHEAP.decode_step_s(1)), DecodeStep(64, CHEAP.decode_step_s(64))
    drafts = candidates([0.6, 0.36], cost_s=3e-4)
    assert share(drafts, alone, 99) == [2]
    assert share(drafts, among, 99) == [0]
    assert alone.least_chance(3e-4) < 0.06 and among.least_chance(3e-4) > 0.7


def test_a_draft_token_that_seems_to_cost_nothing_still_counts_for_something() -> None:
    free = WorkerCosts(step_s=8e-3, decode_token_s=0.0, draft_token_s=0.0)
    assert DecodeStep(1, 8e-3).cost_s(free, 100) > 0
    assert share(candidates([0.5] * 3, cost_s=1e-9), DecodeStep(300, 8e-3), 99) == [3]


def test_the_cost_of_a_draft_token_is_learnt() -> None:
    fit = CostFit(WorkerCosts())
    for index in range(600):
        num_drafted = index % 9
        fit.step(StepShape(0, 1, 100.0, num_draft_tokens=num_drafted), 8e-3 + 3e-4 * num_drafted)
        fit.costs()
    assert fit.costs().draft_token_s == pytest.approx(3e-4, rel=0.05)


# Rows


def test_rows_are_the_request_behind_each_token_of_its_draft() -> None:
    request = Request(make_assignment(prompt=(1, 2, 3), generated=(4,)), chain_of(), arrival=0)
    request.num_computed = 3
    first, *others = rows_of([chunk_with(request, (5, 6))])
    assert first is request
    assert [row.token_ids for row in others] == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]]
    assert [row.num_output for row in others] == [2, 3]
    assert all(isinstance(row, DraftedRow) and row.request_id == "a" for row in others)
    assert all(row.assignment is request.assignment for row in others)


def chunk_with(request: Request, draft: tuple[int, ...]) -> ScheduledChunk:
    return replace(chunk_of(request, 1), num_tokens=1 + len(draft), draft=draft, draft_source=DraftSource.REQUEST)


def test_tokens_count_up_to_the_first_difference() -> None:
    def kept(draft: Sequence[int], *tokens: int) -> list[int]:
        return [token.token_id for token in up_to_difference(draft, [SampledToken(token) for token in tokens])]

    assert kept((), 5) == [5]
    assert kept((5, 6), 5, 6, 7) == [5, 6, 7]
    assert kept((5, 6), 5, 9, 7) == [5, 9]
    assert kept((5, 6), 9, 6, 7) == [9]


def test_a_draft_ends_before_a_row_that_is_none_of_the_answer() -> None:
    requests = [Request(make_assignment(name, prompt=(1, 2)), chain_of(), arrival=0) for name in "abc"]
    for request in requests:
        request.num_computed = 1
    chunks = [chunk_with(requests[0], (5, 6)), chunk_with(requests[1], ()), chunk_with(requests[2], (7, 8))]
    rows = rows_of(chunks)
    assert [(row.request_id, draft) for row, draft in with_drafts(rows)] == [("a", (5, 6)), ("b", ()), ("c", (7, 8))]

    tokens = [SampledToken(token_id) for token_id in (5, 6, 9, 4, 7, 8, 3)]
    found = sampled_by_request(chunks, tokens, ended={2, 5, 6})
    assert {name: [token.token_id for token in kept] for name, kept in found.items()} == {
        "a": [5, 6],
        "b": [4],
        "c": [7],
    }


# A scheduler's step

PROMPT = (1, 2, 3, 0, 1, 1, 2, 3, 2, 0, 0, 1)
"""Exactly three blocks of four."""


def draft_of(*token_ids: int, request_id: str = "a", chance: float = 1.0) -> Draft:
    return Draft(request_id, DraftSource.REQUEST, token_ids, (chance,) * len(token_ids))


def drafted_step(scheduler: Scheduler, model: FakeModel, *drafts: Draft) -> tuple[SchedulerOutput, StepOutcome]:
    output = scheduler.schedule(0.0, drafts)
    model.move_all(output)
    outcome = scheduler.update(output, model.run(output), 0.0)
    for export in outcome.exports:
        scheduler.transfers.release(export, 0.0)
    return output, outcome


def decoding(scheduler: Scheduler, model: FakeModel, assignment: Assignment) -> list[int]:
    """Submit and prefill a request; returns its whole answer, of which one token is there."""
    submit(scheduler, assignment)
    step(scheduler, model)
    return answer_to(assignment)


def wrong(token_id: int) -> int:
    return (token_id + 1) % 4


def test_a_right_draft_brings_all_its_tokens_and_one_more(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.pool)
    answer = decoding(scheduler, model, make_assignment(prompt=PROMPT, max_tokens=9))
    output, outcome = drafted_step(scheduler, model, draft_of(*answer[1:5]))
    [chunk] = output.chunks
    assert (chunk.start, chunk.num_tokens, chunk.draft) == (12, 5, tuple(answer[1:5]))
    assert tokens_of(outcome.events) == answer[1:6]
    assert [event.position for event in outcome.events] == [1, 2, 3, 4, 5]
    assert [(event.num_accepted, event.num_rejected) for event in outcome.events] == [(0, 0)] * 4 + [(4, 0)]
    request = scheduler.requests.get("a")
    assert request is not None and (request.num_computed, request.num_sealed) == (17, 4)
    assert tokens_of(run_all(scheduler, model)["a"]) == answer[6:]
    assert vars_of_counts(scheduler) == (4, 4)


def vars_of_counts(scheduler: Scheduler) -> tuple[int, int]:
    counts = scheduler.drafting.counts[DraftSource.REQUEST]
    return counts.num_drafted, counts.num_accepted


def test_a_wrong_draft_brings_the_token_without_it_and_leaves_nothing(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.pool)
    answer = decoding(scheduler, model, make_assignment(prompt=PROMPT, max_tokens=9))
    num_free = scheduler.pool.num_available
    output, outcome = drafted_step(scheduler, model, draft_of(*map(wrong, answer[1:9])))
    assert output.num_tokens == 8, "no row behind the answer's last token"
    assert tokens_of(outcome.events) == [answer[1]]
    request = scheduler.requests.get("a")
    assert request is not None and request.num_computed == 13
    assert scheduler.pool.num_available == num_free - 1, "the draft's blocks are free again, but the next token's"
    assert tokens_of(run_all(scheduler, model)["a"]) == answer[2:]
    assert vars_of_counts(scheduler) == (7, 0)


def test_a_draft_that_is_right_for_some_tokens(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.pool)
    answer = decoding(scheduler, model, make_assignment(prompt=PROMPT, max_tokens=12))
    _, outcome = drafted_step(scheduler, model, draft_of(*answer[1:4], wrong(answer[4]), *answer[5:8]))
    assert tokens_of(outcome.events) == answer[1:5]
    assert (outcome.events[-1].num_accepted, outcome.events[-1].num_rejected) == (3, 4)
    assert tokens_of(run_all(scheduler, model)["a"]) == answer[5:]
    assert vars_of_counts(scheduler) == (7, 3)


def test_a_stop_token_ends_the_draft_and_its_kv_is_not_kept(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.pool)
    whole = answer_to(make_assignment(prompt=PROMPT, max_tokens=30))
    stop = whole[4]
    assignment = make_assignment(prompt=PROMPT, max_tokens=30, stop=[stop], min_tokens=4)
    answer = decoding(scheduler, model, assignment)
    assert len(answer) == 5
    _, outcome = drafted_step(scheduler, model, draft_of(*whole[1:9]))
    assert tokens_of(outcome.events) == answer[1:]
    assert [event.finish for event in outcome.events] == [None, None, None, FinishReason.STOP]
    assert [request.request_id for request in outcome.finished] == ["a"]
    assert scheduler.pool.num_available == scheduler.pool.num_blocks
    assert vars_of_counts(scheduler) == (8, 3)


def test_a_draft_ends_with_the_longest_sequence(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(num_blocks=4)
    model = FakeModel(scheduler.pool)
    assignment = make_assignment(prompt=PROMPT, max_tokens=99)
    submit(scheduler, assignment)
    step(scheduler, model)
    answer = answer_to(assignment, max_model_len=16)
    output, outcome = drafted_step(scheduler, model, draft_of(*answer_to(assignment)[1:9]))
    assert output.num_tokens == 3
    assert tokens_of(outcome.events) == answer[1:]
    assert outcome.events[-1].finish is FinishReason.LENGTH


def test_a_draft_takes_no_block_that_another_request_needs(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(num_blocks=8, max_model_len=20)
    model = FakeModel(scheduler.pool)
    for name, prompt in (("a", PROMPT[:10]), ("b", PROMPT[1:12])):
        submit(scheduler, make_assignment(name, prompt, max_tokens=9))
    step(scheduler, model)
    filler = scheduler.pool.allocate(scheduler.pool.num_available - 1, 0.0)
    output = scheduler.schedule(0.0, [draft_of(0, 0, 0, 0, 0, request_id="a")])
    assert not output.preempted
    assert {chunk.request.request_id: chunk.num_tokens for chunk in output.chunks} == {"a": 2, "b": 1}
    scheduler.update(output, model.run(output), 0.0)
    scheduler.pool.release(filler, 0.0)
    run_all(scheduler, model)


def test_drafts_get_what_prefills_leave_of_the_budget(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(token_budget=20)
    model = FakeModel(scheduler.pool)
    answer = decoding(scheduler, model, make_assignment(prompt=PROMPT, max_tokens=30))
    submit(scheduler, make_assignment("b", [3] * 16, max_tokens=1))
    output, _ = drafted_step(scheduler, model, draft_of(*answer[1:9]))
    assert [chunk.num_tokens for chunk in output.chunks] == [4, 16]
    run_all(scheduler, model)


def test_a_request_that_is_handed_over_has_no_draft(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.pool)
    submit(scheduler, make_assignment("handed over", (2,), stage=Stage.PREFILL, max_tokens=9))
    output, _ = drafted_step(scheduler, model, draft_of(1, 2, request_id="handed over"))
    assert not any(chunk.draft for chunk in output.chunks)


# The drafter


def drafting_engine(limits: DraftLimits = DEFAULT_LIMITS, num_blocks: int = 64, token_budget: int = 64) -> Engine:
    pool = BlockPool(num_blocks, 4)
    model = FakeModel(pool)
    drafter = Drafter(limits)
    engine = Engine(model, model, pool, SchedulerLimits(token_budget, 64), num_blocks * 4, FINGERPRINT, drafter=drafter)
    engine.scheduler.learn_costs(CHEAP)
    return engine


def answers(engine: Engine) -> dict[str, list[int | None]]:
    """All tokens of all requests, with the scheduler checked after each step."""
    found: dict[str, list[int | None]] = {}
    while (result := engine.step(0.0)) is not None:
        engine.scheduler.check_integrity()
        for event in result.events:
            found.setdefault(event.request_id, []).append(event.token_id)
    return found


def counts_of(engine: Engine) -> tuple[int, int]:
    return vars_of_counts(engine.scheduler)


@given(
    prompts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), min_size=1, max_size=4),
    num_blocks=st.integers(24, 64),
    depth=st.integers(1, 12),
)
def test_answers_are_the_same_with_drafts(prompts: list[list[int]], num_blocks: int, depth: int) -> None:
    engine = drafting_engine(DraftLimits(depth=depth), num_blocks)
    assignments = [make_assignment(str(index), prompt, max_tokens=60) for index, prompt in enumerate(prompts)]
    for assignment in assignments:
        engine.submit(assignment, 0.0)
    found = answers(engine)
    assert found == {each.request_id: answer_to(each) for each in assignments}
    assert engine.pool.num_available == engine.pool.num_blocks


def repeating(scheduler: Scheduler, prompt: Sequence[int], generated: Sequence[int]) -> Request:
    """A request about to decode behind these tokens."""
    submit(scheduler, make_assignment(prompt=prompt, generated=generated, max_tokens=99))
    scheduler.schedule(0.0)
    [request] = scheduler.running.values()
    request.num_computed = len(request.token_ids) - 1
    return request


def test_text_that_comes_again_is_drafted_and_accepted() -> None:
    engine = drafting_engine()
    once = make_assignment("once", PROMPT, max_tokens=40)
    engine.submit(once, 0.0)
    answer = answers(engine)["once"]
    again = make_assignment("again", (*PROMPT, *answer_to(once), 2, *PROMPT, *answer_to(once)[:8]), max_tokens=20)
    engine.submit(again, 0.0)
    assert len(answer) == 40 and answers(engine)["again"] == answer_to(again)
    num_drafted, num_accepted = counts_of(engine)
    assert 0 < num_accepted <= num_drafted


def test_the_proposal_is_what_followed_and_stops_before_a_stop(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    scheduler.learn_costs(CHEAP)
    request = repeating(scheduler, [9, 1, 2, 3, 4, 5, 6, 7, 8, 0], [1, 2, 3])
    [draft] = Drafter(DraftLimits(depth=5)).propose(scheduler)
    assert draft.token_ids == (4, 5, 6, 7, 8)
    assert list(draft.chances) == sorted(draft.chances, reverse=True)
    request.assignment = replace(request.assignment, sampling=Sampling(99, stop_token_ids=(6,)))
    [draft] = Drafter(DraftLimits(depth=5)).propose(scheduler)
    assert draft.token_ids == (4, 5) and len(draft.chances) == 2
    request.assignment = replace(request.assignment, sampling=Sampling(5))
    [draft] = Drafter(DraftLimits(depth=5)).propose(scheduler)
    assert draft.token_ids == (4,), "the fifth token needs no draft behind it"
    request.assignment = replace(request.assignment, sampling=Sampling(99, speculation=False))
    assert Drafter(DraftLimits(depth=5)).propose(scheduler) == []
    scheduler.abort("a", 0.0)


def test_where_rows_are_dear_nothing_is_looked_for(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    scheduler.learn_costs(WorkerCosts(step_s=1e-3, decode_token_s=0.0, draft_token_s=2e-3))
    request = repeating(scheduler, [9, 1, 2, 3, 4], [1, 2, 3])
    assert Drafter(DraftLimits()).propose(scheduler) == [] and request.suffixes is None
    scheduler.abort("a", 0.0)


def test_memory_bounds_the_requests_that_have_drafts() -> None:
    engine = drafting_engine(DraftLimits(index_tokens=30))
    for name in ("a", "b", "c"):
        engine.submit(make_assignment(name, PROMPT, max_tokens=9), 0.0)
    for _ in range(3):
        engine.step(0.0)
    assert [request.suffixes is not None for request in engine.scheduler.requests.values()] == [True, True, False]
    answers(engine)


def test_a_long_prompt_is_indexed_over_several_steps(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(num_blocks=2048, token_budget=8192)
    scheduler.learn_costs(CHEAP)
    block = list(range(100, 100 + INDEXED_PER_STEP + 10))
    request = repeating(scheduler, [*block, 1], block[:5])
    drafter = Drafter(DraftLimits(depth=8))
    assert drafter.propose(scheduler) == []
    assert request.suffixes is not None and request.suffixes.num_missing == 16
    [draft] = drafter.propose(scheduler)
    assert draft.token_ids == tuple(block[5:13])
    scheduler.abort("a", 0.0)
