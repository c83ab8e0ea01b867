"""Keys and values of 8 bits: stored as the specification says, byte for byte, and read as what was stored."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from raydix.kernels.cpp import cpu_ops
from raydix.kernels.narrow_kv import FACTOR_BYTES, narrow_rows, widen_rows
from raydix.kernels.paged_attention import paged_attention
from raydix.kernels.rotary import rotary_tables
from raydix.kernels.rotary_kv_store import rotary_kv_store
from raydix.kernels.rotary_kv_store.reference import rotary_kv_store_reference
from tests.kernels.kernel_cases import Chunk, PagedCase, batch_of, paged_case
from tests.skips import NO_KERNELS

needs_cpp = pytest.mark.skipif(cpu_ops() is None, reason=NO_KERNELS)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def test_a_row_is_as_near_as_its_numbers_allow() -> None:
    rows = torch.randn(50, 3, 80) * torch.logspace(-6, 6, 50)[:, None, None]
    wide = widen_rows(narrow_rows(rows), torch.float32)
    largest = rows.abs().amax(-1, keepdim=True)
    assert torch.all((wide - rows).abs() <= largest / 254 * 1.001)
    assert torch.equal(wide.abs().amax(-1, keepdim=True).isclose(largest), torch.ones_like(largest, dtype=torch.bool))


@pytest.mark.parametrize("value", [0.0, 1e-38, torch.inf, -torch.inf, torch.nan])
def test_rows_that_no_number_stands_for_spoil_no_others(value: float) -> None:
    rows = torch.randn(3, 64)
    rows[1] = value
    wide = widen_rows(narrow_rows(rows), torch.float32)
    assert torch.all(wide[1] == 0.0)
    assert torch.equal(wide[::2], widen_rows(narrow_rows(rows[::2]), torch.float32))


def store(qkv: Tensor, norm: Tensor | None, function: Any, block_size: int, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The queries of 9 heads, and a pool of 3 heads beside other bytes."""
    pool = torch.full((8, 2, 2, 3, block_size, 80 + FACTOR_BYTES), 77, dtype=torch.int8)
    positions, tables = torch.arange(len(qkv)), rotary_tables(80, 500, 1e4)
    query = function(qkv, positions, tables, pool[:, 1, 0], pool[:, 1, 1], slots, 9, q_norm=norm, k_norm=norm)
    return query, pool


@needs_cpp
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
def test_store_writes_what_the_specification_writes(dtype: torch.dtype, has_norm: bool) -> None:
    qkv = torch.randn(37, 15 * 80).to(dtype)
    slots = torch.randperm(8 * 16)[:37]
    slots[4::5] = -1
    norm = torch.randn(80).to(dtype) if has_norm else None
    query, pool = store(qkv, norm, rotary_kv_store, 16, slots)
    expected_query, expected = store(qkv, norm, rotary_kv_store_reference, 16, slots)
    assert torch.allclose(query.float(), expected_query.float(), rtol=1e-2, atol=1e-3)
    assert torch.equal(pool[:, 0], expected[:, 0])
    # Values are stored as they come, so their bytes are the specification's. A key is turned first, where a machine may
    # round once instead of twice, and one number of 127 then be the next one.
    assert torch.equal(pool[:, 1, 1], expected[:, 1, 1])
    keys, expected_keys = (widen_rows(each[:, 1, 0], torch.float32) for each in (pool, expected))
    largest = expected_keys.abs().amax(-1, keepdim=True)
    assert torch.all((keys - expected_keys).abs() <= largest / 126)


@needs_cpp
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_s_bytes_do_not_depend_on_what_was_there(dtype: torch.dtype) -> None:
    """A draft token that is taken back leaves nothing: what is written over it is as if it had never been."""
    slots, qkv = torch.tensor([5, 6]), torch.randn(2, 15 * 80).to(dtype)
    _, once = store(qkv, None, rotary_kv_store, 16, slots)
    positions, tables = torch.arange(2), rotary_tables(80, 500, 1e4)
    twice = torch.full_like(once, 77)
    for rows in (qkv * 1000, qkv):
        rotary_kv_store(rows, positions, tables, twice[:, 1, 0], twice[:, 1, 1], slots, 9)
    assert torch.equal(once, twice)


def narrowed(case: PagedCase) -> tuple[PagedCase, PagedCase]:
    """The case with caches of 8 bits, and with these widened again."""
    narrow = [narrow_rows(cache.nan_to_num()) for cache in (case.key_cache, case.value_cache)]
    wide = [widen_rows(each, case.key_cache.dtype) for each in narrow]
    return replace(case, key_cache=narrow[0], value_cache=narrow[1]), replace(
        case, key_cache=wide[0], value_cache=wide[1]
    )


@needs_cpp
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 40}, {"soft_cap": 2.0}])
def test_attention_has_the_bits_of_the_widened_caches(
    dtype: torch.dtype, head_dim: int, options: dict[str, Any]
) -> None:
    narrow, wide = narrowed(paged_case([1, 300, 37, 64], head_dim=head_dim, dtype=dtype))
    for chunks in ([Chunk(0, 0, 1), Chunk(1, 290, 300), Chunk(2, 0, 37)], [Chunk(1, 299, 300), Chunk(3, 63, 64)]):
        found, expected = (
            paged_attention(*batch_of(case, chunks), scale=case.scale, **options) for case in (narrow, wide)
        )
        assert torch.equal(found, expected)


@needs_cpp
def test_caches_of_another_form_are_refused() -> None:
    case = paged_case([20], dtype=torch.bfloat16)
    narrow, _ = narrowed(case)
    chunks = [Chunk(0, 19, 20)]
    with pytest.raises(ValueError, match="head_dim"):
        cut = replace(
            narrow,
            key_cache=narrow.key_cache[..., 1:].contiguous(),
            value_cache=narrow.value_cache[..., 1:].contiguous(),
        )
        paged_attention(*batch_of(cut, chunks), scale=1.0)
    with pytest.raises((ValueError, TypeError)):
        paged_attention(*batch_of(replace(narrow, value_cache=case.value_cache), chunks), scale=1.0)
