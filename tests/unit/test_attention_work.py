"""How the work of attention on a GPU is cut: everything once, nothing empty, within its bounds, by positions alone."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydix.kernels.paged_attention.work import GRAIN, NO_SLOT, Cut, Sequences, WorkList, work_list

SEGMENT = 32
cuts = st.builds(
    Cut,
    tile_queries=st.sampled_from((1, 4, 13, 32)),
    segment=st.just(SEGMENT),
    keeps_segments=st.booleans(),
    num_programs=st.sampled_from((1, 5, 40)),
    num_slots=st.sampled_from((0, 3, 50, 100_000)),
    window=st.sampled_from((None, 1, 20, 32, 100)),
)
# Queries of each sequence, and the positions before them.
batches = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 900)), max_size=12)


def sequences_of(batch: list[tuple[int, int]], stride: int = 1000) -> Sequences:
    queries = np.array([count for count, _ in batch], np.int64)
    before = np.array([count for _, count in batch], np.int64)
    return Sequences(np.cumsum(queries) - queries, queries, before + queries, stride * np.arange(len(batch)))


def walked(batch: list[tuple[int, int]], cut: Cut) -> tuple[WorkList, dict[int, list[tuple[int, int]]]]:
    """The work, and the ranges of positions of each row of the batch, in the order in which they are added up."""
    work = work_list(sequences_of(batch), cut)
    ranges: dict[int, list[tuple[int, int]]] = {}
    of_slot: dict[int, tuple[int, int, int]] = {}
    for token, queries, _, _, begin, end, slot in work.items.tolist():
        assert begin < end and queries > 0, "an empty item"
        pieces = [(begin, end)]
        if slot != NO_SLOT and cut.keeps_segments:
            edges = range(begin // SEGMENT * SEGMENT, end, SEGMENT)
            pieces = [(max(begin, edge), min(end, edge + SEGMENT)) for edge in edges]
        for query in range(queries):
            if slot == NO_SLOT:
                assert token + query not in ranges, "two items write one result"
                ranges[token + query] = pieces
                continue
            for index, piece in enumerate(pieces):
                own = slot + index * queries + query
                assert own not in of_slot, "two items write one slot"
                of_slot[own] = (token + query, *piece)
    for token, slot, stride, count in work.merges.tolist():
        assert token not in ranges, "a result is written twice"
        parts = [of_slot.pop(slot + index * stride) for index in range(count)]
        assert all(part[0] == token for part in parts), "a slot of another query is added"
        ranges[token] = [part[1:] for part in parts]
    assert not of_slot, "a partial result that nothing adds"
    return work, ranges


@given(batch=batches, cut=cuts)
def test_each_position_is_walked_once_for_each_query(batch: list[tuple[int, int]], cut: Cut) -> None:
    _, ranges = walked(batch, cut)
    row = 0
    for count, before in batch:
        for query in range(count):
            position = before + query
            pieces = ranges.pop(row)
            # One after the other, from no later than the first position that the query sees to its own.
            assert all(left[1] == right[0] for left, right in pairwise(pieces))
            assert pieces[0][0] <= (0 if cut.window is None else max(0, position - cut.window + 1))
            assert pieces[0][0] >= (0 if cut.window is None else position - cut.window - cut.tile_queries + 2)
            assert position < pieces[-1][1] <= position + cut.tile_queries
            row += 1
    assert not ranges


@given(batch=batches, cut=cuts)
def test_items_say_where_their_queries_are(batch: list[tuple[int, int]], cut: Cut) -> None:
    work, sequences = work_list(sequences_of(batch), cut), sequences_of(batch)
    for token, queries, position, table, begin, end, _ in work.items.tolist():
        index = table // 1000
        first = token - sequences.first_token[index]
        assert first >= 0 and first + queries <= sequences.num_queries[index] and queries <= cut.tile_queries
        assert position == sequences.context_len[index] - sequences.num_queries[index] + first
        assert 0 <= begin < end <= position + queries
    costs = work.items[:, 5] - work.items[:, 4]
    assert (np.diff(costs) <= 0).all(), "the most costly first"


@given(batch=batches, cut=cuts)
def test_the_work_is_within_its_bounds(batch: list[tuple[int, int]], cut: Cut) -> None:
    work = work_list(sequences_of(batch), cut)
    num_tiles = sum(-(-count // cut.tile_queries) for count, _ in batch)
    assert work.num_slots <= cut.num_slots
    assert len(work.items) <= cut.most_items(num_tiles)
    assert len(work.merges) <= sum(count for count, _ in batch)
    assert len(work.merges) == 0 or int(work.merges[:, 3].min()) > 1, "one partial result alone is a result"


@given(batch=batches, cut=cuts)
def test_items_are_even_while_there_are_slots(batch: list[tuple[int, int]], cut: Cut) -> None:
    work = work_list(sequences_of(batch), replace(cut, num_slots=10**9))
    costs = work.items[:, 5] - work.items[:, 4]
    if len(costs):
        assert costs.max() <= costs.sum() / cut.num_programs / GRAIN + SEGMENT


@given(
    count=st.integers(1, 40),
    before=st.integers(0, 900),
    beside=batches,
    cut=cuts,
    other=cuts,
)
def test_the_order_of_additions_is_that_of_positions(
    count: int, before: int, beside: list[tuple[int, int]], cut: Cut, other: Cut
) -> None:
    """Where segments are kept, whatever the tile, the batch and the device: a query's sum is of whole segments, or of
    one range that the kernel walks segment by segment."""
    for batch, each in (([(count, before)], cut), ([*beside, (count, before)], other)):
        _, ranges = walked(batch, replace(each, keeps_segments=True))
        for pieces in ranges.values():
            assert len(pieces) == 1 or all(end % SEGMENT == 0 for _, end in pieces[:-1])
            assert len(pieces) == 1 or len({begin // SEGMENT for begin, _ in pieces}) == len(pieces)


@pytest.mark.parametrize("keeps_segments", [False, True])
def test_one_long_request_among_short_ones_is_shared_out(keeps_segments: bool) -> None:
    """Of 255 requests at 500 and one at 17,000 positions, on 264 programs for 8 heads."""
    cut = Cut(4, 512, keeps_segments, 33, 10_000)
    work = work_list(sequences_of([(1, 499)] * 255 + [(1, 16_999)]), cut)
    assert len(work.items) == 255 + len(work.items[work.items[:, 6] != NO_SLOT]) < 300
    costs = work.items[:, 5] - work.items[:, 4]
    assert costs.sum() == 255 * 500 + 17_000 and costs.max() <= 2048
