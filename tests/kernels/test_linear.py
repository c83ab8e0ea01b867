"""The packed matrix product: against the specification, and rows against the number of rows."""

import pytest
import torch

from raydix.kernels.cpp import cpu_ops, loader, prefer_huge_pages
from raydix.kernels.linear import linear, pack_weight, quantize
from raydix.kernels.linear.packing import Layout
from raydix.kernels.linear.reference import linear_reference
from tests.kernels.kernel_cases import assert_close
from tests.skips import NO_KERNELS, NO_PRODUCT

LAYERS = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "lm_head": (49152, 576)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(0, 33, 64), (1, 33, 7), (5, 33, 64), (5, 960, 576), (26, 100, 2050), (200, 70, 64)])
def test_matches_reference(dtype: torch.dtype, with_bias: bool, shape: tuple[int, int, int]) -> None:
    rows, out_features, in_features = shape
    weight = (torch.randn(out_features, in_features) / in_features**0.5).to(dtype)
    bias = torch.randn(out_features).to(dtype) if with_bias else None
    x = torch.randn(rows, in_features).to(dtype)
    assert_close(linear(x, pack_weight(weight, bias)), linear_reference(x, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    "shape", [(0, 33, 64), (1, 33, 7), (5, 33, 64), (7, 960, 576), (6, 64, 2050), (26, 100, 2050), (200, 70, 64)]
)
def test_int8_matches_reference(dtype: torch.dtype, with_bias: bool, shape: tuple[int, int, int]) -> None:
    rows, out_features, in_features = shape
    weight = (torch.randn(out_features, in_features) / in_features**0.5).to(dtype)
    bias = torch.randn(out_features).to(dtype) if with_bias else None
    x = torch.randn(rows, in_features).to(dtype)
    rounded, scales = quantize(weight)
    assert_close(linear(x, pack_weight(weight, bias, int8=True)), linear_reference(x, rounded, bias, scales))


def test_quantized_weights_are_off_by_half_a_step_at_most() -> None:
    weight = torch.randn(40, 300) * torch.logspace(-20, 4, 40)[:, None]
    weight[7] = 0
    rounded, scales = quantize(weight)
    assert rounded.dtype == torch.int8 and rounded.min() >= -127
    assert (rounded.abs().amax(1) == torch.where(weight.abs().amax(1) > 0, 127, 0)).all()
    assert ((rounded * scales[:, None] - weight).abs() <= 0.5001 * scales[:, None]).all()


@pytest.mark.skipif(cpu_ops() is None, reason=NO_KERNELS)
def test_every_instruction_set_but_the_plain_one_has_a_product_of_ours() -> None:
    ops = cpu_ops()
    assert ops is not None and ops.has_linear() == (loader.chosen() != "plain")


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("int8", [False, True])
def test_bits_of_a_row_do_not_depend_on_the_rows(layer: str, int8: bool) -> None:
    """Held by whichever product `pack_weight` chooses on this machine."""
    ops = cpu_ops()
    if ops is None or not ops.has_linear():
        pytest.skip(NO_PRODUCT)
    out_features, in_features = LAYERS[layer]
    packed = pack_weight((torch.randn(out_features, in_features) / in_features**0.5).bfloat16(), int8=int8)
    assert packed.layout is Layout.PANELS
    x = torch.randn(512, in_features).bfloat16()
    whole = linear(x, packed)
    counts = [1, 2, 3, 17, 64, 65, 256] if layer == "lm_head" else [*range(1, 34), 47, 64, 65, 100, 127, 129, 255, 511]
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for count in counts:
                offset = (count * 37) % (512 - count + 1)
                part = linear(x[offset : offset + count].contiguous(), packed)
                assert torch.equal(part, whole[offset : offset + count]), f"{count} rows on {threads} threads"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("int8", [False, True])
def test_wrong_widths_and_types(int8: bool) -> None:
    packed = pack_weight(torch.randn(8, 16).bfloat16(), int8=int8)
    for wrong in (torch.randn(2, 18).bfloat16(), torch.randn(2, 16)):
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            linear(wrong, packed)


def test_huge_pages_are_only_a_hint() -> None:
    for size in (0, 10, 5 << 20):
        tensor = torch.empty(size, dtype=torch.uint8)
        prefer_huge_pages(tensor)
        assert tensor.fill_(3).sum() == 3 * size
