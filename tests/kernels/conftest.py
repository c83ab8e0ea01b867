"""Fixtures for the kernel tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.kernels.interpreter import INTERPRETING, collect_triton_module, teach_arithmetic

if INTERPRETING:
    teach_arithmetic()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Tests of Triton kernels run on a GPU or under the interpreter, in a process of its own if need be."""
    return collect_triton_module(module_path, parent)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Runs the test's kernels on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
