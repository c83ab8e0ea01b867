"""Weights in MXFP4, 4-bit floating-point numbers in blocks of 32 with a power of two each, widened to bfloat16.

Every such number is one of bfloat16's, so widening rounds nothing. Format: the OCP Microscaling Formats specification.
"""

import torch
from torch import Tensor

_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127


def widened(blocks: Tensor, scales: Tensor) -> Tensor:
    """`blocks` [..., num_blocks, 16] of bytes, the first number of each in its lower half, and the exponents `scales`
    [..., num_blocks], as bfloat16 [..., num_blocks * 32]."""
    table = torch.tensor([*_NUMBERS, *(-number for number in _NUMBERS)], dtype=torch.bfloat16)
    numbers = torch.stack((table[(blocks & 15).long()], table[(blocks >> 4).long()]), -1).flatten(-2)
    return torch.ldexp(numbers.float(), (scales.int() - _BIAS)[..., None]).to(torch.bfloat16).flatten(-2)
