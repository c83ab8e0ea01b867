"""The report of a run: a JSON document, and tables on the terminal."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from benchmarks.load.client import Record
from benchmarks.load.options import BenchmarkError, Options
from benchmarks.load.runner import Outcome
from benchmarks.load.stats import curve, spread, summarise, timeline
from benchmarks.machine import describe, public_name, public_url

Report = dict[str, Any]

FORMAT = 1
BUSY_GENERATOR = 0.8
LATE_GENERATOR_MS = 20.0
FIGURES = ("mean", "p50", "p90", "p99", "max")
LATENCIES = {
    "ttft_ms": "time to first token",
    "first_turn_ttft_ms": "  first turn",
    "later_turn_ttft_ms": "  later turns",
    "tpot_ms": "time per output token",
    "gap_ms": "gap between tokens",
    "latency_ms": "end to end",
}


def build(options: Options, argv: Sequence[str], outcome: Outcome) -> Report:
    """Everything about a run, ready for JSON and without host names or absolute paths."""
    records = outcome.records
    return {
        "format": FORMAT,
        "label": options.label,
        **describe("benchmarks.serve", argv),
        "server": {"version": outcome.server_version, "model": public_name(outcome.model)},
        "options": _public_options(options),
        "interrupted": outcome.interrupted,
        "generator_cpu": round(outcome.cpu_fraction, 3),
        "summary": summarise(records, options.output_tokens, options.ttft_slo_ms, options.tpot_slo_ms),
        "curves": {
            "ttft_ms": curve(record.ttft_s for record in records if record.error is None and record.ttft_s is not None),
            "gap_ms": curve(itertools.chain.from_iterable(record.gaps_s for record in records if record.error is None)),
        },
        "timeline": timeline(records),
        "requests": [_row(record) for record in sorted(records, key=lambda record: record.sent_s)],
    }


def load(path: Path) -> Report:
    """Read a report written earlier; raises BenchmarkError with one line for any other file."""
    try:
        report = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise BenchmarkError(f"{path}: {getattr(error, 'strerror', None) or f'not JSON: {error}'}") from error
    if not isinstance(report, dict) or report.get("format") != FORMAT or "summary" not in report:
        raise BenchmarkError(f"{path}: not a report of benchmarks.serve")
    return report


def save(report: Report, path: Path) -> None:
    """Write `report` to `path`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(orjson.dumps(report) + b"\n")
    except OSError as error:
        raise BenchmarkError(f"cannot write {path}: {error.strerror}") from error


def show(report: Report, console: Console) -> None:
    """Print the latency table, the other figures, and the faults of the run, if any."""
    summary = report["summary"]
    table = Table(title=f"{report['label']}, milliseconds", title_justify="left")
    table.add_column("")
    for figure in FIGURES:
        table.add_column(figure, justify="right")

    for key, name in LATENCIES.items():
        if summary.get(key):
            table.add_row(name, *(f"{summary[key][figure]:,.2f}" for figure in FIGURES))

    console.print(table)
    figures = Table(show_header=False, box=None)
    for name, value in _figures(report):
        figures.add_row(name, value)

    console.print(figures)
    for line in warnings(report):
        console.print(line, style="yellow", highlight=False, markup=False)


def warnings(report: Report) -> list[str]:
    """Warnings for readers of the figures."""
    summary = report["summary"]
    lines = [
        f"{count} x {error}: {summary['error_messages'][error]}".rstrip(": ")
        for error, count in summary["errors"].items()
    ]
    if summary["short_answers"]:
        lines.append(
            f"{summary['short_answers']} answers were shorter than asked for: does the server obey ignore_eos?"
        )

    if summary.get("breaks"):
        lines.append(f"{summary['breaks']} connections broke, and their streams went on; see max gap")
    if report["generator_cpu"] > BUSY_GENERATOR:
        lines.append(f"the generator itself used {report['generator_cpu']:.0%} of a core: it may be the limit")
    if summary["late_ms"] and summary["late_ms"]["p99"] > LATE_GENERATOR_MS:
        lines.append(f"requests were sent late (p99 {summary['late_ms']['p99']:.0f} ms): the generator lacks CPU")
    if report["interrupted"]:
        lines.append("interrupted: only requests that had ended are counted")

    return lines


def _figures(report: Report) -> list[tuple[str, str]]:
    summary, options = report["summary"], report["options"]
    cached = summary["cached_fraction"]
    rows = [
        ("requests", f"{summary['answered']} answered of {summary['requests']} in {summary['duration_s']:.2f} s"),
        ("throughput", f"{summary['requests_per_s']:,.2f} requests/s"),
        ("", f"{summary['input_tokens_per_s']:,.0f} input tokens/s"),
        ("", f"{summary['output_tokens_per_s']:,.0f} output tokens/s"),
        ("cached prompt tokens", "not reported by the server" if cached is None else f"{cached:.1%}"),
    ]
    if goodput := summary["goodput"]:
        names = {"ttft_slo_ms": "TTFT", "tpot_slo_ms": "TPOT"}
        limits = ", ".join(f"{name} {options[key]:g} ms" for key, name in names.items() if options[key] is not None)
        rows.append(("goodput", f"{goodput['requests_per_s']:,.2f} requests/s, {goodput['fraction']:.1%} ({limits})"))
    return [*rows, ("generator", f"{report['generator_cpu']:.0%} of a core"), ("seed", str(options["seed"]))]


def _public_options(options: Options) -> dict[str, Any]:
    values = dataclasses.asdict(options)
    for name in ("json", "plot", "progress", "api_key_env"):
        del values[name]
    return values | {"url": public_url(options.url), "model": options.model and public_name(options.model)}


def _row(record: Record) -> dict[str, Any]:
    """One request, in milliseconds; the gaps are in the curve."""
    gaps = spread(record.gaps_s)
    row = {
        "index": record.index,
        "sent_ms": _ms(record.sent_s),
        "ttft_ms": _ms(record.ttft_s),
        "tpot_ms": _ms(record.tpot_s),
        "max_gap_ms": gaps and gaps["max"],
        "latency_ms": _ms(record.latency_s),
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "cached_tokens": record.cached_tokens,
        "error": record.error,
    }
    if record.breaks:
        row["breaks"] = record.breaks
    return row if record.user is None else row | {"user": record.user, "turn": record.turn}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
