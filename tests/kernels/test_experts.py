"""A mixture of experts: against the specification, and rows against the number of rows."""

from typing import Any

import pytest
import torch
from torch import Tensor

from raydix.kernels import experts as module
from raydix.kernels.experts import PackedExperts, experts, experts_reference, pack_experts
from raydix.kernels.experts.reference import route_reference
from raydix.kernels.linear import Layout, pack_weight
from tests.kernels.kernel_cases import assert_close
from tests.skips import NO_PRODUCT

HIDDEN, INNER, NUM = 96, 72, 9


class Weights:
    """Random experts, as they are stored and as they are packed."""

    def __init__(self, dtype: torch.dtype, *, per_token: int = 3, normalised: bool = True, **options: Any) -> None:
        scale = HIDDEN**-0.5
        # Logits that are the row's own numbers, so that no order of addition chooses other experts.
        self.router = torch.eye(NUM, HIDDEN, dtype=dtype)
        self.gate_up = [(torch.randn(2 * INNER, HIDDEN) * scale).to(dtype) for _ in range(NUM)]
        self.down = [(torch.randn(HIDDEN, INNER) * scale).to(dtype) for _ in range(NUM)]
        self.per_token, self.normalised, self.options = per_token, normalised, options

    def packed(self, *, int8: bool = False) -> PackedExperts:
        return pack_experts(
            pack_weight(self.router),
            [pack_weight(weight, int8=int8) for weight in self.gate_up],
            [pack_weight(weight, int8=int8) for weight in self.down],
            self.per_token,
            normalised=self.normalised,
            **self.options,
        )

    def expected(self, x: Tensor) -> Tensor:
        weights = self.router, self.gate_up, self.down
        return experts_reference(x, *weights, self.per_token, normalised=self.normalised, **self.options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 2, 40])
@pytest.mark.parametrize("per_token", [1, 3, NUM])
@pytest.mark.parametrize("normalised", [True, False])
def test_matches_reference(dtype: torch.dtype, rows: int, per_token: int, normalised: bool) -> None:
    weights = Weights(dtype, per_token=per_token, normalised=normalised)
    x = torch.randn(rows, HIDDEN).to(dtype)
    assert_close(experts(x, weights.packed()), weights.expected(x))


def test_another_activation() -> None:
    weights, x = Weights(torch.bfloat16, activation="gelu_tanh"), torch.randn(7, HIDDEN).bfloat16()
    assert_close(experts(x, weights.packed()), weights.expected(x))


def test_of_equal_logits_the_lower_index_comes_first() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0]])
    ids, shares = route_reference(logits, 3, normalised=True)
    assert ids.tolist() == [[1, 3, 2]]
    assert_close(shares, torch.softmax(torch.tensor([[3.0, 3.0, 2.0]]), 1))


@pytest.mark.parametrize("int8", [False, True])
def test_ties_and_int8_give_the_bits_of_one_product_for_each_expert(int8: bool) -> None:
    """Of a router with equal rows, so that logits are equal, too."""
    weights = Weights(torch.bfloat16)
    weights.router[4:] = weights.router[3]
    packed, x = weights.packed(int8=int8), torch.randn(30, HIDDEN).bfloat16()
    if packed.handle is None:
        pytest.skip(NO_PRODUCT)
    assert_close(experts(x, packed), module._expert_by_expert(x, packed))


@pytest.mark.parametrize("int8", [False, True])
def test_bits_of_a_row_do_not_depend_on_the_rows(int8: bool) -> None:
    packed = Weights(torch.bfloat16).packed(int8=int8)
    if packed.router.layout is not Layout.PANELS:
        pytest.skip(NO_PRODUCT)
    x = torch.randn(200, HIDDEN).bfloat16()
    together = experts(x, packed)
    for size in (1, 2, 7, 33):
        parts = [experts(x[start : start + size], packed) for start in range(0, len(x), size)]
        assert torch.equal(torch.cat(parts), together), size


def test_what_does_not_fit_is_refused() -> None:
    packed = Weights(torch.bfloat16).packed()
    if packed.handle is None:
        pytest.skip(NO_PRODUCT)
    with pytest.raises(ValueError, match="x must be"):
        experts(torch.randn(3, HIDDEN + 2).bfloat16(), packed)
    with pytest.raises(TypeError, match="bfloat16"):
        experts(torch.randn(3, HIDDEN), packed)
    more = (*packed.gate_up, packed.gate_up[0])
    with pytest.raises(ValueError, match="each expert"):
        pack_experts(packed.router, more, packed.down, 3, normalised=True)
    with pytest.raises(ValueError, match="more experts"):
        pack_experts(packed.router, packed.gate_up, packed.down, NUM + 1, normalised=True)
    with pytest.raises(ValueError, match="one shape"):
        pack_experts(packed.router, packed.down, packed.gate_up, 3, normalised=True)
