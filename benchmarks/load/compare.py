"""Several reports side by side, each as a ratio to the first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.load.report import LATENCIES, Report

# Options that may differ between runs that measure the same thing.
OWN_OPTIONS = {"url", "seed", "label", "model", "allow_remote", "timeout", "warmup"}
RATES = {
    "requests_per_s": "requests/s",
    "input_tokens_per_s": "input tokens/s",
    "output_tokens_per_s": "output tokens/s",
}


def ratio(base: float | None, other: float | None) -> float | None:
    """`other` / `base`; None where either is missing or there is nothing to divide by."""
    return other / base if base and other is not None else None


def metrics(summary: dict[str, Any]) -> Iterator[tuple[str, float | None, bool]]:
    """Name, value and whether more is better, of all figures worth comparing."""
    for key, name in LATENCIES.items():
        for figure in ("p50", "p90", "p99", "max"):
            yield f"{name.strip()} {figure} (ms)", (summary.get(key) or {}).get(figure), False
    for key, name in RATES.items():
        yield name, summary[key], True
    yield "goodput requests/s", (summary["goodput"] or {}).get("requests_per_s"), True
    yield "cached fraction", summary["cached_fraction"], True


def differences(reports: Sequence[Report]) -> list[str]:
    """Options in which the runs differ although the comparison assumes them equal."""
    names = sorted(reports[0]["options"].keys() - OWN_OPTIONS)
    lines = []
    for name in names:
        values = [report["options"].get(name) for report in reports]
        if any(value != values[0] for value in values):
            lines.append(f"{name} differs: {' / '.join(map(str, values))}")
    return lines


def show(reports: Sequence[Report], console: Console) -> None:
    """Print one row per figure: values, ratios to the first report, green where better by more than 2 %."""
    table = Table()
    table.add_column("")
    for report in reports:
        table.add_column(report["label"], justify="right")

    for report in reports[1:]:
        table.add_column(f"{report['label']} / {reports[0]['label']}", justify="right")

    for rows in zip(*(metrics(report["summary"]) for report in reports), strict=True):
        name, base, more_is_better = rows[0]
        values = [value for _, value, _ in rows]
        if any(value is not None for value in values):
            ratios = [_coloured(ratio(base, value), more_is_better) for value in values[1:]]
            table.add_row(name, *("-" if value is None else f"{value:,.2f}" for value in values), *ratios)

    console.print(table)
    for line in differences(reports):
        console.print(line, style="yellow", highlight=False, markup=False)


def _coloured(value: float | None, more_is_better: bool) -> str:
    if value is None:
        return "-"
    gain = value if more_is_better else 1 / value if value else float("inf")
    colour = "green" if gain > 1.02 else "red" if gain < 0.98 else "default"
    return f"[{colour}]{value:.2f}x[/]"
