"""Matrix products with weights packed once for the machine they run on."""

import torch
from torch import Tensor
from torch.nn import functional

from raydix.kernels.batch_invariant_matmul import batch_invariant_matmul
from raydix.kernels.cpp import cpu_ops
from raydix.kernels.linear.groups import GroupedWeight, Groups, Scales, in_one_form, stacked
from raydix.kernels.linear.packing import Layout, PackedLinear, keeps_groups, pack_groups, pack_weight
from raydix.kernels.linear.quantize import quantize
from raydix.kernels.linear.reference import linear_reference

__all__ = [
    "GroupedWeight",
    "Groups",
    "Layout",
    "PackedLinear",
    "Scales",
    "in_one_form",
    "keeps_groups",
    "linear",
    "pack_groups",
    "pack_weight",
    "quantize",
    "stacked",
]


def linear(x: Tensor, packed: PackedLinear) -> Tensor:
    """x weight^T + bias: [num_tokens, in_features] -> [num_tokens, out_features], in x's dtype.

    In bfloat16 on CPU, and where the weight was packed as deterministic on a GPU, a row's bits do not depend on the
    other rows, their number, or threads; nor do they with an int8 weight where our own product takes it. Raises
    `ValueError` on a wrong width and `TypeError` on a wrong dtype.
    """
    if packed.layout is Layout.PLAIN:
        if packed.scales is not None:
            return linear_reference(x, packed.weight, packed.bias, packed.scales)
        return functional.linear(x, packed.weight, packed.bias)
    if packed.layout is Layout.INVARIANT:
        return batch_invariant_matmul(x, packed.weight, packed.bias)
    ops = cpu_ops()
    if packed.layout is Layout.PANELS:
        assert ops is not None
        panel_product: Tensor = ops.linear(
            x, packed.weight, packed.scales, packed.bias, packed.out_features, packed.groups
        )
        return panel_product
    if ops is not None:
        product: Tensor = ops.onednn_linear(x, packed.weight, packed.bias, packed.out_features)
        return product
    if x.shape[0] == 0:
        return x.new_empty((0, packed.out_features))
    slow: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed.weight, packed.bias, "none", [], "")
    return slow
