"""Specification of the gated activation."""

from torch import Tensor
from torch.nn import functional


def silu_and_mul_reference(x: Tensor, kind: str = "silu") -> Tensor:
    """act(gate) * up of x = [gate | up] along the last dim, in float32, rounded once."""
    gate, up = x.float().chunk(2, dim=-1)
    activated = functional.silu(gate) if kind == "silu" else functional.gelu(gate, approximate="tanh")
    return (activated * up).to(x.dtype)
