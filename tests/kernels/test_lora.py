"""Low-rank additions against their specification, and rows against themselves alone."""

import pytest
import torch

from raydix.kernels.linear import Layout, pack_weight
from raydix.kernels.lora import PackedLora, add_lora, lora_reference
from tests.skips import NO_PRODUCT

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def factors(dtype: torch.dtype, in_features: int, rank: int, out_features: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    down = torch.randn(rank, in_features, generator=generator) / in_features**0.5
    up = torch.randn(out_features, rank, generator=generator) / rank**0.5
    return down.to(dtype), up.to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("in_features", "rank", "out_features"), [(64, 8, 64), (96, 2, 200), (64, 34, 66), (130, 64, 1)]
)
@pytest.mark.parametrize("rows", [[], [0], [4, 1, 2], [0, 1, 2, 3, 4, 5, 6]], ids=str)
def test_some_rows(dtype: torch.dtype, in_features: int, rank: int, out_features: int, rows: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, in_features, generator=generator).to(dtype)
    out = torch.randn(7, out_features, generator=generator).to(dtype)
    down, up = factors(dtype, in_features, rank, out_features)
    expected = lora_reference(out, x, torch.tensor(rows, dtype=torch.int64), down, up)
    before = out.clone()
    add_lora(out, x, torch.tensor(rows, dtype=torch.int64), PackedLora(pack_weight(down), pack_weight(up)))
    torch.testing.assert_close(out, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    others = [row for row in range(7) if row not in rows]
    assert torch.equal(out[others], before[others])


@pytest.mark.parametrize("rank", [2, 8, 34, 192])
def test_a_row_has_the_same_bits_beside_any_others(rank: int) -> None:
    down, up = factors(torch.bfloat16, 576, rank, 1536)
    lora = PackedLora(pack_weight(down), pack_weight(up))
    if lora.up.layout is not Layout.PANELS:
        pytest.skip(NO_PRODUCT)
    x, out = torch.randn(300, 576).bfloat16(), torch.randn(300, 1536).bfloat16()
    together, some = out.clone(), out.clone()
    add_lora(together, x, torch.arange(300), lora)
    add_lora(some, x, torch.arange(299, 0, -7), lora)
    for row in (5, 12, 299):
        alone = out[row : row + 1].clone()
        add_lora(alone, x[row : row + 1], torch.tensor([0]), lora)
        assert torch.equal(alone[0], together[row]) and torch.equal(alone[0], some[row])
