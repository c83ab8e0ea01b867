"""Specification of the gated delta rule (arXiv 2412.06464)."""

import torch
from torch import Tensor
from torch.nn import functional

from raydix.kernels.states import StateUse, sequences_of, state_before

EPS = 1e-6  # added to the squared length of a query or key before it is divided by its length


def gated_delta_reference(
    mixed: Tensor,
    beta: Tensor,
    step: Tensor,
    decay_rate: Tensor,
    step_bias: Tensor,
    states: Tensor,
    query_start: Tensor,
    use: StateUse,
) -> Tensor:
    """Row by row: S = exp(g) S + k (beta (v - k exp(g) S)), and the output q S; see `gated_delta`."""
    _, num_heads, key_dim, value_dim = states.shape
    num_key_heads = (mixed.shape[1] - num_heads * value_dim) // (2 * key_dim)
    sizes = [num_key_heads * key_dim, num_key_heads * key_dim, num_heads * value_dim]
    result = torch.empty(mixed.shape[0], sizes[2], dtype=mixed.dtype)
    for sequence in sequences_of(query_start, use):
        state = state_before(states, sequence.source)
        for row in range(sequence.first, sequence.end):
            query, key, value = torch.split(mixed[row].float(), sizes)
            q, k = (_unit(each.view(num_key_heads, key_dim)) for each in (query, key))
            # Each head of keys serves several neighbouring heads of values.
            q, k = (each.repeat_interleave(num_heads // num_key_heads, 0)[:, :, None] for each in (q, k))
            state = state * torch.exp(-decay_rate * functional.softplus(step[row].float() + step_bias))[:, None, None]
            change = value.view(num_heads, value_dim) - (state * k).sum(1)
            state = state + k * (change * torch.sigmoid(beta[row].float())[:, None])[:, None, :]
            result[row] = ((state * q).sum(1) * key_dim**-0.5).flatten().to(mixed.dtype)
            if row in sequence.writes:
                states[sequence.writes[row]] = state
    return result


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(1, keepdim=True) + EPS)
