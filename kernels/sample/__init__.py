"""Logits to tokens: penalties, bias, temperature, truncation and one uniform number per row."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpp import cpu_ops
from kernels.sample.reference import adjusted_row, ranks_of, sample_row
from kernels.sample.types import LogitBias, Penalties, SampleOutput

__all__ = ["LogitBias", "Penalties", "SampleOutput", "sample"]


def sample(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    penalties: Penalties | None = None,
    bias: LogitBias | None = None,
    num_logprobs: Sequence[int | None] | None = None,
    given: Tensor | None = None,
) -> SampleOutput:
    """Chooses one token per row of `logits` [batch, vocabulary], each row independent of the others bit for bit.

    `temperature`, `top_p`, `min_p`: [batch] float32; `top_k`: [batch] int32, 0 for all; `uniform`: [batch] float32 in
    [0, 1). In this order: penalties, bias, temperature (0 is greedy, lowest id on ties), min-p, top-k, top-p, then the
    first token in id order at which the kept tokens' cumulative probability exceeds `uniform`. `num_logprobs[b]` asks
    for row b's log-softmax (after penalties and bias, before temperature) of the chosen token and of the n most
    probable ones; `None` asks for neither. With `given` [batch] int64 nothing is drawn: these tokens count as chosen.
    Raises `ValueError` on wrong shapes and `TypeError` on wrong dtypes.
    """
    batch, vocabulary = logits.shape
    wanted = [-1] * batch if num_logprobs is None else [-1 if n is None else min(n, vocabulary) for n in num_logprobs]
    if len(wanted) != batch:
        raise ValueError(f"num_logprobs has {len(wanted)} entries for {batch} rows")
    if logits.is_cuda:
        from kernels.sample.triton import sample_triton

        return sample_triton(
            logits,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            uniform=uniform,
            penalties=penalties,
            bias=bias,
            wanted=wanted,
            given=given,
        )
    ops = cpu_ops()
    if ops is not None:
        controls = (temperature, top_k, top_p, min_p, uniform)
        counts = None if max(wanted, default=-1) < 0 else torch.tensor(wanted, dtype=torch.int64)
        return SampleOutput(*ops.sample(logits, *controls, *_fields(penalties, 6), *_fields(bias, 3), counts, given))
    return _sample_by_rows(logits, temperature, top_k, top_p, min_p, uniform, penalties, bias, wanted, given)


def _fields(value: Penalties | LogitBias | None, count: int) -> tuple[Tensor | None, ...]:
    if value is None:
        return (None,) * count
    return tuple(getattr(value, name) for name in value.__slots__)


def _sample_by_rows(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    penalties: Penalties | None,
    bias: LogitBias | None,
    wanted: list[int],
    given: Tensor | None,
) -> SampleOutput:
    """Every row through the reference."""
    batch, widest = len(wanted), max(wanted, default=-1)
    tokens = torch.zeros(batch, dtype=torch.int64, device=logits.device)
    logprobs = torch.zeros(batch, device=logits.device)
    top_ids = torch.zeros((batch, max(widest, 0)), dtype=torch.int64, device=logits.device)
    top_logprobs = torch.zeros((batch, max(widest, 0)), device=logits.device)
    controls = zip(temperature.tolist(), top_k.tolist(), top_p.tolist(), min_p.tolist(), uniform.tolist(), strict=True)
    ranks = None if given is None else torch.zeros_like(tokens)
    for row, control in enumerate(controls):
        z = adjusted_row(logits, row, penalties, bias)
        tokens[row] = sample_row(z, *control) if given is None else given[row]
        if ranks is not None:
            ranks[row] = ranks_of(z[None], tokens[row, None])[0]
        if (n := wanted[row]) >= 0:
            normalised = torch.log_softmax(z, -1)
            logprobs[row] = normalised[tokens[row]]
            ranked, order = torch.sort(normalised, descending=True, stable=True)
            top_ids[row, :n], top_logprobs[row, :n] = order[:n], ranked[:n]
    if widest < 0:
        return SampleOutput(tokens, None, None, None, ranks)
    return SampleOutput(tokens, logprobs, top_ids, top_logprobs, ranks)
