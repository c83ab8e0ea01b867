"""Prometheus' text format (0.0.4) of metrics' values.

A scrape runs in the event loop between other requests' tokens, so each line is written by one expression, and the text
of a sample's labels is made once.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import accumulate

from raydix.actors.metric_values import Distribution, Labels, MetricFamily

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_KEPT = 1 << 14
"""Texts of labels that are kept between scrapes."""


def exposition(families: Iterable[MetricFamily]) -> str:
    """The families in Prometheus' text format; each name may appear once."""
    return "".join(line for family in families for line in _lines(family))


def _lines(family: MetricFamily) -> Iterator[str]:
    name = f"{family.name}_total" if family.kind == "counter" else family.name
    description = family.description.replace("\\", r"\\").replace("\n", r"\n")
    yield f"# HELP {name} {description}\n# TYPE {name} {family.kind}\n"
    for labels, value in family.values.items():
        if isinstance(value, Distribution):
            yield from _histogram(name, _text(labels), value, family.bounds)
        else:
            yield f"{name}{_in_braces(_text(labels))} {value!r}\n"


def _histogram(name: str, labels: str, value: Distribution, bounds: tuple[float, ...]) -> Iterator[str]:
    start = f'{name}_bucket{{{labels}{"," if labels else ""}le="'
    count = 0
    for bound, count in zip((*map(_bound, bounds), "+Inf"), accumulate(value.counts), strict=True):
        yield f'{start}{bound}"}} {count}\n'
    braces = _in_braces(labels)
    yield f"{name}_sum{braces} {value.total!r}\n{name}_count{braces} {count}\n"


def _in_braces(labels: str) -> str:
    return f"{{{labels}}}" if labels else ""


@lru_cache(MAX_KEPT)
def _text(labels: Labels) -> str:
    """The labels without their braces."""
    return ",".join(f'{key}="{_escaped(value)}"' for key, value in labels)


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


@lru_cache(MAX_KEPT)
def _bound(bound: float) -> str:
    return repr(int(bound) if bound.is_integer() else bound)
