"""The runner of a GPU: a step in which every request decodes is the replay of a CUDA graph.

A graph is the decoder's work on so many rows of so many blocks each; a step takes the smallest graph that fits. A
request has 1 + k rows, for its last token and the k tokens of its draft: each row is a sequence of one query that ends
there. In each layer the KV of all rows is stored before any row attends, so a row sees those of its request before it,
and in deterministic mode its bits are those of a chunk of 1 + k positions. The remaining rows are padding: a token that
sees itself only, is stored nowhere, and whose result is ignored. A graph has one input, an int32 matrix that one copy
from pinned memory fills, [rows, 4 + max_blocks]:

    token id, position, slot, context length, block table

and returns the rows from which logits are computed. Logits and sampling are launched after the graph, while it runs.
Any other step (a chunk of a prompt, scored positions, rows of adapters, more rows than any graph takes) is launched
kernel by kernel, by `ModelRunner`. Nothing waits for the device before the end of a step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

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

MAX_ROWS = 512
MIN_TOKENS = 1024
# Rows times context of one graph: bounds its block tables, and the splits that attention's kernels are started for.
MAX_TOKENS = 1 << 24
FIELDS = 4
PADDING = (0, 0, -1, 1)
CHUNK = 128  # tokens of the shortest chunk for which kernels are chosen by the number of tokens
SHORT = 32  # tokens of a chunk that attention counts among those of many queries, though they are few
# Launches every kernel of sampling. Without a top-k, top-p or min-p the drawing kernel is another variant.
EVERYTHING = Sampling(
    max_tokens=1, top_k=1, presence_penalty=1.0, logit_bias=((0, 1.0),), allowed_token_ids=(0,), logprobs=1
)


@dataclass(frozen=True, slots=True, order=True)
class GraphShape:
    """Size of a graph: its rows, and the blocks of each."""

    rows: int
    max_blocks: int

    @property
    def size(self) -> int:
        """Entries of the input."""
        return self.rows * (FIELDS + self.max_blocks)


def graph_shapes(
    max_requests: int, max_model_len: int, block_size: int, max_drafted: int = 0
) -> tuple[GraphShape, ...]:
    """The graphs of an engine, smallest first: rows by powers of two, contexts by powers of four. `max_drafted`: most
    draft tokens of a step."""
    rows = _up_to(min(max_requests + max_drafted, MAX_ROWS), first=1, factor=2)
    contexts = _up_to(max_model_len, first=MIN_TOKENS, factor=4)
    return tuple(
        GraphShape(num_rows, -(-context // block_size))
        for num_rows in rows
        for context in contexts
        if num_rows * context <= MAX_TOKENS
    )


def smallest_fitting(shapes: Sequence[GraphShape], chunks: Sequence[ScheduledChunk]) -> GraphShape | None:
    """The smallest of `shapes`, given in ascending order, that takes the step; None if none does."""
    if not all(chunk.samples and chunk.num_tokens == 1 + len(chunk.draft) and not chunk.scored for chunk in chunks):
        return None
    num_rows, num_blocks = _num_rows(chunks), max(len(chunk.request.blocks) for chunk in chunks)
    return next((shape for shape in shapes if shape.rows >= num_rows and shape.max_blocks >= num_blocks), None)


class GraphInput:
    """The input of a graph in the host's memory, `host` [rows * (FIELDS + max_blocks)] int32, at first all padding.

    A block table is written only where it is not the one that the row holds from an earlier step: most steps give most
    requests the same row and no new block.
    """

    def __init__(self, shape: GraphShape, *, pinned: bool) -> None:
        self.host = torch.zeros(shape.size, dtype=torch.int32, pin_memory=pinned)
        self._rows = self.host.numpy().reshape(shape.rows, FIELDS + shape.max_blocks)
        self._rows[:, :FIELDS] = PADDING
        self._tables: list[list[int]] = [[0] for _ in range(shape.rows)]

    def fill(self, chunks: Sequence[ScheduledChunk], block_size: int) -> None:
        """Write a step's decodes and the padding behind them. Behind a row's blocks anything may stay."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for chunk in chunks:
            blocks = chunk.request.blocks
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
        self._rows[:count, 3] = self._rows[:count, 1] + 1  # the context that the row sees
        self._rows[count:, :FIELDS] = PADDING
        for row in range(count, len(self._rows)):
            self._set_table(row, [0])

    def _set_table(self, row: int, blocks: list[int]) -> None:
        if self._tables[row] != blocks:
            self._rows[row, FIELDS : FIELDS + len(blocks)] = blocks
            self._tables[row] = blocks.copy()


class CudaRunner(ModelRunner):
    """The decoder over a paged KV pool on a GPU, with `shapes` captured at the start."""

    def __init__(
        self,
        decoder: Decoder,
        kv_pool: KVPool,
        shapes: Sequence[GraphShape],
        graphs: Graphs,
        grammars: Grammars | None = None,
        adapters: AdapterStore | None = None,
    ) -> None:
        super().__init__(decoder, kv_pool, grammars, adapters)
        self.shapes = tuple(sorted(shapes))
        self._graphs = graphs
        self._warm_tokens = 0
        self._inputs = {shape: GraphInput(shape, pinned=kv_pool.data.is_cuda) for shape in self.shapes}
        size = max((shape.size for shape in self.shapes), default=0)
        self._input = torch.zeros(size, dtype=torch.int32, device=kv_pool.device)
        count = max((shape.rows for shape in self.shapes), default=0) + 1
        self._counting = torch.arange(count, dtype=torch.int64, device=kv_pool.device)
        self._counting_int32 = self._counting.int()
        self._replays: dict[GraphShape, Callable[[], Tensor]] = {}
        for shape in reversed(self.shapes):  # the largest first: the others find room in its memory
            self._input[: shape.size].copy_(self._inputs[shape].host)
            self._replays[shape] = graphs.capture(partial(self._decode, shape))

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
        shape = None if have_adapters(chunks) else smallest_fitting(self.shapes, chunks)
        if shape is None:
            return super().hidden(chunks)
        graph_input = self._inputs[shape]
        graph_input.fill(chunks, self.kv_pool.block_size)
        self._input[: shape.size].copy_(graph_input.host, non_blocking=True)
        return self._replays[shape]()[: _num_rows(chunks)]

    def warm_up(self, num_tokens: int) -> None:
        """Run steps of up to so many tokens that store nothing, unless a step as large has run: compiles every variant
        of the kernels that a step outside of the graphs may need before a request waits for it, and finds out whether
        the memory suffices."""
        block_size = self.kv_pool.block_size
        longest = min(self.decoder.max_position, self.kv_pool.num_blocks * block_size)
        num_tokens = min(num_tokens, longest)
        if num_tokens <= self._warm_tokens:
            return
        step = partial(made_up_step, block_size=block_size)
        # The largest first, since the memory that it takes serves the others. Tiles of products double with the tokens.
        self.run(step([num_tokens], sampling=EVERYTHING))
        length = num_tokens
        while (length := _halved(length)) >= CHUNK:
            self.run(step([length]))
        # A short chunk behind a long context: attention cuts the context into parts.
        short = min(SHORT, num_tokens)
        self.run(step([short], start=longest - short))
        # A chunk among as many requests that decode as there may be: attention has enough to do without that.
        most = max((shape.rows for shape in self.shapes), default=1)
        if num_tokens > most + 1:
            self.run(step([*[1] * most, min(CHUNK, num_tokens - most)]))
        self._warm_tokens = num_tokens

    @torch.inference_mode()
    def _decode(self, shape: GraphShape) -> Tensor:
        """Compute a graph's work: from the input to the rows from which logits are computed, [rows, hidden_size]."""
        rows = self._input[: shape.size].view(shape.rows, FIELDS + shape.max_blocks)
        token_ids, positions, slots = rows.t()[:3].long().contiguous()
        batch = ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slots,
            block_tables=rows[:, FIELDS:],
            query_start=self._counting_int32[: shape.rows + 1],
            context_lens=rows[:, 3].contiguous(),
            logits_rows=self._counting[: shape.rows],
            max_query_len=1,
        )
        return self.decoder.hidden(batch, self.kv_pool)


def _halved(length: int) -> int:
    """The largest power of two below."""
    return 1 << (length - 1).bit_length() - 1


def _num_rows(chunks: Sequence[ScheduledChunk]) -> int:
    """Rows of a step in which every request decodes, drafts included."""
    return sum(chunk.num_tokens for chunk in chunks)


def _up_to(largest: int, *, first: int, factor: int) -> list[int]:
    """Return first, first * factor ... below `largest`, and `largest`."""
    values = []
    while first < largest:
        values.append(first)
        first *= factor
    return [*values, largest]
