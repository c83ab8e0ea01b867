"""What the tests of Triton kernels share: the device they run on, and its inputs."""

from dataclasses import fields, replace
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from tests.kernels.kernel_cases import PagedCase
from tests.skips import NO_GPU

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)

# Relative norm of the difference to the float32 reference.
RELATIVE = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}

Moved = TypeVar("Moved")


def on_device(value: Moved) -> Moved:
    """A dataclass of tensors with each tensor on `DEVICE`; a paged case keeps its caches views of its pool."""
    moved = replace(value, **{f.name: _moved(getattr(value, f.name)) for f in fields(value)})  # type: ignore
    if isinstance(moved, PagedCase):
        moved = replace(moved, key_cache=moved.pool[:, 1, 0], value_cache=moved.pool[:, 1, 1])
    return moved


def _moved(value: object) -> object:
    if isinstance(value, list):
        return [_moved(item) for item in value]
    return value.to(DEVICE) if isinstance(value, Tensor) else value


def assert_relative(actual: Tensor, expected: Tensor) -> None:
    """Small difference in relative norm, and no NaN left of what the output was filled with."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert not actual.isnan().any()
    error = (actual.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-30)
    assert error <= RELATIVE[actual.dtype], f"relative error {error:.2e}"
