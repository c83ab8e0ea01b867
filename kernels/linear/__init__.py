"""Matrix products with weights packed once for the machine they run on."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpp import cpu_ops

__all__ = ["PackedLinear", "linear", "pack_weight"]


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight in the layout `linear` wants: opaque where `prepacked`, else [out_features, in_features]."""

    weight: Tensor
    bias: Tensor | None
    in_features: int
    out_features: int
    prepacked: bool


def pack_weight(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Packs `weight` [out_features, in_features] and `bias` [out_features]; the original may be dropped afterwards.

    bfloat16 on CPU becomes oneDNN's own blocked layout, whose product gives each row the same bits whatever the number
    of rows; anything else stays as it is.
    """
    out_features, in_features = weight.shape
    prepacked = (
        weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    if prepacked:
        weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
    return PackedLinear(weight, bias, in_features, out_features, prepacked)


def linear(x: Tensor, packed: PackedLinear) -> Tensor:
    """x weight^T + bias: [num_tokens, in_features] -> [num_tokens, out_features], in x's dtype."""
    if not packed.prepacked:
        return functional.linear(x, packed.weight, packed.bias)
    ops = cpu_ops()
    if ops is not None:
        fast: Tensor = ops.linear(x, packed.weight, packed.bias, packed.in_features, packed.out_features)
        return fast
    if x.shape[0] == 0:
        return x.new_empty((0, packed.out_features))
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed.weight, packed.bias, "none", [], "")
    return product
