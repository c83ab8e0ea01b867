"""Peers for attention on this GPU: torch's backends, flex attention, and libraries where installed.

Each peer is a function without arguments that returns [num_tokens, num_heads, head_dim]. Peers get keys and values
contiguous and in their preferred layout; only flashinfer reads the paged pool in decode.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

Peer = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """A batch of equal sequences: the newest `num_queries` positions of each attend to all `context_len`.

    `query`: [batch * num_queries, num_heads, head_dim]; `keys`, `values`: the caches, [num_blocks, num_kv_heads,
    block_size, head_dim]; `block_tables`: [batch, blocks_per_sequence].
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    block_tables: Tensor
    query_start: Tensor
    context_lens: Tensor
    num_queries: int
    context_len: int
    scale: float

    @property
    def batch(self) -> int:
        return len(self.context_lens)

    def contiguous(self) -> tuple[Tensor, Tensor, Tensor]:
        """q [batch, num_heads, num_queries, head_dim]; k, v [batch, num_kv_heads, context_len, head_dim]."""
        num_heads, head_dim = self.query.shape[1:]
        q = self.query.view(self.batch, self.num_queries, num_heads, head_dim).transpose(1, 2).contiguous()
        k, v = (
            cache[self.block_tables.long()].transpose(1, 2).flatten(2, 3)[:, :, : self.context_len].contiguous()
            for cache in (self.keys, self.values)
        )
        return q, k, v


def attention_peers(inputs: AttentionInputs, *, with_flex: bool) -> dict[str, Callable[[], Peer]]:
    """Makers of peers by name; a maker, or the peer made, raises where this machine cannot run it."""
    makers: dict[str, Callable[[], Peer]] = {
        "sdpa-flash": lambda: _sdpa(inputs, SDPBackend.FLASH_ATTENTION),
        "sdpa-efficient": lambda: _sdpa(inputs, SDPBackend.EFFICIENT_ATTENTION),
        "sdpa-cudnn": lambda: _sdpa(inputs, SDPBackend.CUDNN_ATTENTION),
        "flash-attn": lambda: _flash_attn(inputs),
        "flashinfer": lambda: _flashinfer(inputs),
    }
    return makers | ({"flex": lambda: _flex(inputs)} if with_flex else {})


def _tokens(out: Tensor) -> Tensor:
    """[batch, num_heads, num_queries, head_dim] -> [num_tokens, num_heads, head_dim]."""
    return out.transpose(1, 2).flatten(0, 1)


def _sdpa(inputs: AttentionInputs, backend: SDPBackend) -> Peer:
    q, k, v = inputs.contiguous()
    shares_heads = backend != SDPBackend.EFFICIENT_ATTENTION
    if not shares_heads:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))

    is_chunk = 1 < inputs.num_queries < inputs.context_len
    is_causal = inputs.num_queries == inputs.context_len > 1
    mask = _chunk_mask(inputs, backend) if is_chunk else None

    def run() -> Tensor:
        with sdpa_kernel(backend):
            out = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=is_causal, scale=inputs.scale, enable_gqa=shares_heads
            )
        return _tokens(out)

    return run


def _chunk_mask(inputs: AttentionInputs, backend: SDPBackend) -> Tensor:
    """Mask of the last queries of a longer context; `is_causal` would align them to the first keys."""
    if backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        return causal_lower_right(inputs.num_queries, inputs.context_len)  # a rule, no tensor in memory
    shape = (inputs.num_queries, inputs.context_len)
    offset = inputs.context_len - inputs.num_queries
    return torch.ones(shape, dtype=torch.bool, device=inputs.query.device).tril(offset)


def _flex(inputs: AttentionInputs) -> Peer:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = inputs.contiguous()
    offset = inputs.context_len - inputs.num_queries

    def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query + offset >= key

    mask = create_block_mask(causal, None, None, inputs.num_queries, inputs.context_len, device=str(q.device))
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda: _tokens(compiled(q, k, v, block_mask=mask, scale=inputs.scale, enable_gqa=True))


def _flash_attn(inputs: AttentionInputs) -> Peer:
    attend = importlib.import_module("flash_attn").flash_attn_func
    q, k, v = (x.transpose(1, 2).contiguous() for x in inputs.contiguous())
    return lambda: attend(q, k, v, softmax_scale=inputs.scale, causal=True).flatten(0, 1)


def _flashinfer(inputs: AttentionInputs) -> Peer:
    flashinfer = importlib.import_module("flashinfer")
    num_heads, head_dim = inputs.query.shape[1:]

    if inputs.num_queries > 1:
        if inputs.batch > 1:
            raise ValueError("only one sequence at a time here")
        _, k, v = (x[0].transpose(0, 1).contiguous() for x in inputs.contiguous())
        prefill = flashinfer.single_prefill_with_kv_cache
        return lambda: prefill(inputs.query, k, v, causal=True, sm_scale=inputs.scale)

    num_kv_heads, block_size = inputs.keys.shape[1:3]
    blocks = inputs.block_tables.shape[1]
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=inputs.query.device)
    decoder = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    decoder.plan(
        torch.arange(inputs.batch + 1, dtype=torch.int32, device=workspace.device) * blocks,
        inputs.block_tables.flatten(),
        torch.full_like(inputs.context_lens, (inputs.context_len - 1) % block_size + 1),
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
        sm_scale=inputs.scale,
        data_type=inputs.keys.dtype,
        q_data_type=inputs.query.dtype,
    )
    return lambda: decoder.run(inputs.query, (inputs.keys, inputs.values))
