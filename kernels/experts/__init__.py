"""A mixture of experts: each row goes through the few MLPs that its router scores highest.

Rows are grouped by expert, so only the weights of experts that some row has chosen are read, and each once. A row's
contributions are added in the order of their rank, so that where products give a row the same bits in any batch, so do
experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from raydix.kernels.cpp import cpu_ops
from raydix.kernels.experts.reference import experts_reference, route_reference
from raydix.kernels.linear import Layout, PackedLinear, linear
from raydix.kernels.routing import Routing
from raydix.kernels.silu_and_mul import KINDS, activate, silu_and_mul

__all__ = ["PackedExperts", "experts", "experts_reference", "pack_experts"]


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """The experts of one layer; make them with `pack_experts`."""

    router: PackedLinear | Tensor
    """A product whose logits are rounded to the input's dtype; or [num_experts, hidden] float32, of which they are
    not."""
    correction: Tensor | None
    """[num_experts] float32: added to the scores by which experts are chosen."""
    factors: Tensor | None
    """[num_experts] float32: each is a factor of its expert's share."""
    gate_up: tuple[PackedLinear, ...]
    """Of experts without a gate the up projections alone."""
    down: tuple[PackedLinear, ...]
    routing: Routing
    activation: str
    has_gate: bool
    handle: Any | None
    """Weights packed for the C++ kernels; None: they do not compute these products."""

    def products(self) -> tuple[PackedLinear, ...]:
        routers = () if isinstance(self.router, Tensor) else (self.router,)
        return (*routers, *self.gate_up, *self.down)


def pack_experts(
    router: PackedLinear | Tensor,
    gate_up: Sequence[PackedLinear],
    down: Sequence[PackedLinear],
    routing: Routing,
    *,
    correction: Tensor | None = None,
    factors: Tensor | None = None,
    activation: str = "silu",
    has_gate: bool = True,
) -> PackedExperts:
    """Put the packed weights of a layer's experts together, see `PackedExperts`. Raises `ValueError` on shapes that do
    not fit, and for a choice that cannot be made."""
    routing.check(len(down))
    packed = PackedExperts(
        router=router,
        correction=correction,
        factors=factors,
        gate_up=tuple(gate_up),
        down=tuple(down),
        routing=routing,
        activation=activation,
        has_gate=has_gate,
        handle=None,
    )
    if any(product.layout is not Layout.PANELS for product in packed.products()):
        return packed
    ops = cpu_ops()
    assert ops is not None
    handle = ops.make_experts(
        router if isinstance(router, Tensor) else router.as_tuple(),
        [product.as_tuple() for product in gate_up],
        [product.as_tuple() for product in down],
        correction,
        (
            routing.per_token,
            routing.normalised,
            routing.score == "sigmoid",
            routing.num_groups,
            routing.top_groups,
            routing.group_best,
            routing.scale,
            routing.sum_offset,
        ),
        KINDS.index(activation),
        has_gate,
        factors,
    )
    return replace(packed, handle=handle)


def experts(x: Tensor, packed: PackedExperts, routed: Tensor | None = None) -> Tensor:
    """Sum what its experts make of each row of `x` [num_tokens, hidden]. The result has the shape and dtype of `x`.

    `routed`, like `x`: the rows that the router reads; None: those of `x`. Routing and the sum are in float32; logits
    are, too, or are rounded to x's dtype, as the published implementations do. Raises `ValueError` on a wrong width and
    `TypeError` on a wrong dtype.
    """
    if packed.handle is not None:
        ops = cpu_ops()
        assert ops is not None
        result: Tensor = ops.experts(packed.handle, x.contiguous(), routed)
        return result
    return _expert_by_expert(x, packed, routed)


def _expert_by_expert(x: Tensor, packed: PackedExperts, routed: Tensor | None = None) -> Tensor:
    """Compute a pair of products for each expert that some row has chosen."""
    ranks, router = packed.routing.per_token, packed.router
    read = x if routed is None else routed
    logits = functional.linear(read.float(), router) if isinstance(router, Tensor) else linear(read, router)
    ids, shares = route_reference(logits, packed.routing, packed.correction, packed.factors)
    chosen = ids.flatten()
    places = torch.sort(chosen, stable=True).indices  # index // ranks is the row, index % ranks the rank
    groups = torch.split(places, torch.bincount(chosen, minlength=len(packed.down)).tolist())

    outputs = x.new_empty((len(chosen), x.shape[1]))
    for expert, group in enumerate(groups):
        if len(group) > 0:
            act = silu_and_mul if packed.has_gate else activate
            inner = act(linear(x[group // ranks], packed.gate_up[expert]), packed.activation)
            outputs[group] = linear(inner, packed.down[expert])

    by_rank = outputs.view(-1, ranks, x.shape[1])
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for rank in range(ranks):
        total += shares[:, rank, None] * by_rank[:, rank].float()
    return total.to(x.dtype)
