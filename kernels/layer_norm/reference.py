"""Specification of layer normalisation."""

import torch
from torch import Tensor


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - m) / sqrt(mean((x - m)^2) + eps) * weight + bias over the last dim, in float32, rounded once to x's dtype.

    Row r takes the weight of its group, r % groups, where there are several.
    """
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    of_rows = weight if weight.dim() == 1 else weight[torch.arange(len(x)) % len(weight)]
    scaled = normed * of_rows.float()
    return (scaled if bias is None else scaled + bias.float()).to(x.dtype)


def add_layer_norm_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """(layer_norm(s), s) with s = x + residual rounded to x's dtype first."""
    total = (x.float() + residual.float()).to(x.dtype)
    return layer_norm_reference(total, weight, bias, eps), total
