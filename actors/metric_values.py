"""Values of metrics, as they travel between processes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Labels: TypeAlias = tuple[tuple[str, str], ...]
"""Names and values of a sample's labels."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Observations of a histogram."""

    counts: tuple[int, ...]
    """Observations up to each bound and above the one before; the last count is of those above all bounds."""
    total: float
    """Sum of the observations."""


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """A metric of one process, or of several, with its values."""

    name: str
    """Without the `_total` of a counter."""
    kind: Kind
    description: str
    values: Mapping[Labels, float | Distribution]
    bounds: tuple[float, ...] = ()
    """Bounds of a histogram's buckets, ascending."""


def labels_of(tags: Mapping[str, str]) -> Labels:
    """The labels with these names and values, in one order."""
    return tuple(sorted(tags.items()))


def merged(families: Iterable[MetricFamily]) -> list[MetricFamily]:
    """Merge families of the same name; of values with the same labels the latest counts."""
    found: dict[str, MetricFamily] = {}
    for family in families:
        known = found.get(family.name)
        found[family.name] = family if known is None else replace(known, values={**known.values, **family.values})
    return list(found.values())
