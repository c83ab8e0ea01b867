"""Preempted requests go on from KV kept outside the pool, or compute it again; what they answer is the same."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import numpy as np
import pytest

from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.settings import SchedulerLimits
from raydix.engine.core.types import Assignment
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.core.worker.request import Swapped
from raydix.engine.core.worker.scheduler import Scheduler
from raydix.engine.core.worker.step import SchedulerOutput, SwapDrop, SwapIn, SwapOut
from raydix.engine.core.worker.swaps import SwapPolicy
from raydix.engine.model.engine import Engine
from raydix.engine.model.segments import Bytes
from raydix.engine.model.swap_space import ProcessMemory
from tests.unit.builders import FINGERPRINT, FakeModel, answer_to, make_assignment, run_all, step, submit, tokens_of

FREE = WorkerCosts(swap_s=0.0, swap_byte_s=0.0)
DEAR = WorkerCosts(swap_s=1e9)
OLD = make_assignment("old", (0, 1, 2, 3, 0, 1, 2, 3, 0), max_tokens=12)
LATE = make_assignment("late", (3, 3, 2, 2, 1, 1, 0), max_tokens=12)
EVEN = make_assignment("even", (3, 3, 2, 2, 1, 1, 0, 0, 2), max_tokens=12)
"""It has as much computed when it is preempted as fills its blocks."""


def make(num_blocks: int, max_blocks: int = 100, costs: WorkerCosts = FREE) -> tuple[Scheduler, FakeModel]:
    pool = BlockPool(num_blocks, 4)
    swap_policy = SwapPolicy(max_blocks, costs=costs)
    return Scheduler(pool, SchedulerLimits(64, 8), num_blocks * 4, swap_policy), FakeModel(pool)


def until_preempted(scheduler: Scheduler, model: FakeModel) -> SchedulerOutput:
    """Step until somebody is; that step is done, too."""
    while True:
        output, _ = step(scheduler, model)
        scheduler.check_integrity()
        if output.preempted:
            return output


def swaps(output: SchedulerOutput) -> list[type]:
    return [type(move) for move in output.moves if isinstance(move, SwapOut | SwapIn | SwapDrop)]


def preempted(
    max_blocks: int = 100, costs: WorkerCosts = FREE, late: Assignment = LATE
) -> tuple[Scheduler, FakeModel, SchedulerOutput]:
    """Two requests in six blocks, the later one preempted."""
    scheduler, model = make(6, max_blocks, costs)
    submit(scheduler, OLD)
    submit(scheduler, late)
    return scheduler, model, until_preempted(scheduler, model)


def test_a_swapped_request_goes_on_where_it_was() -> None:
    scheduler, model, output = preempted()
    late = scheduler.requests.get("late")
    assert late is not None and late.swapped is not None and swaps(output) == [SwapOut]
    num_computed = late.swapped.num_computed
    assert num_computed % 4, "the last block is a partial one"
    assert num_computed == len(late.token_ids) - 1
    while not late.blocks:
        output, _ = step(scheduler, model)
    assert swaps(output) == [SwapIn]
    [chunk] = [chunk for chunk in output.chunks if chunk.request is late]
    assert (chunk.start, chunk.num_tokens) == (num_computed, 1)
    assert late.swapped is None and not model.swapped
    position = late.num_output
    events = run_all(scheduler, model)
    assert tokens_of(events["late"]) == answer_to(LATE)[position:]


@pytest.mark.parametrize(("max_blocks", "costs"), [(0, FREE), (1, FREE), (100, DEAR)])
def test_without_room_or_at_a_higher_price_it_is_computed_again(max_blocks: int, costs: WorkerCosts) -> None:
    scheduler, model, output = preempted(max_blocks, costs)
    assert swaps(output) == [] and scheduler.num_swapped == 0
    assert tokens_of(run_all(scheduler, model)["late"])[-1] == answer_to(LATE)[-1]


def test_the_quicker_way_is_taken() -> None:
    costs = WorkerCosts(step_s=0.01, prefill_token_s=0.001, swap_s=0.02, swap_byte_s=1e-6)
    policy = SwapPolicy(max_blocks=100, block_bytes=1000, costs=costs)
    assert policy.pays(num_blocks=10, num_lost=160, num_kept=0, token_budget=512)  # 0.06 s against 0.17
    assert not policy.pays(num_blocks=2, num_lost=17, num_kept=0, token_budget=512)  # 0.044 s against 0.027
    assert policy.pays(num_blocks=2, num_lost=17, num_kept=0, token_budget=4)  # against 0.067


def test_what_the_pool_still_has_is_not_copied_back() -> None:
    """Only the partial block must come back if nobody took the full ones meanwhile."""
    scheduler, model, _ = preempted()
    late = scheduler.requests.get("late")
    assert late is not None and late.swapped is not None
    num_full = late.swapped.num_computed // 4
    scheduler.abort("old", 0.0)
    output, _ = step(scheduler, model)
    assert [len(move.blocks) for move in output.moves if isinstance(move, SwapIn)] == [1]
    assert late.num_shared == num_full * 4
    run_all(scheduler, model)


def test_blocks_that_others_hold_are_not_copied_out() -> None:
    scheduler, model = make(8)
    same = (0, 1, 2, 3, 3, 2, 1, 0)
    for name in ("old", "late"):
        submit(scheduler, make_assignment(name, (*same, len(name) % 4), max_tokens=16))
        step(scheduler, model)
    output = until_preempted(scheduler, model)
    late = scheduler.requests.get("late")
    assert late is not None and late.swapped is not None
    assert late.swapped.first_block == 2
    [move] = [move for move in output.moves if isinstance(move, SwapOut)]
    assert len(move.blocks) == late.swapped.num_blocks == -(-late.swapped.num_computed // 4) - 2
    run_all(scheduler, model)
    assert not model.swapped


def test_what_no_longer_meets_the_pool_is_dropped() -> None:
    """The shared beginning has been evicted: what follows it is of no use."""
    scheduler, model, _ = preempted()
    late = scheduler.requests.get("late")
    assert late is not None and late.swapped is not None
    late.swapped = Swapped(1, late.swapped.num_blocks, late.swapped.num_computed)
    scheduler.abort("old", 0.0)
    scheduler.pool.reset()
    output, _ = step(scheduler, model)
    assert swaps(output) == [SwapDrop] and not model.swapped
    [chunk] = output.chunks
    assert chunk.start == 0
    run_all(scheduler, model)


def test_one_that_must_go_again_before_it_has_computed_anything_stays_outside() -> None:
    scheduler, model, _ = preempted(late=EVEN)
    even = scheduler.requests.get("even")
    assert even is not None and even.swapped is not None
    before = even.swapped
    assert before.num_computed == before.num_blocks * 4, "the next token needs another block"
    scheduler.abort("old", 0.0)
    scheduler.pool.reset()
    held = scheduler.pool.allocate(6 - before.num_blocks, 0.0)
    output, _ = step(scheduler, model)
    assert output.preempted == ("even",) and output.chunks == () and output.moves == ()
    assert even.swapped == before and "even" in model.swapped
    scheduler.check_integrity(held)
    scheduler.pool.release(held, 0.0)
    run_all(scheduler, model)
    assert not model.swapped


def test_what_does_not_fit_in_any_more_is_computed_again_in_chunks() -> None:
    """Exports hold the blocks that it would need at once."""
    scheduler, model, _ = preempted()
    scheduler.abort("old", 0.0)
    scheduler.pool.reset()
    held = scheduler.pool.allocate(5, 0.0)
    output, _ = step(scheduler, model)
    assert swaps(output) == [SwapDrop]
    scheduler.check_integrity(held)
    scheduler.pool.release(held, 0.0)
    run_all(scheduler, model)


def test_a_swapped_request_does_not_wait_for_others_to_compute_what_it_has() -> None:
    scheduler, model, _ = preempted()
    late = scheduler.requests.get("late")
    assert late is not None
    scheduler.abort("old", 0.0)
    scheduler.pool.reset()
    late.swapped, kept = None, late.swapped
    scheduler.preempted.clear()
    submit(scheduler, make_assignment("same", LATE.token_ids, max_tokens=1))
    scheduler.limits = SchedulerLimits(3, 8)
    step(scheduler, model)  # the first of the prompt's seven tokens
    late.swapped = kept
    scheduler.preempted.append(late)
    output, _ = step(scheduler, model)
    assert swaps(output) == [SwapIn]
    run_all(scheduler, model)


def test_an_aborted_request_keeps_nothing_outside() -> None:
    scheduler, model, _ = preempted()
    assert "late" in model.swapped
    scheduler.abort("late", 0.0)
    step(scheduler, model)
    assert not model.swapped
    run_all(scheduler, model)


def test_nobody_who_waits_overtakes_a_swapped_request() -> None:
    scheduler, model, _ = preempted()
    submit(scheduler, make_assignment("new", (2,), max_tokens=1))
    started = []
    while scheduler.requests:
        output, _ = step(scheduler, model)
        started += [chunk.request.request_id for chunk in output.chunks if chunk.request.request_id not in started]
    assert started == ["old", "late", "new"]


def test_a_swapped_request_resumes_before_an_earlier_one_that_is_computed_again() -> None:
    scheduler, model = make(9, max_blocks=3)
    submit(scheduler, OLD)
    submit(scheduler, make_assignment("again", (2, 2, 3, 0, 1, 2, 0), max_tokens=16))
    submit(scheduler, LATE)
    while len(scheduler.preempted) < 2:
        step(scheduler, model)
    submit(scheduler, make_assignment("new", (2,), max_tokens=1))
    by_id = {request.request_id: request for request in scheduler.preempted}
    assert by_id["late"].swapped is not None and by_id["again"].swapped is None
    started = []
    while scheduler.requests:
        output, _ = step(scheduler, model)
        started += [chunk.request.request_id for chunk in output.chunks if chunk.request.request_id not in started]
        scheduler.check_integrity()
    assert started == ["old", "late", "again", "new"]


class Unreliable(ProcessMemory):
    """Every third call fails."""

    def __init__(self) -> None:
        super().__init__()
        self.num_failures = self.num_calls = 0

    def put(self, request_id: str, payload: Bytes) -> None:
        self._fail()
        super().put(request_id, payload)

    def take(self, request_id: str) -> Bytes:
        payload = super().take(request_id)
        self._fail()
        return payload

    def _fail(self) -> None:
        self.num_calls += 1
        if self.num_calls % 3 == 0:
            self.num_failures += 1
            raise OSError("gone")


class ReadOnly(ProcessMemory):
    """As a shared memory: what it gives back cannot be written to, and is not where it was."""

    def take(self, request_id: str) -> Bytes:
        payload = np.array(super().take(request_id))
        payload.flags.writeable = False
        return payload


def storm(seed: int) -> list[Assignment]:
    """Requests of all lengths, some of which begin alike."""
    source = random.Random(seed)
    common = [source.randrange(4) for _ in range(18)]
    made = []
    for index in range(24):
        own = [source.randrange(4) for _ in range(source.randint(1, 20))]
        prompt = [*common, *own] if index % 3 == 0 else own
        scores = source.choice([None, None, 1])
        made.append(make_assignment(f"r{index}", prompt, max_tokens=source.randint(8, 24), prompt_logprobs=scores))
    return made


def num_needed(assignments: Sequence[Assignment]) -> int:
    """Blocks to run all of them at once."""
    return sum(-(-(len(each.token_ids) + each.sampling.max_tokens) // 4) for each in assignments)


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    made: list[Engine] = []
    yield made
    for engine in made:
        engine.scheduler.check_integrity()
        assert len(engine.scheduler.requests) == 0 and engine.pool.num_available == engine.pool.num_blocks


@pytest.mark.parametrize("token_budget", [24, 100])
@pytest.mark.parametrize("swap_bytes", [0, 300, 1 << 20])
@pytest.mark.parametrize("space", [ProcessMemory, ReadOnly, Unreliable])
def test_in_a_third_of_the_blocks_everybody_is_answered_as_ever(
    engines: list[Engine], space: type[ProcessMemory], swap_bytes: int, token_budget: int
) -> None:
    assignments = storm(token_budget)
    pool = BlockPool(int(0.3 * num_needed(assignments)), 4)
    model, kept = FakeModel(pool), space()
    engine = Engine(model, model, pool, SchedulerLimits(token_budget, 24), 64, FINGERPRINT, kept, swap_bytes)
    engine.scheduler.swap_policy.costs = FREE
    engines.append(engine)
    for each in assignments:
        engine.submit(each, 0.0)
    answers: dict[str, list[int | None]] = {}
    while engine.scheduler.requests:
        result = engine.step(0.0)
        engine.scheduler.check_integrity()
        assert engine.scheduler.num_swapped == len(kept)
        for event in result.events if result is not None else ():
            answers.setdefault(event.request_id, []).append(event.token_id)
    assert answers == {each.request_id: answer_to(each) for each in assignments}
    counts = asdict(engine.preemptions)
    assert (counts["num_swapped"] > 0) == (counts["swapped_out_bytes"] > 0) == (swap_bytes > 0)
    assert (counts["swapped_out_s"] > 0) == (swap_bytes > 0) == (counts["swapped_in_s"] > 0)
    assert counts["num_recomputed"] > 0 or swap_bytes > 300
    assert counts["swapped_in_bytes"] <= counts["swapped_out_bytes"]
    assert not isinstance(kept, Unreliable) or bool(kept.num_failures) == (swap_bytes > 0)
