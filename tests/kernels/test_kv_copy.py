"""Packing blocks into a segment and back."""

import pytest
import torch

from raydix.kernels.kv_pack import kv_pack
from raydix.kernels.kv_pack.reference import kv_pack_reference
from raydix.kernels.kv_unpack import kv_unpack
from raydix.kernels.kv_unpack.reference import kv_unpack_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(7, 2, 2, 3, 16, 64), (9, 5), (4, 3, 250_000)])
@pytest.mark.parametrize("ids", [[], [3], [2, 0, 3, 1], [1, 1]])
def test_round_trip(dtype: torch.dtype, shape: tuple[int, ...], ids: list[int]) -> None:
    pool = torch.randint(0, 100, shape).to(dtype)
    block_bytes = pool[0].numel() * pool.element_size()
    out = torch.full((len(ids) * block_bytes,), 255, dtype=torch.uint8)
    assert kv_pack(pool, ids, out) is out
    wanted = torch.tensor(ids, dtype=torch.int64)
    assert torch.equal(out, kv_pack_reference(pool, wanted))
    assert torch.equal(kv_pack(pool, wanted), out)

    target, expected = torch.zeros_like(pool), torch.zeros_like(pool)
    kv_unpack(out, target, ids)
    kv_unpack_reference(out, expected, wanted)
    assert torch.equal(target, expected)


def test_rejects_wrong_sizes_and_blocks() -> None:
    pool = torch.zeros(4, 8)
    with pytest.raises(ValueError, match="64 bytes"):
        kv_pack(pool, [0, 1], torch.zeros(63, dtype=torch.uint8))
    with pytest.raises(ValueError, match="64 bytes"):
        kv_unpack(torch.zeros(65, dtype=torch.uint8), pool, [0, 1])
    for wrong in ([4], [-1]):
        with pytest.raises(IndexError):
            kv_pack(pool, wrong)
        with pytest.raises(IndexError):
            kv_unpack(torch.zeros(32, dtype=torch.uint8), pool, wrong)
