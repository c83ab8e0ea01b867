"""Weights of few bits in groups of input features, each group with its own scale, as files of 4 to 8 bits have them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

PANEL = 64


class Scales(IntEnum):
    """How the scales of groups are stored."""

    PRODUCTS = 0
    """A float16 for `Groups.super` input features times an int8 for each group."""
    EXPONENTS = 1
    """A byte for each group, 2 ** (byte - 128): half of MXFP4's scale (E8M0), since its table is doubled."""
    FLOATS = 2
    """A float32 for each group."""


class Groups(NamedTuple):
    """The form of such a weight: w = scale * (number - zero) - least.

    `least` is the product of a float16 for `super` input features and a whole number for a group of `size`; so is the
    scale, unless `scales` says otherwise.
    """

    bits: int
    """Of a number in memory: 4 or 8."""
    size: int
    super: int
    zero: int = 0
    has_least: bool = False
    scales: Scales = Scales.PRODUCTS
    values: tuple[int, ...] = ()
    """What each of the sixteen numbers of four bits stands for; empty: for itself."""
    is_float8: bool = False
    """Numbers are the bytes of floating-point numbers (E4M3), none of them a NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedWeight:
    """A weight [out_features, in_features] in groups."""

    groups: Groups
    numbers: Tensor
    """[out_features, in_features] uint8, below 2 ** bits."""
    scales: Tensor
    """[out_features, in_features / super]: float16, or as `Scales` says uint8 or float32."""
    factors: Tensor | None = None
    """[out_features, in_features / size] int8: a group's scale is its factor times the scale. None: scales are not
    products, and stand for themselves."""
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
            factors=None if self.factors is None else self.factors[index],
            least=None if self.least is None else self.least[index],
            least_factors=None if self.least_factors is None else self.least_factors[index],
        )

    def widened(self) -> Tensor:
        """The weight in float32, each rounded once; [out_features, in_features]."""
        form, scales, numbers = self.groups, self.scales.float(), self.numbers.float()
        if form.values:
            numbers = torch.tensor(form.values, dtype=torch.float32)[self.numbers.long()]
        elif form.is_float8:
            numbers = self.numbers.view(torch.float8_e4m3fn).float()
        if form.scales is Scales.EXPONENTS:
            scales = torch.ldexp(torch.ones(()), scales - 128)
        scale = self._of_each(scales, self.factors)
        if self.least is None or self.least_factors is None:
            return scale * (numbers - form.zero)
        # The product is exact, so that this is the fused operation of the C++ kernels.
        return scale * numbers - self._of_each(self.least, self.least_factors)

    def _of_each(self, scales: Tensor, factors: Tensor | None) -> Tensor:
        of_groups = scales.float().repeat_interleave(self.groups.super // self.groups.size, 1)
        if factors is not None:
            of_groups = of_groups * factors.float()
        return of_groups.repeat_interleave(self.groups.size, 1)


def stacked(weights: Sequence[GroupedWeight]) -> GroupedWeight:
    """Weights of one form, one below the other. Raises `ValueError` where their forms differ."""
    if len({weight.groups for weight in weights}) != 1:
        raise ValueError("only weights of one form can be stacked")
    factors, least, least_factors = None, None, None
    if weights[0].groups.scales is Scales.PRODUCTS:
        factors = torch.cat([weight.factors for weight in weights if weight.factors is not None])
    if weights[0].groups.has_least:
        least = torch.cat([weight.least for weight in weights if weight.least is not None])
        least_factors = torch.cat([weight.least_factors for weight in weights if weight.least_factors is not None])
    return GroupedWeight(
        groups=weights[0].groups,
        numbers=torch.cat([weight.numbers for weight in weights]),
        scales=torch.cat([weight.scales for weight in weights]),
        factors=factors,
        least=least,
        least_factors=least_factors,
    )


def in_one_form(weights: Sequence[GroupedWeight]) -> list[GroupedWeight] | None:
    """The same weights, bit by bit, in one form, so that they can be stacked; None where there is no common one.

    The common form has eight bits, the smallest groups among all, and another zero or what is taken off. Weights whose
    scales are no products have none with others, nor have those with scales beyond float16.
    """
    if len({weight.groups for weight in weights}) == 1:
        return list(weights)
    if any(weight.groups.scales is not Scales.PRODUCTS for weight in weights):
        return None
    weights = [_without_table(weight) for weight in weights]
    forms = [weight.groups for weight in weights]
    if len({(form.size, form.super) for form in forms}) == 1 and not any(form.has_least for form in forms):
        zero = max(form.zero for form in forms)
        return [_with_zero(weight, zero) for weight in weights]
    size, length = min(form.size for form in forms), min(form.super for form in forms)
    alike = [_with_least(weight, size, length) for weight in weights]
    return [weight for weight in alike if weight is not None] if None not in alike else None


def _without_table(weight: GroupedWeight) -> GroupedWeight:
    """The weight with the values of its table as numbers around 128."""
    form = weight.groups
    if not form.values:
        return weight
    numbers = (torch.tensor(form.values) + 128).to(torch.uint8)[weight.numbers.long()]
    return replace(weight, groups=form._replace(bits=8, zero=128, values=()), numbers=numbers)


def _with_zero(weight: GroupedWeight, zero: int) -> GroupedWeight:
    """The weight with other numbers around another zero."""
    numbers = weight.numbers + (zero - weight.groups.zero)
    return replace(weight, groups=weight.groups._replace(bits=8, zero=zero), numbers=numbers)


def _with_least(weight: GroupedWeight, size: int, length: int) -> GroupedWeight | None:
    """The weight in groups of `size` with scales for `length` input features, and with what is taken off in place of a
    zero; None if that is beyond float16, or a number beyond eight bits."""
    form, factors, numbers = weight.groups, weight.factors, weight.numbers
    least, least_factors = weight.least, weight.least_factors
    assert factors is not None, "only scales that are products have a common form"
    if least is None or least_factors is None:
        # Zeros are powers of two, so that this product is exact wherever it is finite.
        least, least_factors = weight.scales * form.zero, factors.abs().view(torch.uint8)
        if not bool(least.isfinite().all()):
            return None
        if bool((factors < 0).any()):
            # What is taken off has factors without a sign, so all groups get a negative factor: an int8 holds -128,
            # which Q6_K has in every block, and not 128. Groups with a positive one count from the other end.
            positive = factors.repeat_interleave(form.size, 1) > 0
            counted = torch.where(positive, 2 * form.zero - numbers.to(torch.int16), numbers)
            if bool((counted > 255).any()):
                return None
            numbers = counted.to(torch.uint8)
            least, factors = -least, -factors.to(torch.int16).abs()
    times, lengths = form.size // size, form.super // length
    return GroupedWeight(
        groups=Groups(8, size, length, 0, has_least=True),
        numbers=numbers,
        scales=weight.scales.repeat_interleave(lengths, 1),
        factors=factors.to(torch.int8).repeat_interleave(times, 1),
        least=least.repeat_interleave(lengths, 1),
        least_factors=least_factors.repeat_interleave(times, 1),
    )


def group_panels(weight: GroupedWeight) -> Tensor:
    """The weight as the C++ product reads it (kernels/cpp/linear_groups.h): uint8 [panels, in_features / super, bytes].

    The last panel is padded with zeros.
    """
    bits, size, length, has_least = weight.groups.bits, weight.groups.size, weight.groups.super, weight.groups.has_least
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
    scales, factors = [panels(weight.scales, 1)], []
    if weight.factors is not None:
        factors.append(panels(weight.factors, length // size).view(torch.uint8))
    if has_least:
        assert weight.least is not None and weight.least_factors is not None
        scales.append(panels(weight.least, 1))
        factors.append(panels(weight.least_factors, length // size))
    # A group's factors stand side by side: of its scale, then of what is taken off.
    of_groups = [torch.stack(factors, 3)] if factors else []
    return torch.cat([as_bytes(each) for each in (*scales, *of_groups, pairs)], 2).contiguous()
