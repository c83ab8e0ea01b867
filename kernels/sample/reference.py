"""Specification of sampling: what one row of logits becomes."""

import torch
from torch import Tensor

from kernels.sample.types import LogitBias, Penalties


def adjusted_row(logits: Tensor, row: int, penalties: Penalties | None, bias: LogitBias | None) -> Tensor:
    """Float32 logits of one row after repetition, frequency and presence penalty, then bias. NaN counts as -inf."""
    z = logits[row].float()
    z = torch.where(z.isnan(), -torch.inf, z)
    if penalties is not None:
        entries = slice(int(penalties.offsets[row]), int(penalties.offsets[row + 1]))
        ids, counts = penalties.token_ids[entries], penalties.output_counts[entries]
        seen = z[ids]
        seen = torch.where(seen > 0, seen / penalties.repetition[row], seen * penalties.repetition[row])
        z[ids] = seen - penalties.frequency[row] * counts - penalties.presence[row] * (counts > 0)
    if bias is not None:
        entries = slice(int(bias.offsets[row]), int(bias.offsets[row + 1]))
        z[bias.token_ids[entries]] += bias.values[entries]
    return z


def kept_probabilities(z: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Probabilities of one row at `temperature`, zero where truncated.

    Tokens are ranked by probability, ties by id. min-p keeps those of at least `min_p` times the most probable one;
    top-k the first k of these; top-p the shortest prefix of these whose share of their mass reaches `top_p`.
    """
    p = torch.softmax(z / temperature, -1)
    p, order = torch.sort(p, descending=True, stable=True)
    p = torch.where(p >= min_p * p[0], p, 0.0)
    if top_k > 0:
        p[top_k:] = 0.0
    before = p.double().cumsum(-1) - p
    p = torch.where((before < top_p * p.double().sum()) | (top_p >= 1), p, 0.0)
    p[0] = p[0].clamp_min(torch.finfo(torch.float32).tiny)
    return torch.zeros_like(p).scatter_(0, order, p)


def ranks_of(z: Tensor, token_ids: Tensor) -> Tensor:
    """The place of one token in each row of `z` [batch, vocabulary], from 1: most probable first, ties by id."""
    at = z.gather(1, token_ids[:, None])
    ids = torch.arange(z.shape[1], device=z.device)
    return 1 + ((z > at) | ((z == at) & (ids < token_ids[:, None]))).sum(1)


def sample_row(z: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    """Greedy at temperature 0 (lowest id on ties), else the inverse CDF over the kept tokens in id order."""
    if temperature == 0:
        return int(torch.argmax(z))
    cdf = kept_probabilities(z, temperature, top_k, top_p, min_p).double().cumsum(-1)
    drawn = torch.searchsorted(cdf, uniform * cdf[-1:], right=True)
    return min(int(drawn), int(torch.searchsorted(cdf, cdf[-1:])))
