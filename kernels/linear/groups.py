"""Weights of few bits in groups of input features, each group with its own scale, as files of 4 to 8 bits have them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

PANEL = 64


class Groups(NamedTuple):
    """The form of such a weight: w = scale * (number - zero) - least.

    Scale and least are the products of a float16 for `super` input features and a whole number for a group of `size`.
    """

    bits: int
    """Of a number in memory: 4 or 8."""
    size: int
    super: int
    zero: int = 0
    has_least: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedWeight:
    """A weight [out_features, in_features] in groups."""

    groups: Groups
    numbers: Tensor
    """[out_features, in_features] uint8, below 2 ** bits."""
    scales: Tensor
    """[out_features, in_features / super] float16."""
    factors: Tensor
    """[out_features, in_features / size] int8: a group's scale is its factor times the scale."""
    least: Tensor | None = None
    """[out_features, in_features / super] float16, if the weight has that."""
    least_factors: Tensor | None = None
    """[out_features, in_features / size] uint8."""

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    def rows(self, index: Tensor | slice) -> "GroupedWeight":
        """Some of the output features, in the order of `index`."""
        return GroupedWeight(
            groups=self.groups,
            numbers=self.numbers[index],
            scales=self.scales[index],
            factors=self.factors[index],
            least=None if self.least is None else self.least[index],
            least_factors=None if self.least_factors is None else self.least_factors[index],
        )

    def widened(self) -> Tensor:
        """The weight in float32, each rounded once; [out_features, in_features]."""
        scale = self._of_each(self.scales, self.factors)
        if self.least is None or self.least_factors is None:
            return scale * (self.numbers.float() - self.groups.zero)
        # The product is exact, so that this is the fused operation of the C++ kernels.
        return scale * self.numbers - self._of_each(self.least, self.least_factors)

    def _of_each(self, scales: Tensor, factors: Tensor) -> Tensor:
        of_groups = scales.float().repeat_interleave(self.groups.super // self.groups.size, 1) * factors.float()
        return of_groups.repeat_interleave(self.groups.size, 1)


def stacked(weights: Sequence[GroupedWeight]) -> GroupedWeight:
    """Weights of one form, one below the other. Raises `ValueError` where their forms differ."""
    if len({weight.groups for weight in weights}) != 1:
        raise ValueError("only weights of one form can be stacked")
    least, least_factors = None, None
    if weights[0].groups.has_least:
        least = torch.cat([weight.least for weight in weights if weight.least is not None])
        least_factors = torch.cat([weight.least_factors for weight in weights if weight.least_factors is not None])
    return GroupedWeight(
        groups=weights[0].groups,
        numbers=torch.cat([weight.numbers for weight in weights]),
        scales=torch.cat([weight.scales for weight in weights]),
        factors=torch.cat([weight.factors for weight in weights]),
        least=least,
        least_factors=least_factors,
    )


def in_one_form(weights: Sequence[GroupedWeight]) -> list[GroupedWeight] | None:
    """The same weights, bit by bit, in one form, so that they can be stacked; None where there is no common one.

    The common form has eight bits: with another zero, or where groups are parts of 256 with what is taken off.
    """
    forms = {weight.groups for weight in weights}
    if len(forms) == 1:
        return list(weights)
    if len({(form.size, form.super) for form in forms}) == 1 and not any(form.has_least for form in forms):
        zero = max(form.zero for form in forms)
        return [_with_zero(weight, zero) for weight in weights]
    if all(form.super == 256 for form in forms):
        return [_with_least(weight) for weight in weights]
    return None


def _with_zero(weight: GroupedWeight, zero: int) -> GroupedWeight:
    """The weight with other numbers around another zero."""
    numbers = weight.numbers + (zero - weight.groups.zero)
    return replace(weight, groups=weight.groups._replace(bits=8, zero=zero), numbers=numbers)


def _with_least(weight: GroupedWeight) -> GroupedWeight:
    """The weight in groups of 16 with what is taken off, in place of a zero."""
    form, factors, numbers = weight.groups, weight.factors, weight.numbers
    least, least_factors = weight.least, weight.least_factors
    if least is None or least_factors is None:
        # What is taken off has factors without a sign, so all groups get a negative factor: an int8 holds -128, which
        # Q6_K has in every block, and not 128. Groups with a positive one count from the other end.
        positive = factors.repeat_interleave(form.size, 1) > 0
        numbers = torch.where(positive, 2 * form.zero - numbers, numbers)
        sizes = factors.to(torch.int16).abs()
        factors = -sizes
        least, least_factors = -weight.scales * form.zero, sizes.to(torch.uint8)
    times = form.size // 16
    return GroupedWeight(
        groups=Groups(8, 16, form.super, 0, has_least=True),
        numbers=numbers,
        scales=weight.scales,
        factors=factors.to(torch.int8).repeat_interleave(times, 1),
        least=least,
        least_factors=least_factors.repeat_interleave(times, 1),
    )


def group_panels(weight: GroupedWeight) -> Tensor:
    """The weight as the C++ product reads it (kernels/cpp/linear_groups.h): uint8 [panels, in_features / super, bytes].

    The last panel is padded with zeros.
    """
    bits, size, length, _, has_least = weight.groups
    supers = weight.shape[1] // length

    def panels(of: Tensor, each: int) -> Tensor:
        """[out_features, supers * each] as [panels, supers, each, PANEL]."""
        padded = functional.pad(of, (0, 0, 0, -len(of) % PANEL))
        return padded.reshape(-1, PANEL, supers, each).permute(0, 2, 3, 1)

    def as_bytes(of: Tensor) -> Tensor:
        flat = of.contiguous()
        return flat.view(torch.uint8).reshape(flat.shape[0], supers, -1)

    numbers = panels(weight.numbers, length)
    first, second = numbers[:, :, 0::2], numbers[:, :, 1::2]
    pairs = first | second << 4 if bits == 4 else torch.stack((first, second), -1)
    scales, factors = [panels(weight.scales, 1)], [panels(weight.factors, length // size).view(torch.uint8)]
    if has_least:
        assert weight.least is not None and weight.least_factors is not None
        scales.append(panels(weight.least, 1))
        factors.append(panels(weight.least_factors, length // size))
    # A group's factors stand side by side: of its scale, then of what is taken off.
    of_groups = torch.stack(factors, 3)
    return torch.cat([*(as_bytes(each) for each in scales), as_bytes(of_groups), as_bytes(pairs)], 2).contiguous()
