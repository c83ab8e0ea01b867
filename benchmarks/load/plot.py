"""One figure for one or several reports: TTFT and gap distributions, and output over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.load.options import BenchmarkError
from benchmarks.load.report import Report

CURVES = {"ttft_ms": "Time to first token (ms)", "gap_ms": "Gap between tokens (ms)"}


def draw(reports: Sequence[Report], path: Path) -> None:
    """Write the figure to `path`; its suffix chooses the format."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter
    except ImportError as error:
        raise BenchmarkError("plots need matplotlib: pip install matplotlib") from error

    figure = Figure(figsize=(12, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2)

    for column, (key, name) in enumerate(CURVES.items()):
        axes = figure.add_subplot(grid[0, column])
        _distribution(axes, reports, key, name)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))

    _timeline(figure.add_subplot(grid[1, :]), reports)
    figure.suptitle(" / ".join(report["label"] for report in reports))

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"cannot draw {path}: {error}") from error


def _distribution(axes: Any, reports: Sequence[Report], key: str, name: str) -> None:
    """Cumulative share of requests (or gaps) at most this long, on a logarithmic scale."""
    for report in reports:
        values = np.maximum(report["curves"][key], 1e-3)
        if values.size:
            axes.plot(values, np.linspace(0, 100, values.size), label=report["label"])
    axes.set(xscale="log", xlabel=name, ylabel="share (%)", ylim=(0, 101))
    for share in (50, 90, 99):
        axes.axhline(share, color="0.8", linewidth=0.7, zorder=0)
    _finish(axes, len(reports))


def _timeline(axes: Any, reports: Sequence[Report]) -> None:
    """Output tokens per second; for a single report also the requests under way."""
    for report in reports:
        line = report["timeline"]
        times = np.arange(len(line["output_tokens_per_s"])) * line["step_s"]
        axes.step(times, line["output_tokens_per_s"], where="post", label=report["label"])
    axes.set(xlabel="time (s)", ylabel="output tokens/s", ylim=(0, None), xlim=(0, None))
    if len(reports) == 1:
        other = axes.twinx()
        other.step(times, line["running"], where="post", color="C1", linewidth=1)
        other.set_ylabel("requests under way", color="C1")
        other.set_ylim(0, None)
        other.spines["top"].set_visible(False)
    _finish(axes, len(reports))


def _finish(axes: Any, num_reports: int) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    if num_reports > 1 and axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
