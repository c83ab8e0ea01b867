"""Specification of RMS normalisation."""

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, in float32, rounded once to x's dtype."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def add_rms_norm_reference(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]:
    """(rms_norm(s), s) with s = x + residual rounded to x's dtype first."""
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm_reference(total, weight, eps), total
