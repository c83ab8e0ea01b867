"""A matrix product whose rows do not depend on the number of rows."""

from torch import Tensor

from raydix.kernels.batch_invariant_matmul.reference import batch_invariant_matmul_reference

__all__ = ["batch_invariant_matmul"]


def batch_invariant_matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias: [num_tokens, in_features] -> [num_tokens, out_features], in x's dtype.

    `weight`: [out_features, in_features]; `bias`: [out_features]. Float32 accumulation, rounded once. On a GPU each
    row's bits depend on the row, `weight` and `bias` only: the order of summation is fixed by the shape of `weight`. On
    CPU this is the specification; `raydix.kernels.linear`, which has the same property, serves there. Raises
    `ValueError` on wrong shapes and `TypeError` on wrong dtypes.
    """
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"cannot multiply {list(x.shape)} with the transpose of {list(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have {weight.shape[0]} entries, not shape {list(bias.shape)}")
    if x.dtype != weight.dtype:
        raise TypeError(f"x is {x.dtype}, weight {weight.dtype}")
    if x.is_cuda:
        from raydix.kernels.batch_invariant_matmul.triton import batch_invariant_matmul_triton

        return batch_invariant_matmul_triton(x, weight, bias)
    return batch_invariant_matmul_reference(x, weight, bias)
