"""Attention of a varlen batch of query chunks over paged KV: the seed of chunked prefill over cached prefixes."""

from typing import Literal, overload

from torch import Tensor

from raydix.kernels.cpp import cpu_ops
from raydix.kernels.paged_attention.plan import AttentionPlan
from raydix.kernels.paged_attention.reference import paged_attention_reference

__all__ = ["paged_attention"]


@overload
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = ...,
    soft_cap: float | None = ...,
    return_lse: Literal[False] = ...,
    out: Tensor | None = ...,
    deterministic: bool = ...,
    sinks: Tensor | None = ...,
    plan: AttentionPlan | None = ...,
) -> Tensor: ...


@overload
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = ...,
    soft_cap: float | None = ...,
    return_lse: Literal[True],
    out: Tensor | None = ...,
    deterministic: bool = ...,
    sinks: Tensor | None = ...,
    plan: AttentionPlan | None = ...,
) -> tuple[Tensor, Tensor]: ...


def paged_attention(
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
    return_lse: bool = False,
    out: Tensor | None = None,
    deterministic: bool = False,
    sinks: Tensor | None = None,
    plan: AttentionPlan | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention of each sequence's newest queries over all its KV (prefix plus chunk).

    `query`: [num_tokens, num_heads, head_dim], the chunks of all sequences one after the other.
    `key_cache`, `value_cache`: [num_blocks, num_kv_heads, block_size, head_dim], last three dims contiguous; on CPUs
    also int8 rows of `raydix.kernels.narrow_kv` in the place of the last dim.
    `block_tables`: [num_sequences, max_blocks] int32; `query_start`: [num_sequences + 1] int32;
    `context_lens`: [num_sequences] int32, KV tokens of the sequence including its chunk, whose queries are the last
    `query_start[s + 1] - query_start[s]` positions.

    Returns out [num_tokens, num_heads, head_dim] (`out` itself if given), and with `return_lse` also the natural
    log-sum-exp of the scores, [num_tokens, num_heads] float32. With `deterministic` each row's bits depend only on the
    row's query and KV, never on chunking, neighbours or threads; on CPU they never do (bfloat16 and float32). `sinks`
    [num_heads] float32, on CPUs only: of each head the score of one more key, whose value is zero. `plan`, for GPUs
    only: of this step and this window; without one a GPU is waited for to make it. Raises `ValueError` on wrong shapes
    and `TypeError` on wrong dtypes.
    """
    if query.is_cuda:
        # Imported where it is needed: a machine without a GPU may have no Triton.
        from raydix.kernels.paged_attention.triton import paged_attention_triton

        return paged_attention_triton(
            query,
            key_cache,
            value_cache,
            block_tables,
            query_start,
            context_lens,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            return_lse=return_lse,
            out=out,
            deterministic=deterministic,
            sinks=sinks,
            plan=plan,
        )
    ops = cpu_ops()
    if ops is not None:
        result: Tensor | tuple[Tensor, Tensor] = ops.paged_attention(
            query,
            key_cache,
            value_cache,
            block_tables,
            query_start,
            context_lens,
            scale,
            sliding_window,
            soft_cap,
            return_lse,
            out,
            sinks,
        )
        return result
    computed, lse = paged_attention_reference(
        query,
        key_cache,
        value_cache,
        block_tables,
        query_start,
        context_lens,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks,
    )
    if out is not None:
        # Copied, not returned: the caller's tensor may be a part of a larger one.
        computed = out.copy_(computed)
    return (computed, lse) if return_lse else computed
