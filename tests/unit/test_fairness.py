"""Computing shared among tenants: the counters, the scheduler's choices, and a flood in virtual time."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.settings import SchedulerLimits
from raydix.engine.core.tenants import Tenant
from raydix.engine.core.types import CacheHints
from raydix.engine.core.worker.order import VirtualTime, chunk_s
from raydix.engine.core.worker.request import Request
from raydix.engine.core.worker.scheduler import Scheduler
from raydix.engine.core.worker.step import chunk_of
from tests.unit.builders import VOCAB, FakeModel, chain_of, make_assignment, run_all, step, submit
from tests.unit.tenant_simulation import measure

MakeScheduler = Callable[..., Scheduler]
COSTS = WorkerCosts(step_s=0.0, prefill_token_s=1.0, decode_token_s=1.0)


def request_of(tenant: str, num_tokens: int = 8) -> Request:
    assignment = make_assignment(tenant, range(num_tokens), cache=CacheHints(tenant=tenant))
    request = Request(assignment=assignment, chain=chain_of(), arrival=0)
    request.begin_with([])
    return request


def compute(time: VirtualTime, tenant: str, num_tokens: int) -> None:
    time.computed([chunk_of(request_of(tenant, 100), num_tokens)], COSTS)


def first(time: VirtualTime) -> str:
    return min(time.active, key=time.order)


def test_the_tenant_for_which_least_was_computed_is_first() -> None:
    time = VirtualTime()
    for tenant in ("a", "b"):
        time.joined(tenant)
    compute(time, "a", 3)
    assert first(time) == "b"
    compute(time, "b", 4)
    assert first(time) == "a"


def test_weights_divide_computing() -> None:
    time, computed = VirtualTime({"a": 3.0}), Counter[str]()
    for tenant in ("a", "b"):
        time.joined(tenant)
    for _ in range(400):
        tenant = first(time)
        compute(time, tenant, 1)
        computed[tenant] += 1
    assert abs(computed["a"] - 300) <= 2
    time.weigh({})
    assert time.weight("a") == 1


def test_nobody_saves_time_up_and_nobody_loses_debts() -> None:
    time = VirtualTime()
    for tenant in ("a", "b"):
        time.joined(tenant)
    compute(time, "a", 50)
    time.left("b")
    compute(time, "a", 50)
    time.joined("b")
    compute(time, "b", 1)
    assert first(time) == "a", "b was lifted to a's time when it came back"

    compute(time, "b", 20)
    time.left("b")
    time.joined("b")
    assert first(time) == "a", "going away for a moment does not make b's time less"
    time.left("b")
    compute(time, "a", 100)
    time.left("a")
    time.joined("c")
    time.joined("a")
    assert first(time) in ("a", "c") and time.order("a")[0] == time.order("c")[0], "all begin where the last one left"
    assert not VirtualTime().are_several and VirtualTime().places() is None


def at_times(**seconds: int) -> VirtualTime:
    """The time of tenants with one request each, for which so much was computed since all had come."""
    time = VirtualTime()
    for tenant in seconds:
        time.joined(tenant)
    for tenant, num_tokens in seconds.items():
        compute(time, tenant, num_tokens)
    return time


def test_who_comes_begins_with_the_least_time_of_the_others() -> None:
    time = at_times(a=10, b=5)
    time.joined("c")
    assert [time.order(tenant)[0] for tenant in "abc"] == [10, 5, 5]


def test_who_is_ahead_is_remembered_and_who_is_behind_is_not() -> None:
    time = at_times(a=10, b=5, c=20)
    for tenant in ("a", "c"):
        time.left(tenant)
        time.joined(tenant)
    assert [time.order(tenant)[0] for tenant in "abc"] == [10, 5, 20]
    time.left("b")
    assert time._times.keys() == {"a", "c"}
    even = at_times(a=5, b=5)
    even.left("a")
    assert even._times.keys() == {"b"}


def test_a_prompt_that_has_begun_counts_as_if_it_were_computed() -> None:
    time = at_times(a=10, b=10)
    turns = time.turns([], COSTS)
    assert turns is not None and turns.choose("ab") == "a"
    turns = time.turns([request_of("a", 2)], COSTS)
    assert turns is not None and turns.choose("ab") == "b"
    assert turns.is_before("b", "a") is False, "once a's request waits again, both have the same time"
    assert at_times(a=10).turns([], COSTS) is None


@pytest.mark.parametrize(("a_s", "turn"), [(4, "a"), (6, "b")])
def test_a_prompt_that_has_begun_counts_by_its_costs_and_the_weight(a_s: int, turn: str) -> None:
    time = at_times(a=a_s, b=0)
    time.weigh({"b": 2.0})
    costs = WorkerCosts(step_s=0.0, prefill_token_s=0.2, decode_token_s=1.0)
    turns = time.turns([request_of("b", 25), request_of("b", 25)], costs)
    assert turns is not None and turns.choose("ab") == turn, "b is at 5 s with what its two requests will take"


def test_an_answer_that_goes_on_does_not_count_ahead() -> None:
    turns = at_times(a=10, b=10).turns([request_of("a", 1)], COSTS)
    assert turns is not None and turns.choose("ab") == "a"


def test_a_step_is_charged_to_its_chunks_in_equal_parts() -> None:
    time = at_times(a=0, b=0)
    chunks = [chunk_of(request_of("a", 9), 5), chunk_of(request_of("b", 9), 2)]
    time.computed(chunks, WorkerCosts(step_s=8.0, prefill_token_s=1.0))
    assert [time.order(tenant)[0] for tenant in "ab"] == [9, 6]


@pytest.mark.parametrize(
    ("start", "num_tokens", "draft", "tokens_s", "num_pairs"),
    [
        (2, 3, (), 3 * 10, 3 + 4 + 5),
        (6, 4, (1, 2), 2 * 10 + 2 * 1000, 7 + 8 + 9 + 10),
        (8, 1, (), 100, 9),
        (9, 3, (1, 2), 100 + 2 * 1000, 10 + 11 + 12),
    ],
    ids=["prompt", "end of a prompt with a draft", "first token behind the prompt", "draft"],
)
def test_a_chunk_takes_its_tokens_drafts_and_pairs(
    start: int, num_tokens: int, draft: tuple[int, ...], tokens_s: float, num_pairs: int
) -> None:
    costs = WorkerCosts(prefill_token_s=10.0, decode_token_s=100.0, draft_token_s=1000.0, pair_s=0.5)
    chunk = replace(chunk_of(request_of("a"), 1), start=start, num_tokens=num_tokens, draft=draft)
    assert chunk_s(chunk, costs) == tokens_s + num_pairs / 2


def submit_of(scheduler: Scheduler, name: str, tenant: str, num_tokens: int = 8, priority: int = 0) -> None:
    chance = random.Random(name)
    prompt = [chance.randrange(VOCAB) for _ in range(num_tokens)]
    hints = CacheHints(tenant=tenant)
    submit(scheduler, make_assignment(name, prompt, max_tokens=12, cache=hints, priority=priority))


def test_a_tenant_that_comes_later_starts_next(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(token_budget=8, max_requests=8, num_blocks=64)
    model = FakeModel(scheduler.pool)
    for number in range(6):
        submit_of(scheduler, f"a{number}", "a")
    step(scheduler, model)
    submit_of(scheduler, "b0", "b", 4)
    output, _ = step(scheduler, model)
    assert "b0" in {chunk.request.request_id for chunk in output.chunks if chunk.samples}
    events = run_all(scheduler, model)
    assert len(events) == 7 and len(scheduler.requests) == 0


def test_priorities_of_one_tenant_stay_and_go_before_tenants(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(max_requests=1, num_blocks=64)
    model = FakeModel(scheduler.pool)
    for name, tenant, priority in (("a1", "a", 1), ("a0", "a", 0), ("b2", "b", 2), ("b1", "b", 1)):
        submit_of(scheduler, name, tenant, priority=priority)
    order: list[str] = []
    while scheduler.requests:
        output, _ = step(scheduler, model)
        order += [chunk.request.request_id for chunk in output.chunks]
    assert list(dict.fromkeys(order)) == ["a0", "b1", "a1", "b2"]


def test_places_above_a_share_are_given_back(make_scheduler: MakeScheduler) -> None:
    """One tenant has all places of running requests with long answers; another gets its half of them at once."""
    scheduler = make_scheduler(max_requests=4, num_blocks=64)
    model = FakeModel(scheduler.pool)
    for number in range(5):
        submit_of(scheduler, f"a{number}", "a")
    step(scheduler, model)
    assert len(scheduler.running) == 4
    for number in range(3):
        submit_of(scheduler, f"b{number}", "b")
    preempted: list[str] = []
    while "b1" not in scheduler.running:
        preempted += step(scheduler, model)[0].preempted
        assert "b0" in scheduler.running or preempted == ["a3"], "in the next step, then others when it is their turn"
    assert preempted == ["a3", "a2"], "the last ones first"
    assert set(scheduler.running) == {"a0", "a1", "b0", "b1"}
    output, _ = step(scheduler, model)
    assert not output.preempted, "nobody is above its share"
    assert len(run_all(scheduler, model)) == 8 and len(scheduler.requests) == 0


def test_each_step_computes_something_when_room_is_given_back(make_scheduler: MakeScheduler) -> None:
    """The budget is one token, and the request whose turn it is to decode is the one that is preempted."""
    scheduler = make_scheduler(max_requests=2, token_budget=1, num_blocks=64)
    model = FakeModel(scheduler.pool)
    for name, priority in (("a0", 1), ("a1", 0)):
        submit_of(scheduler, name, "a", 1, priority)
        step(scheduler, model)
    submit_of(scheduler, "b0", "b", 1)
    preempted: list[str] = []
    while scheduler.requests:
        output, _ = step(scheduler, model)
        preempted += output.preempted
        assert output.chunks
    assert preempted == ["a0"]


def test_room_that_its_tenant_would_take_again_is_not_given_back(make_scheduler: MakeScheduler) -> None:
    """a has more than its share of places and less computing behind it than b: preempted, it would start again."""
    scheduler = make_scheduler(max_requests=4, num_blocks=256, token_budget=64, max_model_len=128)
    scheduler.learn_costs(COSTS)
    model = FakeModel(scheduler.pool)
    submit_of(scheduler, "b0", "b", 60)
    submit_of(scheduler, "a0", "a", 1)
    step(scheduler, model)
    for name in ("a1", "a2"):
        submit_of(scheduler, name, "a", 1)
    step(scheduler, model)
    assert len(scheduler.running) == 4
    submit_of(scheduler, "b1", "b", 1)
    assert not step(scheduler, model)[0].preempted
    run_all(scheduler, model)


def test_a_weight_is_a_share_of_places_too(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(max_requests=4, num_blocks=64)
    scheduler.change_limits(SchedulerLimits(64, 4), [Tenant("b", weight=3.0)])
    model = FakeModel(scheduler.pool)
    for number in range(4):
        submit_of(scheduler, f"a{number}", "a")
    step(scheduler, model)
    for number in range(4):
        submit_of(scheduler, f"b{number}", "b")
    while "b2" not in scheduler.running:
        step(scheduler, model)
    assert Counter(request.tenant for request in scheduler.running.values()) == {"a": 1, "b": 3}
    run_all(scheduler, model)


def test_who_had_more_is_preempted_when_blocks_run_out(make_scheduler: MakeScheduler) -> None:
    """Both need more blocks than there are; b came later, and a has computed more."""
    scheduler = make_scheduler(num_blocks=8, max_requests=4, max_model_len=32)
    model = FakeModel(scheduler.pool)
    for number in range(3):
        submit_of(scheduler, f"a{number}", "a")
    step(scheduler, model)
    submit_of(scheduler, "b0", "b", 4)
    preempted: list[str] = []
    for _ in range(7):
        preempted += step(scheduler, model)[0].preempted
    assert preempted and all(name.startswith("a") for name in preempted)
    run_all(scheduler, model)
    assert len(scheduler.requests) == 0


def test_one_tenant_alone_is_ordered_as_without_tenants(make_scheduler: MakeScheduler) -> None:
    schedules = []
    for tenant in ("", "a"):
        scheduler = make_scheduler(num_blocks=12, token_budget=10, max_requests=4, max_model_len=40)
        model = FakeModel(scheduler.pool)
        for number in range(7):
            submit_of(scheduler, f"r{number}", tenant, 5 + number, priority=number % 2)
        schedule = []
        while scheduler.requests:
            output, _ = step(scheduler, model)
            schedule.append([(chunk.request.request_id, chunk.start, chunk.num_tokens) for chunk in output.chunks])
        schedules.append(schedule)
    assert schedules[0] == schedules[1]


def test_a_flood_of_one_tenant_does_not_reach_the_other() -> None:
    """The production scheduler, placement and room: first tokens of the light tenant, and all that is computed."""
    found = measure(seconds=6.0, times=20.0)
    calm, blind, shared = (found[name] for name in list(found)[1:])
    assert blind.light_p90_ms > 5 * calm.light_p90_ms, "without shares the other tenant waits"
    assert shared.light_p90_ms < 1.6 * calm.light_p90_ms
    assert shared.computed_tokens_per_s > 0.97 * blind.computed_tokens_per_s
    assert shared.refused["light"] == 0 < shared.refused["heavy"]


def test_the_figures_are_the_same_each_time() -> None:
    assert measure(1.0, 4.0) == measure(1.0, 4.0)


@pytest.mark.parametrize("tenant", ["a", "b"])
def test_two_that_both_want_everything_get_half_each(tenant: str, make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(num_blocks=256, token_budget=16, max_requests=8)
    model = FakeModel(scheduler.pool)
    for number in range(40):
        submit_of(scheduler, f"a{number}", "a", 20)
    for number in range(10):
        submit_of(scheduler, f"b{number}", "b", 20)
    computed: Counter[str] = Counter()
    while any(request.tenant == "b" for request in scheduler.waiting):
        for chunk in step(scheduler, model)[0].chunks:
            computed[chunk.request.tenant] += chunk.num_tokens
    assert abs(computed[tenant] / computed.total() - 0.5) < 0.15
    run_all(scheduler, model)
