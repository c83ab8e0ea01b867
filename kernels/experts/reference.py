"""Specification of a mixture of experts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from raydix.kernels.linear.reference import linear_reference
from raydix.kernels.routing import Routing
from raydix.kernels.silu_and_mul.reference import activate_reference, silu_and_mul_reference


def route_reference(
    logits: Tensor, routing: Routing, correction: Tensor | None = None, factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The experts of each row of `logits` [num_tokens, num_experts], best first, and their shares: two
    [num_tokens, per_token].

    In float32. Experts are chosen by their scores, with `correction` [num_experts] added to these; shares are made of
    the scores as they are, and each is multiplied by its expert's number of `factors` [num_experts]. Of equals the one
    with the lower index comes first.
    """
    logits = logits.float()
    scores = logits.sigmoid() if routing.score == "sigmoid" else logits.softmax(1)
    # Of logits the softmax keeps the order, but rounds some to equals.
    choice = logits if routing.score == "softmax" and correction is None else scores
    if correction is not None:
        choice = scores + correction
    if routing.num_groups > 1:
        groups = choice.view(len(choice), routing.num_groups, choice.shape[1] // routing.num_groups)
        of_group = groups.topk(routing.group_best).values.sum(2)
        best = torch.sort(of_group, dim=1, descending=True, stable=True).indices[:, : routing.top_groups]
        others = torch.ones_like(of_group, dtype=torch.bool).scatter(1, best, value=False)
        choice = groups.masked_fill(others[:, :, None], -torch.inf).flatten(1)
    ids = torch.sort(choice, dim=1, descending=True, stable=True).indices[:, : routing.per_token]
    shares = scores.gather(1, ids)
    if routing.normalised:
        shares = shares / (shares.sum(1, keepdim=True) + routing.sum_offset)
    shares = shares * routing.scale
    return ids, shares if factors is None else shares * factors[ids]


def experts_reference(
    x: Tensor,
    router: Tensor,
    gate_up: Sequence[Tensor],
    down: Sequence[Tensor],
    routing: Routing,
    correction: Tensor | None = None,
    *,
    factors: Tensor | None = None,
    routed: Tensor | None = None,
    activation: str = "silu",
    has_gate: bool = True,
) -> Tensor:
    """Row by row, the sum over the row's experts of share * down(act(gate(x)) * up(x)), added in order of rank.

    `x` [num_tokens, hidden]; `router` [num_experts, hidden], in float32 if its logits are not to be rounded to x's
    dtype; `correction` and `factors` [num_experts]; `routed`, like `x`, the rows that the router reads; of each expert
    `gate_up` [2 * intermediate, hidden] (without a gate [intermediate, hidden]) and `down` [hidden, intermediate]. Each
    product is rounded to x's dtype, the sum is in float32 and rounded once.
    """
    read = x if routed is None else routed
    logits = linear_reference(read, router, None) if router.dtype == x.dtype else read.float() @ router.T
    ids, shares = route_reference(logits, routing, correction, factors)
    result = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for row in range(x.shape[0]):
        for expert, share in zip(ids[row].tolist(), shares[row], strict=True):
            act = silu_and_mul_reference if has_gate else activate_reference
            inner = act(linear_reference(x[row : row + 1], gate_up[expert], None), activation)
            result[row] += share * linear_reference(inner, down[expert], None)[0].float()
    return result.to(x.dtype)
