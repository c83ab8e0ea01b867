"""Specification of Mamba-2's selective scan (arXiv 2405.21060)."""

import torch
from torch import Tensor
from torch.nn import functional

from raydix.kernels.states import StateUse, sequences_of, state_before


def selective_scan_reference(
    mixed: Tensor,
    step: Tensor,
    decay_rate: Tensor,
    step_bias: Tensor,
    skip: Tensor,
    states: Tensor,
    query_start: Tensor,
    use: StateUse,
    *,
    step_limits: tuple[float, float],
) -> Tensor:
    """Row by row: S = exp(-decay_rate d) S + B (d x), and the output C S + skip x; see `selective_scan`."""
    _, num_heads, state_size, head_dim = states.shape
    values = num_heads * head_dim
    num_groups = (mixed.shape[1] - values) // (2 * state_size)
    result = torch.empty(mixed.shape[0], values, dtype=mixed.dtype)
    for sequence in sequences_of(query_start, use):
        state = state_before(states, sequence.source)
        for row in range(sequence.first, sequence.end):
            x, key, query = torch.split(mixed[row].float(), [values, *[num_groups * state_size] * 2])
            x = x.view(num_heads, head_dim)
            # Each group serves several neighbouring heads.
            key, query = (
                each.view(num_groups, state_size).repeat_interleave(num_heads // num_groups, 0)[:, :, None]
                for each in (key, query)
            )
            length = functional.softplus(step[row].float() + step_bias).clamp(*step_limits)
            state = state * torch.exp(-decay_rate * length)[:, None, None] + key * (x * length[:, None])[:, None, :]
            result[row] = ((state * query).sum(1) + skip[:, None] * x).flatten().to(mixed.dtype)
            if row in sequence.writes:
                states[sequence.writes[row]] = state
    return result
