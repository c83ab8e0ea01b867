"""A mixture of experts: against the specification, and rows against the number of rows."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from raydix.kernels import experts as module
from raydix.kernels.experts import PackedExperts, experts, experts_reference, pack_experts
from raydix.kernels.experts.reference import route_reference
from raydix.kernels.linear import pack_weight
from raydix.kernels.linear.reference import linear_reference
from raydix.kernels.routing import Routing
from raydix.kernels.silu_and_mul.reference import silu_and_mul_reference
from tests.kernels.kernel_cases import assert_close
from tests.skips import NO_PRODUCT

HIDDEN, INNER, NUM = 96, 72, 9
PLAIN = Routing(per_token=3, normalised=True)


class Weights:
    """Random experts, as they are stored and as they are packed."""

    def __init__(
        self,
        dtype: torch.dtype,
        routing: Routing = PLAIN,
        *,
        activation: str = "silu",
        has_gate: bool = True,
        is_corrected: bool = False,
        is_float: bool = False,
    ) -> None:
        scale = HIDDEN**-0.5
        # Logits that are the row's own numbers, so that no order of addition chooses other experts.
        self.router = torch.eye(NUM, HIDDEN, dtype=torch.float32 if is_float else dtype)
        self.is_float = is_float
        wide = 2 * INNER if has_gate else INNER
        self.gate_up = [(torch.randn(wide, HIDDEN) * scale).to(dtype) for _ in range(NUM)]
        self.down = [(torch.randn(HIDDEN, INNER) * scale).to(dtype) for _ in range(NUM)]
        self.correction = torch.randn(NUM) if is_corrected else None
        self.routing, self.activation, self.has_gate = routing, activation, has_gate

    def packed(self, *, int8: bool = False) -> PackedExperts:
        return pack_experts(
            self.router if self.is_float else pack_weight(self.router),
            [pack_weight(weight, int8=int8) for weight in self.gate_up],
            [pack_weight(weight, int8=int8) for weight in self.down],
            self.routing,
            correction=self.correction,
            activation=self.activation,
            has_gate=self.has_gate,
        )

    def expected(self, x: Tensor) -> Tensor:
        weights = self.router, self.gate_up, self.down
        return experts_reference(
            x, *weights, self.routing, self.correction, activation=self.activation, has_gate=self.has_gate
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 2, 40])
@pytest.mark.parametrize("per_token", [1, 3, NUM])
@pytest.mark.parametrize("normalised", [True, False])
def test_matches_reference(dtype: torch.dtype, rows: int, per_token: int, normalised: bool) -> None:
    weights = Weights(dtype, Routing(per_token=per_token, normalised=normalised))
    x = torch.randn(rows, HIDDEN).to(dtype)
    assert_close(experts(x, weights.packed()), weights.expected(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_float", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 40])
def test_the_router_may_read_other_rows_and_shares_have_factors(dtype: torch.dtype, is_float: bool, rows: int) -> None:
    weights = Weights(dtype, is_float=is_float)
    factors = torch.rand(NUM) + 0.5
    packed = pack_experts(
        weights.router if is_float else pack_weight(weights.router),
        [pack_weight(weight) for weight in weights.gate_up],
        [pack_weight(weight) for weight in weights.down],
        weights.routing,
        factors=factors,
    )
    x, routed = torch.randn(rows, HIDDEN).to(dtype), torch.randn(rows, HIDDEN).to(dtype)
    of = weights.router, weights.gate_up, weights.down, weights.routing
    actual = experts(x, packed, routed)
    assert_close(actual, experts_reference(x, *of, factors=factors, routed=routed))
    # In float32 the last bits may depend on the batch.
    for row in range(0, rows if packed.handle is not None else 0, 13):
        assert torch.equal(experts(x[row : row + 1], packed, routed[row : row + 1])[0], actual[row])


def test_routed_rows_of_another_shape_are_refused() -> None:
    packed = Weights(torch.bfloat16).packed()
    if packed.handle is None:
        pytest.skip(NO_PRODUCT)
    x = torch.zeros(2, HIDDEN, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="routed rows must be contiguous and like x"):
        experts(x, packed, x[:1])


ROUTINGS = {
    "of the best groups": Routing(
        per_token=2, normalised=True, score="sigmoid", num_groups=3, top_groups=1, group_best=2, scale=2.5
    ),
    "shares as they are": Routing(per_token=3, normalised=False, score="sigmoid", sum_offset=1e-6),
    "of a softmax": Routing(per_token=4, normalised=True, num_groups=3, top_groups=2, scale=0.5),
}


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("is_corrected", [False, True])
@pytest.mark.parametrize("is_float", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_routings(name: str, is_corrected: bool, is_float: bool, dtype: torch.dtype) -> None:
    weights = Weights(dtype, ROUTINGS[name], is_corrected=is_corrected, is_float=is_float)
    x, packed = torch.randn(40, HIDDEN).to(dtype), weights.packed()
    assert_close(experts(x, packed), weights.expected(x))
    assert experts(x[:0], packed).shape == weights.expected(x[:0]).shape == (0, HIDDEN)
    if packed.handle is not None:  # otherwise the last bits may depend on the batch
        parts = [experts(x[start : start + 7], packed) for start in range(0, len(x), 7)]
        assert torch.equal(torch.cat(parts), experts(x, packed))


def test_logits_in_float32_choose_what_rounded_ones_cannot() -> None:
    """Two logits that differ by less than bfloat16 shows."""
    for is_float, best in ((False, 0), (True, 1)):
        weights = Weights(torch.bfloat16, Routing(per_token=1, normalised=True), is_float=is_float)
        weights.router[:] = 0
        weights.router[0, 0] = weights.router[1, 0] = 1.0
        weights.router[1, 1] = 0.125
        x = torch.randn(1, HIDDEN).bfloat16()
        x[0, 0], x[0, 1] = 4.0, 0.03125
        alone = weights.packed()
        inner = linear_reference(x, weights.gate_up[best], None)
        expected = linear_reference(silu_and_mul_reference(inner), weights.down[best], None)
        assert_close(experts(x, alone), expected)


def test_a_correction_chooses_and_is_no_share() -> None:
    logits, correction = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([9.0, 0.0, 0.0])
    ids, shares = route_reference(logits, Routing(per_token=1, normalised=False, score="sigmoid"), correction)
    assert ids.tolist() == [[0]]
    assert_close(shares, torch.tensor([[0.5]]))


def test_groups_are_chosen_before_experts() -> None:
    """The best expert of all stands in the worse of two groups."""
    routing = Routing(per_token=1, normalised=True, score="sigmoid", num_groups=2, top_groups=1, group_best=2)
    ids, _ = route_reference(torch.tensor([[3.0, -5.0, 2.0, 2.5]]), routing)
    assert ids.tolist() == [[3]]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"per_token": 0}, "cannot have 0 experts"),
        ({"num_groups": 2}, "groups cannot be chosen of 9"),
        ({"num_groups": 3, "top_groups": 4}, "4 of 3 groups"),
        ({"num_groups": 9, "top_groups": 2}, "too small for 3"),
        ({"num_groups": 3, "group_best": 4}, "too small"),
    ],
)
def test_choices_that_cannot_be_made_are_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(PLAIN, **changes).check(NUM)


@pytest.mark.parametrize(("activation", "has_gate"), [("gelu_tanh", True), ("relu2", False), ("silu", False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7])
def test_another_activation(activation: str, has_gate: bool, dtype: torch.dtype, rows: int) -> None:
    weights, x = Weights(dtype, activation=activation, has_gate=has_gate), torch.randn(rows, HIDDEN).to(dtype)
    assert_close(experts(x, weights.packed()), weights.expected(x))


def test_of_equal_logits_the_lower_index_comes_first() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0]])
    ids, shares = route_reference(logits, PLAIN)
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
    if packed.handle is None:
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
        pack_experts(packed.router, more, packed.down, PLAIN)
    with pytest.raises(ValueError, match="cannot have 10 experts of 9"):
        pack_experts(packed.router, packed.gate_up, packed.down, replace(PLAIN, per_token=NUM + 1))
    with pytest.raises(ValueError, match="one shape"):
        pack_experts(packed.router, packed.down, packed.gate_up, PLAIN)
