"""Triton sampling: against the specification, and each row against the batch."""
# mypy: allow-untyped-decorators, allow-untyped-calls

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from raydix.kernels.sample import Controls, LogitBias, Penalties, SampleOutput, TokenMask
from raydix.kernels.sample import triton as kernels
from raydix.kernels.sample.reference import adjusted_row, gumbel_noise, masked_row, ranks_of
from raydix.kernels.sample.triton import sample_triton
from raydix.kernels.sample.triton_noise import arrivals, first_arrivals, logarithm
from tests.kernels.test_sample import FIXED, adjustments, controls, masks, mixed_controls, same, specified
from tests.kernels.triton_cases import DEVICE, needs_gpu, on_device


def draw(
    logits: Tensor,
    given: Controls,
    penalties: Penalties | None = None,
    bias: LogitBias | None = None,
    wanted: tuple[int, ...] = (),
    chosen: Tensor | None = None,
    mask: TokenMask | None = None,
    cuts: bool = True,
) -> SampleOutput:
    """The kernel's answer, on the CPU."""
    result = sample_triton(
        logits.to(DEVICE),
        Controls(*(value.to(DEVICE) for value in given)),
        penalties=on_device(penalties) if penalties else None,
        bias=on_device(bias) if bias else None,
        mask=on_device(mask) if mask else None,
        wanted=wanted,
        given=None if chosen is None else chosen.to(DEVICE),
        cuts=cuts,
    )
    fields = (result.token_ids, result.logprobs, result.top_ids, result.top_logprobs, result.ranks)
    return SampleOutput(*(None if field is None else field.cpu() for field in fields))  # type: ignore[arg-type]


def check(batch: int, vocabulary: int, dtype: torch.dtype, adjusted: bool, masked: bool = False) -> None:
    logits = (torch.randn(batch, vocabulary) * 3).to(dtype)
    given = mixed_controls(batch, vocabulary)
    penalties, bias = adjustments(batch, vocabulary) if adjusted else (None, None)
    wanted = tuple(-1 if row % 3 == 0 else min(row % 7, vocabulary) for row in range(batch))
    mask = masks(batch, vocabulary) if masked else None
    result = draw(logits, given, penalties, bias, wanted, mask=mask)
    assert result.logprobs is not None
    assert result.top_ids is not None
    assert result.top_logprobs is not None
    for row in range(batch):
        z = adjusted_row(logits, row, penalties, bias)
        token, count = int(result.token_ids[row]), wanted[row]
        left = masked_row(z, row, mask)
        if mask is not None and not left.isfinite().any():
            continue  # a bias has forbidden the tokens that the mask allows
        assert token == specified(left, row, given)
        if count < 0:
            assert result.logprobs[row] == 0
            continue
        normalised = torch.log_softmax(z.double(), -1).float()
        ranked, order = torch.sort(normalised, descending=True, stable=True)
        torch.testing.assert_close(result.logprobs[row], normalised[token], rtol=1e-5, atol=1e-5, equal_nan=True)
        torch.testing.assert_close(
            result.top_logprobs[row, :count], ranked[:count], rtol=1e-5, atol=1e-5, equal_nan=True
        )
        torch.testing.assert_close(z[result.top_ids[row, :count]], z[order[:count]], rtol=1e-6, atol=1e-6)
        assert (result.top_ids[row, count:] == 0).all()


@pytest.mark.parametrize(
    ("vocabulary", "dtype", "adjusted"),
    [
        (1, torch.float32, True),
        (17, torch.float32, False),
        (17, torch.bfloat16, True),
        (1000, torch.bfloat16, False),
        (1000, torch.float16, True),
    ],
)
def test_matches_reference(vocabulary: int, dtype: torch.dtype, adjusted: bool) -> None:
    check(20, vocabulary, dtype, adjusted)


@pytest.mark.parametrize(("vocabulary", "dtype"), [(1, torch.float32), (77, torch.bfloat16), (1000, torch.float16)])
def test_masked_rows_match_the_reference(vocabulary: int, dtype: torch.dtype) -> None:
    check(20, vocabulary, dtype, adjusted=False, masked=True)


def test_matches_reference_over_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MAX_BLOCK", 256)
    check(10, 1001, torch.bfloat16, True, masked=True)


def test_the_parts_of_a_row_and_the_uncut_way_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(12, 1001) * 3
    given = controls(12, temperature=1.0)._replace(
        seed=torch.arange(12), temperature=torch.tensor([0.0, 0.7, 1.0, 5.0]).repeat(3)
    )
    whole = draw(logits, given).token_ids
    monkeypatch.setattr(kernels, "DRAWN", 256)
    monkeypatch.setattr(kernels, "PART_BLOCKS", 1)
    assert torch.equal(draw(logits, given).token_ids, whole)
    assert torch.equal(draw(logits, given, cuts=False).token_ids, whole)
    assert whole.tolist() == [specified(logits[row], row, given) for row in range(12)]


def test_a_seed_fixes_the_tokens() -> None:
    logits = (torch.arange(300) * 37 % 101 / 20).repeat(8, 1)
    given = controls(8, temperature=0.8)._replace(
        seed=torch.tensor([0, 0, 0, 1, 1, -1, 7, 2**62]), position=torch.tensor([0, 1, 2, 0, 1, 0, 1_000_000, 5])
    )
    assert draw(logits, given).token_ids.tolist() == FIXED


@triton.jit
def _noise_kernel(noise_ptr, seed_ptr, position_ptr, NUM_GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The noise of the tokens of all groups, [NUM_GROUPS, 16] float32."""
    groups = tl.arange(0, NUM_GROUPS)
    seed, position = tl.load(seed_ptr), tl.load(position_ptr)
    members, times = first_arrivals(seed, position, groups)
    noise = -logarithm(arrivals(seed, position, groups, members, times, NUM_GROUPS))
    tl.store(noise_ptr + groups[:, None] * 16 + tl.arange(0, 16)[None, :], noise)


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (-1, 2**31), (2**63 - 1, 5), (-(2**63), 2**32 - 1)])
def test_noise_has_the_specified_bits(seed: int, position: int) -> None:
    num_groups = 256
    noise = torch.full((num_groups, 16), torch.nan, device=DEVICE)
    arguments = (torch.tensor([value], device=DEVICE) for value in (seed, position))
    _noise_kernel[(1,)](noise, *arguments, NUM_GROUPS=num_groups, enable_fp_fusion=False)
    groups, members = torch.arange(num_groups)[:, None], torch.arange(16)
    ids = groups // 16 * 256 + members * 16 + groups % 16
    assert torch.equal(noise.cpu(), gumbel_noise(seed, position, ids.flatten()).view(num_groups, 16))


@pytest.mark.parametrize(
    ("values", "allowed"),
    [
        ({"top_k": 2}, {2, 3}),
        ({"top_p": 0.65}, {2, 3}),
        ({"top_p": 0.0}, {3}),
        ({"min_p": 0.6}, {2, 3}),
        ({"top_k": 3, "top_p": 0.4}, {3}),
    ],
)
def test_truncation(values: dict[str, float], allowed: set[int]) -> None:
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log().repeat(20, 1)
    given = controls(20, temperature=1.0, **values)
    assert set(draw(logits, given).token_ids.tolist()) == allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_go_to_the_lowest_id(dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 300, dtype=dtype)
    logits[1, 77] = logits[1, 200] = 1
    logits[2] = -torch.inf
    result = draw(logits, controls(3), wanted=(3, 3, 3))
    assert result.token_ids.tolist() == [0, 77, 0]
    assert result.top_ids is not None
    assert result.top_ids.tolist() == [[0, 1, 2], [77, 200, 0], [0, 1, 2]]
    given = controls(30, temperature=1.0, top_k=2)
    drawn = draw(logits.repeat(10, 1), given).token_ids.view(10, 3)
    assert [set(column.tolist()) for column in drawn.t()] == [{0, 1}, {77, 200}, {0}]
    # It takes four of 40 equals to reach nearly a tenth.
    drawn = draw(logits[:1, :40].repeat(40, 1), controls(40, temperature=1.0, top_p=0.099)).token_ids
    assert set(drawn.tolist()) == set(range(4))


def test_nan_and_forbidden_tokens_are_never_chosen() -> None:
    logits = torch.tensor([[torch.nan, 1.0, 2.0, torch.nan]]).repeat(2, 1)
    bias = LogitBias(torch.tensor([0, 1, 2]), torch.tensor([2, 2]), torch.full((2,), -torch.inf))
    given = controls(2)._replace(temperature=torch.tensor([0.0, 1.0]))
    assert draw(logits, given).token_ids.tolist() == [2, 2]
    assert draw(logits, given, bias=bias).token_ids.tolist() == [1, 1]


def test_extreme_temperatures() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.1]]).repeat(60, 1)
    given = controls(60)._replace(temperature=torch.tensor([1e-30, 1e30, 1e-3]).repeat(20))
    drawn = draw(logits, given).token_ids.view(20, 3)
    assert [set(column.tolist()) for column in drawn.t()] == [{2}, {0, 1, 2}, {2}]


def test_a_given_token_has_the_bits_of_a_drawn_one() -> None:
    logits = torch.randn(6, 300) * 3
    drawn = draw(logits, mixed_controls(6, 300), wanted=(3,) * 6)
    scored = draw(logits, controls(6), wanted=(3,) * 6, chosen=drawn.token_ids)
    assert same(scored, drawn)
    assert scored.ranks is not None
    assert torch.equal(scored.ranks, ranks_of(logits, drawn.token_ids))


def test_empty_batch() -> None:
    result = draw(torch.randn(0, 50), controls(0))
    assert result.token_ids.shape == (0,)
    assert result.logprobs is None


def test_a_row_does_not_depend_on_the_batch() -> None:
    check_rows(4, 500)


def check_rows(batch: int, vocabulary: int) -> None:
    logits = (torch.randn(batch, vocabulary) * 3).bfloat16()
    given = mixed_controls(batch, vocabulary, seed=1)
    penalties, bias = adjustments(batch, vocabulary)
    together = draw(logits, given, penalties, bias, (5,) * batch)
    for row in range(batch):
        one = slice(row, row + 1)
        own = slice(int(penalties.offsets[row]), int(penalties.offsets[row + 1]))
        offsets = torch.tensor([0, own.stop - own.start])
        alone = draw(
            logits[one],
            Controls(*(value[one] for value in given)),
            Penalties(
                penalties.presence[one],
                penalties.frequency[one],
                penalties.repetition[one],
                offsets,
                penalties.token_ids[own],
                penalties.output_counts[own],
            ),
            replace(bias, offsets=offsets, token_ids=bias.token_ids[own], values=bias.values[own]),
            (5,),
        )
        fields = (together.logprobs, together.top_ids, together.top_logprobs)
        assert same(alone, SampleOutput(together.token_ids[one], *(t[one] for t in fields if t is not None)))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_vocabularies(dtype: torch.dtype) -> None:
    check(96, 128_256, dtype, True)
    check(96, 128_256, dtype, True, masked=True)
    check_rows(40, 49_152)
