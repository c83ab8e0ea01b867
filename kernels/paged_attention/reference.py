"""Specification of attention over paged KV."""

import torch
from torch import Tensor

from raydix.kernels.narrow_kv import widen_rows


def paged_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(mask(cap(scale * q k^T))) v per sequence and head, in float32; returns (out, lse).

    A query at position p sees keys 0..p, with `sliding_window` only the last `sliding_window` of them. Masked keys
    count for nothing, whatever the pool holds there. `sinks` [num_heads]: each head's score of one more key, which
    every query sees and whose value is zero. Shapes as in `paged_attention`.
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = key_cache.shape[1]
    out = torch.zeros_like(query)
    lse = torch.full(query.shape[:2], -torch.inf, dtype=torch.float32, device=query.device)
    starts, lengths = query_start.tolist(), context_lens.tolist()
    for sequence, length in enumerate(lengths):
        begin, end = starts[sequence], starts[sequence + 1]
        if begin == end:
            continue
        blocks = block_tables[sequence, : -(-length // key_cache.shape[2])].long()
        keys, values = (
            _wide(cache[blocks], query.dtype).transpose(0, 1).reshape(num_kv_heads, -1, head_dim)[:, :length].float()
            for cache in (key_cache, value_cache)
        )
        grouped = query[begin:end].float().view(end - begin, num_kv_heads, num_heads // num_kv_heads, head_dim)
        scores = torch.einsum("qkgd,knd->qkgn", grouped, keys) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        position = torch.arange(length - (end - begin), length, device=query.device)[:, None]
        key_position = torch.arange(length, device=query.device)[None, :]
        visible = key_position <= position
        if sliding_window is not None:
            visible &= key_position > position - sliding_window
        scores = scores.masked_fill(~visible[:, None, None, :], -torch.inf)
        values = values.masked_fill(~visible.any(0)[None, :, None], 0.0)
        weighed = scores
        if sinks is not None:  # one more key per head, without a value
            of_head = sinks.float().view(1, num_kv_heads, -1, 1).expand(*scores.shape[:3], 1)
            weighed = torch.cat((scores, of_head), -1)
        attended = torch.einsum("qkgn,knd->qkgd", torch.softmax(weighed, -1)[..., :length], values)
        out[begin:end] = attended.reshape(end - begin, num_heads, head_dim).to(out.dtype)
        lse[begin:end] = torch.logsumexp(weighed, -1).reshape(end - begin, num_heads)
    return out, lse


def _wide(cache: Tensor, dtype: torch.dtype) -> Tensor:
    return widen_rows(cache, dtype) if cache.dtype == torch.int8 else cache
