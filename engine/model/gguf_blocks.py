"""The blocks of GGUF's 4 to 8 bit weights, kept as they are and taken apart only when a weight is packed.

A matrix that is kept has its name in Hugging Face's terms with the block's kind behind it, and is uint8
[out_features, bytes of a row]. Layouts of the blocks: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from raydix.kernels.linear import GroupedWeight, Groups


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of block."""

    num_weights: int
    num_bytes: int
    split: Callable[[Tensor], GroupedWeight]
    """Takes blocks apart: [out_features, blocks of a row, num_bytes] uint8."""


def grouped(blocks: Tensor, kind: str) -> GroupedWeight:
    """A weight from its rows of blocks, [out_features, bytes of a row] uint8."""
    of = KINDS[kind]
    return of.split(blocks.reshape(blocks.shape[0], -1, of.num_bytes))


def _rows(blocks: Tensor) -> Tensor:
    """Values of each block, [out_features, blocks, n], as those of each row."""
    return blocks.reshape(blocks.shape[0], -1)


def _halves(blocks: Tensor, first: int) -> Tensor:
    """The float16 at byte `first` of each block, [out_features, blocks]."""
    return blocks[:, :, first : first + 2].contiguous().view(torch.float16)[:, :, 0]


def _nibbles(data: Tensor) -> Tensor:
    """Numbers of four bits, the lower halves of all bytes before the upper ones."""
    return torch.cat((data & 15, data >> 4), -1)


def _fifth_bits(data: Tensor) -> Tensor:
    """Bits of a little-endian word, each as 16 or 0: [..., 4] bytes to [..., 32]."""
    bits = data[..., :, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.reshape(*data.shape[:-1], 32) << 4


def _of_32(blocks: Tensor, bits: int, zero: int, numbers: Tensor, *, has_least: bool) -> GroupedWeight:
    """Blocks of one group: its scale, and where there is a least value (added, and so negative here) that one, too."""
    scales = _halves(blocks, 0)
    return GroupedWeight(
        groups=Groups(bits, size=32, super=32, zero=zero, has_least=has_least),
        numbers=_rows(numbers),
        scales=scales,
        factors=torch.ones(scales.shape, dtype=torch.int8),
        least=-_halves(blocks, 2) if has_least else None,
        least_factors=torch.ones(scales.shape, dtype=torch.uint8) if has_least else None,
    )


def _q4_0(blocks: Tensor) -> GroupedWeight:
    # Two bytes of scale, sixteen of numbers around 8.
    return _of_32(blocks, 4, 8, _nibbles(blocks[:, :, 2:]), has_least=False)


def _q4_1(blocks: Tensor) -> GroupedWeight:
    # Two bytes of scale, two of the least value, sixteen of numbers.
    return _of_32(blocks, 4, 0, _nibbles(blocks[:, :, 4:]), has_least=True)


def _q5_0(blocks: Tensor) -> GroupedWeight:
    # Scale, a word of fifth bits, and the lower four bits; numbers around 16.
    numbers = _nibbles(blocks[:, :, 6:]) | _fifth_bits(blocks[:, :, 2:6])
    return _of_32(blocks, 8, 16, numbers, has_least=False)


def _q5_1(blocks: Tensor) -> GroupedWeight:
    # Scale, least value, a word of fifth bits, and the lower four bits.
    numbers = _nibbles(blocks[:, :, 8:]) | _fifth_bits(blocks[:, :, 4:8])
    return _of_32(blocks, 8, 0, numbers, has_least=True)


def _q8_0(blocks: Tensor) -> GroupedWeight:
    # Signed numbers are stored as those above the lowest one.
    return _of_32(blocks, 8, 128, blocks[:, :, 2:] ^ 128, has_least=False)


def _factors_of_k(data: Tensor) -> tuple[Tensor, Tensor]:
    """The six-bit factors of eight groups, of scales and of least values: twelve bytes hold the lower bits of four
    groups each, then both factors' lower halves of the other four, whose upper bits lie above the first ones'."""
    scale, least, both = data[..., 0:4], data[..., 4:8], data[..., 8:12]
    return (
        torch.cat((scale & 63, both & 15 | scale >> 6 << 4), -1).to(torch.int8),
        torch.cat((least & 63, both >> 4 | least >> 6 << 4), -1),
    )


def _of_k(blocks: Tensor, bits: int, numbers: Tensor) -> GroupedWeight:
    # Two bytes of scale, two of the least value, twelve of the factors of both for each 32 weights, then the numbers.
    factors, least_factors = _factors_of_k(blocks[:, :, 4:16])
    return GroupedWeight(
        groups=Groups(bits, size=32, super=256, zero=0, has_least=True),
        numbers=_rows(numbers),
        scales=_halves(blocks, 0),
        factors=_rows(factors),
        least=_halves(blocks, 2),
        least_factors=_rows(least_factors),
    )


def _in_pairs(data: Tensor) -> Tensor:
    """Numbers of 256 weights from 128 bytes: each 32 bytes hold two groups, in their lower and their upper halves."""
    parts = data.reshape(*data.shape[:-1], 4, 32)
    return torch.stack((parts & 15, parts >> 4), -2).reshape(*data.shape[:-1], 256)


def _q4_k(blocks: Tensor) -> GroupedWeight:
    return _of_k(blocks, 4, _in_pairs(blocks[:, :, 16:]))


def _q5_k(blocks: Tensor) -> GroupedWeight:
    # Bit g of a byte is the fifth bit of group g.
    upper = blocks[:, :, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    return _of_k(blocks, 8, _in_pairs(blocks[:, :, 48:]) | upper.reshape(*blocks.shape[:2], 256) << 4)


def _q6_k(blocks: Tensor) -> GroupedWeight:
    # Two halves of 128 weights: 64 bytes of lower halves, 32 bytes of four upper pairs of bits each.
    lower = blocks[:, :, :128].reshape(*blocks.shape[:2], 2, 2, 32)
    lower = torch.stack((lower & 15, lower >> 4), -3)  # [.., half, lower or upper, 2, 32]
    upper = blocks[:, :, 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    upper = upper >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3
    numbers = lower.reshape(*blocks.shape[:2], 2, 4, 32) | upper << 4
    return GroupedWeight(
        groups=Groups(8, size=16, super=256, zero=32),
        numbers=_rows(numbers.reshape(*blocks.shape[:2], 256)),
        scales=_halves(blocks, 208),
        factors=_rows(blocks[:, :, 192:208].contiguous().view(torch.int8)),
    )


# Kinds of blocks that are kept, by GGUF's names: weights of a block, its bytes, and the way to take it apart.
KINDS = {
    "Q4_0": Kind(32, 18, _q4_0),
    "Q4_1": Kind(32, 20, _q4_1),
    "Q5_0": Kind(32, 22, _q5_0),
    "Q5_1": Kind(32, 24, _q5_1),
    "Q8_0": Kind(32, 34, _q8_0),
    "Q4_K": Kind(256, 144, _q4_k),
    "Q5_K": Kind(256, 176, _q5_k),
    "Q6_K": Kind(256, 210, _q6_k),
}
