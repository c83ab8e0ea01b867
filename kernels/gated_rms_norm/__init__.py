"""RMS normalisation in groups, behind a gate."""

from torch import Tensor

from raydix.kernels.cpp import cpu_ops
from raydix.kernels.gated_rms_norm.reference import gated_rms_norm_reference

__all__ = ["gated_rms_norm"]


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, groups: int = 1) -> Tensor:
    """g / sqrt(mean(g^2) + eps) * weight with g = x silu(gate), the mean over each of `groups` equal parts of a row.

    `x`, `gate`: [num_tokens, channels] of one dtype, rows contiguous; `weight`: [channels] float32. Returns
    [num_tokens, channels] in x's dtype. Float32 inside, rounded once. Runs on CPUs. Raises `ValueError` on wrong shapes
    and `TypeError` on wrong dtypes.
    """
    ops = cpu_ops()
    if ops is None:
        return gated_rms_norm_reference(x, gate, weight, eps, groups=groups)
    result: Tensor = ops.gated_rms_norm(x, gate, weight, eps, groups)
    return result
