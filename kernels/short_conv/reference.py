"""Specification of the short convolution."""

import torch
from torch import Tensor
from torch.nn import functional

from raydix.kernels.states import StateUse, sequences_of, state_before


def short_conv_reference(
    x: Tensor,
    weight: Tensor,
    tails: Tensor,
    query_start: Tensor,
    use: StateUse,
    *,
    silu: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """y[t] = bias + sum over k of weight[k] * x[t - K + 1 + k], for each channel by itself, and SiLU of it if asked."""
    result, num_taps = torch.empty(x.shape, dtype=x.dtype), weight.shape[0]
    for sequence in sequences_of(query_start, use):
        # The last inputs before the chunk, [K - 1, channels], and then its own.
        inputs = torch.cat((state_before(tails, sequence.source), x[sequence.first : sequence.end].float()))
        for row in range(sequence.first, sequence.end):
            window = inputs[row - sequence.first : row - sequence.first + num_taps]
            total = torch.zeros(x.shape[1]) if bias is None else bias.clone()
            for tap in range(num_taps):
                total += weight[tap] * window[tap]
            result[row] = (functional.silu(total) if silu else total).to(x.dtype)
            if row in sequence.writes:
                tails[sequence.writes[row]] = window[1:]
    return result
