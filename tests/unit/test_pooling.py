"""Pooled hidden states of prompts in the scheduler and between engines; `FakeModel` knows what each must be."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from raydix.engine.core.settings import SchedulerLimits
from raydix.engine.core.types import Assignment, FinishReason, Pooling, Salt, StartTimes, TokenEvent
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.core.worker.prompt_results import SumStore
from raydix.engine.core.worker.scheduler import Scheduler
from raydix.engine.model.engine import Engine
from tests.unit.builders import (
    FINGERPRINT,
    FakeModel,
    chain_of,
    make_assignment,
    pooled_of,
    run_all,
    run_to_end,
    step,
    submit,
)

MakeScheduler = Callable[..., Scheduler]

PROMPT = (1, 2, 3, 0, 1, 1, 2, 3, 2, 0, 0, 1, 3, 2)
"""Three blocks and a half."""


def pooling(
    request_id: str = "a", prompt: Sequence[int] = PROMPT, kind: Pooling = Pooling.MEAN, **fields: Any
) -> Assignment:
    return make_assignment(request_id, prompt, max_tokens=0, pooling=kind, **fields)


def run(scheduler: Scheduler, model: FakeModel) -> tuple[list[TokenEvent], list[tuple[int, int]]]:
    """Step until nothing is left: events, and first position and length of each chunk."""
    _, events, chunks = run_to_end(scheduler, model)
    return events, chunks


def expected(assignment: Assignment) -> bytes:
    state = pooled_of(assignment, chain_of(assignment.salt))
    assert state is not None
    return state


@pytest.mark.parametrize("kind", Pooling)
def test_a_request_ends_with_the_pooled_state_of_its_prompt(make_scheduler: MakeScheduler, kind: Pooling) -> None:
    scheduler = make_scheduler()
    submit(scheduler, pooling(kind=kind))
    [event], chunks = run(scheduler, FakeModel(scheduler.pool))
    state = expected(pooling(kind=kind))
    start = StartTimes(0.0, 1)
    assert event == TokenEvent("a", 0, 0, None, FinishReason.LENGTH, None, 0, pooled=state, start=start)
    assert chunks == [(0, 14)]


@pytest.mark.parametrize("kind", Pooling)
@pytest.mark.parametrize("budget", [1, 3, 4, 5])
def test_a_long_prompt_is_pooled_in_chunks(make_scheduler: MakeScheduler, kind: Pooling, budget: int) -> None:
    scheduler = make_scheduler(token_budget=budget)
    submit(scheduler, pooling(kind=kind))
    [event], chunks = run(scheduler, FakeModel(scheduler.pool))
    assert event.pooled == expected(pooling(kind=kind))
    assert max(num_tokens for _, num_tokens in chunks) == budget


def test_other_requests_have_none(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    submit(scheduler, make_assignment(prompt=PROMPT))
    submit(scheduler, make_assignment("b", PROMPT, max_tokens=0, prompt_logprobs=0))
    events, _ = run(scheduler, FakeModel(scheduler.pool))
    assert {event.pooled for event in events} == {None}


def test_the_last_state_needs_no_cached_position_again(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.pool)
    submit(scheduler, make_assignment(prompt=PROMPT, max_tokens=1))
    run(scheduler, model)
    submit(scheduler, pooling(kind=Pooling.LAST))
    [event], chunks = run(scheduler, model)
    assert (event.pooled, event.cached_tokens) == (expected(pooling(kind=Pooling.LAST)), 12)
    assert chunks == [(12, 2)]


def test_a_mean_computes_cached_blocks_again_and_does_not_store_them(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.pool)
    submit(scheduler, make_assignment(prompt=PROMPT, max_tokens=1))
    run(scheduler, model)
    before = scheduler.pool.hashes()
    submit(scheduler, pooling())
    output, outcome = step(scheduler, model)
    [chunk], [event] = output.chunks, outcome.events
    assert (chunk.start, chunk.num_tokens, chunk.store_from, chunk.pooled) == (0, 14, 12, range(14))
    assert (event.pooled, event.cached_tokens) == (expected(pooling()), 12)
    assert scheduler.pool.hashes() == before


def test_a_mean_goes_on_from_a_pooled_prefix(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.pool)
    submit(scheduler, pooling())
    run(scheduler, model)
    other = pooling("b", (*PROMPT[:13], 0, 0, 0, 3))
    submit(scheduler, other)
    [event], chunks = run(scheduler, model)
    assert chunks == [(12, 5)]
    assert (event.pooled, event.cached_tokens) == (expected(other), 12)


def test_a_prompt_pooled_to_its_end_computes_one_token(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.pool)
    for name in ("a", "b"):
        submit(scheduler, pooling(name, PROMPT[:12]))
        [event], chunks = run(scheduler, model)
        assert event.pooled == expected(pooling(name, PROMPT[:12]))
    assert chunks == [(11, 1)]


def test_sums_outlive_their_blocks(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.pool)
    submit(scheduler, pooling())
    run(scheduler, model)
    scheduler.pool.reset()
    submit(scheduler, pooling("b"))
    output, outcome = step(scheduler, model)
    assert [(chunk.start, chunk.pooled) for chunk in output.chunks] == [(0, range(12, 14))]
    assert outcome.events[0].pooled == expected(pooling())
    scheduler.reset()
    submit(scheduler, pooling("c"))
    assert step(scheduler, model)[0].chunks[0].pooled == range(14), "a reset forgets them"


@pytest.mark.parametrize("other", [{"salt": Salt(b"tenant")}, {"kind": Pooling.LAST}])
def test_sums_of_another_tenant_or_pooling_are_not_taken(make_scheduler: MakeScheduler, other: dict[str, Any]) -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.pool)
    submit(scheduler, pooling(**other))
    run(scheduler, model)
    submit(scheduler, pooling("b"))
    output, outcome = step(scheduler, model)
    assert [chunk.pooled for chunk in output.chunks] == [range(14)]
    assert outcome.events[0].pooled == expected(pooling())


def test_little_room_for_sums(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(token_budget=5)
    scheduler.prompt_results.sums = SumStore(capacity=20)
    model = FakeModel(scheduler.pool)
    for name in ("a", "b", "c"):
        submit(scheduler, pooling(name))
        assert run(scheduler, model)[0][0].pooled == expected(pooling())


@pytest.mark.parametrize("kind", Pooling)
def test_a_preempted_request_goes_on_where_it_was(make_scheduler: MakeScheduler, kind: Pooling) -> None:
    scheduler = make_scheduler(num_blocks=6, token_budget=2)
    model = FakeModel(scheduler.pool)
    submit(scheduler, make_assignment("first", (0, 1, 2), max_tokens=12))
    submit(scheduler, pooling(kind=kind))
    events: list[TokenEvent] = []
    num_preempted = 0
    while scheduler.requests:
        output, outcome = step(scheduler, model)
        scheduler.check_integrity()
        num_preempted += len(output.preempted)
        events += outcome.events
    assert num_preempted > 0
    assert [event.pooled for event in events if event.request_id == "a"] == [expected(pooling(kind=kind))]


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_every_length_and_block_size(block_size: int) -> None:
    pool = BlockPool(40, block_size)
    scheduler = Scheduler(pool, SchedulerLimits(3, 4), 40)
    model = FakeModel(pool)
    for length in [*range(1, 15), *range(14, 0, -1)]:
        for kind in Pooling:
            each = pooling(f"{kind} {length}", PROMPT[:length], kind)
            submit(scheduler, each)
            [event], _ = run(scheduler, model)
            assert event.pooled == expected(each)


def test_without_a_cache_nothing_is_kept() -> None:
    pool = BlockPool(16, 4, keeps_blocks=False)
    scheduler = Scheduler(pool, SchedulerLimits(64, 8), 64)
    model = FakeModel(pool)
    for name in ("a", "b"):
        submit(scheduler, pooling(name))
        [event], chunks = run(scheduler, model)
        assert (event.pooled, chunks) == (expected(pooling()), [(0, 14)])


def test_many_at_once(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(num_blocks=12, token_budget=7, max_requests=3)
    each = [pooling(f"r{length}", PROMPT[:length], kind) for length in range(1, 15) for kind in [Pooling.MEAN]]
    for assignment in each:
        submit(scheduler, assignment)
    events = run_all(scheduler, FakeModel(scheduler.pool))
    assert {name: event.pooled for name, [event] in events.items()} == {
        assignment.request_id: expected(assignment) for assignment in each
    }


def test_another_worker_computes_it_from_the_start() -> None:
    """After a worker's death a later attempt goes to another one, which knows nothing."""
    states = []
    for attempt in (0, 1):
        pool = BlockPool(16, 4)
        model = FakeModel(pool)
        engine = Engine(model, model, pool, SchedulerLimits(6, 8), 64, FINGERPRINT)
        engine.submit(pooling(attempt=attempt), 0.0)
        while (result := engine.step(0.0)) is not None:
            states += [(event.attempt, event.pooled) for event in result.events]
            assert (result.shape.num_prefill_tokens > 0, result.shape.num_decodes) == (True, 0)
    assert states == [(0, expected(pooling())), (1, expected(pooling()))]
