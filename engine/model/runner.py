"""Runs one scheduled step on the model: builds the batch, runs the decoder, samples, scores and pools."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raydix.engine.core.hashing import BlockChain, root_hash
from raydix.engine.core.types import Assignment, Pooling, Sampling, Stage, TokenLogprobs
from raydix.engine.core.worker.drafts.rows import rows_of, sampled_by_request
from raydix.engine.core.worker.request import Request
from raydix.engine.core.worker.step import RunnerOutput, SampledToken, ScheduledChunk, SchedulerOutput
from raydix.engine.model.adapter_store import AdapterStore
from raydix.engine.model.cuda import upload
from raydix.engine.model.decoder import Decoder, ForwardBatch
from raydix.engine.model.grammars import Grammars
from raydix.engine.model.kv_pool import KVPool
from raydix.engine.model.lora import LoraRows
from raydix.engine.model.sampler import sample_requests, score_tokens
from raydix.engine.model.sizes import SCORED_ROWS
from raydix.engine.model.state_pool import StatePool
from raydix.kernels.states import NO_STATE, StateUse

PLAIN = Sampling(max_tokens=1)  # the wishes of a request that has none


class Runner(Protocol):
    """Interface between the engine and a model."""

    def run(self, output: SchedulerOutput) -> RunnerOutput:
        """Results of a step: the new tokens of each sampling chunk, the scores of each scored one."""
        ...

    def check(self) -> None:
        """Compute the least there is; raises if the model computes nothing any more."""
        ...

    def warm_up(self, num_tokens: int) -> None:
        """Get ready for steps of so many tokens, between two steps; raises if there can be none."""
        ...


class ModelRunner:
    """The decoder over a paged KV pool."""

    def __init__(
        self,
        decoder: Decoder,
        kv_pool: KVPool,
        grammars: Grammars | None = None,
        adapters: AdapterStore | None = None,
        states: StatePool | None = None,
    ) -> None:
        """`states`: of a model with recurrent layers."""
        self.states = states
        self.decoder = decoder
        self.kv_pool = kv_pool
        self.grammars = grammars
        self.adapters = adapters

    @torch.inference_mode()
    def run(self, output: SchedulerOutput) -> RunnerOutput:
        """Compute the step: KV is written to the pool, and a token is sampled for each row of chunks that end their
        sequence."""
        rows = rows_of(output.chunks)
        # Masks are computed in threads beside the forward pass, and are needed only when the logits are there.
        masking = None if self.grammars is None else self.grammars.begin(rows)
        try:
            hidden = self.hidden(output.chunks)
        finally:  # nobody may move the matchers on meanwhile
            masks = None if masking is None else masking.result()

        first_scored = len(rows)
        first_pooled = first_scored + sum(len(chunk.scored) for chunk in output.chunks)

        # The rows come in three ranges: sampled, scored, pooled. Logits are made of the first two only.
        tokens = sample_requests(self.decoder.logits(hidden[:first_scored]), rows, masks) if rows else []
        sampled = sampled_by_request(output.chunks, tokens, () if masks is None else masks.ended)
        refused = {} if masks is None else {rows[row].request_id: why for row, why in masks.dead_ends.items()}

        scores = self._score(hidden[first_scored:first_pooled], output.chunks)
        sums = _pool(hidden[first_pooled:], output.chunks) if len(hidden) > first_pooled else {}
        return RunnerOutput(sampled, scores, refused, sums=sums, pooled=pooled_states(output.chunks, sums))

    def check(self) -> None:
        """Run a step of one token that reads and stores no request's KV, and sample from it."""
        self.run(made_up_step([1], self.kv_pool.block_size))

    def warm_up(self, num_tokens: int) -> None:
        """Nothing: the kernels of a CPU are the same for steps of any size."""

    def hidden(self, chunks: Sequence[ScheduledChunk]) -> Tensor:
        """Compute the rows for the step's logits (`rows_of` the chunks), then one per scored position, then one per
        pooled position."""
        return self.decoder.hidden(self.make_batch(chunks), self.kv_pool, self.states)

    def make_batch(self, chunks: Sequence[ScheduledChunk]) -> ForwardBatch:
        """Lay out a step, with its rows of adapters and its recurrent states."""
        batch = build_batch(chunks, self.kv_pool.block_size, self.kv_pool.device)
        if self.adapters is not None and have_adapters(chunks):
            batch = replace(batch, loras=lora_rows(chunks, self.adapters, self.kv_pool.device))
        if self.states is not None:
            batch = replace(batch, states=state_use(chunks))
        return batch

    def _score(self, hidden: Tensor, chunks: Sequence[ScheduledChunk]) -> dict[str, list[TokenLogprobs]]:
        """The scores of each chunk; `hidden` has the rows of all their scored positions, [num_scored, hidden_size]."""
        scoring = [chunk for chunk in chunks if chunk.scored]
        token_ids, num_top = [], []
        for chunk in scoring:
            token_ids += [chunk.request.token_ids[position + 1] for position in chunk.scored]
            num_top += [chunk.request.assignment.sampling.prompt_logprobs or 0] * len(chunk.scored)
        scores: list[TokenLogprobs] = []
        # Logits of a whole prompt would be gigabytes: some rows at a time, as the pool's size reckons with.
        for first in range(0, len(token_ids), SCORED_ROWS):
            rows = slice(first, first + SCORED_ROWS)
            scores += score_tokens(self.decoder.logits(hidden[rows]), token_ids[rows], num_top[rows])
        left = iter(scores)
        return {chunk.request.request_id: list(islice(left, len(chunk.scored))) for chunk in scoring}


def _pool(hidden: Tensor, chunks: Iterable[ScheduledChunk]) -> dict[str, list[bytes]]:
    """The sums of each chunk; `hidden` has the rows of all their pooled positions, [num_pooled, hidden_size]."""
    # Float32 sums in one fixed order on the host, whatever device computed the states: the embedding has the same bits.
    rows, first = hidden.float().cpu().numpy(), 0
    sums: dict[str, list[bytes]] = {}
    for chunk in chunks:
        if chunk.pooled:
            sums[chunk.request.request_id] = sums_of(chunk, rows[first : first + len(chunk.pooled)])
            first += len(chunk.pooled)
    return sums


CERTAIN = TokenLogprobs(0.0, (), (), 1)  # the log-probability of a token for which there is no other choice


class NullRunner:
    """Computes nothing and returns at once, so that the cost of everything around the model can be measured."""

    def __init__(self, hidden_size: int = 1) -> None:
        self._hidden_size = hidden_size

    def run(self, output: SchedulerOutput) -> RunnerOutput:
        """Return a letter of the alphabet by its position for each row, certain where its log-probability is asked for,
        certainty for scored positions, and ones for pooled positions."""
        sums = {
            chunk.request.request_id: sums_of(chunk, np.ones((len(chunk.pooled), self._hidden_size), np.float32))
            for chunk in output.chunks
            if chunk.pooled
        }
        tokens = [
            SampledToken(66 + row.num_output % 26, None if row.assignment.sampling.logprobs is None else CERTAIN)
            for row in rows_of(output.chunks)
        ]
        return RunnerOutput(
            sampled_by_request(output.chunks, tokens),
            {chunk.request.request_id: [CERTAIN] * len(chunk.scored) for chunk in output.chunks if chunk.scored},
            sums=sums,
            pooled=pooled_states(output.chunks, sums),
        )

    def check(self) -> None:
        """Do nothing: no device could fail."""

    def warm_up(self, num_tokens: int) -> None:
        """Do nothing: no kernel is to be compiled."""


def made_up_step(
    lengths: Sequence[int], block_size: int, sampling: Sampling = PLAIN, start: int = 0
) -> SchedulerOutput:
    """Make a step of made-up requests: of each a chunk of so many tokens from position `start` on, of which nothing is
    stored, and whose end is sampled as `sampling` says."""
    return SchedulerOutput(tuple(_made_up(length, block_size, sampling, start) for length in lengths), ())


def _made_up(length: int, block_size: int, sampling: Sampling, start: int) -> ScheduledChunk:
    end = start + length
    assignment = Assignment(
        request_id="made up",
        attempt=0,
        stage=Stage.WHOLE,
        token_ids=(0,) * end,
        num_prompt_tokens=end,
        sampling=sampling,
        reply_to="",
    )
    request = Request(assignment, BlockChain(root_hash("made up"), assignment.salt, block_size), 0)
    # Any blocks will do: nothing is stored (`store_from` is the end), and what attention reads there does not matter.
    request.blocks += range(-(-end // block_size))
    return ScheduledChunk(request, start, length, end, samples=True)


class Positions(NamedTuple):
    """Consecutive positions of a sequence to be computed."""

    token_ids: Sequence[int]
    """Tokens of these positions."""
    start: int
    blocks: Sequence[int]
    """Blocks of the sequence, from its first position on."""
    store_from: int = 0
    """Positions below are computed for their output, not stored."""


def build_batch(chunks: Sequence[ScheduledChunk], block_size: int, device: torch.device) -> ForwardBatch:
    """Lay out the tensors of one step. Positions in shared blocks get slot -1: computed, not stored."""
    parts = [
        Positions(
            [*chunk.request.token_ids[chunk.start : chunk.start + chunk.num_tokens], *chunk.draft],
            chunk.start,
            chunk.request.blocks,
            chunk.store_from,
        )
        for chunk in chunks
    ]
    return lay_out(parts, _wanted_rows(chunks), block_size, device)


def lay_out(
    parts: Sequence[Positions], wanted_rows: Sequence[int], block_size: int, device: torch.device
) -> ForwardBatch:
    """Lay out the tensors of a forward pass. `wanted_rows`: tokens of the batch whose results are wanted."""
    num_tokens = sum(len(part.token_ids) for part in parts)
    token_ids = np.empty(num_tokens, np.int64)
    positions = np.empty(num_tokens, np.int64)
    slots = np.empty(num_tokens, np.int64)
    block_tables = np.zeros((len(parts), max(len(part.blocks) for part in parts)), np.int32)
    query_start = np.zeros(len(parts) + 1, np.int32)
    context_lens = np.empty(len(parts), np.int32)
    row = 0

    for index, part in enumerate(parts):
        start, end = part.start, part.start + len(part.token_ids)
        rows = slice(row, row + end - start)
        block_tables[index, : len(part.blocks)] = part.blocks
        token_ids[rows] = part.token_ids
        positions[rows] = at = np.arange(start, end)
        # int64 before the product: a slot counts tokens of the whole pool, of which there may be more than 2^31.
        slots[rows] = block_tables[index, at // block_size].astype(np.int64) * block_size + at % block_size
        if part.store_from > start:
            # A shared block is never written: positions in it are computed for their output alone.
            slots[rows][: part.store_from - start] = -1

        row += end - start
        query_start[index + 1] = row
        context_lens[index] = end

    return ForwardBatch(
        token_ids=upload(token_ids, torch.int64, device),
        positions=upload(positions, torch.int64, device),
        slot_mapping=upload(slots, torch.int64, device),
        block_tables=upload(block_tables, torch.int32, device),
        query_start=upload(query_start, torch.int32, device),
        context_lens=upload(context_lens, torch.int32, device),
        logits_rows=upload(wanted_rows, torch.int64, device),
    )


def state_use(chunks: Sequence[ScheduledChunk]) -> StateUse:
    """Lay out the recurrent states of one step. A made-up chunk begins its sequence, and leaves no state."""
    sources: list[int] = []
    rows: list[int] = []
    slots: list[int] = []
    first = 0
    for chunk in chunks:
        moves = chunk.states
        sources.append(NO_STATE if moves is None or moves.source is None else moves.source)
        for num_tokens, slot in () if moves is None else moves.writes:
            rows.append(first + num_tokens - chunk.start - 1)
            slots.append(slot)
        first += chunk.num_tokens
    return StateUse(*(torch.tensor(values, dtype=torch.int64) for values in (sources, rows, slots)))


def have_adapters(chunks: Sequence[ScheduledChunk]) -> bool:
    """True if a token of a chunk is computed with an adapter."""
    return any(
        chunk.request.assignment.adapter is not None and _num_plain(chunk) < chunk.num_tokens for chunk in chunks
    )


def _num_plain(chunk: ScheduledChunk) -> int:
    """Leading tokens of a chunk that stand before those of its request's adapter."""
    return min(max(0, chunk.request.assignment.salt.num_plain_tokens - chunk.start), chunk.num_tokens)


def lora_rows(chunks: Sequence[ScheduledChunk], adapters: AdapterStore, device: torch.device) -> tuple[LoraRows, ...]:
    tokens: dict[bytes, list[range]] = {}
    first = 0
    for chunk in chunks:
        rows_of_chunk = range(first + _num_plain(chunk), first + chunk.num_tokens)
        if (adapter := chunk.request.assignment.adapter) is not None and rows_of_chunk:
            tokens.setdefault(adapter.digest, []).append(rows_of_chunk)
        first += chunk.num_tokens

    groups, wanted = [], np.array(_wanted_rows(chunks), np.int64)
    for digest, ranges in tokens.items():
        rows = np.concatenate([np.arange(each.start, each.stop) for each in ranges])
        places = np.flatnonzero(np.isin(wanted, rows))
        groups.append(
            LoraRows(adapters[digest], upload(rows, torch.int64, device), upload(places, torch.int64, device))
        )
    return tuple(groups)


def _wanted_rows(chunks: Sequence[ScheduledChunk]) -> list[int]:
    """Tokens of the batch whose results are wanted: the last token of each chunk that samples and each token of its
    draft, then each scored position, then each pooled one, in the order of the chunks."""
    sampled: list[int] = []
    scored: list[int] = []
    pooled: list[int] = []
    first = 0
    for chunk in chunks:
        end = first + chunk.num_tokens
        if chunk.samples:
            sampled += range(end - 1 - len(chunk.draft), end)
        scored += [first + position - chunk.start for position in chunk.scored]
        pooled += [first + position - chunk.start for position in chunk.pooled]
        first = end
    return sampled + scored + pooled


def sums_of(chunk: ScheduledChunk, rows: npt.NDArray[np.float32]) -> list[bytes]:
    """Return the sums of a chunk, as `RunnerOutput.sums`. `rows` are the hidden states of its pooled positions,
    [num_pooled, hidden_size]."""
    start, stop, block_size = chunk.pooled.start, chunk.pooled.stop, chunk.request.block_size
    before = np.frombuffer(chunk.request.pooled_sum) if chunk.request.pooled_sum else np.zeros(rows.shape[1])
    totals = np.add.accumulate(np.vstack((before, rows)))  # [n] includes the first n rows
    ends = dict.fromkeys([*range((start // block_size + 1) * block_size, stop + 1, block_size), stop])
    return [totals[end - start].tobytes() for end in ends]


def pooled_states(chunks: Iterable[ScheduledChunk], sums: Mapping[str, Sequence[bytes]]) -> dict[str, bytes]:
    """Return the pooled hidden states that are known after a step with these `sums`, as `RunnerOutput.pooled`."""
    states = {}
    for chunk in chunks:
        if chunk.ends_pooled:
            request = chunk.request
            total = sums[request.request_id][-1] if chunk.pooled else request.pooled_sum
            is_mean = request.assignment.sampling.pooling is Pooling.MEAN
            state = np.frombuffer(total) / (request.num_to_pool if is_mean else 1)
            states[request.request_id] = state.astype("<f4").tobytes()
    return states
