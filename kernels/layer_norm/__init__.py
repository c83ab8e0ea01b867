"""Layer normalisation on CPUs, optionally fused with the preceding residual add."""

from typing import overload

from torch import Tensor

from raydix.kernels.cpp import cpu_ops
from raydix.kernels.layer_norm.reference import add_layer_norm_reference, layer_norm_reference

__all__ = ["layer_norm"]


@overload
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: None = ...) -> Tensor: ...


@overload
def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor
) -> tuple[Tensor, Tensor]: ...


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """(x - m) / sqrt(mean((x - m)^2) + eps) * weight + bias with m = mean(x), for each row of `x` [num_rows, hidden].

    `weight`: [hidden] float32, or [groups, hidden], of which row r takes that of r % groups; `bias`: [hidden] float32;
    None: there is none. With `residual` (like `x`) the row is s = x + residual, rounded to x's dtype, and the result is
    (layer_norm(s), s). Float32 inside; a row's bits do not depend on the other rows. Raises `ValueError` on wrong
    shapes and `TypeError` on wrong dtypes.
    """
    ops = cpu_ops()
    if ops is not None:
        result: Tensor | tuple[Tensor, Tensor] = ops.layer_norm(x, weight, bias, eps, residual)
        return result
    if residual is None:
        return layer_norm_reference(x, weight, bias, eps)
    return add_layer_norm_reference(x, weight, bias, eps, residual)
