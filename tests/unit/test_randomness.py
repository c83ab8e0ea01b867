"""The uniform numbers that tokens are drawn with."""

from hypothesis import given
from hypothesis import strategies as st

from engine.core.randomness import uniform

SEEDS = st.integers(-(2**63), 2**64 - 1)


@given(seed=SEEDS, position=st.integers(0, 2**20))
def test_in_the_unit_interval_and_exact_in_float32(seed: int, position: int) -> None:
    number = uniform(seed, position)
    assert 0.0 <= number < 1.0
    assert (number * 2**24).is_integer()
    assert uniform(seed, position) == number


def test_known_values() -> None:
    """A resumed request may be drawing on another version's worker."""
    assert [uniform(seed, position) for seed, position in ((0, 0), (0, 1), (1, 0), (-1, 7))] == [
        0.6524484753608704,
        0.034011662006378174,
        0.3681895136833191,
        0.10134947299957275,
    ]


def test_spread_evenly_over_positions_and_over_seeds() -> None:
    count, num_bins = 20_000, 20
    for numbers in ([uniform(7, i) for i in range(count)], [uniform(i, 3) for i in range(count)]):
        bins = [0] * num_bins
        for number in numbers:
            bins[int(number * num_bins)] += 1
        chi_square = sum((found - count / num_bins) ** 2 / (count / num_bins) for found in bins)
        assert chi_square < 50, "1 in 10,000 for 19 degrees of freedom"


def test_neighbours_do_not_follow_from_each_other() -> None:
    pairs = [(uniform(seed, i), uniform(seed, i + 1)) for seed in range(50) for i in range(200)]
    mean = sum((a - 0.5) * (b - 0.5) for a, b in pairs) / len(pairs)
    assert abs(mean * 12) < 0.05, "correlation of successive positions"
    pairs = [(uniform(seed, i), uniform(seed + 1, i)) for seed in range(50) for i in range(200)]
    mean = sum((a - 0.5) * (b - 0.5) for a, b in pairs) / len(pairs)
    assert abs(mean * 12) < 0.05, "correlation of neighbouring seeds"


def test_a_seed_and_a_position_are_not_interchangeable() -> None:
    assert uniform(3, 5) != uniform(5, 3)
