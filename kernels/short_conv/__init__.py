"""A convolution over the last few positions of each channel, from a state of the inputs before them."""

from torch import Tensor

from raydix.kernels.cpp import cpu_ops
from raydix.kernels.short_conv.reference import short_conv_reference
from raydix.kernels.states import StateUse

__all__ = ["short_conv"]


def short_conv(
    x: Tensor,
    weight: Tensor,
    tails: Tensor,
    query_start: Tensor,
    use: StateUse,
    *,
    silu: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """y[t] = bias + sum over k of weight[k] * x[t - K + 1 + k], each channel by itself; with `silu` y / (1 + exp(-y)).

    `x`: [num_tokens, channels], rows contiguous; `weight`: [K, channels] float32; `tails`: [num_slots, K - 1, channels]
    float32, a slot contiguous: the last inputs of a sequence, oldest first, read and written as `use` says;
    `query_start`: [num_sequences + 1] int32; `bias`: [channels] float32, None: zeros. Returns [num_tokens, channels] in
    x's dtype.

    Float32 inside, in one order of additions, rounded once: a row's bits depend on its own and the K - 1 rows before it
    alone. Runs on CPUs. Raises `ValueError` on wrong shapes and slots, `TypeError` on wrong dtypes.
    """
    ops = cpu_ops()
    if ops is None:
        return short_conv_reference(x, weight, tails, query_start, use, silu=silu, bias=bias)
    result: Tensor = ops.short_conv(
        x, weight, tails, query_start, use.sources, use.write_rows, use.write_slots, int(silu), bias
    )
    return result
