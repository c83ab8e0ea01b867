"""Specification of the batch-invariant matrix product."""

from torch import Tensor


def batch_invariant_matmul_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias in float32, rounded once to x's dtype."""
    product = x.float() @ weight.float().T
    return (product if bias is None else product + bias.float()).to(x.dtype)
