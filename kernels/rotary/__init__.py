"""Rotary position tables, computed once per model."""

from typing import Any

import torch
from torch import Tensor

from raydix.kernels.rotary.reference import inverse_frequencies

__all__ = ["rotary_order", "rotary_tables"]


def rotary_tables(
    head_dim: int, max_position: int, theta: float, scaling: dict[str, Any] | None = None, *, share: float = 1.0
) -> Tensor:
    """Cosines and sines of every position: [max_position, head_dim] float32, first half cos, second half sin.

    `scaling` is a `rope_parameters` dictionary as in Hugging Face configurations (kinds default, linear, llama3, yarn,
    longrope, proportional). `share` of the dimensions is rotated: of each half of a head in the order of `rotary_order`
    the first ones; the others turn by nothing. LongRoPE has two sets of frequencies; a table longer than the context of
    training has the long ones at every position, also at the first, so that a key is the same whatever follows it.

    Raises `ValueError` for another kind, or an odd number of rotated dimensions.
    """
    num_rotated = _num_rotated(head_dim, share)
    frequency, factor = inverse_frequencies(num_rotated, theta, scaling or {}, max_position)
    angle = torch.arange(max_position, dtype=torch.float32)[:, None] * frequency
    still = torch.ones(max_position, (head_dim - num_rotated) // 2)
    return torch.cat((angle.cos() * factor, still, angle.sin() * factor, 0 * still), dim=-1)


def rotary_order(head_dim: int, share: float = 1.0, *, interleaved: bool = False) -> Tensor:
    """The dimensions of a head in the order in which the kernels rotate them: [head_dim] int64.

    The kernels turn dimension i with i + head_dim / 2. Models turn i with i + half of the rotated dimensions, or
    `interleaved` 2i with 2i + 1. The two of each rotated pair come first in the two halves, in their order.
    """
    num_rotated = _num_rotated(head_dim, share)
    rotated = torch.arange(num_rotated)
    first, second = (rotated[0::2], rotated[1::2]) if interleaved else rotated.chunk(2)
    still_first, still_second = torch.arange(num_rotated, head_dim).chunk(2) if share < 1.0 else (rotated[:0],) * 2
    return torch.cat((first, still_first, second, still_second))


def _num_rotated(head_dim: int, share: float) -> int:
    num_rotated = int(head_dim * share)
    if head_dim % 2 or num_rotated % 2:
        raise ValueError(f"{num_rotated} of {head_dim} dimensions cannot be rotated in pairs")
    return num_rotated
