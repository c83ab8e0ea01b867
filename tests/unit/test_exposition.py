"""Prometheus' text format of metrics, read back by Prometheus' own parser."""

from prometheus_client.parser import text_string_to_metric_families

from raydix.actors.ingress.exposition import exposition
from raydix.actors.metric_values import Distribution, MetricFamily, labels_of, merged

NASTY = 'a "quoted" \\ back\nslash'


def samples(*families: MetricFamily) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = exposition(families)
    found = (sample for metric in text_string_to_metric_families(text) for sample in metric.samples)
    return {(sample.name, labels_of(sample.labels)): sample.value for sample in found}


def test_values_and_labels_come_back() -> None:
    counter = MetricFamily("c", "counter", NASTY, {labels_of({"b": NASTY, "a": "1"}): 3.0, (): 0})
    gauge = MetricFamily("g", "gauge", "", {(): 0.25})
    assert samples(counter, gauge) == {
        ("c_total", (("a", "1"), ("b", NASTY))): 3.0,
        ("c_total", ()): 0.0,
        ("g", ()): 0.25,
    }


def test_a_histogram_counts_up_to_each_bound() -> None:
    family = MetricFamily("h", "histogram", "", {(("w", "x"),): Distribution((1, 0, 2), 7.5)}, bounds=(0.5, 1.0))
    own = ("w", "x")
    assert samples(family) == {
        ("h_bucket", (("le", "0.5"), own)): 1.0,
        ("h_bucket", (("le", "1"), own)): 1.0,
        ("h_bucket", (("le", "+Inf"), own)): 3.0,
        ("h_sum", (own,)): 7.5,
        ("h_count", (own,)): 3.0,
    }


def test_families_of_several_processes_become_one() -> None:
    first = MetricFamily("c", "counter", "", {(("w", "1"),): 1.0})
    second = MetricFamily("c", "counter", "", {(("w", "2"),): 2.0})
    [both] = merged([first, second])
    assert both.values == {(("w", "1"),): 1.0, (("w", "2"),): 2.0}
    assert exposition([both]).count("# TYPE") == 1
