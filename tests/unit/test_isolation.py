"""A step that raises costs only the requests that make it raise."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydix.engine.core.settings import SchedulerLimits
from raydix.engine.core.types import FinishReason, Stage, TokenEvent
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.core.worker.step import RunnerOutput, SchedulerOutput
from raydix.engine.model.engine import Engine
from raydix.engine.model.isolation import NUM_ALONE
from tests.unit.builders import FINGERPRINT, FakeModel, answer_to, make_assignment, tokens_of


class Delicate(FakeModel):
    """Raises for a batch with a request of `poison`, after it has written the KV of the whole batch; and for any step
    from its `breaks_at`-th run on."""

    def __init__(self, pool: BlockPool, poison: Sequence[str] = (), breaks_at: int = 1 << 30) -> None:
        super().__init__(pool)
        self.poison = set(poison)
        self.breaks_at = breaks_at
        self.num_runs = 0

    def run(self, output: SchedulerOutput) -> RunnerOutput:
        self.num_runs += 1
        self._write(output)
        self.check()
        if found := self.poison & {chunk.request.request_id for chunk in output.chunks}:
            raise ValueError(f"cannot stand {sorted(found)[0]}")
        return self._read(output)

    def check(self) -> None:
        if self.num_runs >= self.breaks_at:
            raise RuntimeError("illegal memory access")


def make_engine(
    num_blocks: int = 64, budget: int = 64, poison: Sequence[str] = (), breaks_at: int = 1 << 30
) -> tuple[Engine, Delicate]:
    pool = BlockPool(num_blocks, 4)
    model = Delicate(pool, poison, breaks_at)
    return Engine(model, model, pool, SchedulerLimits(budget, 16), num_blocks * 4, FINGERPRINT, None, 1 << 20), model


def run(engine: Engine) -> tuple[dict[str, list[TokenEvent]], dict[str, TokenEvent]]:
    """Events of each request, and the failures, until nothing moves."""
    events: dict[str, list[TokenEvent]] = {}
    failures: dict[str, TokenEvent] = {}
    while (step := engine.step(0.0)) is not None:
        for event in step.events:
            events.setdefault(event.request_id, []).append(event)
        for failure in step.failures:
            assert failure.request_id not in failures
            failures[failure.request_id] = failure
        engine.scheduler.check_integrity()
    return events, failures


@given(
    prompts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12).map(tuple), min_size=1, max_size=12),
    poison=st.sets(st.integers(0, 11), max_size=4),
    num_healthy_steps=st.integers(0, 4),
    budget=st.sampled_from([16, 64]),
    num_blocks=st.sampled_from([12, 64]),
)
def test_the_others_answer_as_if_nothing_had_been(
    prompts: list[tuple[int, ...]], poison: set[int], num_healthy_steps: int, budget: int, num_blocks: int
) -> None:
    engine, model = make_engine(num_blocks, budget)
    for index, prompt in enumerate(prompts):
        engine.submit(make_assignment(str(index), prompt, max_tokens=12), 0.0)
    before: dict[str, list[TokenEvent]] = {}
    for _ in range(num_healthy_steps):
        if (step := engine.step(0.0)) is not None:
            for event in step.events:
                before.setdefault(event.request_id, []).append(event)
    model.poison = {str(index) for index in poison}
    events, failures = run(engine)
    ill = model.poison & {str(index) for index in range(len(prompts))}
    assert failures.keys() == {index for index in ill if len(before.get(index, ())) < 12}
    for index, prompt in enumerate(prompts):
        got = tokens_of([*before.get(str(index), ()), *events.get(str(index), ())])
        answer = answer_to(make_assignment(prompt=prompt, max_tokens=12))
        assert got == answer[: len(got)] and (len(got) == len(answer) or str(index) in failures)
    for request_id, failure in failures.items():
        assert failure.finish is FinishReason.ERROR and failure.token_id is None
        assert failure.position == len(before.get(request_id, ()))
        assert failure.detail == f"ValueError: cannot stand {request_id}"
    assert engine.pool.num_available == engine.pool.num_blocks


@pytest.mark.parametrize("num_requests", [1, 2, 3, 8, 16])
def test_one_among_many_costs_a_logarithm(num_requests: int) -> None:
    for ill in {0, num_requests // 2, num_requests - 1}:
        engine, model = make_engine(poison=[str(ill)])
        for index in range(num_requests):
            engine.submit(make_assignment(str(index), (index % 4, 1, 2), max_tokens=2), 0.0)
        step = engine.step(0.0)
        assert step is not None and not step.is_typical
        assert [failure.request_id for failure in step.failures] == [str(ill)]
        assert len(step.events) == num_requests - 1
        assert model.num_runs <= 1 + 2 * math.ceil(math.log2(num_requests))
        healthy = engine.step(0.0)
        assert num_requests == 1 or (healthy is not None and healthy.is_typical)


def test_a_failure_that_does_not_come_again_ends_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that is too large for the memory that is left, say: its halves are not."""
    engine, model = make_engine(poison=["together"])
    for index in range(4):
        engine.submit(make_assignment(str(index), (index, 1, 2), max_tokens=3), 0.0)
    whole = model.run

    def run_few(output: SchedulerOutput) -> RunnerOutput:
        if len(output.chunks) > 2:
            raise MemoryError
        return whole(output)

    monkeypatch.setattr(model, "run", run_few)
    events, failures = run(engine)
    assert not failures and all(len(each) == 3 for each in events.values())


def test_what_waits_for_blocks_of_the_one_that_fails_computes_them() -> None:
    shared = tuple(index % 4 for index in range(12))
    engine, _ = make_engine(budget=16, poison=["ill"])
    engine.submit(make_assignment("ill", shared), 0.0)
    engine.submit(make_assignment("behind it", (*shared, 1)), 0.0)
    events, failures = run(engine)
    assert failures.keys() == {"ill"}
    assert tokens_of(events["behind it"]) == answer_to(make_assignment(prompt=(*shared, 1)))


def test_a_prefill_that_fails_exports_nothing_more() -> None:
    engine, model = make_engine(budget=16)
    engine.submit(make_assignment("ill", tuple(index % 4 for index in range(40)), stage=Stage.PREFILL), 0.0)
    first = engine.step(0.0)
    assert first is not None and first.segments
    model.poison = {"ill"}
    second = engine.step(0.0)
    assert second is not None and not second.segments and not second.finished
    assert [failure.request_id for failure in second.failures] == ["ill"]


def test_a_broken_model_is_found_at_once_and_ends_no_request() -> None:
    engine, model = make_engine(breaks_at=2)
    for index in range(8):
        engine.submit(make_assignment(str(index), (index % 4, 1, 2)), 0.0)
    engine.step(0.0)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.step(0.0)
    assert model.num_runs == 2 and not engine.still_runs()
    assert len(engine.scheduler.requests) == 8
    engine.scheduler.check_integrity()


@pytest.mark.parametrize("breaks_at", [2, 3, 5])
def test_a_model_that_breaks_while_the_one_is_looked_for_ends_no_request(breaks_at: int) -> None:
    engine, model = make_engine(poison=["0"], breaks_at=breaks_at)
    for index in range(8):
        engine.submit(make_assignment(str(index), (index % 4, 1, 2)), 0.0)
    with pytest.raises(ValueError, match="cannot stand 0"):
        engine.step(0.0)
    assert model.num_runs >= breaks_at and not engine.still_runs()
    assert len(engine.scheduler.requests) == 8
    engine.scheduler.check_integrity()


def test_work_that_nobody_waits_for_fails_alone_and_gives_back_what_it_holds() -> None:
    engine, _ = make_engine(poison=["idle"])
    assignment = make_assignment("a", (1, 2, 3, 0, 1), max_tokens=6)
    engine.submit(assignment, 0.0)
    engine.submit(make_assignment("idle", (3,) * 12, max_tokens=0, is_idle=True), 0.0)
    events, failures = run(engine)
    assert tokens_of(events["a"]) == answer_to(assignment)
    assert failures.keys() == {"idle"}
    assert not engine.scheduler.requests
    assert engine.pool.num_available == engine.pool.num_blocks


def test_a_suspect_begins_alone_and_is_named_alone() -> None:
    engine, _ = make_engine()
    noted: list[tuple[str, ...]] = []
    engine.tell_work(lambda request_ids: noted.append(tuple(request_ids)))
    assignments = [make_assignment(str(index), (index, 1, 2), max_tokens=2 * NUM_ALONE) for index in range(4)]
    assignments[1] = replace(assignments[1], is_suspect=True)
    assignments[3] = replace(assignments[3], is_suspect=True)
    for assignment in assignments:
        engine.submit(assignment, 0.0)
    events, failures = run(engine)
    assert not failures
    for assignment in assignments:
        assert tokens_of(events[assignment.request_id]) == answer_to(assignment), "the same tokens"
    steps = [names for names in noted if names][len(assignments) :]
    assert steps[: 3 * NUM_ALONE] == [("0", "2"), ("1",), ("3",)] * NUM_ALONE
    assert set(steps[3 * NUM_ALONE :]) == {("0", "1", "2", "3")}, "cleared, they are computed with the others"
    assert noted[-1] == ()


def test_a_suspect_that_raises_ends_alone() -> None:
    engine, _ = make_engine(poison=["1"])
    for index in range(3):
        engine.submit(replace(make_assignment(str(index), (index, 1, 2)), is_suspect=True), 0.0)
    events, failures = run(engine)
    assert failures.keys() == {"1"} and events.keys() == {"0", "2"}
