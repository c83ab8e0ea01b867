"""Specification of sampling from one row of logits, of the noise it draws with, and of a batch's controls.

A row's token is the kept token of the largest sum of its logit, divided by the temperature, and its noise (Gumbel-max):
each is taken with its probability. The noise is a function of seed, position and token id alone. So it is the same for
every model, batch and machine, and two distributions that differ little mostly give the same token.

`gumbel_noise` and `scores` are specified to the bit. Every operation on floats below is one of float32, rounded once
(IEEE 754), and none is fused with another.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from raydix.kernels.sample.types import LogitBias, Penalties, TokenMask

GROUP = 16
"""Tokens of one group: token 256 * (g // 16) + 16 * m + g % 16 is member m of group g."""
LN_2 = 0.6931472
# 1 / 9, 1 / 7 ... 1.
SERIES = (0.11111111, 0.14285715, 0.2, 0.33333334, 1.0)
_WORD = (1 << 32) - 1


class Controls(NamedTuple):
    """Rules of drawing, one number per row: [batch] float32 each, but `top_k` int32, `seed` and `position` int64."""

    temperature: Tensor
    """0 is greedy."""
    top_k: Tensor
    """0 for all."""
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    """The 64 bits that key the noise, as int64."""
    position: Tensor
    """The token's index among its request's generated tokens, int64, below 2^32."""

    @classmethod
    def neutral(cls, batch: int, device: torch.device | str = "cpu") -> "Controls":
        """Controls that take the likeliest token and cut nothing off."""
        zeros = torch.zeros(batch, device=device)
        return cls(
            temperature=zeros,
            top_k=zeros.int(),
            top_p=zeros + 1,
            min_p=zeros,
            seed=zeros.long(),
            position=zeros.long(),
        )


def adjusted_row(logits: Tensor, row: int, penalties: Penalties | None, bias: LogitBias | None) -> Tensor:
    """Float32 logits of one row after repetition, frequency and presence penalty, then bias. NaN counts as -inf."""
    z = logits[row].float()
    # A NaN compares false with everything: as -inf it is never drawn, and the other tokens still are.
    z = torch.where(z.isnan(), -torch.inf, z)
    if penalties is not None:
        entries = slice(int(penalties.offsets[row]), int(penalties.offsets[row + 1]))
        ids, counts = penalties.token_ids[entries], penalties.output_counts[entries]
        seen = z[ids]
        # Either way the logit falls; dividing a negative one would raise it.
        seen = torch.where(seen > 0, seen / penalties.repetition[row], seen * penalties.repetition[row])
        z[ids] = seen - penalties.frequency[row] * counts - penalties.presence[row] * (counts > 0)
    if bias is not None:
        entries = slice(int(bias.offsets[row]), int(bias.offsets[row + 1]))
        z[bias.token_ids[entries]] += bias.values[entries]
    return z


def masked_row(z: Tensor, row: int, mask: TokenMask | None) -> Tensor:
    """The logits of one row, -inf at each token that the row may not choose."""
    if mask is None or mask.rows[row] < 0:
        return z
    words = mask.bits[mask.rows[row]]
    allowed = (words[:, None] >> torch.arange(32, device=z.device, dtype=torch.int32)) & 1
    return torch.where(allowed.flatten()[: len(z)].bool(), z, -torch.inf)


def kept_probabilities(z: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Probabilities of one row at `temperature`, zero where truncated.

    Tokens are ranked by probability, ties by id. min-p keeps tokens of at least `min_p` times the most probable one;
    top-k the first k of these; top-p the shortest prefix of these whose share of their mass reaches `top_p`.
    """
    p = torch.softmax(z / temperature, -1)
    # Stable, so that tokens of equal probability keep the order of their ids on every machine.
    p, order = torch.sort(p, descending=True, stable=True)
    p = torch.where(p >= min_p * p[0], p, 0.0)
    if top_k > 0:
        p[top_k:] = 0.0
    # Sums of a vocabulary in float32 would lose the tail, and cut at another token.
    before = p.double().cumsum(-1) - p
    p = torch.where((before < top_p * p.double().sum()) | (top_p >= 1), p, 0.0)
    # The likeliest token always stays, whatever is cut.
    p[0] = p[0].clamp_min(torch.finfo(torch.float32).tiny)
    return torch.zeros_like(p).scatter_(0, order, p)


def ranks_of(z: Tensor, token_ids: Tensor) -> Tensor:
    """The place of one token in each row of `z` [batch, vocabulary], from 1: most probable first, ties by id."""
    at = z.gather(1, token_ids[:, None])
    ids = torch.arange(z.shape[1], device=z.device)
    return 1 + ((z > at) | ((z == at) & (ids < token_ids[:, None]))).sum(1)


def sample_row(z: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int) -> int:
    """Greedy at temperature 0 and where no logit is finite, else the kept token of the highest score; the lowest id on
    ties.

    The row's controls come in the order of `Controls`.
    """
    # Where no logit is finite nothing can be drawn: the first of the largest is taken, as greedily.
    if temperature == 0 or not z.max().isfinite():
        return int(torch.argmax(z))
    kept = kept_probabilities(z, temperature, top_k, top_p, min_p).nonzero()[:, 0]
    return int(kept[torch.argmax(scores(z, temperature, seed, position)[kept])])


def scores(z: Tensor, temperature: float, seed: int, position: int) -> Tensor:
    """Distance to the largest logit by `temperature`, plus noise, for each token of one row."""
    ids = torch.arange(len(z), device=z.device)
    return (z - z.max()) / torch.full_like(z, temperature) + gumbel_noise(seed, position, ids)


def gumbel_noise(seed: int, position: int, ids: Tensor) -> Tensor:
    """Independent noise of some tokens, [n] float32 with the distribution exp(-exp(-x)), for `ids` [n] int64.

    Noise is -ln of an exponential arrival time. Of a group the earliest is drawn first, together with the member that
    arrives then, and the others follow after it: the distribution is the same, since exponential times have no memory,
    and a group that cannot hold the winner needs no more than one random word.

    That word is word g / 16 % 4 of block g / 64 * 16 + g % 16 of stream 0: its low 4 bits name the member, the others
    give 16 times the arrival time. Member m's word is word m % 4 of block 4 * g + m / 4 of stream 1.
    """
    groups, members = ids // (GROUP * 16) * 16 + ids % 16, ids // 16 % GROUP
    word = _words(seed, position, 0, groups // 64 * 16 + groups % 16, groups // 16 % 4)
    first = exponential(word // GROUP, 2.0**-28) * (1 / GROUP)
    later = exponential(_words(seed, position, 1, 4 * groups + members // 4, members % 4), 2.0**-32)
    return -_logarithm(torch.where(members == word % GROUP, first, first + later))


def exponential(numbers: Tensor, unit: float) -> Tensor:
    """-ln(1 - v) where v = (number + 1/2) * unit, float32, is in (0, 1)."""
    v = (numbers.float() + 0.5) * unit
    # 1 - v rounds to 0 for the largest numbers, and their logarithm would be infinite.
    rest = (1 - v).clamp_min(2.0**-25)
    return -torch.where(v < 0.25, _series(-v), _logarithm(rest))


def _logarithm(x: Tensor) -> Tensor:
    """ln(x) of positive normal float32 numbers, as 2^exponent * (1 + f) with 1 + f from sqrt(1/2) to sqrt(2)."""
    bits = x.view(torch.int32)
    # The constant is sqrt(1/2): the rest of the number then lies around 1, where the series is short.
    exponents = (bits - 0x3F3504F3) >> 23
    return exponents.float() * LN_2 + _series((bits - (exponents << 23)).view(torch.float32) - 1)


def _series(f: Tensor) -> Tensor:
    """ln(1 + f) = 2 artanh(s) where s = f / (2 + f), |s| < 0.18, to the ninth power of s."""
    s = f / (f + 2)
    q = s * s
    total = torch.full_like(q, SERIES[0])
    for coefficient in SERIES[1:]:
        total = total * q + coefficient
    return (s + s) * total


def _words(seed: int, position: int, stream: int, blocks: Tensor, words: Tensor) -> Tensor:
    """Word `words[i]` of block `blocks[i]`, each [n] int64: Philox-4x32-10 (Salmon et al., SC '11) with the seed as its
    key and (block, position, stream, 0) as its counter."""
    zeros = torch.zeros_like(blocks)
    state = blocks, zeros + (position & _WORD), zeros + stream, zeros
    made = torch.stack(philox(state, seed & _WORD, seed >> 32 & _WORD))
    return made.gather(0, words[None])[0]


def philox(counter: tuple[Tensor, ...], low: int, high: int) -> tuple[Tensor, ...]:
    """Ten rounds on four words, each int64 in [0, 2^32), with a key of two."""
    c0, c1, c2, c3 = counter
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = (b >> 32 & _WORD) ^ c1 ^ low, b & _WORD
        c2, c3 = (a >> 32 & _WORD) ^ c3 ^ high, a & _WORD
        low, high = low + 0x9E3779B9 & _WORD, high + 0xBB67AE85 & _WORD
    return c0, c1, c2, c3
