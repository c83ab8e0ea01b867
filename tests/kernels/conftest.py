"""Fixtures for the kernel tests."""

from pathlib import Path

import pytest
import torch

from tests.kernels.interpreter import INTERPRETING, InterpretedTests, collect_triton_module, teach_arithmetic

if INTERPRETING:
    teach_arithmetic()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Tests of Triton kernels run on a GPU or under the interpreter, in a process of its own if need be."""
    return collect_triton_module(module_path, parent)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest: each module under the interpreter is one test."""
    items.sort(key=lambda item: not isinstance(item, InterpretedTests))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Runs kernels on one thread, where a test does not ask for more: each core has a process of its own."""
    torch.set_num_threads(1)
