"""Logits of a whole sequence through the paged decoder, for comparison with another implementation."""

import torch

from raydix.engine.model.decoder import Decoder, ForwardBatch
from raydix.engine.model.kv_pool import KVPool
from raydix.engine.model.state_pool import StatePool
from raydix.kernels.states import NO_STATE, StateUse

BLOCK_SIZE = 16


def logits_in_chunks(decoder: Decoder, token_ids: list[int], chunk: int) -> torch.Tensor:
    """Logits of every position, computed chunk by chunk through paged KV whose blocks are not in order."""
    num_blocks = len(token_ids) // BLOCK_SIZE + 1
    pool = KVPool(decoder.config, num_blocks, BLOCK_SIZE, decoder.dtype)
    table = torch.arange(num_blocks - 1, -1, -1, dtype=torch.int32)
    # Two states in turn: one is read while the other is written.
    states = None if decoder.config.recurrent is None else StatePool(decoder.config, 2)
    parts = []
    for number, start in enumerate(range(0, len(token_ids), chunk)):
        positions = torch.arange(start, min(start + chunk, len(token_ids)))
        batch = ForwardBatch(
            token_ids=torch.tensor(token_ids)[positions],
            positions=positions,
            slot_mapping=table[positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE,
            block_tables=table[None],
            query_start=torch.tensor([0, len(positions)], dtype=torch.int32),
            context_lens=torch.tensor([int(positions[-1]) + 1], dtype=torch.int32),
            logits_rows=torch.arange(len(positions)),
            states=StateUse(
                sources=torch.tensor([(number - 1) % 2 if start else NO_STATE]),
                write_rows=torch.tensor([len(positions) - 1]),
                write_slots=torch.tensor([number % 2]),
            ),
        )
        parts.append(decoder.forward(batch, pool, states))
    return torch.cat(parts)
