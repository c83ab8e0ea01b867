"""Runs one scheduled step on the model: builds the batch, runs the decoder, samples."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from engine.core.scheduler import SampledToken, ScheduledChunk, SchedulerOutput
from engine.model.decoder import Decoder, ForwardBatch
from engine.model.kv_pool import KVPool
from engine.model.sampler import sample_requests


class Runner(Protocol):
    """What the engine asks of a model: the sampled token of each chunk that samples, by request id."""

    def run(self, output: SchedulerOutput) -> dict[str, SampledToken]: ...


class ModelRunner:
    """The decoder over a paged KV pool."""

    def __init__(self, decoder: Decoder, kv_pool: KVPool) -> None:
        self.decoder = decoder
        self.kv_pool = kv_pool

    @torch.inference_mode()
    def run(self, output: SchedulerOutput) -> dict[str, SampledToken]:
        """Compute the step; KV is written to the pool, one token is sampled for each chunk that ends its sequence."""
        batch = build_batch(output.chunks, self.kv_pool.block_size, self.kv_pool.device)
        logits = self.decoder.forward(batch, self.kv_pool)
        requests = [chunk.request for chunk in output.chunks if chunk.samples]
        if not requests:
            return {}
        tokens = sample_requests(logits, requests)
        return {request.request_id: token for request, token in zip(requests, tokens, strict=True)}


class NullRunner:
    """Computes nothing and returns at once: what remains is the cost of everything around the model."""

    def run(self, output: SchedulerOutput) -> dict[str, SampledToken]:
        """A token per sampling chunk, a letter of the alphabet by its position."""
        requests = [chunk.request for chunk in output.chunks if chunk.samples]
        return {request.request_id: SampledToken(66 + request.num_output % 26) for request in requests}


def build_batch(chunks: Sequence[ScheduledChunk], block_size: int, device: torch.device) -> ForwardBatch:
    """The tensors of one step. Positions in shared blocks get slot -1: computed, not stored."""
    num_tokens = sum(chunk.num_tokens for chunk in chunks)
    token_ids = np.empty(num_tokens, np.int64)
    positions = np.empty(num_tokens, np.int64)
    slots = np.empty(num_tokens, np.int64)
    block_tables = np.zeros((len(chunks), max(len(chunk.request.blocks) for chunk in chunks)), np.int32)
    query_start = np.zeros(len(chunks) + 1, np.int32)
    context_lens = np.empty(len(chunks), np.int32)
    logits_rows = []
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
        row += chunk.num_tokens
        query_start[index + 1] = row
        context_lens[index] = end
        if chunk.samples:
            logits_rows.append(row - 1)
    return ForwardBatch(
        token_ids=torch.from_numpy(token_ids).to(device),
        positions=torch.from_numpy(positions).to(device),
        slot_mapping=torch.from_numpy(slots).to(device),
        block_tables=torch.from_numpy(block_tables).to(device),
        query_start=torch.from_numpy(query_start).to(device),
        context_lens=torch.from_numpy(context_lens).to(device),
        logits_rows=torch.tensor(logits_rows, dtype=torch.int64, device=device),
    )
