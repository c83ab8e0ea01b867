"""Low-rank additions to a matrix product (LoRA, arXiv 2106.09685), for some of its rows."""

from dataclasses import dataclass

from torch import Tensor

from raydix.kernels.linear import PackedLinear, linear
from raydix.kernels.lora.reference import lora_reference

__all__ = ["PackedLora", "add_lora", "lora_reference"]


@dataclass(frozen=True, slots=True)
class PackedLora:
    """The two factors of a low-rank addition, packed as `linear` takes them. The second one has the scaling in it."""

    down: PackedLinear
    """[rank, in_features]."""
    up: PackedLinear
    """[out_features, rank]."""


def add_lora(out: Tensor, x: Tensor, rows: Tensor, lora: PackedLora) -> None:
    """Add x down^T up^T to some rows of a product's result, in place.

    `out`: [num_tokens, out_features]; `x`: [num_tokens, in_features], the product's input, of the same dtype; `rows`:
    int64, different rows of both. A row's bits depend on the other rows no more than those of `linear`, and all other
    rows stay as they are. Raises as `linear`.
    """
    if rows.numel() == 0:
        return
    some = x if rows.numel() == x.shape[0] else x.index_select(0, rows)
    added = linear(linear(some, lora.down), lora.up)
    # Each row is there once, so that nothing depends on an order of addition.
    if some is x:
        out += added
    else:
        out.index_add_(0, rows, added)
