"""Processor time, memory and open files of this process, under the names that Prometheus' own clients give them."""

from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import CollectorRegistry

from raydix.actors.metric_values import Kind, MetricFamily, labels_of

KINDS: dict[str, Kind] = {"counter": "counter", "gauge": "gauge"}


class ProcessMetrics:
    """Metrics of the process that this object is made in. Where there is no `/proc` there are none."""

    def __init__(self, process: str) -> None:
        """`process` is a worker's id, a replica's, or the manager's."""
        # In a registry of its own: the usual one belongs to the program, and takes a name once.
        self._collector = ProcessCollector(registry=CollectorRegistry())
        self._labels = labels_of({"process": process})

    def families(self) -> tuple[MetricFamily, ...]:
        """The values of now, in a tenth of a millisecond."""
        return tuple(
            MetricFamily(metric.name, KINDS[metric.type], metric.documentation, {self._labels: metric.samples[0].value})
            for metric in self._collector.collect()
        )
