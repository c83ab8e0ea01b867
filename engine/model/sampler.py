"""From logits to sampled or scored tokens: gathers the rows' parameters and calls the sampling kernel."""

from collections import Counter
from collections.abc import Sequence

import torch

from engine.core.randomness import uniform
from engine.core.request import Request
from engine.core.scheduler import SampledToken
from engine.core.types import SamplingParams, TokenLogprobs
from engine.model.cuda import download, upload
from kernels.sample import LogitBias, Penalties, sample


def sample_requests(logits: torch.Tensor, requests: Sequence[Request]) -> list[SampledToken]:
    """Sample the next token of each request from its row of `logits` [num_requests, vocab_size]."""
    params = [request.assignment.sampling for request in requests]
    device = logits.device
    output = sample(
        logits,
        temperature=upload([p.temperature for p in params], torch.float32, device),
        top_k=upload([p.top_k or 0 for p in params], torch.int32, device),
        top_p=upload([p.top_p for p in params], torch.float32, device),
        min_p=upload([p.min_p for p in params], torch.float32, device),
        uniform=upload(
            [uniform(p.seed, request.num_output) for p, request in zip(params, requests, strict=True)],
            torch.float32,
            device,
        ),
        penalties=_penalties(requests, device),
        bias=_bias(requests, device),
        num_logprobs=[p.logprobs for p in params] if any(p.logprobs is not None for p in params) else None,
    )
    if output.logprobs is None:
        return [SampledToken(token_id) for token_id in download([output.token_ids])[0].tolist()]
    assert output.top_ids is not None and output.top_logprobs is not None
    columns = download([output.token_ids, output.logprobs, output.top_ids, output.top_logprobs])
    rows = zip(params, *(column.tolist() for column in columns), strict=True)
    return [
        SampledToken(token_id)
        if p.logprobs is None
        else SampledToken(
            token_id, TokenLogprobs(chosen, tuple(top_ids[: p.logprobs]), tuple(top_logprobs[: p.logprobs]))
        )
        for p, token_id, chosen, top_ids, top_logprobs in rows
    ]


def score_tokens(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """The log-probability of one given token per row of `logits` [num_tokens, vocab_size], without penalties and bias.

    `num_top[row]` alternatives are named. The bits are those that a sampled token's log-probabilities have.
    """
    count, device = len(token_ids), logits.device
    given = upload(token_ids, torch.int64, device)
    neutral = torch.zeros(count, dtype=torch.float32, device=device)
    output = sample(
        logits,
        temperature=neutral,
        top_k=neutral.int(),
        top_p=neutral + 1,
        min_p=neutral,
        uniform=neutral,
        num_logprobs=num_top,
        given=given,
    )
    assert output.logprobs is not None and output.top_ids is not None and output.top_logprobs is not None
    assert output.ranks is not None
    columns = download([output.logprobs, output.top_ids, output.top_logprobs, output.ranks])
    rows = zip(num_top, *(column.tolist() for column in columns), strict=True)
    return [
        TokenLogprobs(chosen, tuple(top_ids[:k]), tuple(top_logprobs[:k]), rank)
        for k, chosen, top_ids, top_logprobs, rank in rows
    ]


def _penalises(params: SamplingParams) -> bool:
    return params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1


def _penalties(requests: Sequence[Request], device: torch.device) -> Penalties | None:
    """The counts of what each penalised request has seen so far; None if no request asks for penalties."""
    params = [request.assignment.sampling for request in requests]
    if not any(_penalises(p) for p in params):
        return None
    offsets, token_ids, counts = [0], [], []
    for request, p in zip(requests, params, strict=True):
        if _penalises(p):
            generated = Counter(request.token_ids[request.assignment.num_prompt_tokens :])
            seen = dict.fromkeys(request.token_ids)
            token_ids += list(seen)
            counts += [generated[token_id] for token_id in seen]
        offsets.append(len(token_ids))
    return Penalties(
        upload([p.presence_penalty for p in params], torch.float32, device),
        upload([p.frequency_penalty for p in params], torch.float32, device),
        upload([p.repetition_penalty for p in params], torch.float32, device),
        upload(offsets, torch.int64, device),
        upload(token_ids, torch.int64, device),
        upload(counts, torch.int32, device),
    )


def _bias(requests: Sequence[Request], device: torch.device) -> LogitBias | None:
    """What callers add to single logits, and the ban on stop tokens before `min_tokens`."""
    rows: list[dict[int, float]] = []
    for request in requests:
        params = request.assignment.sampling
        row = dict(params.logit_bias)
        if request.num_output < params.min_tokens:
            row.update(dict.fromkeys(params.stop_token_ids, float("-inf")))
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
