"""Runs one scheduled step on the model: builds the batch, runs the decoder, samples and scores."""

from collections.abc import Sequence
from itertools import islice
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.core.scheduler import RunnerOutput, SampledToken, ScheduledChunk, SchedulerOutput
from engine.core.types import TokenLogprobs
from engine.model.cuda import upload
from engine.model.decoder import Decoder, ForwardBatch
from engine.model.kv_pool import KVPool
from engine.model.sampler import sample_requests, score_tokens

SCORED_ROWS = 128
"""Rows whose logits are held at once when prompts are scored."""


class Runner(Protocol):
    """What the engine asks of a model: the sampled token of each chunk that samples, the scores of each that scores."""

    def run(self, output: SchedulerOutput) -> RunnerOutput: ...


class ModelRunner:
    """The decoder over a paged KV pool."""

    def __init__(self, decoder: Decoder, kv_pool: KVPool) -> None:
        self.decoder = decoder
        self.kv_pool = kv_pool

    @torch.inference_mode()
    def run(self, output: SchedulerOutput) -> RunnerOutput:
        """Compute the step; KV is written to the pool, one token is sampled for each chunk that ends its sequence."""
        hidden = self.hidden(output.chunks)
        requests = [chunk.request for chunk in output.chunks if chunk.samples]
        sampled: dict[str, SampledToken] = {}
        if requests:
            tokens = sample_requests(self.decoder.logits(hidden[: len(requests)]), requests)
            sampled = {request.request_id: token for request, token in zip(requests, tokens, strict=True)}
        return RunnerOutput(sampled, self._score(hidden[len(requests) :], output.chunks))

    def hidden(self, chunks: Sequence[ScheduledChunk]) -> Tensor:
        """What the step's logits are made of: a row per sampling chunk, then one per scored position."""
        return self.decoder.hidden(build_batch(chunks, self.kv_pool.block_size, self.kv_pool.device), self.kv_pool)

    def _score(self, hidden: Tensor, chunks: Sequence[ScheduledChunk]) -> dict[str, list[TokenLogprobs]]:
        """The scores of each chunk; `hidden` has the rows of all their scored positions, [num_scored, hidden_size]."""
        scoring = [chunk for chunk in chunks if chunk.scored]
        token_ids, num_top = [], []
        for chunk in scoring:
            token_ids += [chunk.request.token_ids[position + 1] for position in chunk.scored]
            num_top += [chunk.request.assignment.sampling.prompt_logprobs or 0] * len(chunk.scored)
        scores: list[TokenLogprobs] = []
        for first in range(0, len(token_ids), SCORED_ROWS):
            rows = slice(first, first + SCORED_ROWS)
            scores += score_tokens(self.decoder.logits(hidden[rows]), token_ids[rows], num_top[rows])
        left = iter(scores)
        return {chunk.request.request_id: list(islice(left, len(chunk.scored))) for chunk in scoring}


class NullRunner:
    """Computes nothing and returns at once: what remains is the cost of everything around the model."""

    def run(self, output: SchedulerOutput) -> RunnerOutput:
        """A token per sampling chunk, a letter of the alphabet by its position; certainty for what is scored."""
        return RunnerOutput(
            {
                chunk.request.request_id: SampledToken(66 + chunk.request.num_output % 26)
                for chunk in output.chunks
                if chunk.samples
            },
            {
                chunk.request.request_id: [TokenLogprobs(0.0, (), (), 1)] * len(chunk.scored)
                for chunk in output.chunks
                if chunk.scored
            },
        )


def build_batch(chunks: Sequence[ScheduledChunk], block_size: int, device: torch.device) -> ForwardBatch:
    """The tensors of one step. Positions in shared blocks get slot -1: computed, not stored.

    Logits are wanted of each chunk that samples, in order, then of each position that is scored, in order.
    """
    num_tokens = sum(chunk.num_tokens for chunk in chunks)
    token_ids = np.empty(num_tokens, np.int64)
    positions = np.empty(num_tokens, np.int64)
    slots = np.empty(num_tokens, np.int64)
    block_tables = np.zeros((len(chunks), max(len(chunk.request.blocks) for chunk in chunks)), np.int32)
    query_start = np.zeros(len(chunks) + 1, np.int32)
    context_lens = np.empty(len(chunks), np.int32)
    sampled_rows: list[int] = []
    scored_rows: list[int] = []
    row = 0
    for index, chunk in enumerate(chunks):
        request, start, end = chunk.request, chunk.start, chunk.start + chunk.num_tokens
        rows = slice(row, row + chunk.num_tokens)
        block_tables[index, : len(request.blocks)] = request.blocks
        token_ids[rows] = request.token_ids[start:end]
        positions[rows] = at = np.arange(start, end)
        slots[rows] = block_tables[index, at // block_size].astype(np.int64) * block_size + at % block_size
        if chunk.store_from > start:
            slots[rows][: chunk.store_from - start] = -1
        scored_rows += [row + position - start for position in chunk.scored]
        row += chunk.num_tokens
        query_start[index + 1] = row
        context_lens[index] = end
        if chunk.samples:
            sampled_rows.append(row - 1)
    return ForwardBatch(
        token_ids=upload(token_ids, torch.int64, device),
        positions=upload(positions, torch.int64, device),
        slot_mapping=upload(slots, torch.int64, device),
        block_tables=upload(block_tables, torch.int32, device),
        query_start=upload(query_start, torch.int32, device),
        context_lens=upload(context_lens, torch.int32, device),
        logits_rows=upload(sampled_rows + scored_rows, torch.int64, device),
        max_query_len=max(chunk.num_tokens for chunk in chunks),
    )
