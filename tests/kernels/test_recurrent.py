"""The short convolution, the gated delta rule and the selective scan: against the specification, in chunks, beside
others, from states."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from raydix.kernels.cpp import cpu_ops
from raydix.kernels.gated_delta import gated_delta
from raydix.kernels.gated_delta.reference import gated_delta_reference
from raydix.kernels.selective_scan import selective_scan
from raydix.kernels.selective_scan.reference import selective_scan_reference
from raydix.kernels.short_conv import short_conv
from raydix.kernels.short_conv.reference import short_conv_reference
from raydix.kernels.states import NO_STATE, StateUse
from tests.kernels.kernel_cases import assert_close
from tests.skips import NO_PRODUCT

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [[1], [5], [17, 1, 3], [2, 40]]
HEADS = [(1, 1, 16, 16), (2, 4, 16, 32), (2, 2, 20, 48), (1, 3, 128, 64)]
"""Heads of keys and of values, and their dimensions."""
SCANS = [(1, 1, 16, 16), (2, 4, 16, 32), (1, 3, 20, 48), (4, 4, 128, 64), (1, 2, 300, 16), (1, 2, 16, 20)]
"""Groups and heads, numbers of a dimension's state and dimensions of a head; the last two run on the reference."""
NUM_SLOTS = 9


class Sequences:
    """Sequences of a batch: every other one goes on from a state, and each leaves one in its middle and at its end."""

    def __init__(self, lengths: Sequence[int]) -> None:
        starts = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
        self.query_start = torch.tensor(starts, dtype=torch.int32)
        self.num_rows = starts[-1]
        rows = sorted({row for first, end in pairwise(starts) for row in ((first + end) // 2, end - 1)})
        sources = [index if index % 2 else NO_STATE for index in range(len(lengths))]
        slots = list(range(len(lengths), len(lengths) + len(rows)))
        self.use = StateUse(*(torch.tensor(values) for values in (sources, rows, slots)))
        self.slots = slots


class Delta:
    """Random inputs of a gated delta rule."""

    def __init__(self, heads: tuple[int, int, int, int], num_rows: int, dtype: torch.dtype) -> None:
        num_key_heads, num_heads, key_dim, value_dim = heads
        width = 2 * num_key_heads * key_dim + num_heads * value_dim
        self.mixed = torch.randn(num_rows, width).to(dtype)
        self.beta, self.step = (torch.randn(num_rows, num_heads).mul(3).to(dtype) for _ in range(2))
        self.decay_rate, self.step_bias = torch.rand(num_heads) * 4, torch.randn(num_heads)
        self.states = torch.randn(NUM_SLOTS, num_heads, key_dim, value_dim)

    def run(self, states: Tensor, query_start: Tensor, use: StateUse, rows: slice = slice(None)) -> Tensor:
        return gated_delta(
            self.mixed[rows],
            self.beta[rows],
            self.step[rows],
            self.decay_rate,
            self.step_bias,
            states,
            query_start,
            use,
        )


class Scan:
    """Random inputs of a selective scan."""

    step_limits = 0.0, math.inf

    def __init__(self, heads: tuple[int, int, int, int], num_rows: int, dtype: torch.dtype) -> None:
        num_groups, num_heads, state_size, head_dim = heads
        width = 2 * num_groups * state_size + num_heads * head_dim
        self.mixed, self.step = torch.randn(num_rows, width).to(dtype), torch.randn(num_rows, num_heads).to(dtype)
        self.decay_rate, self.step_bias, self.skip = torch.rand(num_heads) * 4, *torch.randn(2, num_heads)
        self.states = torch.randn(NUM_SLOTS, num_heads, state_size, head_dim)

    def run(
        self,
        states: Tensor,
        query_start: Tensor,
        use: StateUse,
        rows: slice = slice(None),
        scan: Callable[..., Tensor] = selective_scan,
    ) -> Tensor:
        weights = self.decay_rate, self.step_bias, self.skip
        inputs = self.mixed[rows], self.step[rows]
        return scan(*inputs, *weights, states, query_start, use, step_limits=self.step_limits)


KINDS: list[Callable[..., Delta | Scan]] = [Delta, Scan]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("heads", HEADS)
def test_the_delta_rule_matches_its_reference(
    dtype: torch.dtype, lengths: list[int], heads: tuple[int, int, int, int]
) -> None:
    batch = Sequences(lengths)
    delta = Delta(heads, batch.num_rows, dtype)
    ours, theirs = delta.states.clone(), delta.states.clone()
    expected = gated_delta_reference(
        delta.mixed,
        delta.beta,
        delta.step,
        delta.decay_rate,
        delta.step_bias,
        theirs,
        batch.query_start,
        batch.use,
    )
    assert_close(delta.run(ours, batch.query_start, batch.use), expected)
    assert_close(ours, theirs)
    untouched = [slot for slot in range(NUM_SLOTS) if slot not in batch.slots]
    assert torch.equal(ours[untouched], delta.states[untouched]), "a state that is read, or nobody's, has changed"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("heads", SCANS)
def test_the_selective_scan_matches_its_reference(
    dtype: torch.dtype, lengths: list[int], heads: tuple[int, int, int, int]
) -> None:
    batch = Sequences(lengths)
    scan = Scan(heads, batch.num_rows, dtype)
    ours, theirs = scan.states.clone(), scan.states.clone()
    expected = scan.run(theirs, batch.query_start, batch.use, scan=selective_scan_reference)
    assert_close(scan.run(ours, batch.query_start, batch.use), expected)
    assert_close(ours, theirs)
    untouched = [slot for slot in range(NUM_SLOTS) if slot not in batch.slots]
    assert torch.equal(ours[untouched], scan.states[untouched]), "a state that is read, or nobody's, has changed"


def test_steps_stay_within_their_limits() -> None:
    batch = Sequences([5])
    scan = Scan((1, 2, 16, 16), 5, torch.float32)
    free = scan.run(scan.states.clone(), batch.query_start, batch.use)
    scan.step_limits = 0.5, 0.75
    ours, theirs = scan.states.clone(), scan.states.clone()
    limited = scan.run(ours, batch.query_start, batch.use)
    assert_close(limited, scan.run(theirs, batch.query_start, batch.use, scan=selective_scan_reference))
    assert not torch.allclose(limited, free)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("channels", "taps"), [(7, 2), (64, 4), (100, 3)])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_convolution_matches_its_reference(
    dtype: torch.dtype, lengths: list[int], channels: int, taps: int, silu: bool, has_bias: bool
) -> None:
    batch = Sequences(lengths)
    x, weight = torch.randn(batch.num_rows, channels).to(dtype), torch.randn(taps, channels)
    ours = torch.randn(NUM_SLOTS, taps - 1, channels)
    theirs = ours.clone()
    bias = torch.randn(channels) if has_bias else None
    actual = short_conv(x, weight, ours, batch.query_start, batch.use, silu=silu, bias=bias)
    assert_close(actual, short_conv_reference(x, weight, theirs, batch.query_start, batch.use, silu=silu, bias=bias))
    assert torch.equal(ours, theirs), "inputs are kept as they are"


def chunks(length: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, length)) for first in range(0, length, size)]


@pytest.mark.parametrize("size", [1, 3, 7, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_any_size_and_any_threads_give_the_same_bits(
    size: int, dtype: torch.dtype, kind: Callable[..., Delta | Scan]
) -> None:
    """At once on one thread, and in chunks on two, each from the state that the one before left."""
    length, delta = 40, kind((2, 4, 16, 32), 40, dtype)
    weight, x = torch.randn(4, 100), torch.randn(40, 100).to(dtype)
    whole = StateUse(torch.tensor([NO_STATE]), torch.tensor([length - 1]), torch.tensor([2]))
    start = torch.tensor([0, length], dtype=torch.int32)
    memories, tails = delta.states.clone(), torch.randn(NUM_SLOTS, 3, 100)
    at_once = delta.run(memories, start, whole), short_conv(x, weight, tails, start, whole, silu=True)

    torch.set_num_threads(2)
    parts = []
    for number, rows in enumerate(chunks(length, size)):
        source = NO_STATE if number == 0 else (number - 1) % 2
        ends = torch.tensor([rows.stop - rows.start - 1])
        use = StateUse(torch.tensor([source]), ends, torch.tensor([number % 2]))
        start = torch.tensor([0, rows.stop - rows.start], dtype=torch.int32)
        parts.append((delta.run(memories, start, use, rows), short_conv(x[rows], weight, tails, start, use, silu=True)))
    for index in (0, 1):
        assert torch.equal(torch.cat([part[index] for part in parts]), at_once[index])
    last = (len(parts) - 1) % 2
    assert torch.equal(memories[last], memories[2]) and torch.equal(tails[last], tails[2])


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_has_the_same_bits_beside_others(kind: Callable[..., Delta | Scan]) -> None:
    batch = Sequences([17, 5, 3])
    delta = kind((1, 2, 16, 16), batch.num_rows, torch.bfloat16)
    together = delta.run(delta.states, batch.query_start, batch.use)
    alone = StateUse(torch.tensor([1]), torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))
    one = delta.run(delta.states, torch.tensor([0, 5], dtype=torch.int32), alone, slice(17, 22))
    assert torch.equal(one, together[17:22])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_may_be_strided(kind: Callable[..., Delta | Scan]) -> None:
    batch = Sequences([6])
    delta = kind((1, 2, 16, 16), 6, torch.float32)
    expected = delta.run(delta.states.clone(), batch.query_start, batch.use)
    delta.mixed = torch.cat((delta.mixed, torch.zeros(6, 5)), 1)[:, :-5]
    assert torch.equal(delta.run(delta.states, batch.query_start, batch.use), expected)


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (StateUse(torch.tensor([NUM_SLOTS]), torch.tensor([0]), torch.tensor([0])), "outside the states"),
        (StateUse(torch.tensor([1]), torch.tensor([0]), torch.tensor([1])), "read cannot be written"),
        (StateUse(torch.tensor([1]), torch.tensor([3]), torch.tensor([2])), "outside the batch"),
        (StateUse(torch.tensor([1]), torch.tensor([1, 0]), torch.tensor([2, 3])), "must rise"),
        (StateUse(torch.tensor([1]), torch.tensor([0, 2]), torch.tensor([2, 2])), "written for two rows"),
    ],
)
def test_states_that_are_not_there_are_refused(use: StateUse, says: str) -> None:
    if cpu_ops() is None:
        pytest.skip(NO_PRODUCT)
    start = torch.tensor([0, 3], dtype=torch.int32)
    tails = torch.zeros(NUM_SLOTS, 1, 8)
    for kind in KINDS:
        inputs = kind((1, 1, 16, 16), 3, torch.float32)
        with pytest.raises(ValueError, match=says):
            inputs.run(inputs.states, start, use)
    with pytest.raises(ValueError, match=says):
        short_conv(torch.zeros(3, 8), torch.zeros(2, 8), tails, start, use, silu=False)
