"""Export and import through pinned memory, with copies that happen as late as they may."""

import numpy as np
import pytest
import torch

from raydix.engine.model.cuda_kv_pool import CudaKVPool, Staging
from raydix.engine.model.families import config_of
from tests.cuda_stand_ins import LateCopies

PIECE = 64
SIZES = [1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 3 * PIECE + 5, 10 * PIECE]


def content(num_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_bytes", SIZES)
def test_bytes_come_to_the_host_after_what_was_computed(num_bytes: int) -> None:
    queue = LateCopies()
    staging = Staging(queue, PIECE)
    for seed in range(2):
        source, target = content(num_bytes, seed), torch.zeros(num_bytes, dtype=torch.uint8)
        queue.log.clear()
        staging.to_host(source, target, queue.computed())
        assert torch.equal(target, source)
        assert queue.log == ["after the computation", *["copy"] * -(-num_bytes // PIECE)]


@pytest.mark.parametrize("num_bytes", SIZES)
def test_bytes_come_to_the_device_before_what_is_computed(num_bytes: int) -> None:
    queue = LateCopies()
    staging = Staging(queue, PIECE)
    for seed in range(2):
        source, target = content(num_bytes, seed), torch.zeros(num_bytes, dtype=torch.uint8)
        expected = source.clone()
        queue.log.clear()
        staging.to_device(source, target)
        source.zero_()
        assert torch.equal(target, expected)
        copies = ["copy"] * -(-num_bytes // PIECE)
        assert queue.log == ["after the computation", *copies, "before the computation"]


def test_nothing_is_nothing() -> None:
    staging, nothing = Staging(LateCopies(), PIECE), content(0)
    staging.to_host(nothing, nothing, lambda: None)
    staging.to_device(nothing, nothing)


@pytest.fixture
def pool() -> CudaKVPool:
    hf = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 10,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    pool = CudaKVPool(config_of(hf), 8, 16, torch.float32, torch.device("cpu"), LateCopies)
    pool.data.normal_()
    return pool


def test_exported_blocks_may_be_overwritten_at_once(pool: CudaKVPool) -> None:
    expected = pool.data[[3, 1]].clone()
    first, second = pool.start_export([3, 1]), pool.start_export([1])
    pool.data.zero_()
    assert np.array_equal(second(), expected[1].view(-1).view(torch.uint8).numpy())
    assert np.array_equal(first(), expected.view(-1).view(torch.uint8).numpy())


def test_round_trip(pool: CudaKVPool) -> None:
    payload = pool.export_blocks([3, 1])
    payload.flags.writeable = False
    pool.import_blocks(payload, [0, 5])
    assert torch.equal(pool.data[[0, 5]], pool.data[[3, 1]])
    pool.import_blocks(pool.export_blocks([]), [])
