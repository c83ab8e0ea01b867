"""Prometheus' text format (0.0.4) of metrics' values.

A scrape runs in the event loop between other requests' tokens, so what does not change from scrape to scrape, which is
all but the values, is made once.
"""

from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate

from raydix.actors.metric_values import Distribution, Labels, MetricFamily

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_KEPT = 1 << 14  # beginnings of lines that are kept between scrapes, of each kind


def exposition(families: Iterable[MetricFamily]) -> str:
    """The families in Prometheus' text format; each name may appear once."""
    return "".join(map(_text, families))


def _text(family: MetricFamily) -> str:
    name = f"{family.name}_total" if family.kind == "counter" else family.name
    lines = [_head(name, family.kind, family.description)]
    for labels, value in family.values.items():
        if isinstance(value, Distribution):
            buckets, total, count = _histogram(name, labels, family.bounds)
            counts = list(accumulate(value.counts))
            lines += [f"{start}{number}\n" for start, number in zip(buckets, counts, strict=True)]
            lines.append(f"{total}{value.total!r}\n{count}{counts[-1]}\n")
        else:
            lines.append(f"{_sample(name, labels)}{value!r}\n")
    return "".join(lines)


@lru_cache(MAX_KEPT)
def _head(name: str, kind: str, description: str) -> str:
    escaped = description.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {name} {escaped}\n# TYPE {name} {kind}\n"


@lru_cache(MAX_KEPT)
def _sample(name: str, labels: Labels) -> str:
    """A line up to its value."""
    pairs = ",".join(f'{key}="{_escaped(value)}"' for key, value in labels)
    return f"{name}{{{pairs}}} " if labels else f"{name} "


@lru_cache(MAX_KEPT)
def _histogram(name: str, labels: Labels, bounds: tuple[float, ...]) -> tuple[tuple[str, ...], str, str]:
    """The lines of the buckets, of the sum, and of the count, up to their values."""
    buckets = tuple(_sample(f"{name}_bucket", (*labels, ("le", bound))) for bound in (*map(_bound, bounds), "+Inf"))
    return buckets, _sample(f"{name}_sum", labels), _sample(f"{name}_count", labels)


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _bound(bound: float) -> str:
    return repr(int(bound) if bound.is_integer() else bound)
