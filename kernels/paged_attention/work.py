"""The work of attention on a GPU, cut on the host into items of even cost, in one pass of numpy.

A *tile* is some consecutive queries of one sequence, and walks the positions that any of them sees. A *segment* is a
range of positions between two multiples of a fixed length, so that its ends depend on no batch. An *item* is a tile
with a range of its positions, which begins and ends at segments' ends: a short tile is one item, which writes its
result itself; a long one is cut into several, which write partial results to *slots*, and a *merge* adds up the slots
of a query in the order of their positions. One slot has room for one query with all its heads.

The pass guarantees: each tile's positions are in exactly one item; no item is empty; the slots are at most as many as
there are, since tiles for which none are left stay whole; the items are at most `most_items` of the tiles. It knows
neither tensors nor a device.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

# Items in which a program's even share comes: more are more even, and leave more partial results.
GRAIN = 4
NO_SLOT = -1


class Sequences(NamedTuple):
    """The queries of sequences, which are the last of their positions: an entry of each array per sequence."""

    first_token: Ints
    """Row of the first query among the batch's."""
    num_queries: Ints
    context_len: Ints
    """Positions up to the last query, that one included."""
    table: Ints
    """Where the block table begins, in entries of the memory that holds all tables."""

    def chosen(self, which: npt.NDArray[np.bool_]) -> "Sequences":
        """Those of which `which` [S] is true."""
        return Sequences(*(each[which] for each in self))


@dataclass(frozen=True, slots=True)
class Cut:
    """How the work of one launch is cut."""

    tile_queries: int
    """Queries of a tile, at most."""
    segment: int
    """Positions of a segment."""
    keeps_segments: bool
    """True: each segment of a cut tile has slots of its own, however the tile is cut, so that the order of additions
    depends on positions alone. Otherwise each item has."""
    num_programs: int
    """Programs among which the items of one KV head are shared out."""
    num_slots: int
    """Partial results that there is room for."""
    window: int | None = None
    """Positions that a query sees, its own included; None: all."""

    def most_items(self, num_tiles: int) -> int:
        """A bound on the items of so many tiles: one for each grain of all the costs, and two for a tile's ends."""
        return 2 * num_tiles + GRAIN * self.num_programs


class WorkList(NamedTuple):
    """What one launch does."""

    items: npt.NDArray[np.int32]
    """[num_items, ITEM_FIELDS], the most costly first: row of the first query, queries, position of the first query,
    begin of the block table, begin and end of the positions, slot of the first query (NO_SLOT: writes the result)."""
    merges: npt.NDArray[np.int32]
    """[num_merges, MERGE_FIELDS], one per query of a cut tile: row, first slot, distance of slots, their number."""
    num_slots: int
    """Slots in use."""


ITEM_FIELDS, MERGE_FIELDS = 7, 4


def work_list(sequences: Sequences, cut: Cut) -> WorkList:
    """Cut the attention of some sequences, of which those without queries have no work."""
    num_tiles = -(-sequences.num_queries // cut.tile_queries)
    which, place = _spread(num_tiles)
    first = place * cut.tile_queries
    queries = np.minimum(sequences.num_queries[which] - first, cut.tile_queries)
    position = sequences.context_len[which] - sequences.num_queries[which] + first
    begin = np.zeros_like(position) if cut.window is None else np.maximum(position - cut.window + 1, 0)
    end = position + queries
    cost = end - begin
    first_segment = begin // cut.segment
    segments = (end - 1) // cut.segment - first_segment + 1

    # Segments of an item: a program's share comes in GRAIN items, each of one segment at least.
    share = int(cost.sum()) / cut.num_programs
    grain = max(1, -(-int(share) // (GRAIN * cut.segment)))
    # A tile that costs no more than an item stays whole, also where it lies across the end of a segment.
    parts = np.where(cost > grain * cut.segment, -(-segments // grain), 1)
    results = segments if cut.keeps_segments else parts
    needed = np.where(parts > 1, queries * results, 0)

    # The most costly tiles get slots first. Those without stay whole: as costly, and with the same bits.
    order = np.argsort(-cost, kind="stable")
    taken = np.cumsum(needed[order])
    slot = np.empty_like(needed)
    slot[order] = np.where(taken <= cut.num_slots, taken - needed[order], NO_SLOT)
    is_cut = (parts > 1) & (slot != NO_SLOT)
    table, token = sequences.table[which], sequences.first_token[which] + first
    if not is_cut.any():  # as in most steps of short sequences
        items = np.stack((token, queries, position, table, begin, end, np.full_like(token, NO_SLOT)), axis=1)
        return WorkList(items[order].astype(np.int32), np.empty((0, MERGE_FIELDS), np.int32), 0)
    parts = np.where(is_cut, parts, 1)

    tile, part = _spread(parts)
    cuts_here = is_cut[tile]
    item_segment = first_segment[tile] + part * grain
    low = np.where(cuts_here, np.maximum(begin[tile], item_segment * cut.segment), begin[tile])
    high = np.where(cuts_here, np.minimum(end[tile], (item_segment + grain) * cut.segment), end[tile])
    before = part * grain if cut.keeps_segments else part
    item_slot = np.where(cuts_here, slot[tile] + before * queries[tile], NO_SLOT)
    items = np.stack((token[tile], queries[tile], position[tile], table[tile], low, high, item_slot), axis=1)
    items = items[np.argsort(low - high, kind="stable")]

    merged, query = _spread(np.where(is_cut, queries, 0))
    merges = np.stack(
        (token[merged] + query, slot[merged] + query, queries[merged], results[merged]),
        axis=1,
    )
    used = int(needed[is_cut].sum())
    return WorkList(items.astype(np.int32), merges.astype(np.int32), used)


def _spread(counts: Ints) -> tuple[Ints, Ints]:
    """Of `counts[i]` things of each i: the i of each thing, and its place among those of i."""
    of = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    return of, np.arange(len(of)) - starts[of]
