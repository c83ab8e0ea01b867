"""What nobody waits for is computed with what steps have left, and costs nobody anything. Blocks have four tokens."""

from collections.abc import Callable
from typing import Any

from raydix.engine.core.types import Assignment
from raydix.engine.core.worker.idle import MAX_REQUESTS, MAX_TOKENS, IdleCounts
from raydix.engine.core.worker.scheduler import Scheduler
from tests.unit.builders import FakeModel, hashes_of, make_assignment, run_all, step, submit, tokens_of

MakeScheduler = Callable[..., Scheduler]

PROMPT = (1, 2, 3, 0, 1, 1, 2, 3)
NEXT = (*PROMPT, 2, 0, 0, 1, 3, 3, 0, 2)
"""Two blocks more than the prompt."""


def idle(tokens: tuple[int, ...] = NEXT, request_id: str = "idle", **fields: Any) -> Assignment:
    return make_assignment(request_id, tokens, max_tokens=0, is_idle=True, **fields)


def is_here(scheduler: Scheduler, tokens: tuple[int, ...] = NEXT) -> bool:
    return len(scheduler.pool.match(hashes_of(tokens))) == len(tokens) // 4


def answered(scheduler: Scheduler, model: FakeModel, max_tokens: int = 1) -> None:
    submit(scheduler, make_assignment("a", PROMPT, max_tokens=max_tokens))
    run_all(scheduler, model)


def test_it_is_computed_behind_what_is_cached_and_nobody_hears_of_it(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(token_budget=64)
    model = FakeModel(scheduler.pool)
    answered(scheduler, model)
    submit(scheduler, idle())
    output, outcome = step(scheduler, model)
    assert [(chunk.start, chunk.num_tokens) for chunk in output.chunks] == [(8, 8)]
    assert outcome == type(outcome)((), (), (), ())
    assert is_here(scheduler) and not scheduler.requests
    assert scheduler.idle.counts == IdleCounts(num_tokens=8, num_computed=1)

    submit(scheduler, make_assignment("b", (*NEXT, 1), max_tokens=1))
    [event] = run_all(scheduler, model)["b"]
    assert event.cached_tokens == len(NEXT)


def test_alone_it_takes_an_eighth_of_the_budget_and_beside_decodes_one_block(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(token_budget=64)
    model = FakeModel(scheduler.pool)
    long = tuple(index % 4 for index in range(24))
    submit(scheduler, idle(long))
    assert step(scheduler, model)[0].num_tokens == 8
    submit(scheduler, make_assignment("a", PROMPT, max_tokens=9))
    assert step(scheduler, model)[0].num_tokens == len(PROMPT), "a step that prefills has nothing left"
    for _ in range(4):
        output, _ = step(scheduler, model)
        assert [chunk.num_tokens for chunk in output.chunks] == [1, 4]
    assert step(scheduler, model)[0].num_tokens == 1
    assert is_here(scheduler, long)
    run_all(scheduler, model)


def test_no_decode_is_left_out_for_it(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(token_budget=6, max_requests=3)
    model = FakeModel(scheduler.pool)
    for name in "abc":
        submit(scheduler, make_assignment(name, PROMPT, max_tokens=20))
    while any(request.num_remaining > 1 for request in scheduler.requests.values()):
        step(scheduler, model)
    submit(scheduler, idle())
    output, _ = step(scheduler, model)
    assert [chunk.request.request_id for chunk in output.chunks] == ["a", "b", "c"], "three tokens make no block"
    run_all(scheduler, model)
    assert is_here(scheduler), "it comes when one of them has ended"


def test_it_waits_while_somebody_waits_for_room(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(num_blocks=8, max_requests=1, max_model_len=32)
    model = FakeModel(scheduler.pool)
    submit(scheduler, make_assignment("a", PROMPT, max_tokens=6))
    submit(scheduler, make_assignment("b", PROMPT, max_tokens=6))
    submit(scheduler, idle())
    step(scheduler, model)
    while "a" in scheduler.running:
        assert all(not chunk.request.assignment.is_idle for chunk in step(scheduler, model)[0].chunks)
    assert "b" in {request.request_id for request in scheduler.requests.values()}
    run_all(scheduler, model)
    assert is_here(scheduler)


def test_it_is_dropped_where_running_requests_need_the_room(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(num_blocks=6, max_model_len=24)
    model = FakeModel(scheduler.pool)
    submit(scheduler, make_assignment("a", PROMPT, max_tokens=16))
    step(scheduler, model)
    submit(scheduler, idle(tuple(3 for _ in range(24))))
    events = run_all(scheduler, model)["a"]
    assert len(tokens_of(events)) == 15, "the first came before"
    assert all(event.num_preemptions == 0 for event in events)
    assert scheduler.idle.counts.num_dropped == 1


def test_it_is_bounded(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(num_blocks=2 * MAX_TOKENS // 4)
    model = FakeModel(scheduler.pool)
    submit(scheduler, idle(tuple(index % 4 for index in range(MAX_TOKENS + 4)), "long"))
    assert not step(scheduler, model)[0].chunks
    submit(scheduler, idle(request_id="late", await_timeout_s=5.0), now=0.0)
    assert not step(scheduler, model, now=5.0)[0].chunks
    for number in range(MAX_REQUESTS + 3):
        submit(scheduler, idle((number % 4, number // 4, 0, 0), str(number)), now=5.0)
    assert len(scheduler.requests) == MAX_REQUESTS
    assert scheduler.requests.get("2") is None and scheduler.requests.get("3") is not None, "the oldest go"
    run_all(scheduler, model, now=5.0)
    counts = scheduler.idle.counts
    assert (counts.num_computed, counts.num_dropped) == (MAX_REQUESTS, 5)


def test_what_others_have_computed_is_not_computed_again(make_scheduler: MakeScheduler) -> None:
    """The next turn has come first. It does not wait for idle work either."""
    scheduler = make_scheduler()
    model = FakeModel(scheduler.pool)
    answered(scheduler, model)
    submit(scheduler, idle())
    submit(scheduler, make_assignment("b", (*NEXT, 1), max_tokens=1))
    output, _ = step(scheduler, model)
    assert [(chunk.request.request_id, chunk.num_tokens) for chunk in output.chunks] == [("b", 9)]
    step(scheduler, model)
    assert scheduler.idle.counts == IdleCounts(num_found=1)


def test_it_is_given_up_when_its_beginning_is_evicted_under_way(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(token_budget=32)
    model = FakeModel(scheduler.pool)
    submit(scheduler, idle())
    assert step(scheduler, model)[0].num_tokens == 4
    scheduler.pool.reset()
    assert not step(scheduler, model)[0].chunks
    assert scheduler.idle.counts == IdleCounts(num_tokens=4, num_dropped=1)


def test_abort_gives_back_what_a_step_under_way_holds(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.pool)
    submit(scheduler, idle())
    output = scheduler.schedule(0.0)
    computed = model.run(output)
    assert scheduler.abort("idle", 0.0)
    scheduler.update(output, computed, 0.0)
    assert scheduler.pool.num_available == scheduler.pool.num_blocks
