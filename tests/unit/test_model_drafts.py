"""Drafts of a smaller model: asked for as far as they are worth their time, and never seen in an answer."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.costs import WorkerCosts
from engine.core.settings import DraftLimits, SchedulerLimits
from engine.core.types import DraftSource
from engine.core.worker.block_pool import BlockPool
from engine.core.worker.drafts.agreement import EXPLORING, FIRST_RATE, Agreements
from engine.core.worker.drafts.budget import MAX_TOKENS, DecodeStep
from engine.core.worker.drafts.draft_model import ModelCostFit, ModelCosts, Wanted
from engine.core.worker.drafts.drafter import Drafter
from engine.core.worker.drafts.model_guesser import Ask, num_guesses
from engine.core.worker.request import Request
from engine.model.engine import Engine
from tests.unit.builders import FINGERPRINT, FakeModel, answer_to, chain_of, make_assignment, sampled_after
from tests.unit.test_drafts import answers

CHEAP = WorkerCosts(step_s=8e-3, decode_token_s=3e-4, draft_token_s=1e-5)
QUICK = ModelCosts(pass_s=1e-4, row_s=1e-5, token_s=1e-5)
ALONE = DecodeStep(1, 8e-3)
MODEL_ONLY = DraftLimits(sources=(DraftSource.MODEL,), depth=5)


class Guessing:
    """A draft model that knows what `FakeModel` samples, and errs at every `errs_at`-th position."""

    def __init__(self, errs_at: int = 10_000, costs: ModelCosts = QUICK, num_rooms: int = 99) -> None:
        self.errs_at = errs_at
        self.model_costs = costs
        self.num_rooms = num_rooms
        self.num_asked = 0
        self.num_rests = 0
        self.kept: set[str] = set()

    def costs(self) -> ModelCosts:
        return self.model_costs

    def num_missing(self, request: Request, num_tokens: int) -> int | None:
        known = request.request_id in self.kept
        return 1 if known or len(self.kept) < self.num_rooms else None

    def guesses(self, wanted: Sequence[Wanted]) -> Mapping[str, Sequence[int]]:
        self.num_asked += 1
        found: dict[str, Sequence[int]] = {}
        for request, count in wanted:
            if request.request_id in self.kept or len(self.kept) < self.num_rooms:
                self.kept.add(request.request_id)
                found[request.request_id] = self._guess(request, count)
        return found

    def rest(self) -> None:
        self.num_rests += 1

    def keep(self, requests: Collection[Request]) -> None:
        self.kept &= {request.request_id for request in requests}

    def take_seconds(self) -> float:
        return 0.25

    def _guess(self, request: Request, count: int) -> list[int]:
        token_ids = list(request.token_ids)
        for _ in range(count):
            token_id = sampled_after(request.chain, token_ids)
            token_ids.append((token_id + (len(token_ids) % self.errs_at == 0)) % 4)
        return token_ids[len(request.token_ids) :]


def engine_with(model: Guessing, limits: DraftLimits = MODEL_ONLY, num_blocks: int = 64) -> Engine:
    pool = BlockPool(num_blocks, 4)
    fake = FakeModel(pool)
    step_limits = SchedulerLimits(64, 64)
    drafter = Drafter(limits, model=model)
    engine = Engine(fake, fake, pool, step_limits, num_blocks * 4, FINGERPRINT, drafter=drafter)
    engine.scheduler.learn_costs(CHEAP)
    return engine


def counts_of(engine: Engine) -> tuple[int, int]:
    counts = engine.scheduler.drafting.counts[DraftSource.MODEL]
    return counts.num_drafted, counts.num_accepted


# Answers


@given(
    prompts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), min_size=1, max_size=4),
    num_blocks=st.integers(24, 64),
    errs_at=st.integers(1, 9),
    num_rooms=st.integers(0, 4),
)
def test_answers_are_the_same_with_drafts(
    prompts: list[list[int]], num_blocks: int, errs_at: int, num_rooms: int
) -> None:
    engine = engine_with(Guessing(errs_at, num_rooms=num_rooms), num_blocks=num_blocks)
    assignments = [make_assignment(str(index), prompt, max_tokens=60) for index, prompt in enumerate(prompts)]
    for assignment in assignments:
        engine.submit(assignment, 0.0)
    assert answers(engine) == {each.request_id: answer_to(each) for each in assignments}
    assert engine.pool.num_available == engine.pool.num_blocks


def test_a_model_that_is_right_makes_the_steps_fewer() -> None:
    engine, assignment = engine_with(Guessing()), make_assignment(prompt=(1, 2, 3), max_tokens=31)
    engine.submit(assignment, 0.0)
    num_steps = 0
    while (result := engine.step(0.0)) is not None:
        num_steps += 1
        assert result.drafting_s == 0.25
    num_drafted, num_accepted = counts_of(engine)
    assert num_drafted == num_accepted == 25 and num_steps == 1 + 5


def test_a_model_that_errs_is_not_asked_any_more() -> None:
    model = Guessing(errs_at=1, costs=ModelCosts(pass_s=4e-3, row_s=1e-4, token_s=1e-5))
    engine = engine_with(model)
    for name in "ab":
        assignment = make_assignment(name, (1, 2, 3), max_tokens=40)
        engine.submit(assignment, 0.0)
        assert answers(engine) == {name: answer_to(assignment)}
    assert 0 < model.num_asked < 12 and model.num_rests > 50


def test_a_request_without_room_has_no_drafts_until_another_one_ends() -> None:
    engine = engine_with(model := Guessing(num_rooms=1))
    assignments = [make_assignment(name, prompt, max_tokens=20) for name, prompt in (("a", (1, 2)), ("b", (2, 1)))]
    for assignment in assignments:
        engine.submit(assignment, 0.0)
    ends: dict[str, int] = {}
    num_steps = 0
    while (result := engine.step(0.0)) is not None:
        num_steps += 1
        ends |= {request.request_id: num_steps for request in result.finished}
        assert len(model.kept) <= 1
    assert ends["a"] < ends["b"] < 20, "the second one was guessed on when the first one had ended"


def test_requests_that_do_not_want_drafts_are_not_guessed_on() -> None:
    engine = engine_with(model := Guessing())
    assignment = make_assignment(prompt=(1, 2, 3), max_tokens=9)
    engine.submit(replace(assignment, sampling=replace(assignment.sampling, speculation=False)), 0.0)
    answers(engine)
    assert not model.num_asked


def test_without_its_source_the_model_is_not_asked() -> None:
    engine = engine_with(model := Guessing(), DraftLimits(sources=(DraftSource.REQUEST,)))
    engine.submit(make_assignment(prompt=(1, 2, 3), max_tokens=9), 0.0)
    result = engine.step(0.0)
    assert result is not None and result.drafting_s == 0
    answers(engine)
    assert not model.num_asked


def test_what_the_text_promises_is_not_asked_of_the_model() -> None:
    engine = engine_with(model := Guessing(errs_at=2), DraftLimits(sources=(DraftSource.PREDICTION, DraftSource.MODEL)))
    assignment = make_assignment(prompt=(1, 2, 3), max_tokens=60)
    engine.submit(assignment, 0.0)
    assert answers(engine) == {"a": answer_to(assignment)}
    asked_once = model.num_asked
    predicted = replace(assignment, request_id="b", prediction=tuple(answer_to(assignment)))
    engine.submit(predicted, 0.0)
    assert answers(engine) == {"b": answer_to(assignment)}
    assert model.num_asked < 2 * asked_once
    assert engine.scheduler.drafting.counts[DraftSource.PREDICTION].num_accepted > 20


# The number of guesses


def ask(rate: float, *, depth: int = 8, check_s: float = 1e-4, num_missing: int = 1) -> Ask:
    request = Request(make_assignment(max_tokens=64), chain_of(), arrival=0)
    return Ask(request, [rate ** (index + 1) for index in range(depth)], check_s, num_missing)


def test_passes_are_added_while_they_pay() -> None:
    assert num_guesses([], ALONE, QUICK) == []
    assert num_guesses([ask(0.99)], ALONE, QUICK) == [8]
    assert 0 < num_guesses([ask(0.5)], ALONE, QUICK)[0] < 8
    assert num_guesses([ask(0.01)], ALONE, QUICK) == [0]


def test_a_dear_model_is_not_asked() -> None:
    as_dear = ModelCosts(pass_s=8e-3, row_s=3e-4, token_s=3e-4)
    assert num_guesses([ask(0.9)], ALONE, as_dear) == [0]
    third = ModelCosts(pass_s=2.5e-3, row_s=1e-4, token_s=1e-4)
    assert 0 < num_guesses([ask(0.9)], ALONE, third)[0] < num_guesses([ask(0.9)], ALONE, QUICK)[0]


def test_a_pass_is_shared() -> None:
    dear = ModelCosts(pass_s=6e-3, row_s=1e-5, token_s=1e-5)
    assert num_guesses([ask(0.6)], DecodeStep(1, 8e-3), dear) == [0]
    assert num_guesses([ask(0.6)] * 4 + [ask(0.01)], DecodeStep(5, 9e-3), dear)[-1] == 0
    together = num_guesses([ask(0.9)] * 8, DecodeStep(8, 40e-3), dear)
    assert min(together) > 0


def test_beside_many_decodes_the_model_is_silent() -> None:
    costs = ModelCosts(pass_s=2e-3, row_s=2e-4, token_s=1e-4)
    assert set(num_guesses([ask(0.8, check_s=3e-4)] * 64, DecodeStep(64, 27e-3), costs)) == {0}


def test_a_long_prompt_is_begun_for_a_long_answer_only() -> None:
    costs = ModelCosts(pass_s=1e-3, row_s=1e-4, token_s=3e-4)
    short, long = ask(0.8), ask(0.8, num_missing=4000)
    assert num_guesses([short], ALONE, costs)[0] > 0
    assert num_guesses([long], ALONE, costs) == [0]


def test_a_step_has_so_many_guesses_at_most() -> None:
    free = ModelCosts(0.0, 0.0, 0.0)
    asks = [ask(0.99, depth=16, check_s=1e-6) for _ in range(20)]
    assert sum(num_guesses(asks, DecodeStep(20, 20e-3), free)) == MAX_TOKENS


# Rates and costs


def test_the_rate_of_a_request_is_learnt_and_the_next_one_begins_with_it() -> None:
    agreements = Agreements()
    first = agreements.of("a")
    assert first.rate == FIRST_RATE and first.chances(2) == [FIRST_RATE, FIRST_RATE**2]
    for end in range(100):
        first.guessed(end, [1, 1, 2])
        first.follow([*[1] * (end + 1), 3])
    assert agreements.of("a") is first and first.rate == pytest.approx(0.5, abs=0.1)
    agreements.keep({"b"})
    assert agreements.of("a") is not first and agreements.of("a").rate == pytest.approx(0.5, abs=0.1)


def test_guesses_count_up_to_the_first_wrong_one_and_once() -> None:
    agreement = Agreements().of("a")
    agreement.guessed(2, [7, 8, 9])
    agreement.follow([0, 0])
    assert agreement.rate == FIRST_RATE, "no token has come"
    agreement.guessed(2, [7, 8, 9])
    agreement.follow([0, 0, 7, 8])
    after = agreement.rate
    assert after > FIRST_RATE
    agreement.follow([0, 0, 7, 8, 5])
    assert agreement.rate == after


def test_a_model_of_no_use_gets_another_chance() -> None:
    agreements = Agreements()
    for index in range(200):
        bad = agreements.of("bad")
        bad.guessed(index, [1])
        bad.follow([0] * (index + 1))
    rates = [agreements.of(str(index)).rate for index in range(EXPLORING)]
    assert rates.count(FIRST_RATE) == 1 and min(rates) < 0.05


def test_the_costs_of_a_model_are_learnt_and_fade() -> None:
    fit = ModelCostFit()
    assert fit.costs().pass_s == pytest.approx(ModelCosts().pass_s)
    for index in range(400):
        num_rows, num_others = index % 9, 20 * (index % 7)
        fit.add(num_rows, num_others, 5e-3 + 2e-4 * num_rows + 3e-4 * num_others)
        learnt = fit.costs()
    assert learnt.pass_s == pytest.approx(5e-3, rel=0.2)
    assert learnt.row_s == pytest.approx(2e-4, rel=0.5) and learnt.token_s == pytest.approx(3e-4, rel=0.5)
    for _ in range(20_000):
        fit.rest()
    assert fit.costs().pass_s == pytest.approx(ModelCosts().pass_s, rel=0.1)
