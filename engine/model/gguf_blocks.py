"""The blocks of GGUF's 4 to 8 bit weights, kept as they are and taken apart only when a weight is packed.

A matrix that is kept has its name in Hugging Face's terms with the block's kind behind it, and is uint8
[out_features, bytes of a row]. Layouts of the blocks: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from raydix.engine.model.packed_weights import FLOAT4_DOUBLED
from raydix.kernels.linear import GroupedWeight, Groups, Scales

# The values of the sixteen numbers of IQ4_NL and IQ4_XS.
UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


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


def _iq4_nl(blocks: Tensor) -> GroupedWeight:
    # Two bytes of scale, sixteen of numbers.
    scales = _halves(blocks, 0)
    return GroupedWeight(
        groups=Groups(4, size=32, super=32, values=UNEVEN),
        numbers=_rows(_nibbles(blocks[:, :, 2:])),
        scales=scales,
        factors=torch.ones(scales.shape, dtype=torch.int8),
    )


def _mxfp4(blocks: Tensor) -> GroupedWeight:
    # A byte of exponent, sixteen of numbers.
    return GroupedWeight(
        groups=Groups(4, size=32, super=32, scales=Scales.EXPONENTS, values=FLOAT4_DOUBLED),
        numbers=_rows(_nibbles(blocks[:, :, 1:])),
        scales=blocks[:, :, 0],
    )


def _iq4_xs(blocks: Tensor) -> GroupedWeight:
    # Two bytes of scale, and of eight factors around 32 two bytes of upper bits and four of lower ones, then groups of
    # sixteen bytes of numbers.
    upper = blocks[:, :, 2:4, None] >> torch.arange(0, 8, 2, dtype=torch.uint8) & 3
    lower = blocks[:, :, 4:8, None] >> torch.tensor([0, 4], dtype=torch.uint8) & 15
    factors = (lower.flatten(2) | upper.flatten(2) << 4).to(torch.int8) - 32
    return GroupedWeight(
        groups=Groups(4, size=32, super=256, values=UNEVEN),
        numbers=_rows(_nibbles(blocks[:, :, 8:].reshape(*blocks.shape[:2], 8, 16)).flatten(2)),
        scales=_halves(blocks, 0),
        factors=_rows(factors),
    )


def _q3_k(blocks: Tensor) -> GroupedWeight:
    # Bits worth four of all numbers around four, their lower two bits, then of sixteen factors around 32 the lower four
    # bits and the upper two, and the scale.
    pairs = blocks[:, :, 32:96].reshape(*blocks.shape[:2], 2, 1, 32)
    pairs = pairs >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3
    fours = blocks[:, :, None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    lower = blocks[:, :, None, 96:104] >> torch.tensor([[0], [4]], dtype=torch.uint8) & 15
    upper = blocks[:, :, None, 104:108] >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3
    factors = (lower.flatten(2) | upper.flatten(2) << 4).to(torch.int8) - 32
    return GroupedWeight(
        groups=Groups(4, size=16, super=256, zero=4),
        numbers=_rows(pairs.flatten(2) | fours.flatten(2) << 2),
        scales=_halves(blocks, 108),
        factors=_rows(factors),
    )


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
    "Q3_K": Kind(256, 110, _q3_k),
    "IQ4_NL": Kind(32, 18, _iq4_nl),
    "IQ4_XS": Kind(256, 136, _iq4_xs),
    "MXFP4": Kind(32, 17, _mxfp4),
}
