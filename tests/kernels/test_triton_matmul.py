"""The batch-invariant matrix product: against the specification, and rows against the number of rows."""

import pytest
import torch
from torch import Tensor

from raydix.kernels.batch_invariant_matmul import batch_invariant_matmul
from raydix.kernels.batch_invariant_matmul import triton as kernels
from raydix.kernels.batch_invariant_matmul.reference import batch_invariant_matmul_reference
from raydix.kernels.batch_invariant_matmul.triton import batch_invariant_matmul_triton
from tests.kernels.kernel_cases import assert_close
from tests.kernels.triton_cases import DEVICE, assert_relative, needs_gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def operands(rows: int, out_features: int, in_features: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn((rows, in_features), device=DEVICE)
    weight = torch.randn((out_features, in_features), device=DEVICE) / in_features**0.5
    return x.to(dtype), weight.to(dtype), torch.randn(out_features, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "out_features", "in_features"), [(0, 33, 64), (1, 33, 7), (5, 300, 200), (64, 64, 64), (65, 70, 129)]
)
def test_matches_reference(dtype: torch.dtype, rows: int, out_features: int, in_features: int) -> None:
    x, weight, bias = operands(rows, out_features, in_features, dtype)
    for b in (None, bias):
        assert_close(batch_invariant_matmul_triton(x, weight, b), batch_invariant_matmul_reference(x, weight, b))
        assert_close(batch_invariant_matmul(x, weight, b), batch_invariant_matmul_reference(x, weight, b))


def test_rows_may_be_strided() -> None:
    x, weight, bias = operands(5, 20, 64, torch.float32)
    x, weight = x[:, :32], weight[:, 32:]
    assert_close(batch_invariant_matmul_triton(x, weight, bias), batch_invariant_matmul_reference(x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_row_do_not_depend_on_the_rows(dtype: torch.dtype) -> None:
    x, weight, bias = operands(130, 96, 100, dtype)
    whole = batch_invariant_matmul_triton(x, weight, bias)
    for count in (1, 2, 63, 65):
        part = batch_invariant_matmul_triton(x[3 : 3 + count], weight, bias)
        assert torch.equal(part, whole[3 : 3 + count])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [3, 64, 65, 200])
@pytest.mark.parametrize(("out_features", "in_features"), [(136, 72), (300, 96), (33, 37)])
def test_hoppers_tiles_match_the_reference(
    dtype: torch.dtype, rows: int, out_features: int, in_features: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows, rows that the copy engine reads, and rows of 37 elements, which it cannot read."""
    monkeypatch.setattr(kernels, "is_hopper", lambda device: True)
    x, weight, bias = operands(rows, out_features, in_features, dtype)
    for b in (None, bias):
        assert_close(batch_invariant_matmul_triton(x, weight, b), batch_invariant_matmul_reference(x, weight, b))


def test_more_rows_take_larger_tiles_where_they_fill_the_device() -> None:
    chosen = [kernels._large_tile(rows, 4096, 132) for rows in (65, 512, 8192)]
    assert chosen == [kernels.LARGE[2], kernels.LARGE[1], kernels.LARGE[0]]
    assert kernels._narrow_tile(28672, 4096) == kernels.SHALLOW
    assert kernels._narrow_tile(4096, 14336) == kernels.DEEP
    assert kernels._narrow_tile(6144, 4096) == kernels.NARROW


def test_rejects_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="cannot multiply"):
        batch_invariant_matmul(torch.zeros(2, 3), torch.zeros(4, 5))
    with pytest.raises(ValueError, match="bias"):
        batch_invariant_matmul(torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(3))
    with pytest.raises(TypeError):
        batch_invariant_matmul(torch.zeros(2, 3), torch.zeros(4, 3).bfloat16())


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_features", "in_features"), [(6144, 4096), (28672, 4096), (4096, 14336), (1001, 4099)])
def test_large_shapes(dtype: torch.dtype, out_features: int, in_features: int) -> None:
    x, weight, bias = operands(1500, out_features, in_features, dtype)
    whole = batch_invariant_matmul(x, weight, bias)
    exact = (x.double() @ weight.double().T + bias.double()).to(dtype)
    assert_relative(whole, exact)
    for count in (1, 2, 16, 17, 63, 64, 65, 128, 1000):
        offset = (count * 37) % (1500 - count + 1)
        part = batch_invariant_matmul(x[offset : offset + count].clone(), weight, bias)
        assert torch.equal(part, whole[offset : offset + count]), f"{count} rows"
