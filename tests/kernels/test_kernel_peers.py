"""What the GPU benchmark compares with computes the same: here with torch's backends for CPUs."""

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import CausalBias

from benchmarks.kernel_peers import AttentionInputs, _chunk_mask, _sdpa, attention_peers
from raydix.kernels.paged_attention.reference import paged_attention_reference

BLOCK_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 6, 2, 16


def make_inputs(batch: int, num_queries: int, context_len: int) -> AttentionInputs:
    generator = torch.Generator().manual_seed(num_queries)
    blocks = -(-context_len // BLOCK_SIZE)
    shape = (batch * blocks + 1, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    return AttentionInputs(
        torch.randn((batch * num_queries, NUM_HEADS, HEAD_DIM), generator=generator),
        torch.randn(shape, generator=generator),
        torch.randn(shape, generator=generator),
        (torch.randperm(batch * blocks, generator=generator, dtype=torch.int32) + 1).view(batch, blocks),
        torch.arange(batch + 1, dtype=torch.int32) * num_queries,
        torch.full((batch,), context_len, dtype=torch.int32),
        num_queries,
        context_len,
        HEAD_DIM**-0.5,
    )


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("num_queries", "context_len"), [(1, 1), (1, 10), (10, 10), (3, 10), (9, 10)])
def test_torch_attends_as_the_reference_does(batch: int, num_queries: int, context_len: int) -> None:
    inputs = make_inputs(batch, num_queries, context_len)
    expected, _ = paged_attention_reference(
        inputs.query,
        inputs.keys,
        inputs.values,
        inputs.block_tables,
        inputs.query_start,
        inputs.context_lens,
        scale=inputs.scale,
    )
    torch.testing.assert_close(_sdpa(inputs, SDPBackend.MATH)(), expected)


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])
def test_the_rule_for_a_chunk_is_the_mask(backend: SDPBackend) -> None:
    inputs = make_inputs(1, 3, 10)
    rule = _chunk_mask(inputs, backend)
    assert isinstance(rule, CausalBias)
    assert torch.equal(rule._materialize(), _chunk_mask(inputs, SDPBackend.CUDNN_ATTENTION))


def test_every_backend_can_be_set_up_for_a_chunk_over_a_cached_prefix() -> None:
    makers = attention_peers(make_inputs(1, 3, 10), with_flex=False)
    for name in ("sdpa-flash", "sdpa-efficient", "sdpa-cudnn"):
        makers[name]()
