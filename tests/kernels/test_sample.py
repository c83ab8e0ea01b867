"""Sampling: against the specification, and each row against the batch."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from raydix.kernels.sample import Controls, LogitBias, Penalties, SampleOutput, TokenMask, sample
from raydix.kernels.sample.reference import adjusted_row, masked_row, ranks_of, sample_row

FIXED = [146, 185, 278, 2, 19, 169, 30, 69]
"""Tokens of `test_a_seed_fixes_the_tokens`, on every path."""


def controls(batch: int, **values: float) -> Controls:
    """Greedy, untruncated controls, with some set for every row, and a seed for each."""
    chosen = Controls.neutral(batch)
    return chosen._replace(
        **{name: torch.full_like(getattr(chosen, name), value) for name, value in values.items()},
        seed=torch.arange(batch),
    )


def mixed_controls(batch: int, vocabulary: int, seed: int = 0) -> Controls:
    """Every kind of row: greedy, plain, and all combinations of truncation."""
    generator = torch.Generator().manual_seed(seed)

    def pick(options: list[float]) -> Tensor:
        return torch.tensor(options)[torch.randint(0, len(options), (batch,), generator=generator)]

    return Controls.neutral(batch)._replace(
        temperature=pick([0.0, 0.3, 1.0, 1.0, 2.5]),
        top_k=pick([0, 0, 1, 5, 50, vocabulary + 1]).int(),
        top_p=pick([1.0, 1.0, 0.0, 0.3, 0.9, 0.999]),
        min_p=pick([0.0, 0.0, 0.01, 0.2, 1.0]),
        seed=torch.randint(-(2**63), 2**63 - 1, (batch,), generator=generator),
        position=torch.randint(0, 100_000, (batch,), generator=generator),
    )


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


def masks(batch: int, vocabulary: int) -> TokenMask:
    """Random masks, dense and sparse ones, none for every third row; each allows a token."""
    num_masks = 5
    allowed = torch.rand(num_masks, -(-vocabulary // 32) * 32) < torch.tensor([0.9, 0.5, 0.1, 0.001, 1.0])[:, None]
    allowed[torch.arange(num_masks), torch.randint(0, vocabulary, (num_masks,))] = True
    words = (allowed.view(num_masks, -1, 32).long() << torch.arange(32)).sum(2)
    rows = torch.arange(batch, dtype=torch.int32) % num_masks
    return TokenMask(torch.where(torch.arange(batch) % 3 == 0, -1, rows).int(), words.int())


def specified(z: Tensor, row: int, given: Controls) -> int:
    """The token that the specification takes from one row's logits."""
    seed, position = int(given.seed[row]), int(given.position[row])
    temperature, top_p, min_p = (float(column[row]) for column in (given.temperature, given.top_p, given.min_p))
    return sample_row(z, temperature, int(given.top_k[row]), top_p, min_p, seed=seed, position=position)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [1, 17, 256, 1000, 5003])
@pytest.mark.parametrize("adjusted", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_matches_reference(dtype: torch.dtype, vocabulary: int, adjusted: bool, masked: bool) -> None:
    batch = 64
    mask = masks(batch, vocabulary) if masked else None
    logits = (torch.randn(batch, vocabulary) * 3).to(dtype)
    given = mixed_controls(batch, vocabulary)
    penalties, bias = adjustments(batch, vocabulary) if adjusted else (None, None)
    wanted = [None if row % 3 == 0 else row % 7 for row in range(batch)]
    result = sample(logits, given, penalties=penalties, bias=bias, mask=mask, num_logprobs=wanted)
    assert result.logprobs is not None
    assert result.top_ids is not None
    assert result.top_logprobs is not None
    for row in range(batch):
        z = adjusted_row(logits, row, penalties, bias)
        token = int(result.token_ids[row])
        left = masked_row(z, row, mask)
        if mask is not None and not left.isfinite().any():
            continue  # a bias has forbidden the tokens that the mask allows
        assert token == specified(left, row, given)
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


def test_a_seed_fixes_the_tokens() -> None:
    """A resumed request may be drawing on another version's worker."""
    logits = (torch.arange(300) * 37 % 101 / 20).repeat(8, 1)
    given = controls(8, temperature=0.8)._replace(
        seed=torch.tensor([0, 0, 0, 1, 1, -1, 7, 2**62]), position=torch.tensor([0, 1, 2, 0, 1, 0, 1_000_000, 5])
    )
    assert sample(logits, given).token_ids.tolist() == FIXED


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
    given = controls(101, temperature=1.0, **values)
    assert set(sample(logits, given).token_ids.tolist()) == allowed


def test_ties_go_to_the_lowest_id() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.zeros(3, 300, dtype=dtype)
        logits[1, 77] = logits[1, 200] = 1
        logits[2] = -torch.inf
        assert sample(logits, controls(3)).token_ids.tolist() == [0, 77, 0]
        given = controls(120, temperature=1.0, top_k=2)
        drawn = sample(logits.repeat(40, 1), given).token_ids.view(40, 3)
        assert [set(column.tolist()) for column in drawn.t()] == [{0, 1}, {77, 200}, {0}]


def test_nan_and_forbidden_tokens_are_never_chosen() -> None:
    logits = torch.tensor([[torch.nan, 1.0, 2.0, torch.nan]]).repeat(2, 1)
    bias = LogitBias(torch.tensor([0, 1, 2]), torch.tensor([2, 2]), torch.full((2,), -torch.inf))
    given = controls(2)._replace(temperature=torch.tensor([0.0, 1.0]))
    assert sample(logits, given).token_ids.tolist() == [2, 2]
    assert sample(logits, given, bias=bias).token_ids.tolist() == [1, 1]


def test_banned_tokens_are_never_chosen_and_keep_their_log_probabilities() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log().repeat(4, 1)
    mask = TokenMask(torch.tensor([0, 0, 0, -1]).int(), torch.tensor([[0b0011]]).int())
    given = controls(4, temperature=1.0)._replace(position=torch.tensor([0, 1, 2, 3]))
    result = sample(logits, given, mask=mask, num_logprobs=[1] * 4)
    tokens = result.token_ids
    assert (tokens[:3] < 2).all()
    assert result.logprobs is not None and result.top_ids is not None
    torch.testing.assert_close(result.logprobs.exp(), torch.tensor([0.1, 0.2, 0.3, 0.4])[tokens])
    assert result.top_ids.tolist() == [[3]] * 4
    many = sample(
        logits[:1].repeat(3000, 1),
        controls(3000, temperature=1.0),
        mask=TokenMask(mask.rows[:1].repeat(3000), mask.bits),
    )
    assert abs(many.token_ids.float().mean() - 2 / 3) < 0.03, "a third and two thirds are left for the tokens 0 and 1"
    greedy = controls(4)
    for counts in (None, [1] * 4):
        assert sample(logits, greedy, mask=mask, num_logprobs=counts).token_ids.tolist() == [1, 1, 1, 3]
    scored = sample(logits, greedy, mask=mask, num_logprobs=[0] * 4, given=torch.full((4,), 3))
    assert scored.ranks is not None and scored.ranks.tolist() == [1] * 4


def test_a_mask_that_bans_nothing_changes_no_bit() -> None:
    batch, vocabulary = 32, 4099
    logits = (torch.randn(batch, vocabulary) * 3).bfloat16()
    given = mixed_controls(batch, vocabulary)
    everything = TokenMask(torch.zeros(batch).int(), torch.full((1, -(-vocabulary // 32)), -1).int())
    free = sample(logits, given, num_logprobs=[3] * batch)
    assert same(sample(logits, given, mask=everything, num_logprobs=[3] * batch), free)


def test_wrong_masks_are_refused() -> None:
    logits, rows = torch.zeros(1, 40), torch.zeros(1).int()
    for mask in (
        TokenMask(rows, torch.zeros(1, 1).int()),
        TokenMask(rows + 1, torch.zeros(1, 2).int()),
        TokenMask(rows.long(), torch.zeros(1, 2).int()),
    ):
        with pytest.raises((ValueError, RuntimeError, TypeError, IndexError)):
            sample(logits, controls(1), mask=mask)


def test_extreme_temperatures() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.1]]).repeat(120, 1)
    given = controls(120)._replace(temperature=torch.tensor([1e-30, 1e30, 1e-3]).repeat(40))
    drawn = sample(logits, given).token_ids.view(40, 3)
    assert [set(column.tolist()) for column in drawn.t()] == [{2}, {0, 1, 2}, {2}]


@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 3.0, 1000.0])
@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0, 40.0])
def test_the_bounds_of_groups_leave_out_no_winner(temperature: float, spread: float) -> None:
    """Equal logits have their winner decided by noise alone; at a small spread many groups nearly win."""
    batch, vocabulary = 6, 20_011
    logits = torch.randn(batch, vocabulary) * spread + 900
    given = controls(batch, temperature=temperature, position=3)
    tokens = sample(logits, given).token_ids.tolist()
    assert tokens == [specified(logits[row], row, given) for row in range(batch)]


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
    mask = masks(batch, vocabulary)
    together = sample(logits, given, penalties=penalties, bias=bias, mask=mask, num_logprobs=[5] * batch)
    for row in range(batch):
        one = slice(row, row + 1)
        own = slice(int(penalties.offsets[row]), int(penalties.offsets[row + 1]))
        offsets = torch.tensor([0, own.stop - own.start])
        alone = sample(
            logits[one],
            Controls(*(value[one] for value in given)),
            penalties=Penalties(
                penalties.presence[one],
                penalties.frequency[one],
                penalties.repetition[one],
                offsets,
                penalties.token_ids[own],
                penalties.output_counts[own],
            ),
            bias=replace(bias, offsets=offsets, token_ids=bias.token_ids[own], values=bias.values[own]),
            mask=TokenMask(mask.rows[one], mask.bits) if mask.rows[row] >= 0 else None,
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
        alone = sample(logits, given, num_logprobs=[3] * 16)
        torch.set_num_threads(2)
        assert same(sample(logits, given, num_logprobs=[3] * 16), alone)
    finally:
        torch.set_num_threads(before)
    assert sample(logits[:0], controls(0)).token_ids.shape == (0,)


def test_wrong_number_of_logprobs() -> None:
    with pytest.raises(ValueError, match="1 entries for 2 rows"):
        sample(torch.zeros(2, 4), controls(2), num_logprobs=[None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_given_token_has_the_bits_of_a_drawn_one(dtype: torch.dtype) -> None:
    batch, vocabulary = 16, 5003
    logits = (torch.randn(batch, vocabulary) * 3).to(dtype)
    given = mixed_controls(batch, vocabulary)
    drawn = sample(logits, given, num_logprobs=[3] * batch)
    scored = sample(logits, controls(batch), num_logprobs=[3] * batch, given=drawn.token_ids)
    assert same(scored, drawn)
    assert scored.ranks is not None
    assert torch.equal(scored.ranks, ranks_of(logits, drawn.token_ids))
    last = torch.full((batch,), vocabulary - 1)
    scored = sample(logits, given, num_logprobs=[0] * batch, given=last)
    assert torch.equal(scored.token_ids, last)
    assert scored.logprobs is not None
    expected = torch.log_softmax(logits.double(), -1)[:, -1].float()
    torch.testing.assert_close(scored.logprobs, expected, rtol=1e-5, atol=1e-5)


def test_a_given_token_lies_inside_the_vocabulary() -> None:
    with pytest.raises((ValueError, RuntimeError)):
        sample(torch.zeros(1, 8), controls(1), num_logprobs=[0], given=torch.tensor([8]))


def test_ranks_of_given_tokens() -> None:
    logits = torch.tensor([[1.0, 3.0, torch.nan, 1.0, 2.0]]).repeat(5, 1)
    scored = sample(logits, controls(5), num_logprobs=[0] * 5, given=torch.arange(5))
    assert scored.ranks is not None
    assert scored.ranks.tolist() == [3, 1, 5, 4, 2]
