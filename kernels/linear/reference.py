"""Specification of the matrix product."""

from torch import Tensor


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weight^T + bias in float32, rounded once to x's dtype."""
    product = x.float() @ weight.float().T
    return (product if bias is None else product + bias.float()).to(x.dtype)
