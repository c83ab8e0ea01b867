"""Metrics reported to Ray and kept in this process, too: Ray's cannot be read in the process of their recording."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Generic, TypeVar

from ray.util.metrics import Counter, Gauge, Histogram, Metric

from raydix.actors.metric_values import Distribution, Kind, Labels, MetricFamily, labels_of

MetricT = TypeVar("MetricT", bound=Metric)

NO_TAGS: Mapping[str, str] = {}


class Instrument(Generic[MetricT]):
    """One metric. `metric` is Ray's, with its own default tags; values here have `tags`."""

    kind: Kind

    def __init__(self, metric: MetricT, tags: Mapping[str, str] = NO_TAGS) -> None:
        self.metric = metric
        self._tags = dict(tags)
        self._values: dict[Labels, float | Distribution] = {}

    def family(self) -> MetricFamily:
        """The values so far."""
        info = self.metric.info
        return MetricFamily(str(info["name"]), self.kind, str(info["description"]), dict(self._values))

    def _labels(self, tags: Mapping[str, str]) -> Labels:
        return labels_of({**self._tags, **tags})


class CounterInstrument(Instrument[Counter]):
    """A growing count."""

    kind: Kind = "counter"

    def begin(self, **values: Sequence[str]) -> None:
        """Report 0 for every new combination of these tags' values, so that a counter exists before its first event.

        Without a 0 an event that never happened looks like an event that is not measured, and the first event enters
        no rate. Ray's `inc` refuses 0.
        """
        for combination in product(*values.values()):
            tags = dict(zip(values, combination, strict=True))
            if self._labels(tags) not in self._values:
                self.metric._record(0, tags)
                self._values[self._labels(tags)] = 0

    def inc(self, value: float = 1, tags: Mapping[str, str] = NO_TAGS) -> None:
        """Count `value` more, which is above 0."""
        self.metric.inc(value, tags=dict(tags))
        labels = self._labels(tags)
        known = self._values.get(labels, 0)
        assert not isinstance(known, Distribution)
        self._values[labels] = known + value


class GaugeInstrument(Instrument[Gauge]):
    """A value of now."""

    kind: Kind = "gauge"

    def set(self, value: float, tags: Mapping[str, str] = NO_TAGS) -> None:
        self.metric.set(value, tags=dict(tags))
        self._values[self._labels(tags)] = value


@dataclass(slots=True)
class _Observed:
    counts: list[int]
    total: float = 0.0


class HistogramInstrument(Instrument[Histogram]):
    """Observations by size; there from the start, without any."""

    kind: Kind = "histogram"

    def __init__(self, metric: Histogram, tags: Mapping[str, str] = NO_TAGS, **values: Sequence[str]) -> None:
        """`values` are those of the tags that each observation has beside `tags`."""
        super().__init__(metric, tags)
        self.known = values
        """Values of the observations' own tags."""
        self._bounds = tuple(metric.boundaries)
        self._observed: dict[tuple[str, ...], _Observed] = {
            combination: _Observed([0] * (len(self._bounds) + 1)) for combination in product(*values.values())
        }

    def observe(self, value: float, **tags: str) -> None:
        """Count one observation, with known values of its own tags."""
        self.metric.observe(value, tags=tags)
        # Times of single tokens pass here, so that nothing is merged or sorted.
        observed = self._observed[tuple(tags[key] for key in self.known)]
        observed.counts[bisect_left(self._bounds, value)] += 1
        observed.total += value

    def family(self) -> MetricFamily:
        """The observations so far."""
        info = self.metric.info
        values = {
            self._labels(dict(zip(self.known, combination, strict=True))): Distribution(
                tuple(observed.counts), observed.total
            )
            for combination, observed in self._observed.items()
        }
        return MetricFamily(
            name=str(info["name"]),
            kind=self.kind,
            description=str(info["description"]),
            values=values,
            bounds=self._bounds,
        )


def families_of(group: object) -> tuple[MetricFamily, ...]:
    """The values of all instruments among the attributes of `group`."""
    return tuple(each.family() for each in instruments_of(group))


def instruments_of(group: object) -> "Iterable[Instrument[Metric]]":
    """The instruments among the attributes of `group`."""
    return (each for each in vars(group).values() if isinstance(each, Instrument))
