"""Logits to tokens: penalties, bias, temperature, truncation and noise by seed, position and token id."""

from collections.abc import Sequence

import torch
from torch import Tensor

from raydix.kernels.cpp import cpu_ops
from raydix.kernels.sample.reference import Controls, adjusted_row, masked_row, ranks_of, sample_row
from raydix.kernels.sample.types import LogitBias, Penalties, SampleOutput, TokenMask

__all__ = ["Controls", "LogitBias", "Penalties", "SampleOutput", "TokenMask", "sample"]


def sample(
    logits: Tensor,
    controls: Controls,
    *,
    penalties: Penalties | None = None,
    bias: LogitBias | None = None,
    mask: TokenMask | None = None,
    num_logprobs: Sequence[int | None] | None = None,
    given: Tensor | None = None,
    cuts: bool = True,
) -> SampleOutput:
    """Chooses one token per row of `logits` [batch, vocabulary], each row independent of the others bit for bit.

    In this order: penalties, bias, mask, temperature (0 is greedy, lowest id on ties), min-p, top-k, top-p, then the
    kept token with the largest sum of logit by temperature and noise (`reference.py`). `num_logprobs[b]` asks for row
    b's log-softmax (after penalties and bias, before mask and temperature) of the chosen token and of the n
    most probable ones; `None` asks for neither. With `given` [batch] int64 nothing is drawn: these tokens count as
    chosen, whatever the mask. Without `cuts` the caller knows that no row has a min-p, a top-k or a top-p, and a GPU
    does not look for their bounds.
    Raises `ValueError` on wrong shapes and `TypeError` on wrong dtypes.
    """
    batch, vocabulary = logits.shape
    wanted = [-1] * batch if num_logprobs is None else [-1 if n is None else min(n, vocabulary) for n in num_logprobs]
    if len(wanted) != batch:
        raise ValueError(f"num_logprobs has {len(wanted)} entries for {batch} rows")
    if logits.is_cuda:
        from raydix.kernels.sample.triton import sample_triton

        return sample_triton(
            logits, controls, penalties=penalties, bias=bias, mask=mask, wanted=wanted, given=given, cuts=cuts
        )
    ops = cpu_ops()
    if ops is not None:
        counts = None if max(wanted, default=-1) < 0 else torch.tensor(wanted, dtype=torch.int64)
        adjustments = (*_fields(penalties, 6), *_fields(bias, 3), *_fields(mask, 2))
        return SampleOutput(*ops.sample(logits, *controls, *adjustments, counts, given))
    return _sample_by_rows(logits, controls, penalties=penalties, bias=bias, mask=mask, wanted=wanted, given=given)


def _fields(value: Penalties | LogitBias | TokenMask | None, count: int) -> tuple[Tensor | None, ...]:
    if value is None:
        return (None,) * count
    return tuple(getattr(value, name) for name in value.__slots__)


def _sample_by_rows(
    logits: Tensor,
    controls: Controls,
    *,
    penalties: Penalties | None,
    bias: LogitBias | None,
    mask: TokenMask | None,
    wanted: list[int],
    given: Tensor | None,
) -> SampleOutput:
    """Every row through the reference."""
    batch, widest = len(wanted), max(wanted, default=-1)
    tokens = torch.zeros(batch, dtype=torch.int64, device=logits.device)
    logprobs = torch.zeros(batch, device=logits.device)
    top_ids = torch.zeros((batch, max(widest, 0)), dtype=torch.int64, device=logits.device)
    top_logprobs = torch.zeros((batch, max(widest, 0)), device=logits.device)
    ranks = None if given is None else torch.zeros_like(tokens)
    for row, control in enumerate(zip(*(column.tolist() for column in controls), strict=True)):
        z = adjusted_row(logits, row, penalties, bias)
        tokens[row] = sample_row(masked_row(z, row, mask), *control) if given is None else given[row]
        if ranks is not None:
            ranks[row] = ranks_of(z[None], tokens[row, None])[0]
        if (n := wanted[row]) >= 0:
            normalised = torch.log_softmax(z, -1)
            logprobs[row] = normalised[tokens[row]]
            ranked, order = torch.sort(normalised, descending=True, stable=True)
            top_ids[row, :n], top_logprobs[row, :n] = order[:n], ranked[:n]
    if widest < 0:
        return SampleOutput(token_ids=tokens, logprobs=None, top_ids=None, top_logprobs=None, ranks=ranks)
    return SampleOutput(token_ids=tokens, logprobs=logprobs, top_ids=top_ids, top_logprobs=top_logprobs, ranks=ranks)
