"""The distribution of sampled tokens over seeds and positions, and what two similar distributions share."""

import pytest
import torch
from torch import Tensor

from raydix.kernels.sample import Controls, Penalties, sample
from raydix.kernels.sample.reference import adjusted_row, kept_probabilities

VOCABULARY, DRAWS = 300, 20_000
FILTERS: tuple[dict[str, float], ...] = (
    {},
    {"top_k": 12},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.9},
)


def row_of_logits(seed: int, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randn((1, vocabulary), generator=torch.Generator().manual_seed(seed)) * 2


def controls(draws: int, temperature: float = 1.0, **values: float) -> Controls:
    """As many seeds as positions."""
    chosen = Controls.neutral(draws)
    numbers = torch.arange(draws)
    return chosen._replace(
        **{name: torch.full_like(getattr(chosen, name), value) for name, value in values.items()},
        temperature=torch.full((draws,), temperature),
        seed=numbers // 100,
        position=numbers % 100,
    )


def penalties(draws: int) -> Penalties:
    """Penalties on the same ten tokens in each row."""
    return Penalties(
        presence=torch.full((draws,), 0.5),
        frequency=torch.full((draws,), 0.3),
        repetition=torch.full((draws,), 1.3),
        offsets=torch.arange(draws + 1) * 10,
        token_ids=(torch.arange(10) * 29).repeat(draws),
        output_counts=(torch.arange(10) % 4).int().repeat(draws),
    )


def chi_square(tokens: Tensor, p: Tensor) -> tuple[float, int]:
    """Chi-square of tokens drawn from `p` and its degrees of freedom; tokens that are hardly expected count as one."""
    expected, found = p.double() / p.double().sum() * len(tokens), tokens.bincount(minlength=len(p))
    assert (found[p == 0] == 0).all()
    rare = expected < 8
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    found = torch.cat([found[~rare], found[rare].sum()[None]])
    expected, found = expected[expected > 0], found[expected > 0]
    return float(((found - expected) ** 2 / expected).sum()), len(expected) - 1


@pytest.mark.parametrize("penalised", [False, True])
@pytest.mark.parametrize("temperature", [0.4, 1.0, 1.7])
@pytest.mark.parametrize("values", FILTERS, ids=str)
def test_tokens_have_their_probabilities(values: dict[str, float], temperature: float, penalised: bool) -> None:
    logits, seen = row_of_logits(5), penalties(DRAWS) if penalised else None
    given = controls(DRAWS, temperature, **values)
    tokens = sample(logits.expand(DRAWS, -1), given, penalties=seen).token_ids
    z = adjusted_row(logits, 0, seen, None)
    cut = (int(values.get("top_k", 0)), values.get("top_p", 1.0), values.get("min_p", 0.0))
    found, degrees = chi_square(tokens, kept_probabilities(z, temperature, *cut))
    assert found < degrees + 4.5 * (2 * degrees) ** 0.5 + 6, f"{found:.0f} for {degrees} degrees of freedom"


@pytest.mark.parametrize("spread", [0.5, 1.0, 2.0])
def test_a_slightly_different_distribution_mostly_gives_the_same_token(spread: float) -> None:
    """Logits that are off by 0.3 give at least four of five sampled tokens."""
    draws, vocabulary = 3000, 2000
    logits = torch.cat([row_of_logits(seed, vocabulary) for seed in range(30)]).repeat(draws // 30, 1)
    error = torch.randn((30, vocabulary), generator=torch.Generator().manual_seed(99)).repeat(draws // 30, 1) * 0.3
    logits, given = logits * spread, controls(draws)
    same = sample(logits, given).token_ids == sample(logits + error, given).token_ids
    assert same.float().mean() >= 0.8


@pytest.mark.parametrize("name", ["seed", "position"])
def test_successive_tokens_are_independent(name: str) -> None:
    """Pairs of tokens of neighbouring seeds and positions come as often as two draws of dice."""
    p, pairs = torch.tensor([0.1, 0.2, 0.3, 0.4]), 20_000
    logits = p.log().repeat(pairs + 1, 1)
    given = Controls.neutral(pairs + 1)._replace(
        temperature=torch.ones(pairs + 1), seed=torch.full((pairs + 1,), 8), position=torch.full((pairs + 1,), 8)
    )
    given = given._replace(**{name: torch.arange(pairs + 1)})
    tokens = sample(logits, given).token_ids
    found, degrees = chi_square(tokens[:-1] * 4 + tokens[1:], (p[:, None] * p).flatten())
    assert degrees == 15
    assert found < 50, "once in 80,000"
