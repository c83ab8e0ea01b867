"""The runner of a GPU: a step in which every request decodes is the replay of a CUDA graph.

A graph is the decoder's work on so many rows; a step takes the smallest graph that fits. A request has 1 + k rows, for
its last token and the k tokens of its draft. In each layer the KV of all rows is stored before any row attends, so a
row sees those of its request before it, and in deterministic mode its bits are those of a chunk of 1 + k positions. On
a GPU the rows of a request share tiles of attention, which read its KV once for all of them. The remaining rows are
padding: a token that is stored nowhere, and whose result is ignored. A graph has one input of int32, which one copy
from pinned memory fills:

    of each row token id, position, slot, context length | attention's lists of work | a block table of each row

and returns the rows from which logits are computed. How long contexts are shows in the lists and the tables alone, so
one graph serves all. Logits and sampling are launched after the graph, while it runs. Any other step (a chunk of a
prompt, scored positions, rows of adapters, more rows than any graph takes) is launched kernel by kernel, by
`ModelRunner`. Nothing waits for the device before the end of a step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from raydix.engine.core.types import Sampling
from raydix.engine.core.worker.step import RunnerOutput, ScheduledChunk, SchedulerOutput
from raydix.engine.model.adapter_store import AdapterStore
from raydix.engine.model.cuda import Graphs
from raydix.engine.model.decoder import Decoder, ForwardBatch
from raydix.engine.model.grammars import Grammars
from raydix.engine.model.kv_pool import KVPool
from raydix.engine.model.runner import ModelRunner, have_adapters, made_up_step
from raydix.kernels.paged_attention.plan import AttentionPlanner, Heads, ListPlace, next_power_of_2
from raydix.kernels.paged_attention.work import Sequences

MAX_ROWS = 512
# Entries of the block tables of one step: bounds what is copied for it.
MAX_ENTRIES = 1 << 22
MIN_WIDTH = 64  # entries of a row's block table, at least
FIELDS = 4
PADDING = (0, 0, -1, 1)
CHUNK = 128  # tokens of the shortest chunk for which kernels are chosen by the number of tokens
# Launches every kernel of sampling. Without a top-k, top-p or min-p the drawing kernel is another variant.
EVERYTHING = Sampling(
    max_tokens=1, top_k=1, presence_penalty=1.0, logit_bias=((0, 1.0),), allowed_token_ids=(0,), logprobs=1
)


def graph_rows(max_requests: int, max_drafted: int = 0) -> tuple[int, ...]:
    """Return the rows of each graph of an engine, ascending: powers of two. `max_drafted`: most draft tokens of a
    step."""
    rows: list[int] = []
    largest = min(max_requests + max_drafted, MAX_ROWS)
    while (power := 1 << len(rows)) < largest:
        rows.append(power)
    return (*rows, largest)


def smallest_fitting(graphs: Sequence[int], chunks: Sequence[ScheduledChunk]) -> int | None:
    """Return the rows of the smallest graph, of those given in ascending order, that takes the step; None if none
    does."""
    if not all(chunk.samples and chunk.num_tokens == 1 + len(chunk.draft) and not chunk.scored for chunk in chunks):
        return None
    num_rows = _num_rows(chunks)
    rows = next((rows for rows in graphs if rows >= num_rows), None)
    return rows if rows is not None and rows * _table_width(chunks) <= MAX_ENTRIES else None


@dataclass(frozen=True, slots=True)
class GraphLayout:
    """What lies where in the input of a graph of so many rows, in int32."""

    rows: int
    lists: tuple[ListPlace, ...]
    """Attention's lists of work, behind the rows' fields."""
    max_entries: int
    """Entries of the block tables that there is room for."""

    @classmethod
    def of(cls, rows: int, planner: AttentionPlanner, max_blocks: int) -> "GraphLayout":
        """The layout for sequences of up to so many blocks."""
        width = max(next_power_of_2(max_blocks), MIN_WIDTH)
        return cls(rows, planner.places(rows, rows * FIELDS), min(rows * width, MAX_ENTRIES))

    @property
    def tables(self) -> int:
        """Where the block tables begin."""
        return next(reversed(self.lists)).end if self.lists else self.rows * FIELDS

    @property
    def size(self) -> int:
        """Entries of the input."""
        return self.tables + self.max_entries


class GraphInput:
    """The input of a graph in the host's memory, `host` int32, at first all padding.

    All block tables of a step are equally wide: a power of two of entries, so that the width seldom changes. A table is
    written only where it is not the one that the row holds from an earlier step: most steps give most requests the same
    row and no new block.
    """

    def __init__(self, layout: GraphLayout, planner: AttentionPlanner, *, pinned: bool) -> None:
        self.layout = layout
        self.width = MIN_WIDTH
        self.host = torch.zeros(layout.size, dtype=torch.int32, pin_memory=pinned)
        self._planner = planner
        self._memory = self.host.numpy()
        self._rows = self._memory[: layout.rows * FIELDS].reshape(layout.rows, FIELDS)
        self._rows[:] = PADDING
        self._tables: list[list[int]] = [[0] for _ in range(layout.rows)]

    def fill(self, chunks: Sequence[ScheduledChunk], block_size: int) -> int:
        """Write a step's decodes and the padding behind them; returns how many entries of the input are in use. Behind
        a row's blocks anything may stay."""
        self._set_width(_table_width(chunks))
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        first_rows: list[int] = []
        for chunk in chunks:
            blocks = chunk.request.blocks
            first_rows.append(len(positions))
            token_ids += chunk.request.token_ids[chunk.start], *chunk.draft
            for position in range(chunk.start, chunk.start + 1 + len(chunk.draft)):
                slot = blocks[position // block_size] * block_size + position % block_size
                slots.append(slot if chunk.store_from <= position else -1)
                self._set_table(len(positions), blocks)
                positions.append(position)

        count = len(positions)
        self._rows[:count, 0] = token_ids
        self._rows[:count, 1] = positions
        self._rows[:count, 2] = slots
        self._rows[:count, 3] = self._rows[:count, 1] + 1  # what the row sees
        self._rows[count:] = PADDING
        for row in range(count, self.layout.rows):
            self._set_table(row, [0])
        # Rows of one request are queries of one sequence, so that they read its KV together. Padding is in no list:
        # nothing attends for it.
        first = np.array(first_rows, np.int64)
        queries = np.diff(first, append=count)
        contexts = np.array([chunk.start for chunk in chunks], np.int64) + queries
        self._planner.write(Sequences(first, queries, contexts, first * self.width), self.layout.lists, self._memory)
        return self.layout.tables + self.layout.rows * self.width

    def tables(self, memory: Tensor) -> Tensor:
        """The block tables in `memory`, an input as wide as the last step's, [rows, width]."""
        begin = self.layout.tables
        return memory[begin : begin + self.layout.rows * self.width].view(self.layout.rows, self.width)

    def _set_width(self, width: int) -> None:
        if self.width != width:
            self.width = width
            self._tables = [[] for _ in self._tables]

    def _set_table(self, row: int, blocks: list[int]) -> None:
        if self._tables[row] != blocks:
            begin = self.layout.tables + row * self.width
            self._memory[begin : begin + len(blocks)] = blocks
            self._tables[row] = blocks.copy()


class CudaRunner(ModelRunner):
    """The decoder over a paged KV pool on a GPU, with a graph for each of some numbers of `rows` captured at the
    start."""

    def __init__(
        self,
        decoder: Decoder,
        kv_pool: KVPool,
        rows: Sequence[int],
        graphs: Graphs,
        grammars: Grammars | None = None,
        adapters: AdapterStore | None = None,
    ) -> None:
        super().__init__(decoder, kv_pool, grammars, adapters)
        self.rows = tuple(sorted(rows))
        self.planner = _planner(decoder, kv_pool)
        self._graphs = graphs
        self._warm_tokens = 0
        max_blocks = -(-decoder.max_position // kv_pool.block_size)
        layouts = [GraphLayout.of(rows, self.planner, max_blocks) for rows in self.rows]
        self._inputs = {each.rows: GraphInput(each, self.planner, pinned=kv_pool.data.is_cuda) for each in layouts}
        size = max((layout.size for layout in layouts), default=0)
        self._input = torch.zeros(size, dtype=torch.int32, device=kv_pool.device)
        count = max(self.rows, default=0) + 1
        self._counting = torch.arange(count, dtype=torch.int64, device=kv_pool.device)
        self._counting_int32 = self._counting.int()
        self._replays: dict[int, Callable[[], Tensor]] = {}
        for num_rows in reversed(self.rows):  # the largest first: the others find room in its memory
            self._input[: self._inputs[num_rows].layout.size].copy_(self._inputs[num_rows].host)
            self._replays[num_rows] = graphs.capture(partial(self._decode, num_rows))

        graphs.wait()

    def run(self, output: SchedulerOutput) -> RunnerOutput:
        """Run one step as `ModelRunner.run` does; returns when the device has done the step, so that its time is the
        step's."""
        result = super().run(output)
        self._graphs.wait()
        return result

    def hidden(self, chunks: Sequence[ScheduledChunk]) -> Tensor:
        """Compute hidden states as `ModelRunner.hidden` does; of a graph the result lasts until the next step."""
        # A graph has the products of the model alone.
        rows = None if have_adapters(chunks) else smallest_fitting(self.rows, chunks)
        if rows is None:
            return super().hidden(chunks)
        graph_input = self._inputs[rows]
        used = graph_input.fill(chunks, self.kv_pool.block_size)
        self._input[:used].copy_(graph_input.host[:used], non_blocking=True)
        return self._replays[rows]()[: _num_rows(chunks)]

    def make_batch(self, chunks: Sequence[ScheduledChunk]) -> ForwardBatch:
        """Lay out a step as `ModelRunner.make_batch` does, with a plan of its attention."""
        batch = super().make_batch(chunks)
        queries = np.array([chunk.num_tokens for chunk in chunks], np.int64)
        ends = np.array([chunk.start for chunk in chunks], np.int64) + queries
        tables = np.arange(len(chunks)) * batch.block_tables.shape[1]
        return replace(batch, plans=self.planner.plan(Sequences(np.cumsum(queries) - queries, queries, ends, tables)))

    def warm_up(self, num_tokens: int) -> None:
        """Run steps of up to so many tokens that store nothing, unless a step as large has run: compiles every variant
        of the kernels that a step outside of the graphs may need before a request waits for it, and finds out whether
        the memory suffices."""
        block_size = self.kv_pool.block_size
        longest = min(self.decoder.max_position, self.kv_pool.num_blocks * block_size)
        num_tokens = min(num_tokens, longest)
        if num_tokens <= self._warm_tokens:
            return
        # The largest first, since the memory that it takes serves the others. Tiles of products double with the tokens.
        self.run(made_up_step([num_tokens], block_size, EVERYTHING))
        length = num_tokens
        while (length := _halved(length)) >= CHUNK:
            self.run(made_up_step([length], block_size))
        self._warm_tokens = num_tokens

    @torch.inference_mode()
    def _decode(self, num_rows: int) -> Tensor:
        """Compute a graph's work: from the input to the rows from which logits are computed, [rows, hidden_size]."""
        graph_input = self._inputs[num_rows]
        rows = self._input[: num_rows * FIELDS].view(num_rows, FIELDS)
        token_ids, positions, slots = rows.t()[:3].long().contiguous()
        batch = ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slots,
            # A recorded graph knows where the first one begins: the lists say where each does, whatever the width.
            block_tables=graph_input.tables(self._input),
            query_start=self._counting_int32[: num_rows + 1],
            context_lens=rows[:, 3].contiguous(),
            logits_rows=self._counting[:num_rows],
            plans=self.planner.plans(graph_input.layout.lists, self._input),
        )
        return self.decoder.hidden(batch, self.kv_pool)


def _planner(decoder: Decoder, kv_pool: KVPool) -> AttentionPlanner:
    config = decoder.config
    return AttentionPlanner(
        Heads(config.num_heads, config.num_kv_heads, config.head_dim, decoder.dtype),
        [config.layer_windows[layer] for layer in config.attention_layers],
        kv_pool.device,
        decoder.max_position,
        deterministic=decoder.deterministic,
    )


def _halved(length: int) -> int:
    """The largest power of two below."""
    return 1 << (length - 1).bit_length() - 1


def _num_rows(chunks: Sequence[ScheduledChunk]) -> int:
    """Rows of a step in which every request decodes, drafts included."""
    return sum(chunk.num_tokens for chunk in chunks)


def _table_width(chunks: Sequence[ScheduledChunk]) -> int:
    """Entries of each block table of a step, a power of two."""
    return max(next_power_of_2(max(len(chunk.request.blocks) for chunk in chunks)), MIN_WIDTH)
