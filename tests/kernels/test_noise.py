"""The noise that tokens are drawn with: its bits, its distribution, and what it may not depend on."""

import math

import pytest
import torch
from torch import Tensor

from raydix.kernels.sample.reference import GROUP, exponential, gumbel_noise, philox

KNOWN = {
    (0, 0): [1049444478, -1087765046, -1081764288, 1074720794, -1085125689, 1059721759],
    (0, 1): [1053136881, -1099573726, 1060978736, -1078440478, 1065369815, 1052009601],
    (1, 0): [1073572056, 1071533452, 1062390242, -1105771343, 1039582126, -1089221910],
    (-1, 7): [1075314547, -1083629546, 1070693421, 1047646980, -1086654901, -1088033796],
    (2**63 - 1, 2**32 - 1): [-1089487707, -1091544698, -1095959140, -1080258686, 1074326613, 1056837892],
}
"""Bits of the noise of six tokens by seed and position."""
IDS = torch.arange(40_000)
NUM_BINS = 40
WORST = 90.0
"""Chi-square that 39 degrees of freedom exceed once in 150,000."""


def spread(noise: Tensor) -> float:
    """Chi-square of noise over bins that are equally probable."""
    bins = (torch.exp(-torch.exp(-noise.double())) * NUM_BINS).long().clamp_max(NUM_BINS - 1)
    expected = len(noise) / NUM_BINS
    return float(((bins.bincount(minlength=NUM_BINS) - expected) ** 2 / expected).sum())


def correlation(a: Tensor, b: Tensor) -> float:
    """Of two rows of noise, each made even over (0, 1)."""
    a, b = (torch.exp(-torch.exp(-noise.double())) - 0.5 for noise in (a, b))
    return float((a * b).mean() * 12)


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (0xFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ],
)
def test_philox_gives_its_authors_known_answers(number: int, expected: tuple[int, ...]) -> None:
    word = torch.tensor([number])
    assert tuple(int(made) for made in philox((word,) * 4, number, number)) == expected


def test_known_noise() -> None:
    """A resumed request may be drawing on another version's worker."""
    ids = torch.tensor([0, 1, 16, 255, 256, 49_151])
    for (seed, position), bits in KNOWN.items():
        assert gumbel_noise(seed, position, ids).view(torch.int32).tolist() == bits


def test_noise_has_gumbels_distribution() -> None:
    assert spread(gumbel_noise(7, 0, IDS)) < WORST
    one = torch.tensor([77])
    assert spread(torch.cat([gumbel_noise(7, position, one) for position in range(600)])) < WORST
    assert spread(torch.cat([gumbel_noise(seed, 3, one) for seed in range(600)])) < WORST


def test_the_largest_noise_of_a_group_has_its_distribution_and_is_anybodys() -> None:
    groups = gumbel_noise(11, 5, torch.arange(16 * 256 * 40)).view(-1, GROUP, 16)
    largest, members = groups.max(1)
    assert spread(largest.flatten() - math.log(GROUP)) < WORST
    counts = members.flatten().bincount(minlength=GROUP)
    expected = members.numel() / GROUP
    assert ((counts - expected) ** 2 / expected).sum() < 50, "once in 80,000 of 15 degrees of freedom"
    second = groups.topk(2, dim=1).values[:, 1].flatten()
    assert spread_of_second(second) < WORST


def spread_of_second(second: Tensor) -> float:
    """Chi-square of the second largest noise of each group."""
    times = torch.exp(-second.double())
    arrived = 1 - torch.exp(-GROUP * times) - GROUP * (1 - torch.exp(-times)) * torch.exp(-(GROUP - 1) * times)
    return spread(-torch.log(-torch.log(1 - arrived)))


def test_neighbours_do_not_follow_from_each_other() -> None:
    noise = gumbel_noise(3, 9, IDS)
    for other in (
        *(noise.roll(distance) for distance in (1, 16, 32, 256, 4096)),
        gumbel_noise(3, 10, IDS),
        gumbel_noise(4, 9, IDS),
        gumbel_noise(9, 3, IDS),
        gumbel_noise(3 + (1 << 32), 9, IDS),
    ):
        assert not torch.equal(noise, other)
        assert abs(correlation(noise, other)) < 5 / math.sqrt(len(IDS))


def test_the_noise_of_a_token_does_not_depend_on_the_others() -> None:
    some = torch.tensor([39_999, 5, 5, 1234])
    assert torch.equal(gumbel_noise(1, 2, some), gumbel_noise(1, 2, IDS)[some])


def test_exponential_times_are_exact_where_they_are_short() -> None:
    numbers = torch.cat([2 ** torch.arange(31) + offset for offset in (-1, 0, 1, 12_345)])
    expected = -torch.log1p(-(numbers.double() + 0.5) * 2.0**-32)
    torch.testing.assert_close(exponential(numbers, 2.0**-32).double(), expected, rtol=3e-7, atol=0)
    longest = exponential(torch.tensor([2**32 - 1]), 2.0**-32)
    assert 17 < longest.item() < 18
