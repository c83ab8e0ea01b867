"""Samples or scores tokens by their logits: gathers the rows' parameters and calls the sampling kernel."""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from raydix.engine.core.types import Sampling, TokenLogprobs
from raydix.engine.core.worker.drafts.rows import Row
from raydix.engine.core.worker.step import SampledToken
from raydix.engine.model.cuda import download, upload
from raydix.engine.model.grammars import StepMasks
from raydix.engine.model.masks import early_stops, num_words, own_mask
from raydix.kernels.sample import Controls, LogitBias, Penalties, TokenMask, sample
from raydix.kernels.sample.reference import adjusted_row

MAX_RANKED = 20  # most tokens that the kernel ranks for one row
MAX_TUPLE = 128  # longest list of tokens as a tuple

_CONTROL_DTYPES = tuple(column.dtype for column in Controls.neutral(0))


def sample_requests(
    logits: torch.Tensor, requests: Sequence[Row], masks: StepMasks | None = None
) -> list[SampledToken]:
    """Sample the next token of each request from its row of `logits` [num_requests, vocab_size].

    `masks`: the tokens allowed by the requests' grammars, where any has one. Log-probabilities are those before
    grammars and excluded tokens.
    """
    tokens = _sample(logits, requests, masks)
    if masks is None:
        return tokens
    return [
        replace(token, is_last=True) if row >= 0 and token.token_id in masks.end_ids else token
        for row, token in zip(masks.rows, tokens, strict=True)
    ]


def choose_tokens(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """The tokens that `sample_requests` takes where no row has a grammar, without their log-probabilities."""
    output = sample(
        logits,
        _controls(rows, logits.device),
        penalties=_penalties(rows, logits.device),
        bias=_bias(rows, logits.device),
        mask=_mask(rows, None, num_words(logits.shape[1]), logits.device),
        cuts=_cuts(rows),
    )
    token_ids: list[int] = download([output.token_ids])[0].tolist()
    return token_ids


def _sample(logits: torch.Tensor, requests: Sequence[Row], masks: StepMasks | None) -> list[SampledToken]:
    params = [request.assignment.sampling for request in requests]
    device = logits.device
    output = sample(
        logits,
        _controls(requests, device),
        penalties=_penalties(requests, device),
        bias=_bias(requests, device),
        mask=_mask(requests, masks, num_words(logits.shape[1]), device),
        num_logprobs=[_num_top(p) for p in params] if any(p.logprobs is not None for p in params) else None,
        cuts=_cuts(requests),
    )
    # The usual step: one small copy from the device instead of four.
    if output.logprobs is None:
        return [SampledToken(token_id) for token_id in download([output.token_ids])[0].tolist()]

    assert output.top_ids is not None and output.top_logprobs is not None
    columns = download([output.token_ids, output.logprobs, output.top_ids, output.top_logprobs])
    rows = zip(params, *(column.tolist() for column in columns), strict=True)
    return [
        SampledToken(token_id)
        if (k := _num_top(p)) is None
        else SampledToken(
            token_id,
            TokenLogprobs(chosen, tuple(top_ids[:k]), tuple(top_logprobs[:k]))
            if k == p.logprobs and not p.logprob_token_ids
            else _listed(logits[row : row + 1], requests[row], token_id),
        )
        for row, (p, token_id, chosen, top_ids, top_logprobs) in enumerate(rows)
    ]


def _num_top(params: Sampling) -> int | None:
    """Number of likeliest tokens that the kernel is to rank; `_listed` makes longer lists, and chosen ones."""
    if params.logprobs is None:
        return None
    return 0 if params.logprob_token_ids or params.logprobs > MAX_RANKED else params.logprobs


def _listed(logits: torch.Tensor, request: Row, token_id: int) -> TokenLogprobs:
    """Log-probabilities of the request's `logprob_token_ids`, or of so many likeliest tokens that the kernel's ranking
    would be slow, from its row of `logits` [1, vocab_size]."""
    device, params = logits.device, request.assignment.sampling
    adjusted = adjusted_row(logits, 0, _penalties([request], device), _bias([request], device))
    return _long_list(adjusted, token_id, params.logprobs or 0, params.logprob_token_ids)


def _long_list(adjusted: torch.Tensor, token_id: int, num_top: int, named: Sequence[int] = ()) -> TokenLogprobs:
    """Log-probabilities of a token and of the `num_top` likeliest ones, or of the `named` ones, by a row of logits
    [vocab_size]."""
    # In float64, and sorted stably: the list is the same on every machine, ties in the order of ids.
    z = download([adjusted])[0].double().numpy()
    logprobs = z - z.max()
    logprobs = (logprobs - np.log(np.exp(logprobs).sum())).astype(np.float32)
    ids = np.asarray(named, np.int64) if named else np.argsort(-z, kind="stable")[:num_top]
    chosen, values = float(logprobs[token_id]), logprobs[ids]
    # Long lists stay arrays: as tuples of Python's numbers they take many times the memory.
    if len(ids) <= MAX_TUPLE:
        return TokenLogprobs(chosen, tuple(ids.tolist()), tuple(values.tolist()))
    return TokenLogprobs(chosen, array("i", ids.astype(np.int32).tobytes()), array("f", values.tobytes()))


def score_tokens(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Compute the log-probability of one given token per row of `logits` [num_tokens, vocab_size], without penalties
    and bias.

    `num_top[row]` alternatives are named. The bits equal a sampled token's log-probabilities.
    """
    count, device = len(token_ids), logits.device
    given = upload(token_ids, torch.int64, device)
    ranked = [k if k <= MAX_RANKED else 0 for k in num_top]
    output = sample(logits, Controls.neutral(count, device), num_logprobs=ranked, given=given)

    assert output.logprobs is not None and output.top_ids is not None and output.top_logprobs is not None
    assert output.ranks is not None
    columns = download([output.logprobs, output.top_ids, output.top_logprobs, output.ranks])
    rows = zip(num_top, *(column.tolist() for column in columns), strict=True)
    return [
        TokenLogprobs(chosen, tuple(top_ids[:k]), tuple(top_logprobs[:k]), rank)
        if k <= MAX_RANKED
        else _long_list(adjusted_row(logits, row, None, None), token_ids[row], k)._replace(chosen=chosen, rank=rank)
        for row, (k, chosen, top_ids, top_logprobs, rank) in enumerate(rows)
    ]


def _controls(requests: Sequence[Row], device: torch.device) -> Controls:
    """Gather each control from the sampling parameter of its name, where None is 0; the position from the request."""
    params = [request.assignment.sampling for request in requests]
    names = [name for name in Controls._fields if name not in ("seed", "position")]
    columns: dict[str, list[float]] = {name: [getattr(p, name) or 0 for p in params] for name in names}
    columns["seed"] = [_as_int64(p.seed) for p in params]
    columns["position"] = [request.num_output for request in requests]
    dtypes = zip(Controls._fields, _CONTROL_DTYPES, strict=True)
    return Controls(*(upload(columns[name], dtype, device) for name, dtype in dtypes))


def _cuts(requests: Sequence[Row]) -> bool:
    """Whether a request has a min-p, a top-k or a top-p."""
    params = [request.assignment.sampling for request in requests]
    return any(p.min_p > 0 or (p.top_k or 0) > 0 or p.top_p < 1 for p in params)


def _as_int64(seed: int) -> int:
    """The low 64 bits of a seed, as a signed number."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def _mask(requests: Sequence[Row], masks: StepMasks | None, size: int, device: torch.device) -> TokenMask | None:
    """The tokens that rows may choose, in masks of `size` words; None if every row may choose any token."""
    rows = [-1] * len(requests) if masks is None else list(masks.rows)
    bits = [] if masks is None else [*masks.bits]
    for row, request in enumerate(requests):
        # A grammar's mask has the request's own excluded tokens in it already.
        own = None if request.assignment.sampling.grammar is not None else own_mask(request, size)
        if own is not None:
            rows[row] = len(bits)
            bits.append(own)
    if not bits:
        return None
    return TokenMask(upload(rows, torch.int32, device), upload(np.stack(bits), torch.int32, device))


def _penalises(params: Sampling) -> bool:
    return params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1


def _penalties(requests: Sequence[Row], device: torch.device) -> Penalties | None:
    """Count the tokens seen so far by each penalised request; None if no request asks for penalties."""
    params = [request.assignment.sampling for request in requests]
    if not any(_penalises(p) for p in params):
        return None

    offsets, token_ids, counts = [0], [], []
    for request, p in zip(requests, params, strict=True):
        if _penalises(p):
            generated = Counter(request.token_ids[request.assignment.num_prompt_tokens :])
            # Repetition counts the prompt, too; presence and frequency only what was generated.
            seen = dict.fromkeys(request.token_ids)
            token_ids += list(seen)
            counts += [generated[token_id] for token_id in seen]
        offsets.append(len(token_ids))

    return Penalties(
        presence=upload([p.presence_penalty for p in params], torch.float32, device),
        frequency=upload([p.frequency_penalty for p in params], torch.float32, device),
        repetition=upload([p.repetition_penalty for p in params], torch.float32, device),
        offsets=upload(offsets, torch.int64, device),
        token_ids=upload(token_ids, torch.int64, device),
        output_counts=upload(counts, torch.int32, device),
    )


def _bias(requests: Sequence[Row], device: torch.device) -> LogitBias | None:
    """Callers' biases of single logits, and the ban on stop tokens before `min_tokens`; grammars have their own."""
    rows: list[dict[int, float]] = []
    for request in requests:
        params = request.assignment.sampling
        row = dict(params.logit_bias)
        if params.grammar is None:
            row.update(dict.fromkeys(early_stops(request), float("-inf")))
        rows.append(row)

    if not any(rows):
        return None

    offsets = [0]
    for row in rows:
        offsets.append(offsets[-1] + len(row))

    return LogitBias(
        upload(offsets, torch.int64, device),
        upload([token_id for row in rows for token_id in row], torch.int64, device),
        upload([value for row in rows for value in row.values()], torch.float32, device),
    )
