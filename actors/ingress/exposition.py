"""Prometheus' text format (0.0.4) of metrics' values."""

from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from raydix.actors.metric_values import Distribution, MetricFamily

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Families(Collector):
    """Families as Prometheus' client collects metrics."""

    def __init__(self, families: Iterable[MetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return map(_metric, self._families)


def exposition(families: Iterable[MetricFamily]) -> str:
    """The families in Prometheus' text format; each name may appear once."""
    return generate_latest(_Families(families)).decode()


def _metric(family: MetricFamily) -> Metric:
    metric = Metric(family.name, family.description, family.kind)
    for labels, value in family.values.items():
        if isinstance(value, Distribution):
            _add_histogram(metric, dict(labels), value, family.bounds)
        else:
            metric.add_sample(f"{family.name}_total" if family.kind == "counter" else family.name, dict(labels), value)
    return metric


def _add_histogram(metric: Metric, labels: dict[str, str], value: Distribution, bounds: tuple[float, ...]) -> None:
    counts = list(accumulate(value.counts))
    for bound, count in zip((*map(_text, bounds), "+Inf"), counts, strict=True):
        metric.add_sample(f"{metric.name}_bucket", {**labels, "le": bound}, count)
    metric.add_sample(f"{metric.name}_sum", labels, value.total)
    metric.add_sample(f"{metric.name}_count", labels, counts[-1])


def _text(bound: float) -> str:
    return repr(int(bound) if bound.is_integer() else bound)
