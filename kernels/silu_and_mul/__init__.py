"""The gated activation between the two halves of a feed-forward layer."""

from torch import Tensor

from raydix.kernels.cpp import cpu_ops
from raydix.kernels.silu_and_mul.reference import silu_and_mul_reference

__all__ = ["silu_and_mul"]


def silu_and_mul(x: Tensor, kind: str = "silu") -> Tensor:
    """act(gate) * up for `x` [num_tokens, 2 * intermediate], gate first; returns [num_tokens, intermediate].

    `kind` is "silu" or "gelu_tanh". Float32 inside, rounded once. Raises `ValueError` on another kind or an odd width.
    """
    if kind not in ("silu", "gelu_tanh"):
        raise ValueError(f"unknown activation {kind!r}; known are silu and gelu_tanh")
    if x.is_cuda:
        from raydix.kernels.silu_and_mul.triton import silu_and_mul_triton

        return silu_and_mul_triton(x, kind)
    ops = cpu_ops()
    if ops is not None:
        result: Tensor = ops.silu_and_mul(x, kind == "silu")
        return result
    return silu_and_mul_reference(x, kind)
