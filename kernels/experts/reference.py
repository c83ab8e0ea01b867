"""Specification of a mixture of experts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from raydix.kernels.linear.reference import linear_reference
from raydix.kernels.silu_and_mul.reference import silu_and_mul_reference


def route_reference(logits: Tensor, per_token: int, *, normalised: bool) -> tuple[Tensor, Tensor]:
    """The experts of each row of `logits` [num_tokens, num_experts], best first, and their shares: two
    [num_tokens, per_token].

    In float32. Of equal logits the one with the lower index comes first. Shares are the softmax over all experts, or
    if `normalised` over those that were chosen.
    """
    order = torch.sort(logits.float(), dim=1, descending=True, stable=True)
    ids, best = order.indices[:, :per_token], order.values[:, :per_token]
    if normalised:
        return ids, best.softmax(1)
    return ids, logits.float().softmax(1).gather(1, ids)


def experts_reference(
    x: Tensor,
    router: Tensor,
    gate_up: Sequence[Tensor],
    down: Sequence[Tensor],
    per_token: int,
    *,
    normalised: bool,
    activation: str = "silu",
) -> Tensor:
    """Row by row, the sum over the row's experts of share * down(act(gate(x)) * up(x)), added in order of rank.

    `x` [num_tokens, hidden]; `router` [num_experts, hidden]; of each expert `gate_up` [2 * intermediate, hidden] and
    `down` [hidden, intermediate]. Each product is rounded to x's dtype, the sum is in float32 and rounded once.
    """
    ids, shares = route_reference(linear_reference(x, router, None), per_token, normalised=normalised)
    result = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for row in range(x.shape[0]):
        for expert, share in zip(ids[row].tolist(), shares[row], strict=True):
            inner = silu_and_mul_reference(linear_reference(x[row : row + 1], gate_up[expert], None), activation)
            result[row] += share * linear_reference(inner, down[expert], None)[0].float()
    return result.to(x.dtype)
