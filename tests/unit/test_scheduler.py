"""What the scheduler decides, case by case. Blocks have four tokens; `FakeModel` watches what is attended to."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.hashing import hash_block
from raydix.engine.core.settings import SchedulerLimits
from raydix.engine.core.types import BlockHash, FinishReason, Handover, Salt, Stage, TokenEvent
from raydix.engine.core.worker.order import share_budget
from raydix.engine.core.worker.request import Request
from raydix.engine.core.worker.scheduler import Scheduler
from raydix.engine.core.worker.step import CopyBlock, RunnerOutput, SchedulerOutput
from tests.unit.builders import (
    FakeModel,
    answer_to,
    chain_of,
    hashes_of,
    import_blocks,
    keys_of,
    make_assignment,
    run_all,
    step,
    submit,
    tokens_of,
)

MakeScheduler = Callable[..., Scheduler]

PROMPT = (1, 2, 3, 0, 1, 1, 2, 3, 2, 0, 0, 1)
"""Exactly three blocks."""


def scheduled(output: SchedulerOutput) -> dict[str, tuple[int, int]]:
    """First position and number of tokens by request."""
    return {chunk.request.request_id: (chunk.start, chunk.num_tokens) for chunk in output.chunks}


def fetch(scheduler: Scheduler, model: FakeModel, prompt: tuple[int, ...], hashes: list[BlockHash], now: float) -> None:
    """Blocks of `prompt`, from its first on, arrive from elsewhere; the last one may be partial."""
    keys = keys_of(chain_of(), prompt)
    import_blocks(scheduler, model, hashes, [keys[4 * index : 4 * index + 4] for index in range(len(hashes))])
    scheduler.imports.settled(hashes, now)


def test_a_request_is_prefilled_and_decoded(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    assignment = make_assignment(prompt=PROMPT, max_tokens=5)
    submit(scheduler, assignment)
    events = run_all(scheduler, FakeModel(scheduler.pool))["a"]
    assert tokens_of(events) == answer_to(assignment)
    assert [event.position for event in events] == [0, 1, 2, 3, 4]
    assert [event.finish for event in events] == [None] * 4 + [FinishReason.LENGTH]


def test_long_prompts_are_prefilled_in_chunks(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(token_budget=5)
    model = FakeModel(scheduler.pool)
    submit(scheduler, make_assignment(prompt=PROMPT))
    chunks = [scheduled(step(scheduler, model)[0])["a"] for _ in range(4)]
    assert chunks == [(0, 5), (5, 5), (10, 2), (12, 1)]
    scheduler.abort("a", 0.0)


# Cached prefixes


def test_a_fully_cached_prompt_computes_one_token_and_stores_none(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.pool)
    submit(scheduler, make_assignment(prompt=PROMPT, max_tokens=1))
    run_all(scheduler, model)
    submit(scheduler, make_assignment("b", PROMPT, max_tokens=2))
    output, outcome = step(scheduler, model)
    [chunk] = output.chunks
    assert (chunk.start, chunk.num_tokens, chunk.samples) == (11, 1, True)
    assert chunk.store_from == 12, "the last token is computed for its output; its KV is there"
    assert outcome.events[0].cached_tokens == 11
    assert tokens_of(run_all(scheduler, model)["b"]) == answer_to(make_assignment(prompt=PROMPT, max_tokens=2))[1:]


def test_a_prefix_is_taken_up_and_the_beginning_of_the_next_block_copied(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.pool)
    submit(scheduler, make_assignment(prompt=PROMPT, max_tokens=1))
    run_all(scheduler, model)
    submit(scheduler, make_assignment("b", (*PROMPT[:9], 3, 3), max_tokens=1))
    output, outcome = step(scheduler, model)
    assert scheduled(output) == {"b": (9, 2)}
    assert [type(move) for move in output.moves] == [CopyBlock]
    assert outcome.events[0].cached_tokens == 9


def test_only_the_last_token_is_computed_where_the_rest_can_be_copied(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.pool)
    submit(scheduler, make_assignment(prompt=PROMPT, max_tokens=1))
    run_all(scheduler, model)
    for length in (2, 4, 7, 11):
        prompt = PROMPT[:length]
        submit(scheduler, make_assignment(f"b{length}", prompt, max_tokens=1))
        assert scheduled(step(scheduler, model)[0]) == {f"b{length}": (length - 1, 1)}


def test_a_block_is_copied_even_where_its_copy_takes_its_place(make_scheduler: MakeScheduler) -> None:
    """Two requests start in one step, and what the first copies from is evicted for the second."""
    scheduler = make_scheduler(num_blocks=4, token_budget=16)
    model = FakeModel(scheduler.pool)
    submit(scheduler, make_assignment(prompt=(*PROMPT[:4], 3, 2, 3, 0), max_tokens=1))
    run_all(scheduler, model)
    for name, last in (("b", 1), ("c", 2)):
        submit(scheduler, make_assignment(name, (*PROMPT[:4], 3, 2, last), max_tokens=1))
    output, _ = step(scheduler, model)
    assert scheduled(output) == {"b": (6, 1), "c": (6, 1)}


def test_generated_tokens_are_cached_too(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.pool)
    first = make_assignment(prompt=PROMPT, max_tokens=9)
    submit(scheduler, first)
    run_all(scheduler, model)
    submit(scheduler, make_assignment("b", (*PROMPT, *answer_to(first), 1), max_tokens=1))
    assert scheduled(step(scheduler, model)[0]) == {"b": (20, 2)}, "the ninth token was sampled, but never computed"


def test_tenants_do_not_share(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.pool)
    submit(scheduler, make_assignment(prompt=PROMPT, max_tokens=1))
    run_all(scheduler, model)
    submit(scheduler, make_assignment("b", PROMPT, max_tokens=1, salt=Salt(b"other")))
    assert scheduled(step(scheduler, model)[0]) == {"b": (0, 12)}


def test_tenants_share_the_blocks_of_a_public_prefix_alone(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.pool)
    first = make_assignment(prompt=PROMPT, max_tokens=1, salt=Salt(b"one", 9))
    submit(scheduler, first)
    run_all(scheduler, model)
    submit(scheduler, make_assignment("b", PROMPT, max_tokens=1, salt=Salt(b"two", 9)))
    assert scheduled(step(scheduler, model)[0]) == {"b": (8, 4)}, "the third block has a private token"
    submit(scheduler, make_assignment("c", PROMPT, max_tokens=1, salt=Salt(b"two")))
    assert scheduled(step(scheduler, model)[0]) == {"c": (0, 12)}, "it did not say that its prefix is public"


def test_what_somebody_computes_is_waited_for(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(token_budget=4)
    model = FakeModel(scheduler.pool)
    for request_id in ("a", "b"):
        submit(scheduler, make_assignment(request_id, PROMPT, max_tokens=1))
    outputs = [scheduled(step(scheduler, model)[0]) for _ in range(4)]
    assert outputs == [{"a": (0, 4)}, {"a": (4, 4)}, {"a": (8, 4)}, {"b": (11, 1)}]


def test_when_the_one_who_computes_is_aborted_the_next_takes_over(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(token_budget=4)
    model = FakeModel(scheduler.pool)
    for request_id in ("a", "b"):
        submit(scheduler, make_assignment(request_id, PROMPT, max_tokens=1))
    step(scheduler, model)
    scheduler.abort("a", 0.0)
    assert scheduled(step(scheduler, model)[0]) == {"b": (4, 4)}
    scheduler.abort("b", 0.0)


def test_nothing_is_published_by_an_aborted_step(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    submit(scheduler, make_assignment(prompt=PROMPT))
    output = scheduler.schedule(0.0)
    scheduler.abort("a", 0.0)
    assert scheduler.update(output, RunnerOutput(), 0.0).events == ()
    assert scheduler.pool.hashes() == []
    assert scheduler.pool.num_available == scheduler.pool.num_blocks


# The budget


def test_decodes_come_first_and_prefills_get_the_rest(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(token_budget=6)
    model = FakeModel(scheduler.pool)
    for request_id in ("a", "b"):
        submit(scheduler, make_assignment(request_id, (1, ord(request_id) % 4), max_tokens=9))
    step(scheduler, model)
    submit(scheduler, make_assignment("c", (3,) * 20, max_tokens=1))
    assert scheduled(step(scheduler, model)[0]) == {"a": (2, 1), "b": (2, 1), "c": (0, 4)}
    run_all(scheduler, model)


def test_a_short_prompt_overtakes_a_long_one(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(token_budget=8)
    model = FakeModel(scheduler.pool)
    submit(scheduler, make_assignment("long", (3,) * 40, max_tokens=1))
    submit(scheduler, make_assignment("short", (2, 1, 2), max_tokens=1))
    assert scheduled(step(scheduler, model)[0]) == {"long": (0, 5), "short": (0, 3)}
    run_all(scheduler, model)


def requests_of(sizes: list[int]) -> list[Request]:
    return [Request(make_assignment(str(i), range(size)), chain_of(), arrival=i) for i, size in enumerate(sizes)]


@given(sizes=st.lists(st.integers(1, 50), max_size=8), budget=st.integers(1, 100), heavy=st.integers(0, 7))
def test_shares_of_the_budget_with_weights(sizes: list[int], budget: int, heavy: int) -> None:
    requests = requests_of(sizes)
    shares = {
        request.arrival: share
        for request, share in share_budget(requests, budget, lambda request: 2.5 if request.arrival == heavy else 1.0)
    }
    weighed = sum(share * (2.5 if arrival == heavy else 1.0) for arrival, share in shares.items())
    assert all(0 < share <= sizes[arrival] for arrival, share in shares.items())
    assert weighed <= budget or shares == {0: 1}, "more than the budget only so that the oldest moves"
    if sizes:
        assert 0 in shares, "the oldest always moves"
    if weighed + 2.5 <= budget:
        assert sum(shares.values()) == sum(sizes), "nothing is left unused"


def test_a_token_of_a_long_context_takes_more_of_the_budget_beside_decodes(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(token_budget=16)
    scheduler.learn_costs(WorkerCosts(step_s=0.0, prefill_token_s=1.0, pair_s=1 / 16))
    model = FakeModel(scheduler.pool)
    submit(scheduler, make_assignment("long", (3,) * 40, max_tokens=1))
    assert scheduled(step(scheduler, model)[0]) == {"long": (0, 16)}
    submit(scheduler, make_assignment("stream", (2, 1, 2), max_tokens=20))
    assert scheduled(step(scheduler, model)[0]) == {"stream": (0, 3), "long": (16, 13)}, "nothing decodes"
    assert scheduled(step(scheduler, model)[0]) == {"stream": (3, 1), "long": (29, 5)}, "15 / (1 + 29 / 16)"
    run_all(scheduler, model)


def test_chunks_of_a_prompt_do_not_grow_when_the_fitted_costs_forget_its_context(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(token_budget=16)
    share = 1 / 24  # times the least effort: a token behind 16 others takes twice as long
    known = WorkerCosts(step_s=0.0, prefill_token_s=1.0, pair_s=1 / 16, pair_share=share)
    scheduler.learn_costs(known)
    model = FakeModel(scheduler.pool)
    submit(scheduler, make_assignment("stream", (2, 1, 2), max_tokens=20))
    step(scheduler, model)
    submit(scheduler, make_assignment("long", (3,) * 40, max_tokens=1))
    assert scheduled(step(scheduler, model)[0])["long"] == (0, 15)
    assert scheduled(step(scheduler, model)[0])["long"] == (15, 7), "15 / (1 + 15 / 16)"
    scheduler.learn_costs(replace(known, pair_s=0.0))
    assert scheduled(step(scheduler, model)[0])["long"] == (22, 6), "15 / (1 + 22 / 16)"
    run_all(scheduler, model)


def test_a_long_context_alone_does_not_make_a_step_of_any_length(make_scheduler: MakeScheduler) -> None:
    """The first token of a request that comes meanwhile waits for the step."""
    scheduler = make_scheduler(token_budget=16)
    scheduler.learn_costs(WorkerCosts(step_s=0.0, prefill_token_s=1.0, pair_s=7 / 16))
    model = FakeModel(scheduler.pool)
    submit(scheduler, make_assignment("long", (3,) * 40, max_tokens=1))
    assert scheduled(step(scheduler, model)[0]) == {"long": (0, 16)}
    assert scheduled(step(scheduler, model)[0]) == {"long": (16, 8)}, "four times a step without a context"
    run_all(scheduler, model)


@given(sizes=st.lists(st.integers(1, 50), max_size=8), budget=st.integers(0, 100), order=st.randoms())
def test_shares_of_the_budget(sizes: list[int], budget: int, order: Random) -> None:
    requests = requests_of(sizes)
    shuffled = order.sample(requests, len(requests))
    shares = {request.arrival: share for request, share in share_budget(shuffled, budget)}
    assert all(0 < share <= sizes[arrival] for arrival, share in shares.items())
    assert sum(shares.values()) == min(budget, sum(sizes)), "nothing is left unused"
    if sizes and budget:
        assert shares[0] >= min(sizes[0], (budget + 1) // 2), "the oldest always moves"
    rest = sorted(range(1, len(sizes)), key=lambda arrival: (sizes[arrival], arrival))
    for shorter, longer in pairwise(rest):
        assert longer not in shares or shares.get(shorter) == sizes[shorter], "the shortest are served first"


def test_at_most_max_requests_run(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(max_requests=2)
    model = FakeModel(scheduler.pool)
    for index in range(4):
        submit(scheduler, make_assignment(str(index), (index, 3), max_tokens=3))
    assert scheduled(step(scheduler, model)[0]).keys() == {"0", "1"}
    assert (len(scheduler.running), scheduler.num_waiting, len(scheduler.requests)) == (2, 2, 4)
    run_all(scheduler, model)


# Preemption


def test_the_latest_is_preempted_and_resumes_before_anybody_new(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=16)
    model = FakeModel(scheduler.pool)
    assignments = [make_assignment(str(index), (index, 1, 2, 3, 0, 1), max_tokens=8) for index in range(3)]
    for assignment in assignments:
        submit(scheduler, assignment)
    events: dict[str, list[TokenEvent]] = {}
    preempted: list[str] = []
    while scheduler.requests:
        output, outcome = step(scheduler, model)
        preempted += output.preempted
        if preempted and "1" in {request.request_id for request in scheduler.preempted}:
            assert "2" not in scheduler.running, "a waiting request overtook a preempted one"
        for event in outcome.events:
            events.setdefault(event.request_id, []).append(event)
    assert preempted == ["1"]
    for assignment in assignments:
        assert tokens_of(events[assignment.request_id]) == answer_to(assignment)


# Priorities


def test_more_urgent_requests_start_first(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(max_requests=1)
    model = FakeModel(scheduler.pool)
    asked = {"a": 0, "b": 5, "c": -1, "d": 5, "e": 0}
    for name, priority in asked.items():
        submit(scheduler, make_assignment(name, (1, 2, 3), max_tokens=2, priority=priority))
    assert list(run_all(scheduler, model)) == ["c", "a", "e", "b", "d"]


def test_the_least_urgent_is_preempted_and_resumes_after_more_urgent_ones(make_scheduler: MakeScheduler) -> None:
    """Without priorities the latest would be preempted, and would resume before one that waits."""
    scheduler = make_scheduler(num_blocks=4, max_model_len=16)
    model = FakeModel(scheduler.pool)
    assignments = [
        make_assignment(str(index), (index, 1, 2, 3, 0, 1), max_tokens=8, priority=priority)
        for index, priority in enumerate((1, 0, 0))
    ]
    submit(scheduler, assignments[0])
    events = {"0": list(step(scheduler, model)[1].events)}
    for assignment in assignments[1:]:
        submit(scheduler, assignment)
    preempted: list[str] = []
    ended: list[str] = []
    while scheduler.requests:
        output, outcome = step(scheduler, model)
        preempted += output.preempted
        ended += [request.request_id for request in outcome.finished]
        for event in outcome.events:
            events.setdefault(event.request_id, []).append(event)
    assert preempted[0] == "0" and ended == ["1", "2", "0"]
    for assignment in assignments:
        assert tokens_of(events[assignment.request_id]) == answer_to(assignment)


def test_a_running_request_goes_on_while_more_urgent_ones_wait(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(max_requests=1)
    model = FakeModel(scheduler.pool)
    submit(scheduler, make_assignment("later", PROMPT, max_tokens=3, priority=9))
    step(scheduler, model)
    submit(scheduler, make_assignment("urgent", (1, 2), max_tokens=1, priority=-9))
    assert scheduled(step(scheduler, model)[0]).keys() == {"later"}
    assert list(run_all(scheduler, model)) == ["later", "urgent"]


def test_urgent_prompts_get_the_budget_first(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(token_budget=8)
    model = FakeModel(scheduler.pool)
    submit(scheduler, make_assignment("short", (2, 1, 2), max_tokens=1, priority=1))
    submit(scheduler, make_assignment("long", (3,) * 12, max_tokens=1))
    assert scheduled(step(scheduler, model)[0]) == {"long": (0, 8)}
    assert scheduled(step(scheduler, model)[0]) == {"long": (8, 4), "short": (0, 3)}
    run_all(scheduler, model)


def noting(calls: list[str], name: str, function: Callable[..., object]) -> Callable[..., object]:
    """The function, with its name added to `calls` at each call."""

    def call(*args: object) -> object:
        calls.append(name)
        return function(*args)

    return call


def test_eviction_learns_from_requests_that_end_only(
    make_scheduler: MakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=16)
    model = FakeModel(scheduler.pool)
    left: list[str] = []
    for name in ("retire", "pause"):
        monkeypatch.setattr(scheduler.pool, name, noting(left, name, getattr(scheduler.pool, name)))
    for index in range(2):
        submit(scheduler, make_assignment(str(index), (index, 1, 2, 3, 0, 1), max_tokens=8))
    run_all(scheduler, model, 0.0)
    assert sorted(left) == ["pause", "retire", "retire"], "one was preempted"
    submit(scheduler, make_assignment("2", (2, 1, 2, 3, 0, 1), max_tokens=8))
    step(scheduler, model)
    scheduler.abort("2", 0.0)
    assert left[3:] == ["pause"]


def test_one_that_is_preempted_after_it_was_scheduled_is_not_run(make_scheduler: MakeScheduler) -> None:
    """A decode takes the last block, and then the chunk of an earlier request needs it."""
    scheduler = make_scheduler(num_blocks=4, max_model_len=16, token_budget=4)
    model = FakeModel(scheduler.pool)
    first = make_assignment("first", PROMPT[:10], max_tokens=2)
    second = make_assignment("second", (2, 2, 2), max_tokens=6)
    submit(scheduler, first)
    submit(scheduler, second)
    outputs = []
    events: list[TokenEvent] = []
    while scheduler.requests:
        output, outcome = step(scheduler, model)
        outputs.append((scheduled(output), output.preempted))
        events += outcome.events
    assert outputs[3] == ({"first": (8, 2)}, ("second",))
    for assignment in (first, second):
        mine = [event for event in events if event.request_id == assignment.request_id]
        assert tokens_of(mine) == answer_to(assignment)


def test_imports_that_wait_are_given_up_before_anybody_is_preempted(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=16)
    model = FakeModel(scheduler.pool)
    other = (3, 3, 3, 3, 2, 2, 2, 2)
    waiting = make_assignment("w", (*other, 1), awaited=(*hashes_of(other), b"never"), max_tokens=1)
    submit(scheduler, waiting)
    fetch(scheduler, model, other, hashes_of(other), now=0.0)
    assert scheduler.pool.num_available == 2, "held for the one that waits"
    submit(scheduler, make_assignment("r", (1, 2, 3, 0, 1), max_tokens=9))
    for _ in range(9):
        output, _ = step(scheduler, model)
        assert output.preempted == ()
    assert tokens_of(run_all(scheduler, model, now=100.0)["w"]) == answer_to(waiting)


def test_what_a_waiting_request_will_use_is_evicted_last(make_scheduler: MakeScheduler) -> None:
    """Its prefix is the oldest in the cache, and the request before it needs half of the pool."""
    scheduler = make_scheduler(num_blocks=6, max_model_len=24, max_requests=1)
    model = FakeModel(scheduler.pool)
    submit(scheduler, make_assignment("cached", PROMPT[:8], max_tokens=1))
    run_all(scheduler, model)
    submit(scheduler, make_assignment("newer", (2,) * 8, max_tokens=1))
    run_all(scheduler, model)
    submit(scheduler, make_assignment("running", (3,) * 13, max_tokens=1))
    submit(scheduler, make_assignment("waiting", PROMPT[:9], max_tokens=1))
    submit(scheduler, make_assignment("gone", (2,) * 9, max_tokens=1))
    scheduler.abort("gone", 0.0)
    events = run_all(scheduler, model)
    assert events["waiting"][0].cached_tokens == 8


def test_a_step_may_have_to_wait_for_exports(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(num_blocks=3, max_model_len=12)
    model = FakeModel(scheduler.pool)
    submit(scheduler, make_assignment("p", PROMPT[:8], stage=Stage.PREFILL))
    output = scheduler.schedule(0.0)
    [export] = scheduler.update(output, model.run(output), 0.0).exports
    submit(scheduler, make_assignment("b", (3,) * 10, max_tokens=1))
    assert scheduler.schedule(0.0).chunks == ()
    assert scheduler.schedule(0.0).chunks == ()
    scheduler.pool.release(export.blocks, 0.0)
    assert tokens_of(run_all(scheduler, model)["b"]) == answer_to(make_assignment(prompt=(3,) * 10, max_tokens=1))


# The end of a request


def test_a_stop_token_ends_it_but_not_before_min_tokens(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.pool)
    answer = answer_to(make_assignment(prompt=PROMPT, max_tokens=12))
    stop = answer[1]
    first = answer.index(stop)
    for min_tokens in range(8):
        expected = next(i for i, token in enumerate(answer) if token == stop and i + 1 > min_tokens)
        submit(scheduler, make_assignment(prompt=PROMPT, max_tokens=12, stop=[stop], min_tokens=min_tokens))
        events = run_all(scheduler, model)["a"]
        assert tokens_of(events) == answer[: expected + 1]
        assert events[-1].finish is FinishReason.STOP
        assert expected >= first


def test_the_models_context_ends_it(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(max_model_len=15)
    submit(scheduler, make_assignment(prompt=PROMPT, max_tokens=100))
    events = run_all(scheduler, FakeModel(scheduler.pool))["a"]
    assert len(events) == 3 and events[-1].finish is FinishReason.LENGTH


def test_a_pool_must_hold_the_longest_request(make_scheduler: MakeScheduler) -> None:
    with pytest.raises(AssertionError, match="longest request"):
        make_scheduler(num_blocks=2, max_model_len=9)


def test_abort_releases_everything(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(token_budget=5)
    submit(scheduler, make_assignment(prompt=PROMPT))
    step(scheduler, FakeModel(scheduler.pool))
    assert scheduler.abort("a", 0.0)
    assert not scheduler.abort("a", 0.0)
    assert scheduler.pool.num_available == scheduler.pool.num_blocks
    assert len(scheduler.requests) == 0


@pytest.mark.parametrize(("has_ended", "expected"), [(False, "pause"), (True, "retire")])
def test_only_an_end_is_a_visit_to_eviction(
    make_scheduler: MakeScheduler, monkeypatch: pytest.MonkeyPatch, has_ended: bool, expected: str
) -> None:
    scheduler = make_scheduler()
    submit(scheduler, make_assignment(prompt=PROMPT))
    step(scheduler, FakeModel(scheduler.pool))
    left: list[str] = []
    for name in ("retire", "pause"):
        monkeypatch.setattr(scheduler.pool, name, noting(left, name, getattr(scheduler.pool, name)))
    assert scheduler.abort("a", 0.0, has_ended=has_ended)
    assert left == [expected]


def test_a_newer_attempt_replaces_an_older_one(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.pool)
    submit(scheduler, make_assignment(prompt=PROMPT, max_tokens=5))
    step(scheduler, model)
    answer = answer_to(make_assignment(prompt=PROMPT, max_tokens=5))
    newer = make_assignment(prompt=PROMPT, generated=answer[:2], attempt=2, max_tokens=5)
    submit(scheduler, newer)
    submit(scheduler, make_assignment(prompt=PROMPT, attempt=1, max_tokens=5))
    events = run_all(scheduler, model)["a"]
    assert [(event.attempt, event.position, event.token_id) for event in events] == [
        (2, position, answer[position]) for position in (2, 3, 4)
    ]


# Prefill here, decode there


def test_a_prefill_assignment_exports_and_hands_over(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(token_budget=8)
    model = FakeModel(scheduler.pool)
    prompt = (*PROMPT, 2, 2)
    submit(scheduler, make_assignment(prompt=prompt, stage=Stage.PREFILL))
    hashes = hashes_of(prompt)
    _, outcome = step(scheduler, model)
    assert [(export.hashes, export.handover) for export in outcome.exports] == [(tuple(hashes[:2]), None)]
    _, outcome = step(scheduler, model)
    tail = hash_block(hashes[2], [2, 2])
    [export] = outcome.exports
    assert export.hashes == (hashes[2], tail)
    assert export.handover == Handover("a", 0, answer_to(make_assignment(prompt=prompt))[0], tail)
    assert outcome.events[0].finish is None and len(outcome.finished) == 1
    assert len(scheduler.requests) == 0


def test_a_prompt_of_whole_blocks_is_handed_over_without_a_tail(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    submit(scheduler, make_assignment(prompt=PROMPT, stage=Stage.PREFILL))
    _, outcome = step(scheduler, FakeModel(scheduler.pool))
    [export] = outcome.exports
    assert export.hashes == tuple(hashes_of(PROMPT))
    assert export.handover is not None and export.handover.tail is None


def test_a_fully_cached_prompt_is_a_bare_handover(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.pool)
    for request_id in ("a", "b"):
        submit(scheduler, make_assignment(request_id, PROMPT, stage=Stage.PREFILL))
        _, outcome = step(scheduler, model)
    [export] = outcome.exports
    assert export.hashes == () and export.handover is not None


def test_an_answer_of_one_token_is_not_handed_over(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    submit(scheduler, make_assignment(prompt=PROMPT, stage=Stage.PREFILL, max_tokens=1))
    _, outcome = step(scheduler, FakeModel(scheduler.pool))
    assert outcome.events[0].finish is FinishReason.LENGTH
    assert [export.handover for export in outcome.exports] == [None]


@pytest.mark.parametrize("num_generated", [0, 3])
def test_a_decode_assignment_goes_on_from_imported_blocks(make_scheduler: MakeScheduler, num_generated: int) -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.pool)
    whole = make_assignment(prompt=PROMPT[:10], max_tokens=8)
    answer = answer_to(whole)
    sent = (*PROMPT[:10], *answer[:num_generated])
    hashes = hashes_of(sent)
    tail = hash_block(hashes[-1], sent[len(hashes) * 4 :])
    assignment = make_assignment(
        prompt=PROMPT[:10], generated=answer[:num_generated], stage=Stage.DECODE, awaited=hashes, max_tokens=8
    )
    submit(scheduler, assignment)
    assert step(scheduler, model)[0].chunks == ()
    fetch(scheduler, model, sent, [*hashes, tail], now=0.0)
    assert step(scheduler, model)[0].chunks == ()
    scheduler.imports.handed_over(Handover("a", 0, answer[num_generated], tail), 0.0)
    output, outcome = step(scheduler, model)
    assert scheduled(output) == {"a": (len(sent), 1)}, "nothing of the prompt is computed again"
    assert outcome.events[0].position == num_generated + 1
    assert scheduler.pool.lookup(tail) is None, "the partial block is the request's own now"
    assert tokens_of(run_all(scheduler, model)["a"]) == answer[num_generated + 2 :]


def test_a_prompt_that_its_prefill_worker_scored_is_not_scored_again(make_scheduler: MakeScheduler) -> None:
    """The prefill worker has scored the prompt; the decode worker goes on behind it, and reports no scores."""
    scheduler = make_scheduler()
    model = FakeModel(scheduler.pool)
    hashes = hashes_of(PROMPT[:8])
    assignment = make_assignment(
        prompt=PROMPT[:10], stage=Stage.DECODE, awaited=hashes, max_tokens=4, prompt_logprobs=1
    )
    answer = answer_to(assignment)
    submit(scheduler, assignment)
    fetch(scheduler, model, PROMPT[:8], hashes, now=0.0)
    scheduler.imports.handed_over(Handover("a", 0, answer[0], None), 0.0)
    output, outcome = step(scheduler, model)
    assert scheduled(output) == {"a": (8, 3)}
    assert not outcome.scores and not any(chunk.scored for chunk in output.chunks)
    assert tokens_of(outcome.events) == answer[1:2]
    assert tokens_of(run_all(scheduler, model)["a"]) == answer[2:]


def test_a_tail_that_others_hold_is_computed_again(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.pool)
    hashes = hashes_of(PROMPT[:10])
    tail = hash_block(hashes[-1], PROMPT[8:10])
    assignment = make_assignment(prompt=PROMPT[:10], stage=Stage.DECODE, awaited=hashes, max_tokens=4)
    submit(scheduler, assignment)
    fetch(scheduler, model, PROMPT[:10], [*hashes, tail], now=0.0)
    block = scheduler.pool.lookup(tail)
    assert block is not None
    scheduler.pool.acquire([block])
    answer = answer_to(assignment)
    scheduler.imports.handed_over(Handover("a", 0, answer[0], tail), 0.0)
    assert scheduled(step(scheduler, model)[0]) == {"a": (8, 3)}
    assert tokens_of(run_all(scheduler, model)["a"]) == answer[2:]
    scheduler.pool.release([block], 0.0)


def test_what_does_not_come_in_time_is_computed(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.pool)
    hashes = hashes_of(PROMPT)
    assignment = make_assignment(prompt=PROMPT, stage=Stage.DECODE, awaited=hashes, await_timeout_s=5.0)
    submit(scheduler, assignment, now=1.0)
    assert scheduler.imports.next_deadline() == 6.0
    fetch(scheduler, model, PROMPT, hashes[:1], now=4.0)
    assert scheduler.imports.next_deadline() == 9.0, "something moves: wait on"
    scheduler.imports.keep_awaiting(["a", "unknown"], now=6.0)
    assert scheduler.imports.next_deadline() == 11.0
    assert step(scheduler, model, now=10.9)[0].chunks == ()
    assert scheduled(step(scheduler, model, now=11.0)[0]) == {"a": (4, 8)}
    assert tokens_of(run_all(scheduler, model)["a"]) == answer_to(assignment)[1:]


@pytest.mark.parametrize("has_sampled", [False, True])
def test_a_handover_that_comes_too_late_is_ignored(make_scheduler: MakeScheduler, has_sampled: bool) -> None:
    """Its token would appear twice."""
    scheduler = make_scheduler(token_budget=64 if has_sampled else 8)
    model = FakeModel(scheduler.pool)
    assignment = make_assignment(prompt=PROMPT, stage=Stage.DECODE, await_timeout_s=5.0)
    answer = answer_to(assignment)
    submit(scheduler, assignment)
    _, outcome = step(scheduler, model, now=5.0)
    assert len(outcome.events) == has_sampled
    scheduler.imports.handed_over(Handover("a", 0, answer[0], None), 0.0)
    assert tokens_of([*outcome.events, *run_all(scheduler, model, now=5.0)["a"]]) == answer


@pytest.mark.parametrize(
    "give_up",
    [
        lambda scheduler: scheduler.imports.stop_awaiting(["a", "unknown"]),
        lambda scheduler: scheduler.imports.stop_awaiting_all(),
    ],
)
def test_when_the_sender_is_gone_nobody_waits(
    make_scheduler: MakeScheduler, give_up: Callable[[Scheduler], None]
) -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.pool)
    assignment = make_assignment(prompt=PROMPT, stage=Stage.DECODE, awaited=hashes_of(PROMPT))
    submit(scheduler, assignment)
    give_up(scheduler)
    assert scheduler.imports.next_deadline() is None
    scheduler.imports.handed_over(Handover("a", 0, 0, None), 0.0)
    assert tokens_of(run_all(scheduler, model)["a"]) == answer_to(assignment)


def test_lost_blocks_are_computed_and_the_others_kept(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.pool)
    hashes = hashes_of(PROMPT)
    submit(scheduler, make_assignment(prompt=PROMPT, awaited=hashes, max_tokens=1))
    fetch(scheduler, model, PROMPT, hashes[:2], now=0.0)
    scheduler.imports.settled(hashes, 0.0)
    assert scheduled(step(scheduler, model)[0]) == {"a": (8, 4)}


def test_an_older_attempts_handover_is_ignored(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    submit(scheduler, make_assignment(prompt=PROMPT, stage=Stage.DECODE, attempt=1))
    scheduler.imports.handed_over(Handover("a", 0, 0, None), 0.0)
    scheduler.imports.handed_over(Handover("unknown", 0, 0, None), 0.0)
    assert step(scheduler, FakeModel(scheduler.pool))[0].chunks == ()
    scheduler.abort("a", 0.0)


def test_a_ready_request_overtakes_one_that_awaits(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.pool)
    submit(scheduler, make_assignment("first", PROMPT, awaited=hashes_of(PROMPT)))
    submit(scheduler, make_assignment("second", (2, 2)))
    assert scheduled(step(scheduler, model)[0]) == {"second": (0, 2)}
    run_all(scheduler, model, now=100.0)


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_handover_may_overtake_its_request(make_scheduler: MakeScheduler, attempt: int) -> None:
    scheduler = make_scheduler()
    model = FakeModel(scheduler.pool)
    for old in range(attempt):
        submit(scheduler, make_assignment(prompt=PROMPT, stage=Stage.DECODE, attempt=old))
    assignment = make_assignment(prompt=PROMPT, stage=Stage.DECODE, attempt=attempt)
    answer = answer_to(assignment)
    scheduler.imports.handed_over(Handover("a", attempt, answer[0], None), 0.0)
    submit(scheduler, assignment, now=0.1)
    assert scheduled(step(scheduler, model, now=0.1)[0]) == {"a": (0, len(PROMPT) + 1)}
    assert tokens_of(run_all(scheduler, model)["a"]) == answer[2:]


def test_a_loss_may_overtake_its_request(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    hashes = hashes_of(PROMPT)
    scheduler.imports.settled(hashes, 0.0)
    submit(scheduler, make_assignment(prompt=PROMPT, awaited=hashes), now=0.1)
    assert scheduled(step(scheduler, FakeModel(scheduler.pool), now=0.1)[0]) == {"a": (0, len(PROMPT))}
    scheduler.abort("a", 0.0)


def test_an_old_loss_says_nothing_of_a_new_promise(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    hashes = hashes_of(PROMPT)
    scheduler.imports.settled(hashes, 0.0)
    submit(scheduler, make_assignment(prompt=PROMPT, awaited=hashes), now=100.0)
    assert step(scheduler, FakeModel(scheduler.pool), now=100.0)[0].chunks == ()
    scheduler.abort("a", 0.0)


# Other limits between steps


def test_running_requests_outlive_lower_limits_and_all_decode(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(max_requests=4, token_budget=16)
    model = FakeModel(scheduler.pool)
    assignments = [make_assignment(str(index), (index % 4, 3), max_tokens=6) for index in range(5)]
    for assignment in assignments:
        submit(scheduler, assignment)
    events = step(scheduler, model)[1].events
    assert len(scheduler.running) == 4

    scheduler.change_limits(SchedulerLimits(token_budget=2, max_requests=2), ())
    output, outcome = step(scheduler, model)
    assert scheduled(output).keys() == {"0", "1", "2", "3"}, "nobody is starved by a budget below the running requests"
    seen: dict[str, list[TokenEvent]] = {str(index): [] for index in range(5)}
    for event in (*events, *outcome.events):
        seen[event.request_id].append(event)
    for request_id, later in run_all(scheduler, model).items():
        seen[request_id] += later
    for assignment in assignments:
        assert tokens_of(seen[assignment.request_id]) == answer_to(assignment)


def test_other_limits_hold_from_the_next_step_on(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(max_requests=1, token_budget=4)
    model = FakeModel(scheduler.pool)
    for index in range(3):
        submit(scheduler, make_assignment(str(index), (index, *PROMPT[1:]), max_tokens=3))
    assert step(scheduler, model)[0].num_tokens == 4
    scheduler.change_limits(SchedulerLimits(token_budget=32, max_requests=8), ())
    output, _ = step(scheduler, model)
    assert scheduled(output).keys() == {"0", "1", "2"} and output.num_tokens == 8 + 12 + 12
    run_all(scheduler, model)
