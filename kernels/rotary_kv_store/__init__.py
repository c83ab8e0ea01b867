"""Rotary embedding of q and k, fused with writing k and v to the paged cache."""

from torch import Tensor

from raydix.kernels.cpp import cpu_ops
from raydix.kernels.rotary_kv_store.reference import rotary_kv_store_reference

__all__ = ["rotary_kv_store"]


def rotary_kv_store(
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
    """Normalises q and k per head if asked, rotates them, stores k and v, and returns q.

    `qkv`: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; `positions`, `slot_mapping`: [num_tokens] int64;
    `cos_sin`: [max_position, head_dim] float32 from `rotary_tables`; caches: [num_blocks, num_kv_heads, block_size,
    head_dim], last three dims contiguous, written at slot = block * block_size + offset (negative: not stored), on CPUs
    also int8 rows of `raydix.kernels.narrow_kv`;
    `q_norm`, `k_norm`: [head_dim] weights of an RMS norm over each head (Qwen 3, Gemma 3).

    Returns rotated q, [num_tokens, num_heads, head_dim]. Everything is float32 inside and rounded once. Raises
    `ValueError` on wrong shapes, positions or slots, `TypeError` on wrong dtypes.
    """
    if qkv.is_cuda:
        from raydix.kernels.rotary_kv_store.triton import rotary_kv_store_triton

        return rotary_kv_store_triton(
            qkv,
            positions,
            cos_sin,
            key_cache,
            value_cache,
            slot_mapping,
            num_heads,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
        )
    ops = cpu_ops()
    if ops is not None:
        query: Tensor = ops.rotary_kv_store(
            qkv, positions, cos_sin, key_cache, value_cache, slot_mapping, num_heads, q_norm, k_norm, eps
        )
        return query
    return rotary_kv_store_reference(
        qkv,
        positions,
        cos_sin,
        key_cache,
        value_cache,
        slot_mapping,
        num_heads,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
    )
