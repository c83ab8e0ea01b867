"""Specification of the RMS normalisation behind a gate."""

import torch
from torch import Tensor
from torch.nn import functional


def gated_rms_norm_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, groups: int) -> Tensor:
    """g / sqrt(mean(g^2) + eps) * weight with g = x silu(gate), in float32, rounded once."""
    gated = (x.float() * functional.silu(gate.float())).view(len(x), groups, x.shape[1] // groups)
    normed = gated * torch.rsqrt(gated.square().mean(2, keepdim=True) + eps)
    return (normed.view(x.shape) * weight).to(x.dtype)
