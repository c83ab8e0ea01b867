"""The activation of a feed-forward layer: gated, between its two halves, or plain."""

from torch import Tensor

from raydix.kernels.cpp import cpu_ops
from raydix.kernels.silu_and_mul.reference import activate_reference, silu_and_mul_reference

__all__ = ["KINDS", "PLAIN", "activate", "silu_and_mul"]

# Names of the activations, in the order of the C++ kernels' `Activation`.
KINDS = ("silu", "gelu_tanh", "clamped_swiglu", "sigmoid", "gelu", "relu2")
PLAIN = ("silu", "gelu_tanh", "gelu", "relu2")  # those that need no gate


def silu_and_mul(x: Tensor, kind: str = "silu") -> Tensor:
    """act(gate) * up for `x` [num_tokens, 2 * intermediate], gate first; returns [num_tokens, intermediate].

    `kind` is one of `KINDS`; on CPUs only "gelu", "relu2" (the square of what is positive), "sigmoid", sigmoid(gate) *
    up, and "clamped_swiglu", gate * sigmoid(1.702 gate) * (up + 1) with gate at most 7 and up between -7 and 7
    (gpt-oss). Float32 inside, rounded once. Raises `ValueError` on another kind or an odd width.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown activation {kind!r}; known are {', '.join(KINDS)}")
    if x.is_cuda:
        from raydix.kernels.silu_and_mul.triton import silu_and_mul_triton

        return silu_and_mul_triton(x, kind)
    ops = cpu_ops()
    if ops is not None:
        result: Tensor = ops.silu_and_mul(x, KINDS.index(kind))
        return result
    return silu_and_mul_reference(x, kind)


def activate(x: Tensor, kind: str) -> Tensor:
    """act(x) for `x` [num_tokens, width], on CPUs. Float32 inside, rounded once. Raises `ValueError` on a kind that is
    not of `PLAIN`."""
    if kind not in PLAIN:
        raise ValueError(f"unknown activation {kind!r}; known are {', '.join(PLAIN)}")
    ops = cpu_ops()
    if ops is not None:
        result: Tensor = ops.activate(x, KINDS.index(kind))
        return result
    return activate_reference(x, kind)
