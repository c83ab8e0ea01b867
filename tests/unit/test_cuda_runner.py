"""Which graphs there are, which one a step takes, and what goes into it."""

import random

import pytest
import torch

from raydix.engine.core.worker.request import Request
from raydix.engine.core.worker.step import ScheduledChunk
from raydix.engine.model.cuda_runner import FIELDS, MAX_TOKENS, GraphInput, GraphShape, graph_shapes, smallest_fitting
from tests.unit.builders import chain_of, make_assignment

BLOCK_SIZE = 4


def decode(num_tokens: int, blocks: list[int], store_from: int = 0, draft: tuple[int, ...] = ()) -> ScheduledChunk:
    request = Request(
        make_assignment(prompt=tuple(range(100, 100 + num_tokens))), chain_of(block_size=BLOCK_SIZE), arrival=0
    )
    request.blocks += blocks
    return ScheduledChunk(request, num_tokens - 1, 1 + len(draft), store_from, samples=True, draft=draft)


def test_shapes_reach_exactly_what_an_engine_can_need() -> None:
    assert graph_shapes(6, 3000, 16) == tuple(GraphShape(r, b) for r in (1, 2, 4, 6) for b in (64, 188))
    assert graph_shapes(1, 100, 16) == (GraphShape(1, 7),)
    assert graph_shapes(8, 1024, 16)[-1] == GraphShape(8, 64)
    assert graph_shapes(1, 1024, 16, max_drafted=8) == tuple(GraphShape(rows, 64) for rows in (1, 2, 4, 8, 9))


@pytest.mark.parametrize("max_requests", [1, 7, 64, 4096])
@pytest.mark.parametrize("max_model_len", [64, 8192, 131_072, 1_000_000])
def test_shapes_are_few_and_bounded(max_requests: int, max_model_len: int) -> None:
    shapes = graph_shapes(max_requests, max_model_len, 16)
    assert list(shapes) == sorted(set(shapes)) and len(shapes) <= 60
    assert all(shape.rows * (shape.max_blocks - 1) * 16 < MAX_TOKENS for shape in shapes)


def test_the_smallest_graph_that_fits_is_taken() -> None:
    shapes = graph_shapes(6, 3000, BLOCK_SIZE)
    short, long = decode(5, [0, 1]), decode(5, list(range(400)))
    assert smallest_fitting(shapes, [short]) == GraphShape(1, 256)
    assert smallest_fitting(shapes, [short] * 3) == GraphShape(4, 256)
    assert smallest_fitting(shapes, [short, long]) == GraphShape(2, 750)
    assert smallest_fitting(shapes, [short] * 5) == GraphShape(6, 256)
    assert smallest_fitting(shapes, [short] * 7) is None
    assert smallest_fitting(shapes, [decode(5, list(range(751)))]) is None
    assert smallest_fitting((), [short]) is None


def test_a_draft_takes_rows_of_its_own() -> None:
    shapes, drafted = graph_shapes(6, 3000, BLOCK_SIZE), decode(5, [0, 1, 2], draft=(1, 2, 3))
    assert smallest_fitting(shapes, [drafted]) == GraphShape(4, 256)
    assert smallest_fitting(shapes, [drafted, decode(5, [0, 1])]) == GraphShape(6, 256)
    assert smallest_fitting(shapes, [drafted, drafted]) is None


def test_only_decodes_take_graphs() -> None:
    shapes, request = graph_shapes(6, 3000, BLOCK_SIZE), decode(5, [0, 1]).request
    for chunk in (
        ScheduledChunk(request, 3, 2, 0, samples=True),
        ScheduledChunk(request, 3, 1, 0, samples=False),
        ScheduledChunk(request, 4, 1, 0, samples=True, scored=range(4, 5)),
    ):
        assert smallest_fitting(shapes, [decode(5, [0, 1]), chunk]) is None


def test_a_row_says_where_its_token_is_and_goes() -> None:
    shape = GraphShape(4, 3)
    graph_input = GraphInput(shape, pinned=False)
    graph_input.fill([decode(6, [9, 5]), decode(1, [3]), decode(4, [2], store_from=4)], BLOCK_SIZE)
    rows = graph_input.host.view(4, FIELDS + 3).tolist()
    assert rows[0] == [105, 5, 5 * BLOCK_SIZE + 1, 6, 9, 5, 0]
    assert rows[1] == [100, 0, 3 * BLOCK_SIZE, 1, 3, 0, 0]
    assert rows[2] == [103, 3, -1, 4, 2, 0, 0], "in a shared block: computed, not stored"
    assert rows[3] == [0, 0, -1, 1, 0, 0, 0], "padding stores nothing and sees one token of a block that there is"


def test_each_token_of_a_draft_is_a_sequence_that_ends_there() -> None:
    shape = GraphShape(5, 3)
    graph_input = GraphInput(shape, pinned=False)
    graph_input.fill([decode(7, [9, 5, 4], draft=(50, 51)), decode(1, [3])], BLOCK_SIZE)
    rows = graph_input.host.view(5, FIELDS + 3).tolist()
    assert rows[0] == [106, 6, 5 * BLOCK_SIZE + 2, 7, 9, 5, 4]
    assert rows[1] == [50, 7, 5 * BLOCK_SIZE + 3, 8, 9, 5, 4]
    assert rows[2] == [51, 8, 4 * BLOCK_SIZE, 9, 9, 5, 4]
    assert rows[3] == [100, 0, 3 * BLOCK_SIZE, 1, 3, 0, 0]
    assert rows[4] == [0, 0, -1, 1, 0, 0, 0]


def test_what_earlier_steps_left_in_a_row_does_not_show() -> None:
    """Requests come, go, grow by blocks and change rows; only behind a row's own blocks may others stay."""
    shape, chance = GraphShape(rows=8, max_blocks=20), random.Random(3)
    kept = GraphInput(shape, pinned=False)
    running: list[ScheduledChunk] = []
    for _ in range(100):
        if running and chance.random() < 0.3:
            running.pop(chance.randrange(len(running)))
        if len(running) < 4 and chance.random() < 0.5:
            blocks = [chance.randrange(500) for _ in range(chance.randint(2, 15))]
            running.append(decode(len(blocks) * BLOCK_SIZE - 1, blocks, draft=(7,) * chance.randint(0, 1)))
        for chunk in running:
            if chance.random() < 0.2 and len(chunk.request.blocks) < shape.max_blocks:
                chunk.request.blocks.append(chance.randrange(500))

        fresh = GraphInput(shape, pinned=False)
        for graph_input in (kept, fresh):
            graph_input.fill(running, BLOCK_SIZE)
        counts = [len(chunk.request.blocks) for chunk in running for _ in range(chunk.num_tokens)]
        counts += [1] * (shape.rows - len(counts))
        given, expected = (each.host.view(shape.rows, -1) for each in (kept, fresh))
        for row, count in enumerate(counts):
            assert torch.equal(given[row, : FIELDS + count], expected[row, : FIELDS + count])
