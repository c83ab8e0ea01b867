"""Rotary tables against transformers; rotation and KV store against the specification."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from raydix.kernels.rotary import rotary_order, rotary_tables
from raydix.kernels.rotary_kv_store import rotary_kv_store
from raydix.kernels.rotary_kv_store.reference import rotary_kv_store_reference
from tests.kernels.kernel_cases import assert_close

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LONG = {
    "rope_type": "longrope",
    "factor": 4.0,
    "original_max_position_embeddings": 2048,
    "short_factor": [1.0 + 0.1 * index for index in range(16)],
    "long_factor": [1.0 + 2.0 * index for index in range(16)],
}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
    YARN,
    {**YARN, "beta_fast": 16, "beta_slow": 2, "mscale": 1.0, "mscale_all_dim": 0.7},
    {**YARN, "attention_factor": 1.3},
    {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0},
]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(("head_dim", "theta"), [(64, 10000.0), (128, 1e6)])
def test_tables_match_transformers(scaling: dict[str, Any], head_dim: int, theta: float) -> None:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=8192,
        rope_parameters={**scaling, "rope_theta": theta},
    )
    positions = torch.arange(8192)[None]
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    half = head_dim // 2
    expected = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)
    torch.testing.assert_close(rotary_tables(head_dim, 8192, theta, scaling), expected, rtol=0, atol=2e-6)


def test_tables_refuse_what_they_do_not_know() -> None:
    with pytest.raises(ValueError, match="unsupported rotary scaling"):
        rotary_tables(64, 16, 10000.0, {"rope_type": "own"})
    with pytest.raises(ValueError, match="15 of 30 dimensions cannot be rotated in pairs"):
        rotary_tables(30, 16, 10000.0, share=0.5)
    with pytest.raises(ValueError, match="2 factors for 16 frequencies"):
        rotary_tables(32, 16, 10000.0, {**LONG, "short_factor": [1.0] * 2})


@pytest.mark.parametrize("num_positions", [2048, 8192])
def test_longrope_has_one_set_of_frequencies_by_the_length_of_the_table(num_positions: int) -> None:
    config = Phi3Config(
        hidden_size=128,
        num_attention_heads=4,
        max_position_embeddings=8192,
        original_max_position_embeddings=2048,
        rope_parameters={**LONG, "rope_theta": 1e4},
    )
    cos, sin = Phi3RotaryEmbedding(config)(torch.zeros(1), torch.arange(num_positions)[None])
    expected = torch.cat((cos[0, :, :16], sin[0, :, :16]), dim=-1)
    torch.testing.assert_close(rotary_tables(32, num_positions, 1e4, LONG), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("interleaved", [False, True])
def test_heads_in_the_order_of_the_kernels_turn_the_models_pairs(share: float, interleaved: bool) -> None:
    """Each dimension that the kernels turn with another one is the other's partner in the model; the rest is still."""
    order, half = rotary_order(32, share, interleaved=interleaved), 16
    num_rotated = int(32 * share)
    assert sorted(order.tolist()) == list(range(32))
    for at in range(half):
        first, second = int(order[at]), int(order[at + half])
        if at < num_rotated // 2:
            assert (first, second) == ((2 * at, 2 * at + 1) if interleaved else (at, at + num_rotated // 2))
        else:
            assert min(first, second) >= num_rotated
    table = rotary_tables(32, 9, 1e4, share=share)
    assert torch.equal(table[:, num_rotated // 2 : half], torch.ones(9, half - num_rotated // 2))
    assert torch.equal(table[:, half + num_rotated // 2 :], torch.zeros(9, half - num_rotated // 2))


def store_case(
    num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """qkv, positions, tables, pool full of NaN, and slots in shuffled order, every fifth negative."""
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    pool = torch.full((num_tokens // block_size + 2, 2, 2, num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
    slots = torch.randperm(pool.shape[0] * block_size)[:num_tokens]
    slots[4::5] = -1
    return qkv, torch.randint(0, 500, (num_tokens,)), rotary_tables(head_dim, 500, 1e4), pool, slots


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [0, 1, 37, 130])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "block_size"), [(9, 3, 64, 16), (4, 1, 80, 8)])
@pytest.mark.parametrize("norms", [None, "own", "float"])
def test_store_matches_reference(
    dtype: torch.dtype,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    norms: str | None,
) -> None:
    qkv, positions, tables, pool, slots = store_case(num_tokens, num_heads, num_kv_heads, head_dim, block_size, dtype)
    q_norm = k_norm = None
    if norms:
        kind = dtype if norms == "own" else torch.float32
        q_norm, k_norm = torch.randn(head_dim).to(kind), torch.randn(head_dim).to(kind)
    expected_pool = pool.clone()
    query = rotary_kv_store(
        qkv, positions, tables, pool[:, 1, 0], pool[:, 1, 1], slots, num_heads, q_norm=q_norm, k_norm=k_norm
    )
    expected = rotary_kv_store_reference(
        qkv,
        positions,
        tables,
        expected_pool[:, 1, 0],
        expected_pool[:, 1, 1],
        slots,
        num_heads,
        q_norm=q_norm,
        k_norm=k_norm,
    )
    assert_close(query, expected)
    assert torch.equal(pool.isnan(), expected_pool.isnan())
    assert_close(pool.nan_to_num(), expected_pool.nan_to_num())


def test_a_token_does_not_depend_on_the_others() -> None:
    qkv, positions, tables, pool, slots = store_case(200, 9, 3, 64, 16, torch.bfloat16)
    norm = torch.randn(64).bfloat16()
    other = pool.clone()
    together = rotary_kv_store(qkv, positions, tables, pool[:, 0, 0], pool[:, 0, 1], slots, 9, q_norm=norm, k_norm=norm)
    for i in range(200):
        token = slice(i, i + 1)
        alone = rotary_kv_store(
            qkv[token],
            positions[token],
            tables,
            other[:, 0, 0],
            other[:, 0, 1],
            slots[token],
            9,
            q_norm=norm,
            k_norm=norm,
        )
        assert torch.equal(alone[0], together[i])
    assert torch.equal(pool.view(torch.int16), other.view(torch.int16))


def test_rejects_what_would_write_elsewhere() -> None:
    qkv, positions, tables, pool, slots = store_case(3, 9, 3, 64, 16, torch.bfloat16)
    with pytest.raises((ValueError, IndexError)):
        rotary_kv_store(qkv, positions, tables, pool[:, 0, 0], pool[:, 0, 1], slots + 10_000, 9)
    with pytest.raises((ValueError, IndexError)):
        rotary_kv_store(qkv, positions + 10_000, tables, pool[:, 0, 0], pool[:, 0, 1], slots, 9)
