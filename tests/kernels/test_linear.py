"""The packed matrix product: against the specification, and rows against the number of rows."""

import pytest
import torch
from kernel_cases import assert_close

from kernels.linear import linear, pack_weight
from kernels.linear.reference import linear_reference

LAYERS = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "lm_head": (49152, 576)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("rows", "out_features", "in_features"), [(0, 33, 64), (1, 33, 7), (5, 960, 576)])
def test_matches_reference(dtype: torch.dtype, with_bias: bool, rows: int, out_features: int, in_features: int) -> None:
    weight = (torch.randn(out_features, in_features) / in_features**0.5).to(dtype)
    bias = torch.randn(out_features).to(dtype) if with_bias else None
    x = torch.randn(rows, in_features).to(dtype)
    assert_close(linear(x, pack_weight(weight, bias)), linear_reference(x, weight, bias))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="no bfloat16 in oneDNN here")
def test_bits_of_a_row_do_not_depend_on_the_rows(layer: str) -> None:
    out_features, in_features = LAYERS[layer]
    packed = pack_weight((torch.randn(out_features, in_features) / in_features**0.5).bfloat16())
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
