"""Rotary position tables, computed once per model."""

from typing import Any

import torch
from torch import Tensor

from raydix.kernels.rotary.reference import inverse_frequencies

__all__ = ["rotary_tables"]


def rotary_tables(head_dim: int, max_position: int, theta: float, scaling: dict[str, Any] | None = None) -> Tensor:
    """Cosines and sines of every position: [max_position, head_dim] float32, first half cos, second half sin.

    `scaling` is a `rope_parameters` dictionary as in Hugging Face configurations (kinds default, linear, llama3,
    yarn). Raises `ValueError` for another kind, an odd `head_dim`, or a partial rotation.
    """
    scaling = scaling or {}
    if head_dim % 2 or scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("rotary tables need an even head_dim that is rotated entirely")
    frequency, factor = inverse_frequencies(head_dim, theta, scaling)
    angle = torch.arange(max_position, dtype=torch.float32)[:, None] * frequency
    return torch.cat((angle.cos() * factor, angle.sin() * factor), dim=-1)
