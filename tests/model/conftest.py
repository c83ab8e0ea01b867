"""One thread in each process of these tests, which `make test-model` runs on all cores: threads that wait for each
other use half as much processor time again. Tests for which threads matter ask for `two_threads`."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def two_threads(one_thread: None) -> Iterator[None]:
    """Cuts products, and the attention of few long rows, for two threads."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)
