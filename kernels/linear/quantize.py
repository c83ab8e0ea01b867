"""Weights rounded to 8 bits, with one scale for each output channel."""

import torch
from torch import Tensor


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`weight` [out_features, in_features] as int8 of the same shape and float32 scales [out_features].

    Symmetric: weight ~ int8 * scale, with values from -127 to 127 and each row's largest among them.
    """
    weight = weight.detach().float()
    largest = weight.abs().amax(1)
    scales = torch.where(largest > 0, largest / 127, 1.0)
    return (weight / scales[:, None]).round_().to(torch.int8), scales
