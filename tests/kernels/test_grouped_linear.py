"""Products with weights stored in groups: weights to the bit, sums within rounding, rows that stand by themselves."""

import pytest
import torch

from raydix.kernels.cpp import cpu_ops
from raydix.kernels.linear import (
    GroupedWeight,
    Groups,
    Scales,
    in_one_form,
    keeps_groups,
    linear,
    pack_groups,
    pack_weight,
    stacked,
)
from raydix.kernels.linear.reference import linear_reference
from tests.kernels.kernel_cases import assert_close
from tests.skips import NO_PRODUCT

TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
FORMS = {
    "four bits, one scale": Groups(4, 32, 32, zero=8),
    "four bits, a least value": Groups(4, 32, 32, has_least=True),
    "four bits, factors": Groups(4, 32, 256, has_least=True),
    "eight bits": Groups(8, 32, 32, zero=128),
    "six bits, small groups": Groups(8, 16, 256, zero=32),
    "six bits, a least value": Groups(8, 16, 256, has_least=True),
    "four bits, long groups": Groups(4, 128, 128, has_least=True),
    "a table, exponents": Groups(4, 32, 32, scales=Scales.EXPONENTS, values=TABLE),
    "a table, a scale": Groups(4, 32, 32, values=tuple(range(-127, 128, 16))),
    "a table, factors": Groups(4, 32, 256, values=tuple(range(113, -128, -16))),
    "floats, long groups": Groups(8, 128, 128, scales=Scales.FLOATS, is_float8=True),
    "floats, short groups": Groups(8, 16, 16, scales=Scales.FLOATS, is_float8=True),
}
EXACT = ("a table, exponents",)
"""Forms whose weights are numbers of bfloat16."""
HIGHEST = {0: 15, 8: 15, 32: 63, 128: 255}


@pytest.fixture(autouse=True)
def _has_product() -> None:
    ops = cpu_ops()
    if ops is None or not ops.has_linear():
        pytest.skip(NO_PRODUCT)


def made(out_features: int, in_features: int, form: Groups) -> GroupedWeight:
    """A weight with values such as models have, one group in two with a negative factor where there are factors."""
    num_scales, num_groups = in_features // form.super, in_features // form.size
    if form.scales is Scales.EXPONENTS:
        numbers = torch.randint(0, 16, (out_features, in_features)).to(torch.uint8)
        exponents = torch.randint(116, 124, (out_features, num_scales)).to(torch.uint8)
        return GroupedWeight(groups=form, numbers=numbers, scales=exponents)
    if form.is_float8:
        numbers = (torch.randn(out_features, in_features) * 20).to(torch.float8_e4m3fn).view(torch.uint8)
        return GroupedWeight(groups=form, numbers=numbers, scales=torch.rand(out_features, num_scales) * 0.01)
    signs = 1 if form.has_least else torch.randint(0, 2, (out_features, num_groups)) * 2 - 1
    # As in files, where products with values or numbers of eight bits are exact in float32.
    most = 32 if form.values else 63
    factors = torch.randint(1, most + 1, (out_features, num_groups)) * signs
    if form.zero == 128:
        factors = torch.ones(out_features, num_groups)
    if not form.has_least and form.super > form.size and not form.values:
        # As in files: the group with the largest scale has the number whose opposite an int8 does not hold.
        factors[:, :: form.super // form.size] = -128
    least = (torch.rand(out_features, num_scales) * 0.01).half() if form.has_least else None
    return GroupedWeight(
        groups=form,
        numbers=torch.randint(0, HIGHEST[form.zero] + 1, (out_features, in_features)).to(torch.uint8),
        scales=(torch.rand(out_features, num_scales) * 0.001).half(),
        factors=factors.to(torch.int8),
        least=least,
        least_factors=torch.randint(0, 64, (out_features, num_groups)).to(torch.uint8) if form.has_least else None,
    )


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("shape", [(64, 256), (33, 768), (200, 1280), (1, 512)])
def test_each_weight_has_its_value(form: Groups, shape: tuple[int, int]) -> None:
    weight = made(*shape, form)
    assert keeps_groups(weight)
    one_hot = torch.eye(shape[1]).bfloat16()
    assert torch.equal(linear(one_hot, pack_groups(weight)), weight.widened().T.bfloat16())


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("rows", [0, 1, 5, 7, 100])
@pytest.mark.parametrize("with_bias", [False, True])
def test_matches_reference(form: Groups, rows: int, with_bias: bool) -> None:
    weight, x = made(100, 1280, form), (torch.randn(rows, 1280) * 0.01).bfloat16()
    bias = torch.randn(100) if with_bias else None
    expected = linear_reference(x, weight.widened().bfloat16(), bias)
    assert_close(linear(x, pack_groups(weight, bias)), expected)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_bits_of_a_row_do_not_depend_on_the_rows(form: Groups) -> None:
    packed, x = pack_groups(made(960, 1536, form)), torch.randn(256, 1536).bfloat16()
    whole = linear(x, packed)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for count in (*range(1, 26), 47, 97, 129, 255):
                offset = (count * 37) % (256 - count + 1)
                part = linear(x[offset : offset + count].contiguous(), packed)
                assert torch.equal(part, whole[offset : offset + count]), f"{count} rows on {threads} threads"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "names",
    [
        ("four bits, factors", "six bits, small groups"),
        ("six bits, small groups", "four bits, factors"),
        ("eight bits", "four bits, one scale"),
        ("four bits, factors", "four bits, factors"),
        ("a table, exponents", "a table, exponents"),
        ("floats, long groups", "floats, long groups"),
        ("a table, a scale", "eight bits"),
        ("a table, factors", "six bits, small groups"),
        ("four bits, factors", "a table, factors"),
        ("four bits, a least value", "eight bits"),
        ("a table, a scale", "four bits, factors"),
        ("a table, a scale", "six bits, small groups"),
        ("four bits, long groups", "eight bits"),
    ],
)
def test_weights_of_two_forms_are_one_product(names: tuple[str, str]) -> None:
    weights = [made(70, 768, FORMS[name]) for name in names]
    alike = in_one_form(weights)
    assert alike is not None
    together = stacked(alike)
    assert torch.equal(together.widened(), torch.cat([weight.widened() for weight in weights]))
    x = torch.eye(768).bfloat16()
    assert torch.equal(linear(x, pack_groups(together)), together.widened().T.bfloat16())


def test_some_forms_have_none_in_common() -> None:
    for others in ("a table, exponents", "floats, long groups"):
        weights = [made(64, 256, FORMS[name]) for name in (others, "eight bits")]
        assert in_one_form(weights) is None
    with pytest.raises(ValueError, match="one form"):
        stacked(weights)
    # Half of the range is taken off where the other has what is taken off, which float16 does not hold here.
    weights = [made(64, 256, FORMS[name]) for name in ("four bits, a least value", "eight bits")]
    assert in_one_form(weights) is not None
    weights[1].scales[3, 2] = 600
    assert in_one_form(weights) is None
    # A number of 0 and a negative scale: counted from the other end it is 256.
    weights = [made(64, 256, FORMS[name]) for name in ("four bits, a least value", "eight bits")]
    assert weights[1].factors is not None
    weights[1].factors[3, 2] = -1
    weights[1].numbers[4] = 0
    assert in_one_form(weights) is None


@pytest.mark.parametrize("form", [FORMS[name] for name in EXACT], ids=EXACT)
def test_exact_weights_give_the_bits_of_the_widened_ones(form: Groups) -> None:
    weight, bias = made(130, 800, form), torch.randn(130)
    wide = pack_weight(weight.widened().bfloat16(), bias)
    for rows in (1, 2, 3, 30):
        x = torch.randn(rows, 800).bfloat16()
        assert torch.equal(linear(x, pack_groups(weight, bias)), linear(x, wide)), rows


def test_every_number_and_exponent_has_its_value() -> None:
    form = FORMS["a table, exponents"]
    exponents = torch.arange(255, dtype=torch.uint8)[:, None]
    numbers = torch.arange(32, dtype=torch.uint8).remainder(16).expand(255, 32)
    weight = GroupedWeight(groups=form, numbers=numbers, scales=exponents)
    expected = torch.tensor(TABLE * 2, dtype=torch.float64) * 2.0 ** (
        torch.arange(255, dtype=torch.float64)[:, None] - 128
    )
    expected = expected.float()  # the largest are beyond float32
    assert torch.equal(weight.widened(), expected)
    # The machine's own product of bfloat16 may take subnormal numbers for zeros.
    normal = slice(3, 252)
    given = linear(torch.eye(32).bfloat16(), pack_groups(weight)).T.float()
    assert torch.equal(given[normal], expected[normal])


def test_every_number_of_fp8_has_its_value() -> None:
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers[[127, 255]] = 0  # NaN
    form = FORMS["floats, short groups"]
    weight = GroupedWeight(groups=form, numbers=numbers[None], scales=torch.ones(1, 16))
    given = linear(torch.eye(256).bfloat16(), pack_groups(weight))[:, 0].float()
    assert torch.equal(given, numbers.view(torch.float8_e4m3fn).float())


def test_rows_in_another_order() -> None:
    weight, order = made(64, 512, FORMS["four bits, factors"]), torch.randperm(64)
    x = torch.randn(3, 512).bfloat16()
    assert torch.equal(linear(x, pack_groups(weight.rows(order))), linear(x, pack_groups(weight))[:, order])


@pytest.mark.parametrize(
    "form", [Groups(4, 32, 96, 0), Groups(4, 0, 32, 0), Groups(5, 32, 32, 0), Groups(4, 24, 32, 0)]
)
def test_groups_that_are_no_part_of_a_cache_block_are_refused(form: Groups) -> None:
    packed = pack_groups(made(64, 256, Groups(4, 32, 32, zero=8)))
    ops = cpu_ops()
    assert ops is not None
    with pytest.raises(ValueError, match="groups must be even parts of 256"):
        ops.linear(torch.zeros(1, 256).bfloat16(), packed.weight, None, None, 64, form)


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (Groups(4, 32, 64, scales=Scales.EXPONENTS), "of one group each"),
        (Groups(4, 32, 32, zero=8, scales=Scales.EXPONENTS), "of one group each"),
        (Groups(4, 32, 32, values=(1, 2, 3)), "sixteen"),
        (Groups(4, 32, 32, values=(*TABLE[1:], 128)), "fit into eight bits"),
        (Groups(8, 32, 32, values=TABLE), "sixteen"),
        (Groups(4, 32, 32, zero=8, values=TABLE), "nothing is taken off"),
        (Groups(4, 32, 32, has_least=True, values=TABLE), "nothing is taken off"),
        (Groups(8, 32, 32, is_float8=True), "E4M3"),
        (Groups(8, 32, 32, scales=Scales.FLOATS), "E4M3"),
    ],
)
def test_forms_that_the_product_does_not_know_are_refused(form: Groups, says: str) -> None:
    ops = cpu_ops()
    assert ops is not None
    with pytest.raises(ValueError, match=says):
        ops.linear(torch.zeros(1, 256).bfloat16(), torch.zeros(1, dtype=torch.uint8), None, None, 64, form)


def test_wrong_widths_are_refused() -> None:
    packed = pack_groups(made(64, 256, Groups(4, 32, 32, zero=8)))
    with pytest.raises(ValueError, match="as wide"):
        linear(torch.zeros(2, 288).bfloat16(), packed)
