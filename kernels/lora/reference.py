"""Specification of `add_lora` in plain PyTorch."""

from torch import Tensor


def lora_reference(out: Tensor, x: Tensor, rows: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """`out` [num_tokens, out_features] with x down^T up^T added to its `rows`, computed in float32, in out's dtype.

    `x`: [num_tokens, in_features]; `down`: [rank, in_features]; `up`: [out_features, rank].
    """
    total = out.float().clone()
    total[rows] += x[rows].float() @ down.float().T @ up.float().T
    return total.to(out.dtype)
