"""How elastic workers are divided between prompts and answers, and how many are wanted."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.manager.planner import (
    IDLE,
    MARGIN,
    TARGET,
    TOGETHER,
    Division,
    PoolLoad,
    _pressure,
    chunk_step_s,
    divide,
    max_streams,
    prefill_load,
    wanted,
)
from raydix.engine.core.objectives import Objectives

COSTS = WorkerCosts(step_s=0.01, prefill_token_s=1e-4, decode_token_s=1e-3)
"""A step of 512 prompt tokens takes 61 ms, a decode step of 10 streams 20 ms."""
TIGHT, LOOSE = Objectives(2.0, 0.03), Objectives(2.0, 0.5)

loads = st.builds(
    PoolLoad,
    prefill_rate=st.floats(0, 20),
    queued_s=st.floats(0, 20),
    num_decoding=st.integers(0, 200),
    costs=st.just(COSTS),
    token_budget=st.just(512),
)


def load(prefill_rate: float = 0.0, num_decoding: float = 0, queued_s: float = 0.0) -> PoolLoad:
    return PoolLoad(prefill_rate, queued_s, num_decoding, COSTS, 512)


def pressure(num_workers: int, division: Division, load: PoolLoad, objectives: Objectives) -> float:
    assert objectives.tpot_s is not None
    return _pressure(num_workers, division, load, prefill_load(load, objectives), objectives.tpot_s)


def test_without_an_objective_for_tokens_all_do_both() -> None:
    assert divide(4, load(3.0, 100), Objectives(ttft_s=1.0)) == TOGETHER
    assert divide(1, load(3.0, 100), TIGHT) == TOGETHER


def test_where_chunks_fit_beside_the_decodes_all_do_both() -> None:
    assert divide(3, load(1.5, 20), LOOSE) == TOGETHER


def test_where_chunks_are_too_long_prompts_and_answers_part() -> None:
    assert divide(3, load(1.8, 20), TIGHT) == Division(2, 1)


def test_the_time_of_chunks_counts_where_the_fit_finds_it_in_their_pairs() -> None:
    """Chunks that are all alike have their time in their tokens as well as in their pairs."""
    pair_s = COSTS.prefill_token_s / 256  # a chunk of 512 tokens takes as long as by its tokens
    by_pairs = WorkerCosts(step_s=0.01, prefill_token_s=0.0, decode_token_s=1e-3, pair_s=pair_s)
    assert chunk_step_s(by_pairs, 0, 512, 512) == pytest.approx(chunk_step_s(COSTS, 0, 512, 512))
    crowded = load(1.8, 20, queued_s=10.0)._replace(costs=by_pairs)
    assert divide(3, crowded, TIGHT) == divide(3, crowded._replace(costs=COSTS), TIGHT) == Division(2, 1)


def test_the_division_follows_the_load() -> None:
    assert divide(3, load(1.8, 20), TIGHT) == Division(2, 1)
    assert divide(3, load(0.9, 40), TIGHT, Division(2, 1)) == Division(1, 2)


def test_a_backlog_counts_by_the_objective() -> None:
    assert prefill_load(load(0.5, queued_s=4.0), TIGHT) == 2.5
    assert prefill_load(load(0.5, queued_s=5.0), Objectives()) == 1.5


def test_all_prefill_where_no_division_has_room_for_the_prompts() -> None:
    """As long as tokens stay in time; otherwise a few decode, apart from the prompts."""
    assert divide(3, load(9.0, 3), LOOSE, Division(2, 1)) == TOGETHER
    assert divide(3, load(9.0, 3), TIGHT, Division(2, 1)) == Division(2, 1)


@pytest.mark.parametrize("tpot_s", [0.001, 0.01])
def test_prompts_and_answers_part_where_no_worker_keeps_the_token_time(tpot_s: float) -> None:
    """A single stream misses the objective: apart from the prompts tokens come as near to it as they can."""
    missed = Objectives(2.0, tpot_s)
    crowded = load(1.8, 20)
    assert pressure(3, TOGETHER, crowded, missed) == pressure(3, Division(1, 2), crowded, missed) == inf
    assert divide(3, crowded, missed) == divide(3, crowded, missed, Division(2, 1)) == Division(1, 2)
    assert divide(3, load(9.0, 2), missed) == Division(2, 1), "more prompts than answers"
    assert divide(3, load(0.0, 20), missed) == TOGETHER, "there is nothing to keep away from the answers"
    assert divide(3, load(1.8, 0), missed) == TOGETHER


def test_a_quiet_pool_stays_as_it_is() -> None:
    assert divide(3, load(0.01, 1), TIGHT, Division(2, 1)) == Division(2, 1)


def test_a_division_of_other_workers_is_made_anew() -> None:
    assert sum(divide(4, load(2.0, 15), TIGHT, Division(2, 1))) in (0, 4)


@given(st.integers(2, 9), loads, st.integers(1, 8))
def test_no_division_is_much_better_than_the_chosen_one(num_workers: int, load: PoolLoad, present: int) -> None:
    now = Division(present, num_workers - present) if present < num_workers else TOGETHER
    chosen = divide(num_workers, load, TIGHT, now)
    others = [TOGETHER, *(Division(count, num_workers - count) for count in range(1, num_workers))]
    best = min(pressure(num_workers, each, load, TIGHT) for each in others)
    assert chosen in others
    here = pressure(num_workers, chosen, load, TIGHT)
    is_overrun = best > 1 and chosen == TOGETHER
    assert here <= IDLE or here * (1 - MARGIN) <= best or is_overrun
    assert divide(num_workers, load, TIGHT, chosen) == chosen, "the same load, the same division"


@given(loads, st.integers(1, 8))
def test_so_many_workers_are_wanted_as_are_enough(load: PoolLoad, most: int) -> None:
    number = wanted(load, TIGHT, most)
    assert 1 <= number <= most
    lasting = load._replace(queued_s=0.0)

    def least(num_workers: int) -> float:
        divisions = [TOGETHER, *(Division(count, num_workers - count) for count in range(1, num_workers))]
        return min(pressure(num_workers, each, lasting, TIGHT) for each in divisions)

    assert number == most or least(number) <= TARGET
    assert all(least(fewer) > TARGET for fewer in range(1, number))


@pytest.mark.parametrize("objectives", [TIGHT, Objectives()])
def test_no_worker_is_wanted_only_where_none_need_be_there_and_nobody_asks(objectives: Objectives) -> None:
    nothing = load(0.0, 0)
    assert wanted(nothing, objectives, 8, least=0) == 0
    assert wanted(nothing, objectives, 8) == 1
    assert wanted(nothing._replace(num_decoding=0.02), objectives, 8, least=0) == 1
    assert wanted(nothing._replace(prefill_rate=0.02), objectives, 8, least=0) == 1


def test_without_an_objective_for_tokens_prompts_alone_want_workers() -> None:
    assert wanted(load(2.0, 500), Objectives(), 8) == 3


def test_streams_within_an_objective() -> None:
    assert max_streams(load(), 0.03) == 20
    assert max_streams(load(), 0.005) == 0
    assert max_streams(load(), 0.03, busy=0.2) < 20
    assert pressure(2, Division(1, 1), load(0.0, 3), Objectives(1.0, 0.005)) == inf


@pytest.mark.parametrize(("num_tokens", "prefilled"), [(100, 100), (5000, 502)])
def test_a_chunk_fills_the_budget_at_most(num_tokens: int, prefilled: int) -> None:
    assert chunk_step_s(COSTS, 10, num_tokens, 512) == pytest.approx(0.02 + prefilled * 1e-4)
