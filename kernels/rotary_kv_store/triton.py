"""Rotary embedding fused with writing K and V to the paged cache, on a GPU."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 2048


@triton.jit
def _rotary_kv_store_kernel(
    qkv_ptr,
    positions_ptr,
    cos_sin_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    q_norm_ptr,
    k_norm_ptr,
    out_ptr,
    stride_qkv_token,
    stride_key_block,
    stride_key_head,
    stride_value_block,
    stride_value_head,
    num_slots,
    max_position,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) on the halves of each q and k head, after an optional RMS norm.

    qkv: [num_tokens, (NUM_HEADS + 2 NUM_KV_HEADS) * 2 HALF], rows strided; positions, slot_mapping: [num_tokens] int64;
    cos_sin: [max_position, 2 HALF] float32; key_cache, value_cache: [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, 2 HALF];
    q_norm, k_norm: [2 HALF]; out: [num_tokens, NUM_HEADS, 2 HALF] contiguous. Slots outside the cache store nothing,
    positions outside the table rotate by nothing.

    One program handles BLOCK_HEADS heads of one token.
    """
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dims = tl.arange(0, BLOCK_HALF)
    in_half = dims < HALF
    mask = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & in_half[None, :]
    x_ptrs = qkv_ptr + token * stride_qkv_token + heads[:, None] * (2 * HALF) + dims[None, :]
    raw1 = tl.load(x_ptrs, mask=mask, other=0.0)
    raw2 = tl.load(x_ptrs + HALF, mask=mask, other=0.0)
    x1, x2 = raw1.to(tl.float32), raw2.to(tl.float32)

    is_query = heads < NUM_HEADS
    is_key = (heads >= NUM_HEADS) & (heads < NUM_HEADS + NUM_KV_HEADS)
    is_value = heads >= NUM_HEADS + NUM_KV_HEADS
    if HAS_Q_NORM or HAS_K_NORM:
        scale = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, axis=1) / (2 * HALF) + eps)
        if HAS_Q_NORM:
            w1 = tl.load(q_norm_ptr + dims, mask=in_half, other=0.0).to(tl.float32)
            w2 = tl.load(q_norm_ptr + HALF + dims, mask=in_half, other=0.0).to(tl.float32)
            x1 = tl.where(is_query[:, None], x1 * scale[:, None] * w1[None, :], x1)
            x2 = tl.where(is_query[:, None], x2 * scale[:, None] * w2[None, :], x2)
        if HAS_K_NORM:
            w1 = tl.load(k_norm_ptr + dims, mask=in_half, other=0.0).to(tl.float32)
            w2 = tl.load(k_norm_ptr + HALF + dims, mask=in_half, other=0.0).to(tl.float32)
            x1 = tl.where(is_key[:, None], x1 * scale[:, None] * w1[None, :], x1)
            x2 = tl.where(is_key[:, None], x2 * scale[:, None] * w2[None, :], x2)

    position = tl.load(positions_ptr + token).to(tl.int64)
    known = dims < tl.where((position >= 0) & (position < max_position), HALF, 0)
    cos = tl.load(cos_sin_ptr + position * (2 * HALF) + dims, mask=known, other=1.0)
    sin = tl.load(cos_sin_ptr + position * (2 * HALF) + HALF + dims, mask=known, other=0.0)
    dtype = out_ptr.dtype.element_ty
    y1 = (x1 * cos[None, :] - x2 * sin[None, :]).to(dtype)
    y2 = (x2 * cos[None, :] + x1 * sin[None, :]).to(dtype)

    out_ptrs = out_ptr + (token * NUM_HEADS + heads)[:, None] * (2 * HALF) + dims[None, :]
    query_mask = is_query[:, None] & mask
    tl.store(out_ptrs, y1, mask=query_mask)
    tl.store(out_ptrs + HALF, y2, mask=query_mask)

    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    stored = dims < tl.where((slot >= 0) & (slot < num_slots), HALF, 0)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    key_mask = (is_key[:, None] & mask) & stored[None, :]
    key_heads = (heads - NUM_HEADS).to(tl.int64)[:, None]
    key_ptrs = key_cache_ptr + block * stride_key_block + key_heads * stride_key_head
    key_ptrs += offset * (2 * HALF) + dims[None, :]
    tl.store(key_ptrs, y1, mask=key_mask)
    tl.store(key_ptrs + HALF, y2, mask=key_mask)
    value_mask = (is_value[:, None] & mask) & stored[None, :]
    value_heads = (heads - NUM_HEADS - NUM_KV_HEADS).to(tl.int64)[:, None]
    value_ptrs = value_cache_ptr + block * stride_value_block + value_heads * stride_value_head
    value_ptrs += offset * (2 * HALF) + dims[None, :]
    tl.store(value_ptrs, raw1, mask=value_mask)
    tl.store(value_ptrs + HALF, raw2, mask=value_mask)


def rotary_kv_store_triton(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Do what `rotary_kv_store` does, on one device; to check positions and slots would be to wait for the device."""
    num_tokens = qkv.shape[0]
    num_blocks, num_kv_heads, block_size, head_dim = key_cache.shape
    if qkv.shape[1] != (num_heads + 2 * num_kv_heads) * head_dim or head_dim % 2:
        raise ValueError(f"qkv of width {qkv.shape[1]} does not hold {num_heads} + 2 * {num_kv_heads} heads")
    if key_cache.shape != value_cache.shape or cos_sin.shape[1] != head_dim:
        raise ValueError("the caches must have one shape, and cos_sin a row of head_dim")
    if any(cache.stride()[2:] != (head_dim, 1) for cache in (key_cache, value_cache)) or qkv.stride(1) != 1:
        raise ValueError("rows of qkv and the last two dims of the caches must be contiguous")
    if not qkv.dtype == key_cache.dtype == value_cache.dtype or cos_sin.dtype != torch.float32:
        raise TypeError("qkv and the caches must have one dtype, and cos_sin float32")
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    total_heads, block_half = num_heads + 2 * num_kv_heads, max(16, triton.next_power_of_2(head_dim // 2))
    block_heads = min(triton.next_power_of_2(total_heads), max(ELEMENTS // (2 * block_half), 1))
    if num_tokens:
        _rotary_kv_store_kernel[(num_tokens, triton.cdiv(total_heads, block_heads))](
            qkv,
            positions.contiguous(),
            cos_sin.contiguous(),
            key_cache,
            value_cache,
            slot_mapping.contiguous(),
            qkv if q_norm is None else q_norm.contiguous(),
            qkv if k_norm is None else k_norm.contiguous(),
            out,
            qkv.stride(0),
            key_cache.stride(0),
            key_cache.stride(1),
            value_cache.stride(0),
            value_cache.stride(1),
            num_blocks * block_size,
            cos_sin.shape[0],
            eps,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HALF=head_dim // 2,
            BLOCK_SIZE=block_size,
            HAS_Q_NORM=q_norm is not None,
            HAS_K_NORM=k_norm is not None,
            BLOCK_HEADS=block_heads,
            BLOCK_HALF=block_half,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out
