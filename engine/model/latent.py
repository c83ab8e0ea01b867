"""Attention through a latent (MLA, arXiv 2405.04434), in its absorbed form.

Keys and values of all heads are linear maps of one vector for each position, the latent. The pool keeps that vector,
behind its norm, and one rotated key that all heads share. In the place of the keys each head's query is mapped to the
latent's space, and what attention gives there is mapped to the head's value: a position takes `rank + rope_dim` numbers
of a layer, whatever the number of heads, and attention is that of many query heads over one key-value head.

Shape suffixes as in `raydix.engine.model.decoder`; L rank of the latent, N unrotated and P rotated dimensions of a
query, D both of a latent's row: L + P. A row's bits depend on the row alone, as far as those of the products do.
"""

import torch
from torch import Tensor

from raydix.engine.model.config import LatentConfig
from raydix.kernels.decoder_pass import LatentWeights
from raydix.kernels.linear import linear
from raydix.kernels.linear_heads import linear_heads
from raydix.kernels.narrow_kv import narrow_rows
from raydix.kernels.rms_norm import rms_norm


def store_latents(
    projected_TD: Tensor, weights: LatentWeights, of: LatentConfig, cos_sin_TP: Tensor, cache: Tensor, slots: Tensor
) -> None:
    """Norm and rotate each token's row, and write it to its slot.

    `cache`: [num_blocks, 1, block_size, D], or int8 rows of `raydix.kernels.narrow_kv`; `slots` [T] int64: block *
    block_size + offset, negative: not stored.
    """
    latent_TL, key_TP = torch.split(projected_TD, [of.rank, of.rope_dim], dim=1)
    normed_TL = rms_norm(latent_TL.contiguous(), weights.norm, of.norm_eps)
    rows_TD = torch.cat((normed_TL, _rotated(key_TP, cos_sin_TP)), dim=1)
    kept = slots >= 0
    rows_TD, slots = rows_TD[kept], slots[kept]
    block_size = cache.shape[2]
    cache[slots // block_size, 0, slots % block_size] = narrow_rows(rows_TD) if cache.dtype == torch.int8 else rows_TD


def latent_queries(query_TQ: Tensor, weights: LatentWeights, of: LatentConfig, cos_sin_TP: Tensor) -> Tensor:
    """Each head's query in the latent's space, [T, H, D]. `query_TQ`: what the layer's input projection gives for
    queries, of all heads or of a rank that they share."""
    if weights.query is not None and weights.query_norm is not None:
        query_TQ = linear(rms_norm(query_TQ.contiguous(), weights.query_norm, of.norm_eps), weights.query)
    query_THQ = query_TQ.view(-1, len(weights.keys.weights), of.query_dim)
    mapped_THL = linear_heads(query_THQ[:, :, : of.nope_dim], weights.keys)
    return torch.cat((mapped_THL, _rotated(query_THQ[:, :, of.nope_dim :], cos_sin_TP[:, None])), dim=2)


def latent_values(attended_THD: Tensor, weights: LatentWeights, of: LatentConfig) -> Tensor:
    """Each head's values of what attention gives of rows, [T, H * value_dim]: of the latents in them."""
    return linear_heads(attended_THD[:, :, : of.rank], weights.values).flatten(1)


def _rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    """(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) on the halves of the last dimension, in float32, rounded once."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos_sin.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
