"""Norms and activations: against the specification, and row by row against the whole."""

import pytest
import torch

from raydix.kernels.cpp import cpu_ops
from raydix.kernels.gated_rms_norm import gated_rms_norm
from raydix.kernels.gated_rms_norm.reference import gated_rms_norm_reference
from raydix.kernels.layer_norm import layer_norm
from raydix.kernels.layer_norm.reference import add_layer_norm_reference, layer_norm_reference
from raydix.kernels.rms_norm import rms_norm
from raydix.kernels.rms_norm.reference import add_rms_norm_reference, rms_norm_reference
from raydix.kernels.silu_and_mul import KINDS, PLAIN, activate, silu_and_mul
from raydix.kernels.silu_and_mul.reference import activate_reference, silu_and_mul_reference
from tests.kernels.kernel_cases import assert_close

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(0, 576), (1, 576), (3, 7), (5, 1000), (67, 576), (2, 16)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_matches_reference(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    for weight in (torch.randn(shape[1]).to(dtype), torch.randn(shape[1])):
        assert_close(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))
        normed, total = rms_norm(x, weight, 1e-5, residual)
        expected, expected_total = add_rms_norm_reference(x, weight, 1e-5, residual)
        assert_close(normed, expected)
        assert torch.equal(total, expected_total)
        assert torch.equal(total, x + residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 67])
@pytest.mark.parametrize(("channels", "groups"), [(576, 1), (576, 8), (15, 3), (1000, 2), (16, 16)])
def test_the_gated_norm_matches_its_reference(dtype: torch.dtype, rows: int, channels: int, groups: int) -> None:
    x, gate = torch.randn(rows, channels).to(dtype), (4 * torch.randn(rows, channels)).to(dtype)
    gate[:1, :2] = torch.tensor([200.0, -200.0])
    weight = torch.randn(channels)
    expected = gated_rms_norm_reference(x, gate, weight, 1e-5, groups=groups)
    assert_close(gated_rms_norm(x, gate, weight, 1e-5, groups=groups), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_layer_norm_matches_reference(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, residual = (torch.randn(shape) + 3).to(dtype), torch.randn(shape).to(dtype)  # the mean is far from zero
    for weight in (torch.randn(shape[1]), torch.randn(3, shape[1])):
        for bias in (None, torch.randn(shape[1])):
            assert_close(layer_norm(x, weight, bias, 1e-5), layer_norm_reference(x, weight, bias, 1e-5))
            normed, total = layer_norm(x, weight, bias, 1e-5, residual)
            expected, expected_total = add_layer_norm_reference(x, weight, bias, 1e-5, residual)
            assert_close(normed, expected)
            assert torch.equal(total, expected_total)


def test_layer_norm_is_that_of_torch() -> None:
    x, weight, bias = torch.randn(5, 70), torch.randn(70), torch.randn(70)
    assert_close(layer_norm(x, weight, bias, 1e-5), torch.nn.functional.layer_norm(x, (70,), weight, bias, 1e-5))


def test_layer_norm_refuses_other_shapes_and_dtypes() -> None:
    x = torch.zeros(2, 32)
    if cpu_ops() is None:
        pytest.skip("PyTorch's own errors")
    with pytest.raises(ValueError, match="weight must be"):
        layer_norm(x, torch.ones(31), None, 1e-5)
    with pytest.raises(ValueError, match="bias must be float32"):
        layer_norm(x, torch.ones(32), torch.ones(31), 1e-5)
    with pytest.raises(TypeError, match="weight must be contiguous float32"):
        layer_norm(x, torch.ones(32).bfloat16(), None, 1e-5)
    with pytest.raises(ValueError, match="residual must be"):
        layer_norm(x, torch.ones(32), None, 1e-5, torch.zeros(1, 32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", PLAIN)
def test_activate_matches_reference(dtype: torch.dtype, shape: tuple[int, int], kind: str) -> None:
    x = torch.randn(shape) * 4
    x[:1, :2] = torch.tensor([200.0, -200.0])
    x = x.to(dtype)
    assert_close(activate(x, kind), activate_reference(x, kind))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_silu_and_mul_matches_reference(dtype: torch.dtype, shape: tuple[int, int], kind: str) -> None:
    x = torch.randn(shape[0], shape[1] * 2) * 4
    x[:1, :2] = torch.tensor([200.0, -200.0])[: x.shape[1]]
    x = x.to(dtype)
    assert_close(silu_and_mul(x, kind), silu_and_mul_reference(x, kind))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    x, weight = torch.randn(300, 1152).to(dtype), torch.randn(1152).to(dtype)
    normed, activated = rms_norm(x, weight, 1e-6), silu_and_mul(x)
    added, total = rms_norm(x, weight, 1e-6, x.flip(0).contiguous())
    gated = gated_rms_norm(x, x, weight.float(), 1e-6, groups=3)
    wide, plain = weight.float(), activate(x, "gelu")
    centred, (shifted, _) = layer_norm(x, wide, wide, 1e-6), layer_norm(x, wide, None, 1e-6, x.flip(0).contiguous())
    for row in (0, 1, 150, 299):
        one = x[row : row + 1]
        assert torch.equal(gated_rms_norm(one, one, weight.float(), 1e-6, groups=3)[0], gated[row])
        assert torch.equal(rms_norm(one, weight, 1e-6)[0], normed[row])
        assert torch.equal(silu_and_mul(one)[0], activated[row])
        assert torch.equal(activate(one, "gelu")[0], plain[row])
        assert torch.equal(layer_norm(one, wide, wide, 1e-6)[0], centred[row])
        assert torch.equal(layer_norm(one, wide, None, 1e-6, x[299 - row : 300 - row])[0][0], shifted[row])
        alone, alone_total = rms_norm(one, weight, 1e-6, x[299 - row : 300 - row])
        assert torch.equal(alone[0], added[row])
        assert torch.equal(alone_total[0], total[row])


def test_one_thread_gives_the_same_bits() -> None:
    x, weight = torch.randn(300, 1152).bfloat16(), torch.randn(1152).bfloat16()
    alone = rms_norm(x, weight, 1e-6), silu_and_mul(x), layer_norm(x, weight.float(), None, 1e-6), activate(x, "gelu")
    torch.set_num_threads(2)
    assert torch.equal(rms_norm(x, weight, 1e-6), alone[0])
    assert torch.equal(silu_and_mul(x), alone[1])
    assert torch.equal(layer_norm(x, weight.float(), None, 1e-6), alone[2])
    assert torch.equal(activate(x, "gelu"), alone[3])


def test_rows_may_be_strided() -> None:
    wide, weight = torch.randn(6, 64), torch.randn(32)
    assert_close(rms_norm(wide[:, :32], weight, 1e-5), rms_norm_reference(wide[:, :32], weight, 1e-5))
    assert_close(silu_and_mul(wide[:, :32]), silu_and_mul_reference(wide[:, :32]))
    expected = gated_rms_norm_reference(wide[:, :32], wide[:, 32:], weight, 1e-5, groups=1)
    assert_close(gated_rms_norm(wide[:, :32], wide[:, 32:], weight, 1e-5), expected)
    assert_close(layer_norm(wide[:, :32], weight, None, 1e-5), layer_norm_reference(wide[:, :32], weight, None, 1e-5))
    assert_close(activate(wide[:, :32], "gelu"), activate_reference(wide[:, :32], "gelu"))


def test_unknown_activation() -> None:
    with pytest.raises(ValueError, match="unknown activation"):
        silu_and_mul(torch.zeros(1, 4), "relu")
    with pytest.raises(ValueError, match="unknown activation 'sigmoid'"):
        activate(torch.zeros(1, 4), "sigmoid")
