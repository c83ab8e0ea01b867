"""A matrix product of its own for each head, all as one phase of work: small products share the threads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raydix.kernels.cpp import cpu_ops
from raydix.kernels.linear import Layout, PackedLinear, linear
from raydix.kernels.linear_heads.reference import linear_heads_reference

__all__ = ["PackedHeads", "linear_heads", "linear_heads_reference", "pack_heads"]


@dataclass(frozen=True, slots=True)
class PackedHeads:
    """A weight for each head; make them with `pack_heads`."""

    weights: tuple[PackedLinear, ...]
    handle: Any | None
    """Weights packed for the C++ kernels; None: they do not compute these products."""


def pack_heads(weights: Sequence[PackedLinear]) -> PackedHeads:
    """Put the packed weights of all heads together. Raises `ValueError` unless they have one shape."""
    handle = None
    if all(weight.layout is Layout.PANELS for weight in weights):
        ops = cpu_ops()
        assert ops is not None
        handle = ops.make_heads([weight.as_tuple() for weight in weights])
    return PackedHeads(tuple(weights), handle)


def linear_heads(x: Tensor, packed: PackedHeads) -> Tensor:
    """Multiply each head's rows by its weight: [num_tokens, num_heads, in_features], contiguous in the last dimension,
    to [num_tokens, num_heads, out_features]. The result's heads may lie one after the other in memory.

    A row's bits are those of `linear` with the head's weight, so they depend on other rows no more. Raises `ValueError`
    on a wrong shape and `TypeError` on a wrong dtype.
    """
    if packed.handle is not None:
        ops = cpu_ops()
        assert ops is not None
        by_head: Tensor = ops.linear_heads(packed.handle, x)
        return by_head.transpose(0, 1)
    return torch.stack([linear(x[:, head], weight) for head, weight in enumerate(packed.weights)], dim=1)
