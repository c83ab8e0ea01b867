"""Log-probabilities of prompts in the scheduler and between engines; `FakeModel` knows what each must be."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.core.settings import SchedulerLimits
from engine.core.types import Assignment, FinishReason, PromptEvent, Salt, Stage, TokenEvent, TokenLogprobs
from engine.core.worker.block_pool import BlockPool
from engine.core.worker.scheduler import Scheduler
from engine.core.worker.score_store import ScoreStore
from engine.model.engine import Engine
from tests.unit.builders import (
    FINGERPRINT,
    FakeModel,
    answer_to,
    chain_of,
    hashes_of,
    make_assignment,
    run_to_end,
    scores_of,
    step,
    submit,
)

MakeScheduler = Callable[..., Scheduler]

PROMPT = (1, 2, 3, 0, 1, 1, 2, 3, 2, 0, 0, 1, 3, 2)
"""Three blocks and a half."""


def scoring(request_id: str = "a", prompt: Sequence[int] = PROMPT, max_tokens: int = 0, **fields: Any) -> Assignment:
    return make_assignment(request_id, prompt, max_tokens=max_tokens, **{"prompt_logprobs": 0, **fields})


def joined(scores: Sequence[PromptEvent], first: int = 1) -> list[TokenLogprobs]:
    """All scores, which must come in order from the token at `first` on."""
    values: list[TokenLogprobs] = []
    for event in scores:
        assert event.position == first + len(values)
        values += event.logprobs
    return values


EXPECTED = scores_of(chain_of(), PROMPT)


def test_a_request_without_tokens_ends_with_its_prompt(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    submit(scheduler, scoring())
    scores, events, chunks = run_to_end(scheduler, FakeModel(scheduler.pool))
    assert joined(scores) == EXPECTED
    assert chunks == [(0, 14)]
    assert events == [TokenEvent("a", 0, 0, None, FinishReason.LENGTH, None, 0)]


def test_chunks_report_as_they_are_computed(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(token_budget=5)
    submit(scheduler, scoring(max_tokens=2))
    scores, events, _ = run_to_end(scheduler, FakeModel(scheduler.pool))
    assert [len(event.logprobs) for event in scores] == [5, 5, 3]
    assert joined(scores) == EXPECTED
    assert [event.token_id for event in events] == answer_to(scoring(max_tokens=2))


def test_cached_blocks_are_shared_computed_again_and_not_stored(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.pool)
    submit(scheduler, make_assignment(prompt=PROMPT, max_tokens=1))
    run_to_end(scheduler, model)
    before = scheduler.pool.hashes()
    submit(scheduler, scoring(max_tokens=1))
    output, outcome = step(scheduler, model)
    [chunk] = output.chunks
    assert (chunk.start, chunk.num_tokens, chunk.store_from, chunk.scored) == (0, 14, 12, range(13))
    assert outcome.events[0].cached_tokens == 12, "their KV was found, though they were computed"
    assert joined(outcome.scores) == EXPECTED
    assert scheduler.pool.hashes() == before


def test_a_scored_prefix_is_not_computed_again(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.pool)
    submit(scheduler, scoring())
    run_to_end(scheduler, model)
    other = (*PROMPT[:13], 0, 0, 0, 3)
    submit(scheduler, scoring("b", other))
    scores, [event], chunks = run_to_end(scheduler, model)
    assert chunks == [(11, 6)], "the last stored block's last position scores the token behind it"
    assert joined(scores) == scores_of(chain_of(), other)
    assert event.cached_tokens == 12


def test_a_prompt_scored_to_its_end_computes_one_token(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.pool)
    for name in ("a", "b"):
        submit(scheduler, scoring(name, PROMPT[:12]))
        scores, _, chunks = run_to_end(scheduler, model)
        assert joined(scores) == EXPECTED[:11]
    assert chunks == [(11, 1)]


def test_scores_outlive_their_blocks(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.pool)
    submit(scheduler, scoring())
    run_to_end(scheduler, model)
    scheduler.pool.reset()
    submit(scheduler, scoring("b"))
    output, outcome = step(scheduler, model)
    assert [(chunk.start, chunk.scored) for chunk in output.chunks] == [(0, range(11, 13))]
    assert joined(outcome.scores) == EXPECTED
    assert outcome.events[0].cached_tokens == 0


@pytest.mark.parametrize("other", [{"salt": Salt(b"tenant")}, {"prompt_logprobs": 1}])
def test_scores_of_another_tenant_or_number_are_not_taken(make_scheduler: MakeScheduler, other: dict[str, Any]) -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.pool)
    submit(scheduler, scoring())
    run_to_end(scheduler, model)
    submit(scheduler, scoring("b", **other))
    output, _ = step(scheduler, model)
    assert [chunk.scored for chunk in output.chunks] == [range(13)]


@pytest.mark.parametrize("num_kept", [0, 4])
def test_a_later_attempt_reports_the_rest(make_scheduler: MakeScheduler, num_kept: int) -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.pool)
    if num_kept:
        submit(scheduler, scoring("other", PROMPT[:num_kept]))
        run_to_end(scheduler, model)
    submit(scheduler, scoring(attempt=1, num_scored=6))
    scores, _, chunks = run_to_end(scheduler, model)
    assert joined(scores, first=7) == EXPECTED[6:]
    assert chunks == [(num_kept, 14 - num_kept)]
    submit(scheduler, scoring(attempt=2, num_scored=13))
    scores, [event], chunks = run_to_end(scheduler, model)
    assert scores == []
    assert chunks == [(12, 2)]
    assert event.finish is FinishReason.LENGTH


def test_a_preempted_request_goes_on_scoring_where_it_was(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(num_blocks=6, token_budget=2)
    model = FakeModel(scheduler.pool)
    submit(scheduler, make_assignment("first", (0, 1, 2), max_tokens=12))
    submit(scheduler, scoring(max_tokens=1))
    scores: list[PromptEvent] = []
    num_preempted = 0
    while scheduler.num_requests:
        output, outcome = step(scheduler, model)
        scheduler.check_integrity()
        num_preempted += len(output.preempted)
        scores += outcome.scores
    assert num_preempted > 0
    assert joined(scores) == EXPECTED


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_every_length_and_block_size(block_size: int) -> None:
    pool = BlockPool(40, block_size)
    scheduler = Scheduler(pool, SchedulerLimits(3, 4), 40)
    model = FakeModel(pool)
    for length in [*range(1, 15), *range(14, 0, -1)]:
        submit(scheduler, scoring(f"r{length}", PROMPT[:length]))
        scores, [event], _ = run_to_end(scheduler, model)
        assert joined(scores) == EXPECTED[: length - 1]
        assert event.finish is FinishReason.LENGTH


def test_little_room_for_scores(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(token_budget=5)
    scheduler.prompt_results.scores = ScoreStore(capacity=5)
    model = FakeModel(scheduler.pool)
    for name in ("a", "b", "c"):
        submit(scheduler, scoring(name))
        assert joined(run_to_end(scheduler, model)[0]) == EXPECTED


# Two engines


def make_engine() -> Engine:
    pool = BlockPool(16, 4)
    model = FakeModel(pool)
    return Engine(model, model, pool, SchedulerLimits(6, 8), 64, FINGERPRINT)


SPLIT = replace(scoring(max_tokens=4), awaited=tuple(hashes_of(PROMPT)))


def test_a_handed_over_prompt_is_scored_by_the_prefill_worker_alone() -> None:
    prefill, decode = make_engine(), make_engine()
    prefill.submit(replace(SPLIT, stage=Stage.PREFILL, awaited=()), 0.0)
    decode.submit(replace(SPLIT, stage=Stage.DECODE), 0.0)
    scores: list[PromptEvent] = []
    tokens: list[int | None] = []
    while (result := prefill.step(0.0)) is not None:
        scores += result.scores
        tokens += [event.token_id for event in result.events]
        for segment in result.segments:
            assert decode.import_segment(segment.header, segment.payload, 0.0)
    assert joined(scores) == EXPECTED
    while (result := decode.step(0.0)) is not None:
        assert not result.scores
        assert (result.shape.num_prefill_tokens, result.shape.num_decodes) == (0, 1)
        tokens += [event.token_id for event in result.events]
    assert tokens == answer_to(SPLIT)


@pytest.mark.parametrize("num_arrived", [0, 1, 2])
def test_a_decode_worker_whose_prefill_worker_is_gone_scores_for_itself(num_arrived: int) -> None:
    prefill, decode = make_engine(), make_engine()
    prefill.submit(replace(SPLIT, stage=Stage.PREFILL, awaited=()), 0.0)
    decode.submit(replace(SPLIT, stage=Stage.DECODE), 0.0)
    for _ in range(num_arrived):
        result = prefill.step(0.0)
        assert result is not None
        for segment in result.segments:
            assert decode.import_segment(segment.header, segment.payload, 0.0)
    decode.scheduler.stop_awaiting(["a"])
    scores: list[PromptEvent] = []
    tokens: list[int | None] = []
    while (result := decode.step(0.0)) is not None:
        scores += result.scores
        tokens += [event.token_id for event in result.events]
    assert joined(scores) == EXPECTED
    assert tokens == answer_to(SPLIT)
