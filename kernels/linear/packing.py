"""The weight layouts `linear` knows."""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor
from torch.nn import functional

from raydix.kernels.cpp import cpu_ops, prefer_huge_pages
from raydix.kernels.linear.groups import PANEL, GroupedWeight, Groups, group_panels
from raydix.kernels.linear.quantize import quantize


class Layout(Enum):
    """Layout of a weight in memory."""

    PLAIN = "plain"  # [out_features, in_features]
    PANELS = "panels"  # [out_features / PANEL, in_features / 2, PANEL, 2], for our C++ product
    ONEDNN = "onednn"  # opaque, for oneDNN's
    INVARIANT = "invariant"  # as PLAIN, for the GPU's product whose rows do not depend on their number


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight and bias in the layout `linear` wants on this machine."""

    weight: Tensor
    scales: Tensor | None
    """Scales of an int8 weight: float32, one for each output channel."""
    bias: Tensor | None
    in_features: int
    out_features: int
    layout: Layout
    groups: Groups | None = None
    """Form of a weight of few bits; None: it is not stored in groups."""

    def as_tuple(self) -> tuple[Tensor, Tensor | None, Tensor | None, int, int, Groups | None]:
        """The weight as the C++ kernels take it."""
        return self.weight, self.scales, self.bias, self.in_features, self.out_features, self.groups


def best_layout(weight: Tensor, *, int8: bool = False) -> Layout:
    """Chooses our own product wherever it runs, since oneDNN's rows depend on their number where the CPU has matrix
    tiles (AMX); without ours oneDNN's, and torch's for other types.

    `int8`: torch's without ours, since oneDNN has no such weights.
    """
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu":
        return Layout.PLAIN
    ops = cpu_ops()
    ours = ops is not None and ops.has_linear() and weight.shape[1] % 2 == 0
    if ours:
        return Layout.PANELS
    return Layout.ONEDNN if not int8 and torch.ops.mkldnn._is_mkldnn_bf16_supported() else Layout.PLAIN


def pack_weight(
    weight: Tensor, bias: Tensor | None = None, *, int8: bool = False, deterministic: bool = False
) -> PackedLinear:
    """Packs `weight` [out_features, in_features] and `bias` [out_features]; the originals may be dropped afterwards.

    Where our own product runs, bfloat16 on a CPU takes its layout, which gives each row the same bits for any number of
    rows; so does a `deterministic` weight on a GPU. All other weights keep their layout. With `int8`, for CPUs, the
    weight is quantised before.
    """
    out_features, in_features = weight.shape
    weight = weight.detach()
    layout = Layout.INVARIANT if deterministic and weight.is_cuda else best_layout(weight, int8=int8)
    weight, scales = quantize(weight) if int8 else (weight, None)
    if layout is Layout.ONEDNN:
        weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    elif layout is Layout.PANELS:
        weight, scales, bias = panels(weight), _padded(scales), _padded(bias)
    return PackedLinear(
        weight=weight, scales=scales, bias=bias, in_features=in_features, out_features=out_features, layout=layout
    )


def keeps_groups(weight: GroupedWeight) -> bool:
    """True if `pack_groups` keeps the weight in groups here: our own product takes it."""
    ops = cpu_ops()
    fits = weight.shape[1] % weight.groups.super == 0 and weight.groups.size % 2 == 0
    return ops is not None and ops.has_linear() and fits


def pack_groups(weight: GroupedWeight, bias: Tensor | None = None) -> PackedLinear:
    """Packs a weight stored in groups and `bias` [out_features]; the originals may be dropped afterwards. Only where
    `keeps_groups` says so."""
    out_features, in_features = weight.shape
    packed = group_panels(weight)
    prefer_huge_pages(packed)
    return PackedLinear(
        weight=packed,
        scales=None,
        bias=_padded(bias),
        in_features=in_features,
        out_features=out_features,
        layout=Layout.PANELS,
        groups=weight.groups,
    )


def _padded(values: Tensor | None) -> Tensor | None:
    """`values` [out_features] in float32, for whole panels."""
    return None if values is None else functional.pad(values.detach().float(), (0, -len(values) % PANEL))


def panels(weight: Tensor) -> Tensor:
    """`weight` [out_features, in_features] as [panels, in_features / 2, PANEL, 2], the last panel padded with zeros."""
    out_features, in_features = weight.shape
    packed = torch.empty((-(-out_features // PANEL), in_features // 2, PANEL, 2), dtype=weight.dtype)
    prefer_huge_pages(packed)
    whole = out_features // PANEL
    packed[:whole] = weight[: whole * PANEL].reshape(whole, PANEL, in_features // 2, 2).transpose(1, 2)
    if rest := out_features % PANEL:
        packed[whole] = 0
        packed[whole, :, :rest] = weight[whole * PANEL :].reshape(rest, in_features // 2, 2).transpose(0, 1)
    return packed
