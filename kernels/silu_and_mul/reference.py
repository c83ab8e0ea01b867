"""Specification of the gated activation."""

import torch
from torch import Tensor
from torch.nn import functional


def silu_and_mul_reference(x: Tensor, kind: str = "silu") -> Tensor:
    """act(gate) * up of x = [gate | up] along the last dim, in float32, rounded once."""
    gate, up = x.float().chunk(2, dim=-1)
    if kind == "clamped_swiglu":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (gate * torch.sigmoid(1.702 * gate) * (up + 1)).to(x.dtype)
    if kind == "sigmoid":
        return (torch.sigmoid(gate) * up).to(x.dtype)
    activated = functional.silu(gate) if kind == "silu" else functional.gelu(gate, approximate="tanh")
    return (activated * up).to(x.dtype)
