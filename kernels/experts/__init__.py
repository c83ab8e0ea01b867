"""A mixture of experts: each row goes through the few gated MLPs that its router scores highest.

Rows are grouped by expert, so only the weights of experts that some row has chosen are read, and each once. A row's
contributions are added in the order of their rank, so that where products give a row the same bits in any batch, so do
experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raydix.kernels.cpp import cpu_ops
from raydix.kernels.experts.reference import experts_reference, route_reference
from raydix.kernels.linear import Layout, PackedLinear, linear
from raydix.kernels.silu_and_mul import KINDS, silu_and_mul

__all__ = ["PackedExperts", "experts", "experts_reference", "pack_experts"]


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """The experts of one layer; make them with `pack_experts`."""

    router: PackedLinear
    gate_up: tuple[PackedLinear, ...]
    down: tuple[PackedLinear, ...]
    per_token: int
    normalised: bool
    """A token's shares add up to one; otherwise they are its experts' shares among all."""
    activation: str
    handle: Any | None
    """Weights packed for the C++ kernels; None: they do not compute these products."""

    def products(self) -> tuple[PackedLinear, ...]:
        return (self.router, *self.gate_up, *self.down)


def pack_experts(
    router: PackedLinear,
    gate_up: Sequence[PackedLinear],
    down: Sequence[PackedLinear],
    per_token: int,
    *,
    normalised: bool,
    activation: str = "silu",
) -> PackedExperts:
    """Put the packed weights of a layer's experts together. Raises `ValueError` on shapes that do not fit."""
    handle = None
    if all(product.layout is Layout.PANELS for product in (router, *gate_up, *down)):
        ops = cpu_ops()
        assert ops is not None
        first, second = [product.as_tuple() for product in gate_up], [product.as_tuple() for product in down]
        handle = ops.make_experts(router.as_tuple(), first, second, per_token, normalised, KINDS.index(activation))
    return PackedExperts(
        router=router,
        gate_up=tuple(gate_up),
        down=tuple(down),
        per_token=per_token,
        normalised=normalised,
        activation=activation,
        handle=handle,
    )


def experts(x: Tensor, packed: PackedExperts) -> Tensor:
    """Sum what its experts make of each row of `x` [num_tokens, hidden]. The result has the shape and dtype of `x`.

    Logits are rounded to x's dtype, as the published implementations do; routing and the sum are in float32. Raises
    `ValueError` on a wrong width and `TypeError` on a wrong dtype.
    """
    if packed.handle is not None:
        ops = cpu_ops()
        assert ops is not None
        result: Tensor = ops.experts(packed.handle, x.contiguous())
        return result
    return _expert_by_expert(x, packed)


def _expert_by_expert(x: Tensor, packed: PackedExperts) -> Tensor:
    """Compute a pair of products for each expert that some row has chosen."""
    ranks = packed.per_token
    ids, shares = route_reference(linear(x, packed.router), ranks, normalised=packed.normalised)
    chosen = ids.flatten()
    places = torch.sort(chosen, stable=True).indices  # index // ranks is the row, index % ranks the rank
    groups = torch.split(places, torch.bincount(chosen, minlength=len(packed.down)).tolist())

    outputs = x.new_empty((len(chosen), x.shape[1]))
    for expert, group in enumerate(groups):
        if len(group) > 0:
            inner = silu_and_mul(linear(x[group // ranks], packed.gate_up[expert]), packed.activation)
            outputs[group] = linear(inner, packed.down[expert])

    by_rank = outputs.view(-1, ranks, x.shape[1])
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for rank in range(ranks):
        total += shares[:, rank, None] * by_rank[:, rank].float()
    return total.to(x.dtype)
