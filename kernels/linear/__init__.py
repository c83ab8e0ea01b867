"""Matrix products with weights packed once for the machine they run on."""

import torch
from torch import Tensor
from torch.nn import functional

from kernels.batch_invariant_matmul import batch_invariant_matmul
from kernels.cpp import cpu_ops
from kernels.linear.packing import Layout, PackedLinear, pack_weight

__all__ = ["PackedLinear", "linear", "pack_weight"]


def linear(x: Tensor, packed: PackedLinear) -> Tensor:
    """x weight^T + bias: [num_tokens, in_features] -> [num_tokens, out_features], in x's dtype.

    In bfloat16 on CPU, and where the weight was packed as deterministic on a GPU, a row's bits do not depend on the
    other rows, their number, or threads. Raises `ValueError` on a
    wrong width and `TypeError` on a wrong dtype.
    """
    if packed.layout is Layout.PLAIN:
        return functional.linear(x, packed.weight, packed.bias)
    if packed.layout is Layout.INVARIANT:
        return batch_invariant_matmul(x, packed.weight, packed.bias)
    ops = cpu_ops()
    if packed.layout is Layout.PANELS:
        assert ops is not None
        panel_product: Tensor = ops.linear(x, packed.weight, packed.bias, packed.out_features)
        return panel_product
    if ops is not None:
        product: Tensor = ops.onednn_linear(x, packed.weight, packed.bias, packed.out_features)
        return product
    if x.shape[0] == 0:
        return x.new_empty((0, packed.out_features))
    slow: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed.weight, packed.bias, "none", [], "")
    return slow
