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
    return (_activated(gate, kind) * up).to(x.dtype)


def activate_reference(x: Tensor, kind: str) -> Tensor:
    """act(x) in float32, rounded once."""
    return _activated(x.float(), kind).to(x.dtype)


def _activated(x: Tensor, kind: str) -> Tensor:
    if kind == "silu":
        return functional.silu(x)
    if kind == "relu2":
        return functional.relu(x).square()
    return functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")
