"""Triton sampling: against the specification, and each row against the batch."""

from dataclasses import replace

import pytest
import torch
from test_sample import Controls, adjustments, assert_drawn_from, controls, mixed_controls, same
from torch import Tensor
from triton_cases import DEVICE, needs_gpu, on_device

from kernels.sample import LogitBias, Penalties, SampleOutput
from kernels.sample import triton as kernels
from kernels.sample.reference import adjusted_row, ranks_of
from kernels.sample.triton import sample_triton


def draw(
    logits: Tensor,
    given: Controls,
    penalties: Penalties | None = None,
    bias: LogitBias | None = None,
    wanted: tuple[int, ...] = (),
    chosen: Tensor | None = None,
) -> SampleOutput:
    """The kernel's answer, on the CPU."""
    result = sample_triton(
        logits.to(DEVICE),
        **{name: value.to(DEVICE) for name, value in given.items()},
        penalties=on_device(penalties) if penalties else None,
        bias=on_device(bias) if bias else None,
        wanted=wanted,
        given=None if chosen is None else chosen.to(DEVICE),
    )
    fields = (result.token_ids, result.logprobs, result.top_ids, result.top_logprobs, result.ranks)
    return SampleOutput(*(None if field is None else field.cpu() for field in fields))  # type: ignore[arg-type]


def check(batch: int, vocabulary: int, dtype: torch.dtype, adjusted: bool) -> None:
    logits = (torch.randn(batch, vocabulary) * 3).to(dtype)
    given = mixed_controls(batch, vocabulary)
    penalties, bias = adjustments(batch, vocabulary) if adjusted else (None, None)
    wanted = tuple(-1 if row % 3 == 0 else min(row % 7, vocabulary) for row in range(batch))
    result = draw(logits, given, penalties, bias, wanted)
    assert result.logprobs is not None
    assert result.top_ids is not None
    assert result.top_logprobs is not None
    for row in range(batch):
        z = adjusted_row(logits, row, penalties, bias)
        token, count = int(result.token_ids[row]), wanted[row]
        assert_drawn_from(z, row, given, token)
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


def test_matches_reference_over_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MAX_BLOCK", 256)
    check(10, 1001, torch.bfloat16, True)


def test_the_uniform_number_inverts_the_cdf() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log().repeat(5, 1)
    given = controls(5, temperature=1.0) | {"uniform": torch.tensor([0.0, 0.09, 0.11, 0.5, 0.999])}
    assert draw(logits, given).token_ids.tolist() == [0, 0, 1, 2, 3]


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
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log().repeat(9, 1)
    given = controls(9, temperature=1.0, **values) | {"uniform": torch.linspace(0, 0.9999, 9)}
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
    given = controls(3, temperature=1.0, top_k=2, uniform=0.99)
    assert draw(logits, given).token_ids.tolist() == [1, 200, 0]
    # It takes thirty of 300 equals to reach nearly a tenth.
    assert draw(logits[:1], controls(1, temperature=1.0, top_p=0.099, uniform=0.99)).token_ids.tolist() == [29]


def test_nan_and_forbidden_tokens_are_never_chosen() -> None:
    logits = torch.tensor([[torch.nan, 1.0, 2.0, torch.nan]]).repeat(2, 1)
    bias = LogitBias(torch.tensor([0, 1, 2]), torch.tensor([2, 2]), torch.full((2,), -torch.inf))
    given = controls(2) | {"temperature": torch.tensor([0.0, 1.0])}
    assert draw(logits, given).token_ids.tolist() == [2, 2]
    assert draw(logits, given, bias=bias).token_ids.tolist() == [1, 1]


def test_extreme_temperatures() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.1]]).repeat(3, 1)
    given = controls(3, uniform=0.99) | {"temperature": torch.tensor([1e-30, 1e30, 1e-3])}
    assert draw(logits, given).token_ids.tolist() == [2, 2, 2]


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
            {name: value[one] for name, value in given.items()},
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
    check_rows(40, 49_152)
