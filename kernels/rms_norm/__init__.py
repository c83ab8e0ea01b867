"""RMS normalisation, optionally fused with the preceding residual add."""

from typing import overload

from torch import Tensor

from raydix.kernels.cpp import cpu_ops
from raydix.kernels.rms_norm.reference import add_rms_norm_reference, rms_norm_reference

__all__ = ["rms_norm"]


@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: None = ...) -> Tensor: ...


@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]: ...


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """x / sqrt(mean(x^2) + eps) * weight for each row of `x` [num_tokens, hidden].

    `weight`: [hidden], in x's dtype or float32. With `residual` (like `x`) the row is s = x + residual, rounded to x's
    dtype, and the result is (rms_norm(s), s). Float32 inside. Raises `ValueError` on wrong shapes and `TypeError` on
    wrong dtypes.
    """
    if x.is_cuda:
        from raydix.kernels.rms_norm.triton import rms_norm_triton

        return rms_norm_triton(x, weight, eps, residual)
    ops = cpu_ops()
    if ops is not None:
        result: Tensor | tuple[Tensor, Tensor] = ops.rms_norm(x, weight, eps, residual)
        return result
    if residual is None:
        return rms_norm_reference(x, weight, eps)
    return add_rms_norm_reference(x, weight, eps, residual)
