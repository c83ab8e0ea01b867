"""Products of their own for each head: against the specification, and the bits of one product after the other."""

import pytest
import torch

from raydix.kernels.linear import linear, pack_weight
from raydix.kernels.linear_heads import linear_heads, linear_heads_reference, pack_heads
from tests.kernels.kernel_cases import assert_close
from tests.skips import NO_PRODUCT

HEADS, INPUTS, OUTPUTS = 5, 24, 72


def weights(dtype: torch.dtype) -> list[torch.Tensor]:
    return [(torch.randn(OUTPUTS, INPUTS) * INPUTS**-0.5).to(dtype) for _ in range(HEADS)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 2, 40])
def test_matches_reference(dtype: torch.dtype, rows: int) -> None:
    of_heads, x = weights(dtype), torch.randn(rows, HEADS, INPUTS).to(dtype)
    heads = pack_heads([pack_weight(each) for each in of_heads])
    assert_close(linear_heads(x, heads), linear_heads_reference(x, of_heads))


@pytest.mark.parametrize("threads", [1, 3])
def test_parts_of_rows_have_the_bits_of_one_product_each(threads: int) -> None:
    """Of heads that are parts of longer rows, as queries are with dimensions that are rotated."""
    torch.set_num_threads(threads)
    packed = [pack_weight(each) for each in weights(torch.bfloat16)]
    heads, x = pack_heads(packed), torch.randn(233, HEADS, INPUTS + 16).bfloat16()[:, :, :INPUTS]
    if heads.handle is None:
        pytest.skip(NO_PRODUCT)
    together = linear_heads(x, heads)
    for head, weight in enumerate(packed):
        assert torch.equal(together[:, head], linear(x[:, head], weight))
    assert torch.equal(torch.cat([linear_heads(x[start : start + 7], heads) for start in range(0, 233, 7)]), together)


def test_what_does_not_fit_is_refused() -> None:
    packed = [pack_weight(each) for each in weights(torch.bfloat16)]
    heads = pack_heads(packed)
    if heads.handle is None:
        pytest.skip(NO_PRODUCT)
    with pytest.raises(ValueError, match="x must be"):
        linear_heads(torch.randn(3, HEADS + 1, INPUTS).bfloat16(), heads)
    with pytest.raises(TypeError, match="bfloat16"):
        linear_heads(torch.randn(3, HEADS, INPUTS), heads)
    with pytest.raises(ValueError, match="one shape"):
        pack_heads([*packed, pack_weight(torch.randn(OUTPUTS, INPUTS + 2).bfloat16())])
