"""Specification of rotary embedding fused with writing K and V to their slots."""

import torch
from torch import Tensor

from raydix.kernels.narrow_kv import narrow_rows
from raydix.kernels.rms_norm.reference import rms_norm_reference


def rotary_kv_store_reference(
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
    """(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) on the halves of every q and k head, in float32.

    K and V go to (slot // block_size, slot % block_size); a negative slot stores nothing. Shapes as in
    `rotary_kv_store`.
    """
    num_kv_heads, block_size = key_cache.shape[1:3]
    head_dim = cos_sin.shape[1]
    is_narrow = key_cache.dtype == torch.int8
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    cos, sin = cos_sin[positions][:, None, :].chunk(2, dim=-1)

    def rotate(x: Tensor, norm: Tensor | None) -> Tensor:
        x = x.float() if norm is None else rms_norm_reference(x.float(), norm.float(), eps)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    for cache, rows in ((key_cache, rotate(key, k_norm)), (value_cache, value)):
        stored = narrow_rows(rows[kept]) if is_narrow else rows[kept].to(cache.dtype)
        cache[slots // block_size, :, slots % block_size] = stored
    return rotate(query, q_norm).to(qkv.dtype)
