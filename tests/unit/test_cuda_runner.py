"""Which graphs there are, which one a step takes, and what goes into it."""

import random

import pytest
import torch

from raydix.engine.core.worker.request import Request
from raydix.engine.core.worker.step import ScheduledChunk
from raydix.engine.model.cuda_runner import (
    FIELDS,
    MAX_ENTRIES,
    GraphInput,
    GraphLayout,
    graph_rows,
    smallest_fitting,
)
from raydix.kernels.paged_attention.plan import AttentionPlanner, Heads
from raydix.kernels.paged_attention.work import ITEM_FIELDS
from tests.unit.builders import chain_of, make_assignment

BLOCK_SIZE = 4


def decode(num_tokens: int, blocks: list[int], store_from: int = 0, draft: tuple[int, ...] = ()) -> ScheduledChunk:
    request = Request(
        make_assignment(prompt=tuple(range(100, 100 + num_tokens))), chain_of(block_size=BLOCK_SIZE), arrival=0
    )
    request.blocks += blocks
    return ScheduledChunk(request, num_tokens - 1, 1 + len(draft), store_from, samples=True, draft=draft)


def planner(max_len: int = 3000, windows: tuple[int | None, ...] = (None,)) -> AttentionPlanner:
    heads = Heads(4, 2, 64, torch.bfloat16)
    return AttentionPlanner(heads, windows, torch.device("cpu"), max_len, deterministic=True)


def graph_input_of(rows: int, max_blocks: int = 3, windows: tuple[int | None, ...] = (None,)) -> GraphInput:
    made = planner(max_blocks * BLOCK_SIZE, windows)
    return GraphInput(GraphLayout.of(rows, made, max_blocks), made, pinned=False)


def fields(graph_input: GraphInput) -> list[list[int]]:
    """Of each row what stands in front, and the first three entries of its block table."""
    rows = graph_input.layout.rows
    front = graph_input.host[: rows * FIELDS].view(rows, FIELDS)
    return torch.cat((front, graph_input.tables(graph_input.host)[:, :3]), dim=1).tolist()


def test_graphs_reach_exactly_the_rows_that_an_engine_can_need() -> None:
    assert graph_rows(6) == (1, 2, 4, 6)
    assert graph_rows(1) == (1,)
    assert graph_rows(8) == (1, 2, 4, 8)
    assert graph_rows(1, max_drafted=8) == (1, 2, 4, 8, 9)
    assert graph_rows(4096)[-1] == 512


@pytest.mark.parametrize("max_requests", [1, 7, 64, 256, 4096])
def test_graphs_are_few_whatever_the_context(max_requests: int) -> None:
    rows = graph_rows(max_requests)
    assert list(rows) == sorted(set(rows)) and len(rows) <= 10
    assert len(graph_rows(256)) == 9


@pytest.mark.parametrize("max_len", [64, 8192, 131_072, 10_000_000])
def test_an_input_is_bounded(max_len: int) -> None:
    layout = GraphLayout.of(512, planner(max_len), -(-max_len // 16))
    assert layout.size <= MAX_ENTRIES + 20_000


def test_the_smallest_graph_that_fits_is_taken() -> None:
    graphs = graph_rows(6)
    short, long = decode(5, [0, 1]), decode(5, list(range(400)))
    assert smallest_fitting(graphs, [short]) == 1
    assert smallest_fitting(graphs, [short] * 3) == 4
    assert smallest_fitting(graphs, [short, long]) == 2
    assert smallest_fitting(graphs, [short] * 5) == 6
    assert smallest_fitting(graphs, [short] * 7) is None
    assert smallest_fitting((), [short]) is None
    huge = decode(5, list(range(MAX_ENTRIES // 2 + 1)))
    assert smallest_fitting(graphs, [huge]) == 1
    assert smallest_fitting(graphs, [huge, short]) is None, "their tables would be too wide"


def test_a_draft_takes_rows_of_its_own() -> None:
    graphs, drafted = graph_rows(6), decode(5, [0, 1, 2], draft=(1, 2, 3))
    assert smallest_fitting(graphs, [drafted]) == 4
    assert smallest_fitting(graphs, [drafted, decode(5, [0, 1])]) == 6
    assert smallest_fitting(graphs, [drafted, drafted]) is None


def test_only_decodes_take_graphs() -> None:
    graphs, request = graph_rows(6), decode(5, [0, 1]).request
    for chunk in (
        ScheduledChunk(request, 3, 2, 0, samples=True),
        ScheduledChunk(request, 3, 1, 0, samples=False),
        ScheduledChunk(request, 4, 1, 0, samples=True, scored=range(4, 5)),
    ):
        assert smallest_fitting(graphs, [decode(5, [0, 1]), chunk]) is None


def test_a_row_says_where_its_token_is_and_goes() -> None:
    graph_input = graph_input_of(4)
    graph_input.fill([decode(6, [9, 5]), decode(1, [3]), decode(4, [2], store_from=4)], BLOCK_SIZE)
    rows = fields(graph_input)
    assert rows[0] == [105, 5, 5 * BLOCK_SIZE + 1, 6, 9, 5, 0]
    assert rows[1] == [100, 0, 3 * BLOCK_SIZE, 1, 3, 0, 0]
    assert rows[2] == [103, 3, -1, 4, 2, 0, 0], "in a shared block: computed, not stored"
    assert rows[3] == [0, 0, -1, 1, 0, 0, 0], "padding stores nothing and sees one token of a block that there is"


def test_each_token_of_a_draft_is_a_sequence_that_ends_there() -> None:
    graph_input = graph_input_of(5)
    graph_input.fill([decode(7, [9, 5, 4], draft=(50, 51)), decode(1, [3])], BLOCK_SIZE)
    rows = fields(graph_input)
    assert rows[0] == [106, 6, 5 * BLOCK_SIZE + 2, 7, 9, 5, 4]
    assert rows[1] == [50, 7, 5 * BLOCK_SIZE + 3, 8, 9, 5, 4]
    assert rows[2] == [51, 8, 4 * BLOCK_SIZE, 9, 9, 5, 4]
    assert rows[3] == [100, 0, 3 * BLOCK_SIZE, 1, 3, 0, 0]
    assert rows[4] == [0, 0, -1, 1, 0, 0, 0]


@pytest.mark.parametrize("windows", [(None,), (20, None)])
def test_the_lists_say_where_each_row_s_table_is(windows: tuple[int | None, ...]) -> None:
    graph_input = graph_input_of(5, 500, windows)
    chunks = [decode(7, [9, 5], draft=(50,)), decode(400, list(range(100)))]
    used = graph_input.fill(chunks, BLOCK_SIZE)
    assert graph_input.width == 128 and used == graph_input.layout.tables + 5 * 128
    for window, place in zip(windows, graph_input.layout.lists, strict=True):
        assert place.window == window and graph_input.host[place.begin] == 2, "padding is in no list"
        items = graph_input.host[place.items :][: 2 * ITEM_FIELDS].view(2, ITEM_FIELDS).tolist()
        begins = [0, 0] if window is None else [0, 400 - window]
        assert sorted(item[:6] for item in items) == [
            [0, 2, 6, 0, begins[0], 8],
            [2, 1, 399, 256, begins[1], 400],
        ], "rows of a draft share a tile"


def test_what_earlier_steps_left_in_a_row_does_not_show() -> None:
    """Requests come, go, grow by blocks and change rows; only behind a row's own blocks may others stay."""
    max_blocks, chance = 200, random.Random(3)
    kept = graph_input_of(8, max_blocks)
    running: list[ScheduledChunk] = []
    widths = set()
    for _ in range(100):
        if running and chance.random() < 0.3:
            running.pop(chance.randrange(len(running)))
        if len(running) < 4 and chance.random() < 0.5:
            blocks = [chance.randrange(500) for _ in range(chance.choice((2, 9, 60, 63, 90)))]
            running.append(decode(len(blocks) * BLOCK_SIZE - 1, blocks, draft=(7,) * chance.randint(0, 1)))
        for chunk in running:
            if chance.random() < 0.2 and len(chunk.request.blocks) < max_blocks:
                chunk.request.blocks.append(chance.randrange(500))
        if not running:
            continue

        fresh = graph_input_of(8, max_blocks)
        used = {graph_input.fill(running, BLOCK_SIZE) for graph_input in (kept, fresh)}
        assert len(used) == 1
        widths.add(kept.width)
        counts = [len(chunk.request.blocks) for chunk in running for _ in range(chunk.num_tokens)]
        counts += [1] * (8 - len(counts))
        assert kept.width == fresh.width
        front = 8 * FIELDS
        assert torch.equal(kept.host[:front], fresh.host[:front])
        [given], [expected] = kept.layout.lists, fresh.layout.lists
        length = int(kept.host[given.begin]) * ITEM_FIELDS
        assert torch.equal(kept.host[given.begin :][: length + 4], fresh.host[expected.begin :][: length + 4])
        for row, count in enumerate(counts):
            tables = (each.tables(each.host)[row, :count] for each in (kept, fresh))
            assert torch.equal(*tables)
    assert widths == {64, 128}
