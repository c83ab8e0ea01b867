"""Costs are found again in what was measured."""

import random
from math import ceil

import pytest

from raydix.engine.core.costs import MAX_CONTEXT_WEIGHT, CostFit, LinearFit, StepShape, WorkerCosts, alone

TRUE = WorkerCosts(3e-3, 2.5e-4, 6e-4, 2e-9, 1.5e-3, 4e-10)


def step_s(shape: StepShape) -> float:
    return (
        TRUE.step_s
        + shape.num_prefill_tokens * TRUE.prefill_token_s
        + shape.num_decodes * TRUE.decode_token_s
        + shape.num_pairs * TRUE.pair_s
    )


def shapes(seed: int, count: int) -> list[StepShape]:
    source = random.Random(seed)
    made = []
    for _ in range(count):
        prefill, decodes, context = source.choice([0, 64, 300, 512]), source.randint(0, 60), source.randint(0, 8000)
        made.append(StepShape(prefill, decodes, (prefill + decodes) * context))
    return made


def test_costs_are_found() -> None:
    fit = CostFit(WorkerCosts())
    noise = random.Random(1)
    for shape in shapes(0, 500):
        fit.step(shape, step_s(shape) * noise.uniform(0.9, 1.1))
        num_bytes = noise.randint(0, 1 << 25)
        fit.imported(num_bytes, TRUE.import_s + num_bytes * TRUE.import_byte_s)
        fit.costs()
    for shape in shapes(2, 50):
        found = fit.costs()
        predicted = (
            found.decode_step_s(shape.num_decodes)
            + shape.num_prefill_tokens * found.prefill_token_s
            + shape.num_pairs * found.pair_s
        )
        assert predicted == pytest.approx(step_s(shape), rel=0.1, abs=1e-3)
    assert fit.costs().import_all_s(1 << 24) == pytest.approx(TRUE.import_all_s(1 << 24), rel=0.02)
    assert TRUE.import_all_s(0) == 0


def test_what_is_not_seen_stays_as_it_was() -> None:
    fit = CostFit(WorkerCosts())
    for shape in shapes(0, 500):
        fit.step(shape, step_s(shape))
        fit.costs()
    before = fit.costs()
    for _ in range(3000):
        fit.step(StepShape(0, 8, 8000.0), step_s(StepShape(0, 8, 8000.0)))
        fit.costs()
    assert fit.costs().prefill_token_s == pytest.approx(before.prefill_token_s, rel=0.05)


def test_one_slow_import_does_not_make_all_seem_slow() -> None:
    fit = CostFit(WorkerCosts())
    fit.imported(1 << 20, 2.0)
    assert fit.costs().import_all_s(1 << 20) < 5 * WorkerCosts().import_all_s(1 << 20)


def test_imports_that_became_slow_are_known_soon() -> None:
    fit = CostFit(WorkerCosts())
    for _ in range(20):
        fit.imported(1 << 20, 0.2)
        fit.costs()
    assert fit.costs().import_all_s(1 << 20) == pytest.approx(0.2, rel=0.3)


def test_imports_that_seemed_slow_are_tried_again_after_minutes() -> None:
    fit, prior = CostFit(WorkerCosts()), WorkerCosts().import_all_s(1 << 20)
    for _ in range(200):
        fit.imported(1 << 20, 0.2)
        fit.costs()
    for _ in range(2 * 60):
        fit.fade()
    assert fit.costs().import_all_s(1 << 20) > 0.1, "a minute later it is not forgotten"
    for _ in range(2 * 60 * 15):
        fit.fade()
        fit.costs()
    assert fit.costs().import_all_s(1 << 20) < 2 * prior


def test_no_cost_is_negative() -> None:
    fit = LinearFit((1.0, 1.0), (0.0, 0.0))
    for x, y in ((1.0, 5.0), (2.0, 4.0), (3.0, 3.0)) * 20:
        fit.add((1.0, x), y)
    constant, slope = fit.solve()
    assert slope == 0 and constant == pytest.approx(4.0, rel=0.2)


def test_a_prefill_costs_its_steps_its_tokens_and_what_they_attend_to() -> None:
    costs = WorkerCosts(0.01, 0.001, 0.002, 1e-6)
    assert costs.prefill_s(100, 50, token_budget=64, num_decodes=0) == pytest.approx(2 * 0.01 + 0.1 + 100 * 100 * 1e-6)
    weight = 1 + 64 * 100 * 1e-6 / (0.01 + 64 * 0.001)
    assert costs.context_weight(100, 64) == pytest.approx(weight)
    assert costs.prefill_s(100, 50, token_budget=64, num_decodes=14) == pytest.approx(
        ceil(100 * weight / 50) * (0.01 + 14 * 0.002) + 0.1 + 100 * 100 * 1e-6
    )


@pytest.mark.parametrize(
    ("pair_s", "weight"),
    [
        (0.0, 1 + 1.5 * 2.0),  # the fit has forgotten what a context costs
        (2e-7, 1 + 1.5 * 2.0),
        (1e-6, 1 + 4.0),
        (1.0, 1 + 3 * 2.0),  # or takes the time of everything for that of contexts
    ],
)
def test_the_weight_of_a_context_is_near_what_the_model_multiplies(pair_s: float, weight: float) -> None:
    costs = WorkerCosts(step_s=0.0, prefill_token_s=1e-3, pair_s=pair_s, pair_share=5e-4)
    assert costs.context_weight(4_000, 256) == pytest.approx(weight)


def test_no_fit_changes_what_the_model_multiplies() -> None:
    fit = CostFit(WorkerCosts(pair_share=5e-4))
    fit.step(StepShape(256, 8, 256 * 4_000.0), 0.2)
    assert fit.costs().pair_share == 5e-4


def test_the_weight_of_a_context_is_bounded() -> None:
    assert WorkerCosts(pair_s=1.0).context_weight(10**6, 256) == MAX_CONTEXT_WEIGHT
    assert WorkerCosts(0.0, 0.0, 0.0, pair_s=1.0).context_weight(100, 256) == 1.0


@pytest.mark.parametrize(("num_before", "beside", "without"), [(0, 1, 1), (2_000, 3, 1), (7_000, 8, 2), (10**6, 16, 4)])
def test_a_step_of_prefills_alone_may_be_longer_but_not_by_any_context(
    num_before: int, beside: float, without: float
) -> None:
    costs = WorkerCosts(step_s=0.0, prefill_token_s=1e-3, pair_s=1e-6)
    assert costs.context_weight(num_before, 256) == pytest.approx(beside)
    assert alone(costs.context_weight(num_before, 256)) == pytest.approx(without)


def test_what_swapping_costs_is_learnt_from_steps() -> None:
    fit, source = CostFit(WorkerCosts()), random.Random(3)
    for shape in shapes(4, 500):
        num_swaps = source.choice([0, 0, 1, 2])
        num_bytes = num_swaps * source.randint(0, 1 << 23)
        swapping = StepShape(shape.num_prefill_tokens, shape.num_decodes, shape.num_pairs, num_swaps, num_bytes)
        fit.step(swapping, step_s(shape) + num_swaps * 2e-3 + num_bytes * 5e-10)
    assert fit.costs().swap_once_s(1 << 23) == pytest.approx(2e-3 + (1 << 23) * 5e-10, rel=0.05)


@pytest.mark.parametrize(("jitter", "spread"), [(0.0, 0.0), (0.1, 0.058), (0.4, 0.23)])
def test_the_spread_is_how_far_steps_are_off(jitter: float, spread: float) -> None:
    fit, noise = CostFit(WorkerCosts()), random.Random(5)
    assert fit.costs().spread == WorkerCosts().spread
    for shape in shapes(6, 1000):
        fit.step(shape, step_s(shape) * (1 + noise.uniform(-jitter, jitter)))
        fit.costs()
    assert fit.costs().spread == pytest.approx(spread, rel=0.4, abs=0.01)


def test_a_worker_that_was_slow_and_then_idle_learns_soon_that_it_is_not() -> None:
    shape = StepShape(256, 4, 256 * 300.0)
    learnt = []
    for idle_s in (0, 600):
        fit = CostFit(WorkerCosts())
        for _ in range(300):
            fit.step(shape, 3 * step_s(shape))
            fit.costs()
        for _ in range(2 * idle_s):
            fit.fade()
        for _ in range(3):
            fit.step(shape, step_s(shape))
        learnt.append(fit.costs().prefill_token_s)
    assert learnt[1] < 0.6 * learnt[0]
