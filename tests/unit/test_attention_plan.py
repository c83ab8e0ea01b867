"""Plans of attention on GPUs that are not here: memory within its bound at any load, and no program without work."""

from typing import Any

import numpy as np
import pytest
import torch

from raydix.kernels.paged_attention import plan as plans
from raydix.kernels.paged_attention.plan import MAX_PARTIAL_BYTES, AttentionPlan, AttentionPlanner, Heads, Launch
from raydix.kernels.paged_attention.work import ITEM_FIELDS, MERGE_FIELDS, NO_SLOT, Sequences

MODELS = {
    "Llama-3.1-8B": Heads(32, 8, 128, torch.bfloat16),
    "Phi-3-mini": Heads(32, 32, 96, torch.bfloat16),
    "Gemma-3-4B": Heads(8, 4, 256, torch.bfloat16),
    "SmolLM2": Heads(9, 3, 64, torch.bfloat16),
    "float32": Heads(40, 8, 128, torch.float32),
}
LONGEST = 131_072
# Queries and positions of each sequence.
LOADS = {
    "one": [(1, LONGEST)],
    "256 as long as may be": [(1, LONGEST)] * 256,
    "255 as long as may be, and a chunk": [(1, LONGEST)] * 255 + [(512, LONGEST)],
    "one long among 256": [(1, 500)] * 255 + [(1, 17_000)],
    "256 short": [(1, 500)] * 256,
    "drafts": [(9, 8000)] * 64,
    "a prompt": [(8192, LONGEST)],
    "short chunks": [(64, LONGEST)] * 3 + [(1, 40)] * 20,
}
Modes = tuple[bool, bool]
MODES = [(False, False), (True, False), (True, True)]


@pytest.fixture(params=MODES, ids=["fast", "deterministic", "deterministic on Hopper"])
def deterministic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A device of 132 multiprocessors."""
    deterministic, is_hopper = request.param
    monkeypatch.setattr(plans, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(plans, "is_hopper", lambda device: is_hopper)
    return bool(deterministic)


def sequences_of(load: list[tuple[int, int]]) -> Sequences:
    queries, contexts = np.array(load, np.int64).T
    return Sequences(np.cumsum(queries) - queries, queries, contexts, np.arange(len(load)) * 8192)


def lists(launch: Launch) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The items and merges of a launch."""
    num_items, num_merges = launch.counts[:2].tolist()
    items = launch.items[: num_items * ITEM_FIELDS].view(-1, ITEM_FIELDS)
    return items.numpy(), launch.merges[: num_merges * MERGE_FIELDS].view(-1, MERGE_FIELDS).numpy()


def check_within(plan: AttentionPlan) -> None:
    num_slots = plan.partials.num_slots
    for launch in plan.launches:
        items, merges = lists(launch)
        cut = items[items[:, 6] != NO_SLOT]
        pieces = -(-cut[:, 5] // plan.segment) - cut[:, 4] // plan.segment if plan.deterministic else 1
        assert (cut[:, 6] + pieces * cut[:, 1] <= num_slots).all()
        assert (merges[:, 1] + (merges[:, 3] - 1) * merges[:, 2] < num_slots).all()


@pytest.mark.parametrize("window", [None, 4096])
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("model", MODELS)
def test_partial_results_of_any_load_are_bounded(
    model: str, load: str, window: int | None, deterministic: bool
) -> None:
    heads = MODELS[model]
    planner = AttentionPlanner(heads, (window,), torch.device("cpu"), LONGEST, deterministic=deterministic)
    assert planner.partial_bytes <= MAX_PARTIAL_BYTES
    plan = planner.plan(sequences_of(LOADS[load]))[window]
    check_within(plan)
    assert 1 <= len(plan.launches) <= 2
    for launch in plan.launches:
        items, merges = lists(launch)
        assert (len(items), len(merges)) == (launch.max_items, launch.max_merges), "programs are started for these"
        assert len(items) and (items[:, 5] > items[:, 4]).all()
    tokens = [row for launch in plan.launches for item in lists(launch)[0] for row in range(item[0], sum(item[:2]))]
    assert set(tokens) == set(range(sum(count for count, _ in LOADS[load]))), "every query is in an item"


@pytest.mark.parametrize("model", MODELS)
def test_a_single_stream_fills_the_device(model: str, deterministic: bool) -> None:
    planner = AttentionPlanner(MODELS[model], (None,), torch.device("cpu"), LONGEST, deterministic=deterministic)
    [launch] = planner.plan(sequences_of(LOADS["one"]))[None].launches
    assert launch.max_items * MODELS[model].num_kv_heads >= 2 * 132


def test_what_nothing_cuts_needs_no_memory(deterministic: bool) -> None:
    heads = MODELS["Llama-3.1-8B"]
    planner = AttentionPlanner(heads, (None,), torch.device("cpu"), 512, deterministic=deterministic)
    assert planner.partial_bytes == 0
    [launch] = planner.plan(sequences_of([(1, 512)] * 3))[None].launches
    assert (launch.max_items, launch.max_merges) == (3, 0)


@pytest.mark.parametrize("windows", [(None,), (4096, None)])
def test_a_graph_has_room_for_the_lists_of_any_step(windows: tuple[int | None, ...], deterministic: bool) -> None:
    planner = AttentionPlanner(
        MODELS["Llama-3.1-8B"], windows, torch.device("cpu"), LONGEST, deterministic=deterministic
    )
    places = planner.places(256, begin=1024)
    memory = np.full(places[-1].end, -7, np.int32)
    chance = np.random.default_rng(0)
    drafted = list(zip([1, 9, 4, 8, 6] * 9, map(int, chance.integers(9, LONGEST, 45)), strict=True))
    for load in (*LOADS.values(), drafted, [(1, int(length)) for length in chance.integers(1, LONGEST, 256)]):
        if sum(count for count, _ in load) > 256:
            continue
        planner.write(sequences_of(load), places, memory)
        assert (memory[:1024] == -7).all()
        made = planner.plans(places, torch.from_numpy(memory))
        expected = planner.plan(sequences_of(load))
        for window in windows:
            check_within(made[window])
            [launch], other = made[window].launches, expected[window].launches[0]
            items, merges = lists(launch)
            assert len(items) <= launch.max_items and len(merges) <= launch.max_merges
            assert items[:, 1].sum() >= sum(count for count, _ in load)
            if all(count == 1 for count, _ in load):  # those of more may take other tiles outside of graphs
                assert all(np.array_equal(*pair) for pair in zip(lists(launch), lists(other), strict=True))
                assert launch.tiles == other.tiles
    assert all(offset % 4 == 0 for place in places for offset in (place.begin, place.items, place.merges))
