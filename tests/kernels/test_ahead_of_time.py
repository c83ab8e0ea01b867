"""Kernels compiled for GPUs that are not here: they fit. `make aot` compiles all of them for all targets."""

import pytest

from tests.kernels.ahead_of_time import KIB, SHARED_KIB, attentions, compile_all, products, samplings
from tests.kernels.interpreter import INTERPRETING

pytestmark = pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")


def test_products_on_hopper_keep_their_sums_in_registers() -> None:
    found = compile_all(90, products)
    assert {each.kernel for each in found} == {"_matmul_kernel", "_large_matmul_kernel"}
    assert all(each.spilled == 0 and each.shared <= SHARED_KIB[90] * KIB for each in found), found


def test_the_largest_heads_fit_the_smallest_shared_memory() -> None:
    found = compile_all(120, lambda: attentions([(8, 4, 256)]))
    assert len({each.constants for each in found if each.kernel == "_attend_kernel"}) == 6
    assert all(each.shared <= SHARED_KIB[120] * KIB for each in found), found


def test_drawing_keeps_its_noise_in_registers() -> None:
    drawing = [each for each in compile_all(90, samplings) if each.kernel == "_draw_kernel"]
    assert len(drawing) == 2
    assert all(each.spilled == 0 for each in drawing)
