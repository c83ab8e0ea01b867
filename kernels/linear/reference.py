"""Specification of the matrix product."""

from torch import Tensor


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None = None) -> Tensor:
    """x weight^T scales + bias in float32, rounded once to x's dtype; `scales` [out_features] of an int8 weight."""
    product = x.float() @ weight.float().T
    product = product if scales is None else product * scales
    return (product if bias is None else product + bias.float()).to(x.dtype)
