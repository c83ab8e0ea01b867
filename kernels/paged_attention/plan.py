"""Plans of attention on a GPU: tiles for a device, lists of work for a step, memory of partial results.

A step is planned once for each window of the model's layers, and all layers with that window follow the plan. Its lists
lie in one int32 tensor, which one copy brings to the device; how many entries of a list are in use stands in front of
it, so that a recorded graph follows whatever list is written there. Nothing here needs Triton.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raydix.kernels.gpu import is_hopper, multiprocessors, shared_memory
from raydix.kernels.paged_attention.work import GRAIN, ITEM_FIELDS, MERGE_FIELDS, Cut, Sequences, WorkList, work_list

MAX_PARTIAL_BYTES = 256 * 2**20  # most memory of partial results
SEGMENT = 512
DETERMINISTIC_SEGMENT = 1024
PROGRAMS = 2  # programs that walk a list, for each multiprocessor
COUNTS = 4  # numbers in front of a list, of which two are used: the rest keeps what follows at multiples of 16 bytes


class Tiles(NamedTuple):
    """The shape of a program's work: rows (queries times heads), KV positions per step, warps, pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# By the padded head dim: sequences with few queries, with many, and the deterministic mode. KV is found through the
# block table, whose load takes stages too: with three stages one tile of KV is in flight, with five two.
FEW = {64: Tiles(16, 128, 4, 5), 128: Tiles(16, 64, 4, 5), 256: Tiles(16, 32, 4, 5)}
MANY = {64: Tiles(128, 64, 8, 5), 128: Tiles(128, 64, 8, 5), 256: Tiles(128, 32, 8, 5)}
FIXED = {64: Tiles(64, 64, 4, 5), 128: Tiles(64, 32, 4, 5), 256: Tiles(64, 32, 8, 5)}
# The deterministic mode on Hopper: single queries, and chunks; both with the same number of KV positions.
LOW = {64: Tiles(64, 128, 4, 5), 128: Tiles(64, 64, 4, 5), 256: Tiles(64, 64, 4, 2)}
HIGH = {64: Tiles(128, 128, 8, 5), 128: Tiles(128, 64, 8, 5), 256: Tiles(128, 64, 8, 2)}
# Large tiles of head dim 256 where programs have less than AMPLE bytes of shared memory, as on compute capability 8.6,
# 8.9 and 12.0.
AMPLE, SCANT = 160_000, Tiles(64, 32, 8, 3)
# float32 runs without tensor cores, exactly: one shape for all.
FLOAT32 = {64: Tiles(32, 32, 4, 3), 128: Tiles(32, 32, 8, 3), 256: Tiles(16, 16, 4, 3)}


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a model's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def block_d(self) -> int:
        """The head dim as kernels pad it."""
        return max(64, next_power_of_2(self.head_dim))


@dataclass(frozen=True, slots=True)
class Partials:
    """Memory of partial results, shared by all launches: one *line* for a query's head in a slot. Behind the slots each
    program has lines of its own for one tile."""

    values: Tensor
    """[num_lines, head_dim] float32, weighted."""
    maxima: Tensor
    """[num_lines] float32."""
    sums: Tensor
    """[num_lines] float32."""
    num_slots: int


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of the attention kernel, and of the merging one behind it where `max_merges` is not 0."""

    tiles: Tiles
    counts: Tensor
    """[COUNTS] int32: items, merges."""
    items: Tensor
    merges: Tensor
    max_items: int
    max_merges: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What attention does in the layers with one window."""

    launches: tuple[Launch, ...]
    partials: Partials
    window: int | None
    segment: int
    deterministic: bool
    num_programs: int


class ListPlace(NamedTuple):
    """Where a list of work lies in a plan's memory, and how many entries it has room for. Its halves begin at multiples
    of 16 bytes."""

    window: int | None
    tiles: Tiles
    begin: int
    max_items: int
    max_merges: int

    @property
    def items(self) -> int:
        """Where the items begin, behind the counts."""
        return self.begin + COUNTS

    @property
    def merges(self) -> int:
        """Where the merges begin."""
        return self.items + _aligned(ITEM_FIELDS * self.max_items)

    @property
    def end(self) -> int:
        return self.merges + MERGE_FIELDS * self.max_merges

    def write(self, work: WorkList, memory: npt.NDArray[np.int32]) -> None:
        """Write a list and its counts; what lies behind its entries stays as it is."""
        memory[self.begin : self.begin + 2] = len(work.items), len(work.merges)
        memory[self.items : self.items + work.items.size] = work.items.ravel()
        memory[self.merges : self.merges + work.merges.size] = work.merges.ravel()

    def launch(self, memory: Tensor) -> Launch:
        """The launch that reads the list in `memory` on the device."""
        counts, items, merges = memory[self.begin :], memory[self.items :], memory[self.merges :]
        return Launch(self.tiles, counts, items, merges, self.max_items, self.max_merges)


class _Kind(NamedTuple):
    """Sequences that take one shape of tile: those of up to `most_queries`, None for any number."""

    tiles: Tiles
    most_queries: int | None


Plans = Mapping[int | None, AttentionPlan]
"""A step's plan for each window of a model."""


class AttentionPlanner:
    """Plans the attention of one model on one device, and owns the memory of its partial results.

    `windows`: those of the model's layers. `deterministic`: a row's bits depend only on its query and its KV, whatever
    the chunk and the batch. The number of KV positions per tile and the segments are then the same for everything, and
    what differs by batch is what the bits do not show: which tiles are cut, and on Hopper, whose matrix instruction
    takes 64 rows in tiles of any size, the rows of a tile. Otherwise sequences of few queries take small tiles, others
    large ones. `max_context_len`: positions of the longest sequence.
    """

    def __init__(
        self,
        heads: Heads,
        windows: Sequence[int | None],
        device: torch.device,
        max_context_len: int,
        *,
        deterministic: bool,
    ) -> None:
        self._heads = heads
        self._windows = tuple(dict.fromkeys(windows))
        self._device = device
        self._deterministic = deterministic
        self._kinds = self._choose_kinds()
        self._segment = DETERMINISTIC_SEGMENT if deterministic else SEGMENT
        self._num_programs = self._count_programs()
        self._partials = self._make_partials(max_context_len)

    def plan(self, sequences: Sequences) -> Plans:
        """Plan a step, with lists as long as they must be, on the device, without waiting for it."""
        places, lists, begin = [], [], 0
        for window in self._windows:
            for kind, chosen in self._by_kind(sequences):
                work = work_list(chosen, self._cut(kind, window))
                place = ListPlace(window, kind.tiles, begin, len(work.items), len(work.merges))
                places.append(place)
                lists.append(work)
                begin = _aligned(place.end)

        memory = np.zeros(begin, np.int32)
        for place, work in zip(places, lists, strict=True):
            place.write(work, memory)
        host = torch.from_numpy(memory)
        if self._device.type == "cuda":
            host = host.pin_memory()
        return self.plans(places, host.to(self._device, non_blocking=True))

    def places(self, num_rows: int, begin: int) -> tuple[ListPlace, ...]:
        """Places from `begin` on, a multiple of `COUNTS`, for the lists of any step of sequences of so many queries in
        all, each of few."""
        kind, places = self._kinds[0], []
        for window in self._windows:
            most = self._cut(kind, window).most_items(num_rows)
            places.append(ListPlace(window, kind.tiles, begin, most, num_rows if self._partials.num_slots else 0))
            begin = _aligned(places[-1].end)
        return tuple(places)

    def write(self, sequences: Sequences, places: Sequence[ListPlace], memory: npt.NDArray[np.int32]) -> None:
        """Write the lists of a step of sequences of few queries to their `places` in `memory`."""
        for place in places:
            place.write(work_list(sequences, self._cut(self._kinds[0], place.window)), memory)

    def plans(self, places: Sequence[ListPlace], memory: Tensor) -> Plans:
        """The plans whose lists lie at `places` in `memory` on the device."""
        return {
            window: AttentionPlan(
                tuple(place.launch(memory) for place in places if place.window == window),
                self._partials,
                window,
                self._segment,
                self._deterministic,
                self._num_programs,
            )
            for window in self._windows
        }

    @property
    def partial_bytes(self) -> int:
        """Memory of partial results."""
        return sum(each.nbytes for each in (self._partials.values, self._partials.maxima, self._partials.sums))

    def _choose_kinds(self) -> tuple[_Kind, ...]:
        few, many, most_few = self._tiles(FEW), self._tiles(MANY), 0
        if self._heads.dtype == torch.float32:
            many = few
        elif not self._deterministic:
            most_few = self._tile_queries(few)
        elif is_hopper(self._device):
            few, many, most_few = self._tiles(LOW), self._tiles(HIGH), 1
        else:
            many = self._tiles(FIXED)
        return (_Kind(few, most_few), _Kind(many, None)) if most_few else (_Kind(many, None),)

    def _tiles(self, table: dict[int, Tiles]) -> Tiles:
        """The tile shape for the head dim, with at least one query per tile."""
        block_d, is_float32 = self._heads.block_d, self._heads.dtype == torch.float32
        tiles = (FLOAT32 if is_float32 else table)[block_d]
        if block_d == 256 and not is_float32 and table is not FEW and shared_memory(self._device) < AMPLE:
            tiles = SCANT
        return tiles._replace(block_m=max(tiles.block_m, next_power_of_2(self._heads.group)))

    def _tile_queries(self, tiles: Tiles) -> int:
        return tiles.block_m // self._heads.group

    def _by_kind(self, sequences: Sequences) -> list[tuple[_Kind, Sequences]]:
        """The sequences with queries of each kind that there is."""
        kinds, above = [], 0
        for kind in self._kinds:
            most = kind.most_queries
            which = sequences.num_queries > above
            if most is not None:
                which &= sequences.num_queries <= most
                above = most
            if which.any():
                kinds.append((kind, sequences.chosen(which)))
        return kinds

    def _cut(self, kind: _Kind, window: int | None) -> Cut:
        return Cut(
            tile_queries=self._tile_queries(kind.tiles),
            segment=self._segment,
            keeps_segments=self._deterministic,
            num_programs=max(1, self._num_programs // self._heads.num_kv_heads),
            num_slots=self._partials.num_slots,
            window=window,
        )

    def _count_programs(self) -> int:
        """As many as fill the device, and as few as have lines of their own in half of the partial results' memory."""
        most = MAX_PARTIAL_BYTES // 2 // (self._line_bytes * max(kind.tiles.block_m for kind in self._kinds))
        return max(1, min(PROGRAMS * multiprocessors(self._device), most))

    @property
    def _line_bytes(self) -> int:
        return 4 * (self._heads.head_dim + 2)

    def _make_partials(self, max_context_len: int) -> Partials:
        num_heads, head_dim = self._heads.num_heads, self._heads.head_dim
        most_lines = MAX_PARTIAL_BYTES // self._line_bytes
        most_segments = -(-max_context_len // self._segment)
        num_slots = num_lines = 0
        if most_segments > 1:
            if self._deterministic:
                # A whole tile is added up segment by segment, in its program's own lines.
                num_lines = self._num_programs * max(kind.tiles.block_m for kind in self._kinds)
            # A tile is cut if it costs more than an item, so at most this many are.
            most_cut = GRAIN * max(1, self._num_programs // self._heads.num_kv_heads)
            most_results = most_cut * most_segments if self._deterministic else 3 * most_cut
            wanted = most_results * max(self._tile_queries(kind.tiles) for kind in self._kinds)
            num_slots = max(0, min(wanted, (most_lines - num_lines) // num_heads))
        num_lines += num_slots * num_heads
        values = torch.empty((num_lines, head_dim), device=self._device)
        maxima, sums = (torch.empty(num_lines, device=self._device) for _ in range(2))
        return Partials(values, maxima, sums, num_slots)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below."""
    return 1 << max(number - 1, 0).bit_length()


def _aligned(num_ints: int) -> int:
    """The next multiple of 16 bytes."""
    return -(-num_ints // COUNTS) * COUNTS
