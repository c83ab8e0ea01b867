"""Markdown tables of the results."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.drafting.workloads import WORKLOADS


def speed_table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each workload and number of streams."""
    header = [
        *("workload", "streams", "ms per token: off", "auto", "times as fast", "throughput, auto / off"),
        *("tokens per step", "accepted / drafted", "answers"),
    ]
    rows = [
        [
            WORKLOADS[name].title,
            streams,
            f"{found['time_per_token_ms']['off']:.2f}",
            f"{found['time_per_token_ms']['auto']:.2f}",
            with_spread(found["times_as_fast"]),
            with_spread(found["throughput_ratio"]),
            f"{found['tokens_per_step']:.2f}",
            ", ".join(f"{source} {it['accepted']} / {it['drafted']}" for source, it in found["drafts"].items()) or "–",
            "the same" if found["same_answers"] else "DIFFER",
        ]
        for name, by_streams in figures.items()
        for streams, found in by_streams.items()
    ]
    return markdown(header, rows)


def gap_table(found: Mapping[str, Any]) -> str:
    """A row for each mode."""
    header = [
        "drafts",
        "quiet gap, ms",
        "median gap",
        "longest gap",
        "longest step of the prompt alone",
        "draft tokens",
    ]
    names = ("quiet_ms", "median_ms", "longest_ms", "budget_step_ms", "draft_tokens")
    rows = [[mode, *(f"{found[mode][name]:.1f}" for name in names)] for mode in ("off", "auto")]
    return markdown(header, rows)


def identity_table(report: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """A row for each kind of drafts: differing of compared answers under each circumstance, and accepted drafts."""
    circumstances = list(next(iter(report.values())))
    rows = [
        [
            kind,
            *(f"{tallies[name]['differing']} of {tallies[name]['compared']}" for name in circumstances),
            " / ".join(str(sum(each[name] for each in tallies.values())) for name in ("accepted", "drafted")),
        ]
        for kind, tallies in report.items()
    ]
    events = {name: max(tallies[name]["events"] for tallies in report.values()) for name in circumstances}
    occurred = [f"{events[name]:,}" if events[name] else "" for name in circumstances]
    return markdown(["drafts", *circumstances, "accepted / drafted"], [*rows, ["times that occurred", *occurred, ""]])


def with_spread(figure: Mapping[str, Any]) -> str:
    """A median, and the extremes of several rounds."""
    text = f"{figure['median']:.2f}"
    return text if len(figure["rounds"]) < 2 else f"{text} ({figure['low']:.2f} to {figure['high']:.2f})"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])
