"""Triton kernels that work token by token or block by block, against the specifications."""

from typing import Any

import pytest
import torch
from torch import Tensor

from raydix.kernels.kv_pack.reference import kv_pack_reference
from raydix.kernels.kv_pack.triton import kv_pack_triton
from raydix.kernels.kv_unpack.reference import kv_unpack_reference
from raydix.kernels.kv_unpack.triton import kv_unpack_triton
from raydix.kernels.rms_norm.reference import add_rms_norm_reference, rms_norm_reference
from raydix.kernels.rms_norm.triton import rms_norm_triton
from raydix.kernels.rotary import rotary_tables
from raydix.kernels.rotary_kv_store.reference import rotary_kv_store_reference
from raydix.kernels.rotary_kv_store.triton import rotary_kv_store_triton
from raydix.kernels.silu_and_mul.reference import silu_and_mul_reference
from raydix.kernels.silu_and_mul.triton import silu_and_mul_triton
from tests.kernels.kernel_cases import assert_close
from tests.kernels.triton_cases import DEVICE, assert_relative, needs_gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(0, 576), (1, 576), (3, 7), (5, 1000), (2, 16), (3, 2049)]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_matches_reference(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, residual = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype)
    for weight in (randn(shape[1], dtype=dtype), randn(shape[1])):
        assert_close(rms_norm_triton(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))
        normed, total = rms_norm_triton(x, weight, 1e-5, residual)
        expected, expected_total = add_rms_norm_reference(x, weight, 1e-5, residual)
        assert_close(normed, expected)
        assert torch.equal(total, expected_total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_silu_and_mul_matches_reference(dtype: torch.dtype, shape: tuple[int, int], kind: str) -> None:
    x = randn(shape[0], shape[1] * 2) * 4
    x[:1, :2] = torch.tensor([200.0, -200.0])[: x.shape[1]]
    x = x.to(dtype)
    assert_close(silu_and_mul_triton(x, kind), silu_and_mul_reference(x, kind))


def test_rows_may_be_strided() -> None:
    wide, weight = randn(6, 64), randn(32)
    assert_close(rms_norm_triton(wide[:, :32], weight, 1e-5), rms_norm_reference(wide[:, :32], weight, 1e-5))
    assert_close(silu_and_mul_triton(wide[:, :32]), silu_and_mul_reference(wide[:, :32]))


def test_a_row_does_not_depend_on_the_others() -> None:
    x, weight = randn(9, 1152, dtype=torch.bfloat16), randn(1152, dtype=torch.bfloat16)
    normed, activated = rms_norm_triton(x, weight, 1e-6), silu_and_mul_triton(x)
    for row in range(9):
        assert torch.equal(rms_norm_triton(x[row : row + 1], weight, 1e-6)[0], normed[row])
        assert torch.equal(silu_and_mul_triton(x[row : row + 1])[0], activated[row])


def store_case(
    num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """qkv, positions, tables, pool full of NaN, and slots in shuffled order, every fifth negative."""
    qkv = randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    shape = (num_tokens // block_size + 2, 2, 2, num_kv_heads, block_size, head_dim)
    pool = torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)
    slots = torch.randperm(shape[0] * block_size, device=DEVICE)[:num_tokens]
    slots[4::5] = -1
    tables = rotary_tables(head_dim, 500, 1e4).to(DEVICE)
    return qkv, torch.randint(0, 500, (num_tokens,), device=DEVICE), tables, pool, slots


def check_store(
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    norms: torch.dtype | None,
) -> None:
    qkv, positions, tables, pool, slots = store_case(num_tokens, num_heads, num_kv_heads, head_dim, block_size, dtype)
    weights: dict[str, Any] = {}
    if norms:
        weights = {"q_norm": randn(head_dim, dtype=norms), "k_norm": randn(head_dim, dtype=norms)}
    expected_pool = pool.clone()
    caches, expected_caches = (pool[:, 1, 0], pool[:, 1, 1]), (expected_pool[:, 1, 0], expected_pool[:, 1, 1])
    query = rotary_kv_store_triton(qkv, positions, tables, *caches, slots, num_heads, **weights)
    expected = rotary_kv_store_reference(qkv, positions, tables, *expected_caches, slots, num_heads, **weights)
    assert_close(query, expected)
    assert torch.equal(pool.isnan(), expected_pool.isnan())
    assert_close(pool.nan_to_num(), expected_pool.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [0, 6])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(9, 3, 64, 16), (4, 1, 80, 8), (2, 2, 96, 24), (3, 1, 256, 128), (40, 8, 128, 32)],
)
@pytest.mark.parametrize("with_norms", [False, True])
def test_store_matches_reference(
    dtype: torch.dtype,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    with_norms: bool,
) -> None:
    check_store(num_tokens, num_heads, num_kv_heads, head_dim, block_size, dtype, dtype if with_norms else None)


def test_store_takes_one_norm_and_float_weights() -> None:
    check_store(7, 4, 2, 64, 16, torch.bfloat16, torch.float32)
    qkv, positions, tables, pool, slots = store_case(7, 4, 2, 64, 16, torch.bfloat16)
    expected_pool, norm = pool.clone(), randn(64)
    one: dict[str, Any]
    for name in ("q_norm", "k_norm"):
        one = {name: norm}
        query = rotary_kv_store_triton(qkv, positions, tables, pool[:, 0, 0], pool[:, 0, 1], slots, 4, **one)
        expected = rotary_kv_store_reference(
            qkv, positions, tables, expected_pool[:, 0, 0], expected_pool[:, 0, 1], slots, 4, **one
        )
        assert_close(query, expected)
        assert_close(pool.nan_to_num(), expected_pool.nan_to_num())


def test_slots_and_positions_outside_touch_nothing() -> None:
    qkv, positions, tables, pool, slots = store_case(3, 4, 2, 64, 16, torch.float32)
    rotary_kv_store_triton(qkv, positions, tables, pool[:, 0, 0], pool[:, 0, 1], slots + 10_000, 4)
    assert pool.isnan().all()
    query = rotary_kv_store_triton(qkv, positions + 10_000, tables, pool[:, 0, 0], pool[:, 0, 1], slots, 4)
    assert torch.equal(query, qkv[:, : 4 * 64].view(3, 4, 64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(7, 2, 2, 3, 16, 64), (9, 5), (4, 3, 7001)])
@pytest.mark.parametrize("ids", [[], [2, 0, 3, 1], [1, 1]])
def test_blocks_round_trip(dtype: torch.dtype, shape: tuple[int, ...], ids: list[int]) -> None:
    pool = torch.randint(0, 100, shape, device=DEVICE).to(dtype)
    wanted = torch.tensor(ids, dtype=torch.int64)
    block_bytes = pool[0].numel() * pool.element_size()
    out = torch.full((len(ids) * block_bytes,), 255, dtype=torch.uint8, device=DEVICE)
    assert kv_pack_triton(pool, wanted, out) is out
    assert torch.equal(out, kv_pack_reference(pool, wanted))
    target, expected = torch.zeros_like(pool), torch.zeros_like(pool)
    kv_unpack_triton(out, target, wanted)
    kv_unpack_reference(out, expected, wanted)
    assert torch.equal(target, expected)


def test_unknown_blocks_are_refused() -> None:
    pool = torch.zeros((4, 8), device=DEVICE)
    for wrong in ([4], [-1]):
        with pytest.raises(IndexError):
            kv_pack_triton(pool, torch.tensor(wrong), torch.empty(32, dtype=torch.uint8, device=DEVICE))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_shapes(dtype: torch.dtype) -> None:
    x, residual = randn(4099, 8192, dtype=dtype), randn(4099, 8192, dtype=dtype)
    weight = randn(8192, dtype=dtype)
    normed, total = rms_norm_triton(x, weight, 1e-5, residual)
    expected, expected_total = add_rms_norm_reference(x, weight, 1e-5, residual)
    assert torch.equal(total, expected_total)
    assert_relative(normed, expected)
    assert_relative(silu_and_mul_triton(x), silu_and_mul_reference(x))
    assert_relative(silu_and_mul_triton(x, "gelu_tanh"), silu_and_mul_reference(x, "gelu_tanh"))
    check_store(5003, 32, 8, 128, 16, dtype, None)
    check_store(5003, 32, 8, 128, 16, dtype, torch.float32)


@pytest.mark.gpu
@needs_gpu
def test_large_pools_from_host_memory() -> None:
    pool = torch.randint(-128, 127, (3000, 32, 2, 8, 16, 128), dtype=torch.int8, device=DEVICE)
    ids = torch.randperm(3000)[:777]
    out = torch.empty(777 * pool[0].numel(), dtype=torch.uint8)
    assert torch.equal(kv_pack_triton(pool, ids, out), kv_pack_reference(pool, ids).cpu())
    target = torch.zeros_like(pool)
    kv_unpack_triton(out, target, ids)
    assert torch.equal(target[ids.to(DEVICE)], pool[ids.to(DEVICE)])
