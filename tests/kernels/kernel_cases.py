"""Inputs and tolerances the kernel tests share."""

from dataclasses import dataclass

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Equal up to rounding in their dtype, relative to the size of the values."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


@dataclass(frozen=True, slots=True)
class PagedCase:
    """A paged pool whose slots outside the contexts are NaN, and the queries of whole sequences."""

    pool: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    context_lens: list[int]
    queries: list[Tensor]
    scale: float


def paged_case(
    context_lens: list[int],
    *,
    num_heads: int = 9,
    num_kv_heads: int = 3,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> PagedCase:
    """Random KV at shuffled blocks of layer 1 of 2; queries[s] holds one query per position of sequence s."""
    generator = torch.Generator().manual_seed(seed)
    blocks_of = [-(-length // block_size) for length in context_lens]
    num_blocks = sum(blocks_of) + 3
    pool = torch.full((num_blocks, 2, 2, num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
    key_cache, value_cache = pool[:, 1, 0], pool[:, 1, 1]
    order = torch.randperm(num_blocks, generator=generator).tolist()
    tables = torch.full((len(context_lens), max(blocks_of, default=0) + 1), num_blocks + 7, dtype=torch.int32)
    for sequence, length in enumerate(context_lens):
        for index in range(blocks_of[sequence]):
            block = order.pop()
            tables[sequence, index] = block
            valid = min(block_size, length - index * block_size)
            for cache in (key_cache, value_cache):
                cache[block, :, :valid] = torch.randn((num_kv_heads, valid, head_dim), generator=generator).to(dtype)
    queries = [torch.randn((n, num_heads, head_dim), generator=generator).to(dtype) for n in context_lens]
    return PagedCase(pool, key_cache, value_cache, tables, context_lens, queries, head_dim**-0.5)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions `begin:end` of one sequence, the context ending at `end`."""

    sequence: int
    begin: int
    end: int


def batch_of(case: PagedCase, chunks: list[Chunk]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The tensor arguments of `paged_attention` for some chunks of a case."""
    lengths = [chunk.end - chunk.begin for chunk in chunks]
    query = torch.cat([case.queries[c.sequence][c.begin : c.end] for c in chunks] or [case.queries[0][:0]])
    starts = torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32)
    contexts = torch.tensor([chunk.end for chunk in chunks], dtype=torch.int32)
    tables = case.block_tables[[chunk.sequence for chunk in chunks]]
    return query, case.key_cache, case.value_cache, tables, starts, contexts
