"""Sampling: against the specification, and each row against the batch."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.sample import LogitBias, Penalties, SampleOutput, sample
from kernels.sample.reference import adjusted_row, kept_probabilities, ranks_of

Controls = dict[str, Tensor]


def controls(batch: int, **values: float) -> Controls:
    """Greedy, untruncated controls, with some set for every row."""
    chosen = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "uniform": 0.5} | values
    return {
        name: torch.full((batch,), value, dtype=torch.int32 if name == "top_k" else torch.float32)
        for name, value in chosen.items()
    }


def mixed_controls(batch: int, vocabulary: int, seed: int = 0) -> Controls:
    """Every kind of row: greedy, plain, and all combinations of truncation."""
    generator = torch.Generator().manual_seed(seed)

    def pick(options: list[float]) -> Tensor:
        return torch.tensor(options)[torch.randint(0, len(options), (batch,), generator=generator)]

    return {
        "temperature": pick([0.0, 0.3, 1.0, 1.0, 2.5]),
        "top_k": pick([0, 0, 1, 5, 50, vocabulary + 1]).int(),
        "top_p": pick([1.0, 1.0, 0.0, 0.3, 0.9, 0.999]),
        "min_p": pick([0.0, 0.0, 0.01, 0.2, 1.0]),
        "uniform": torch.rand(batch, generator=generator),
    }


def adjustments(batch: int, vocabulary: int) -> tuple[Penalties, LogitBias]:
    """Random penalties and biases, some rows with none."""
    counts = [min((7 * row) % 23, vocabulary) for row in range(batch)]
    offsets = torch.tensor([sum(counts[:row]) for row in range(batch + 1)])
    ids = torch.cat([torch.randperm(vocabulary)[:count] for count in counts])
    values = torch.randn(len(ids)) * 3
    values[::9] = -torch.inf
    penalties = Penalties(
        presence=torch.rand(batch),
        frequency=torch.rand(batch),
        repetition=1 + torch.rand(batch),
        offsets=offsets,
        token_ids=ids,
        output_counts=torch.randint(0, 4, (len(ids),)).int(),
    )
    biased = torch.cat([torch.randperm(vocabulary)[:count] for count in counts])
    return penalties, LogitBias(offsets, biased, values)


def assert_drawn_from(z: Tensor, row: int, given: Controls, token: int) -> None:
    """`token` is where the row's uniform falls in the specified distribution, up to rounding."""
    temperature, top_k, top_p, min_p, uniform = (
        given[name][row].item() for name in ("temperature", "top_k", "top_p", "min_p", "uniform")
    )
    if temperature == 0:
        assert token == int(torch.argmax(z))
        return
    p = kept_probabilities(z, temperature, int(top_k), top_p, min_p).double()
    assert p[token] > 0
    cdf = p.cumsum(-1) / p.sum()
    before = cdf[token - 1].item() if token else 0.0
    assert before - 2e-6 <= uniform <= cdf[token].item() + 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [1, 17, 1000, 5003])
@pytest.mark.parametrize("adjusted", [False, True])
def test_matches_reference(dtype: torch.dtype, vocabulary: int, adjusted: bool) -> None:
    batch = 64
    logits = (torch.randn(batch, vocabulary) * 3).to(dtype)
    given = mixed_controls(batch, vocabulary)
    penalties, bias = adjustments(batch, vocabulary) if adjusted else (None, None)
    wanted = [None if row % 3 == 0 else row % 7 for row in range(batch)]
    result = sample(logits, **given, penalties=penalties, bias=bias, num_logprobs=wanted)
    assert result.logprobs is not None
    assert result.top_ids is not None
    assert result.top_logprobs is not None
    for row in range(batch):
        z = adjusted_row(logits, row, penalties, bias)
        token = int(result.token_ids[row])
        assert_drawn_from(z, row, given, token)
        count = wanted[row]
        if count is None:
            assert result.logprobs[row] == 0
            continue
        normalised = torch.log_softmax(z.double(), -1).float()
        ranked, order = torch.sort(normalised, descending=True, stable=True)
        count = min(count, vocabulary)
        torch.testing.assert_close(result.logprobs[row], normalised[token], rtol=1e-5, atol=1e-5, equal_nan=True)
        torch.testing.assert_close(
            result.top_logprobs[row, :count], ranked[:count], rtol=1e-5, atol=1e-5, equal_nan=True
        )
        assert torch.equal(z[result.top_ids[row, :count]], z[order[:count]])


def test_the_uniform_number_inverts_the_cdf() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log().repeat(5, 1)
    given = controls(5, temperature=1.0) | {"uniform": torch.tensor([0.0, 0.09, 0.11, 0.5, 0.999])}
    assert sample(logits, **given).token_ids.tolist() == [0, 0, 1, 2, 3]


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
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log().repeat(101, 1)
    given = controls(101, temperature=1.0, **values) | {"uniform": torch.linspace(0, 0.9999, 101)}
    assert set(sample(logits, **given).token_ids.tolist()) == allowed


def test_ties_go_to_the_lowest_id() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.zeros(3, 300, dtype=dtype)
        logits[1, 77] = logits[1, 200] = 1
        logits[2] = -torch.inf
        assert sample(logits, **controls(3)).token_ids.tolist() == [0, 77, 0]
        given = controls(3, temperature=1.0, top_k=2, uniform=0.99)
        assert sample(logits, **given).token_ids.tolist() == [1, 200, 0]


def test_nan_and_forbidden_tokens_are_never_chosen() -> None:
    logits = torch.tensor([[torch.nan, 1.0, 2.0, torch.nan]]).repeat(2, 1)
    bias = LogitBias(torch.tensor([0, 1, 2]), torch.tensor([2, 2]), torch.full((2,), -torch.inf))
    given = controls(2) | {"temperature": torch.tensor([0.0, 1.0])}
    assert sample(logits, **given).token_ids.tolist() == [2, 2]
    assert sample(logits, **given, bias=bias).token_ids.tolist() == [1, 1]


def test_extreme_temperatures() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.1]]).repeat(3, 1)
    given = controls(3, uniform=0.99) | {"temperature": torch.tensor([1e-30, 1e30, 1e-3])}
    assert sample(logits, **given).token_ids.tolist() == [2, 2, 2]


def same(a: SampleOutput, b: SampleOutput) -> bool:
    pairs = zip(
        (a.token_ids, a.logprobs, a.top_ids, a.top_logprobs),
        (b.token_ids, b.logprobs, b.top_ids, b.top_logprobs),
        strict=True,
    )
    return all(x is y or (x is not None and y is not None and torch.equal(x, y)) for x, y in pairs)


def test_a_row_does_not_depend_on_the_batch() -> None:
    batch, vocabulary = 32, 4099
    logits = (torch.randn(batch, vocabulary) * 3).bfloat16()
    given = mixed_controls(batch, vocabulary, seed=1)
    penalties, bias = adjustments(batch, vocabulary)
    together = sample(logits, **given, penalties=penalties, bias=bias, num_logprobs=[5] * batch)
    for row in range(batch):
        one = slice(row, row + 1)
        own = slice(int(penalties.offsets[row]), int(penalties.offsets[row + 1]))
        offsets = torch.tensor([0, own.stop - own.start])
        alone = sample(
            logits[one],
            **{name: value[one] for name, value in given.items()},
            penalties=Penalties(
                penalties.presence[one],
                penalties.frequency[one],
                penalties.repetition[one],
                offsets,
                penalties.token_ids[own],
                penalties.output_counts[own],
            ),
            bias=replace(bias, offsets=offsets, token_ids=bias.token_ids[own], values=bias.values[own]),
            num_logprobs=[5],
        )
        fields = (together.logprobs, together.top_ids, together.top_logprobs)
        expected = SampleOutput(together.token_ids[one], *(t[one] for t in fields if t is not None))
        assert same(alone, expected)


def test_threads_and_empty_batches() -> None:
    logits = torch.randn(16, 8192)
    given = mixed_controls(16, 8192)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = sample(logits, **given, num_logprobs=[3] * 16)
        torch.set_num_threads(2)
        assert same(sample(logits, **given, num_logprobs=[3] * 16), alone)
    finally:
        torch.set_num_threads(before)
    assert sample(logits[:0], **controls(0)).token_ids.shape == (0,)


def test_wrong_number_of_logprobs() -> None:
    with pytest.raises(ValueError, match="1 entries for 2 rows"):
        sample(torch.zeros(2, 4), **controls(2), num_logprobs=[None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_given_token_has_the_bits_of_a_drawn_one(dtype: torch.dtype) -> None:
    batch, vocabulary = 16, 5003
    logits = (torch.randn(batch, vocabulary) * 3).to(dtype)
    given = mixed_controls(batch, vocabulary)
    drawn = sample(logits, **given, num_logprobs=[3] * batch)
    scored = sample(logits, **controls(batch), num_logprobs=[3] * batch, given=drawn.token_ids)
    assert same(scored, drawn)
    assert scored.ranks is not None
    assert torch.equal(scored.ranks, ranks_of(logits, drawn.token_ids))
    last = torch.full((batch,), vocabulary - 1)
    scored = sample(logits, **given, num_logprobs=[0] * batch, given=last)
    assert torch.equal(scored.token_ids, last)
    assert scored.logprobs is not None
    expected = torch.log_softmax(logits.double(), -1)[:, -1].float()
    torch.testing.assert_close(scored.logprobs, expected, rtol=1e-5, atol=1e-5)


def test_a_given_token_lies_inside_the_vocabulary() -> None:
    with pytest.raises((ValueError, RuntimeError)):
        sample(torch.zeros(1, 8), **controls(1), num_logprobs=[0], given=torch.tensor([8]))


def test_ranks_of_given_tokens() -> None:
    logits = torch.tensor([[1.0, 3.0, torch.nan, 1.0, 2.0]]).repeat(5, 1)
    scored = sample(logits, **controls(5), num_logprobs=[0] * 5, given=torch.arange(5))
    assert scored.ranks is not None
    assert scored.ranks.tolist() == [3, 1, 5, 4, 2]
