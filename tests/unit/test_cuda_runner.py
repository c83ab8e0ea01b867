"""Which graphs there are, which one a step takes, and what goes into it."""

import pytest
import torch

from raydix.engine.core.worker.request import Request
from raydix.engine.core.worker.step import ScheduledChunk
from raydix.engine.model.cuda_runner import FIELDS, MAX_TOKENS, GraphShape, fill, graph_shapes, smallest_fitting
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
    host = torch.full((100,), 7, dtype=torch.int32)
    fill(host, shape, [decode(6, [9, 5]), decode(1, [3]), decode(4, [2], store_from=4)], BLOCK_SIZE)
    rows = host[: shape.size].view(4, FIELDS + 3).tolist()
    assert rows[0] == [105, 5, 5 * BLOCK_SIZE + 1, 6, 9, 5, 7]
    assert rows[1] == [100, 0, 3 * BLOCK_SIZE, 1, 3, 7, 7]
    assert rows[2] == [103, 3, -1, 4, 2, 7, 7], "in a shared block: computed, not stored"
    assert rows[3] == [0, 0, -1, 1, 0, 7, 7], "padding stores nothing and sees one token of a block that there is"
    assert (host[shape.size :] == 7).all()


def test_each_token_of_a_draft_is_a_sequence_that_ends_there() -> None:
    shape = GraphShape(5, 3)
    host = torch.full((40,), 7, dtype=torch.int32)
    fill(host, shape, [decode(7, [9, 5, 4], draft=(50, 51)), decode(1, [3])], BLOCK_SIZE)
    rows = host[: shape.size].view(5, FIELDS + 3).tolist()
    assert rows[0] == [106, 6, 5 * BLOCK_SIZE + 2, 7, 9, 5, 4]
    assert rows[1] == [50, 7, 5 * BLOCK_SIZE + 3, 8, 9, 5, 4]
    assert rows[2] == [51, 8, 4 * BLOCK_SIZE, 9, 9, 5, 4]
    assert rows[3] == [100, 0, 3 * BLOCK_SIZE, 1, 3, 7, 7]
    assert rows[4] == [0, 0, -1, 1, 0, 7, 7]
