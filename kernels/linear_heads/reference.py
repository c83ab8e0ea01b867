"""Specification of products of their own for each head."""

from collections.abc import Sequence

import torch
from torch import Tensor


def linear_heads_reference(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """x[:, h] weights[h]^T for each head h: `x` [num_tokens, num_heads, in_features], `weights` [out_features,
    in_features] each; [num_tokens, num_heads, out_features] in x's dtype, computed in float32."""
    results = [x[:, head].float() @ weight.float().T for head, weight in enumerate(weights)]
    return torch.stack(results, dim=1).to(x.dtype)
