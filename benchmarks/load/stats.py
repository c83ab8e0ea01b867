"""Figures of a run, computed from its records."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from benchmarks.load.client import Record

Spread = dict[str, float]

QUANTILES = {"p50": 50, "p90": 90, "p99": 99}
CURVE_POINTS = 201
TIMELINE_BINS = 120


def spread(values_s: Iterable[float]) -> Spread | None:
    """Mean, p50, p90, p99 and max in milliseconds of times in seconds; None of none.

    Percentiles interpolate linearly between the two nearest values.
    """
    values = np.fromiter(values_s, float) * 1000
    if not values.size:
        return None
    quantiles = np.percentile(values, list(QUANTILES.values()))
    figures = {"mean": values.mean(), **dict(zip(QUANTILES, quantiles, strict=True)), "max": values.max()}
    return {name: round(float(figure), 3) for name, figure in figures.items()} | {"count": float(values.size)}


def curve(values_s: Iterable[float]) -> list[float]:
    """The values, in milliseconds, at evenly spaced fractions from 0 to 1: a cumulative distribution to draw."""
    values = np.fromiter(values_s, float) * 1000
    points = np.quantile(values, np.linspace(0, 1, CURVE_POINTS)) if values.size else values
    return [round(float(point), 3) for point in points]


def is_good(record: Record, ttft_slo_ms: float | None, tpot_slo_ms: float | None) -> bool:
    """Answered, and within the limits given; an answer of one token has no TPOT to judge."""
    if record.error is not None:
        return False
    in_ttft = ttft_slo_ms is None or (record.ttft_s is not None and record.ttft_s * 1000 <= ttft_slo_ms)
    return in_ttft and (tpot_slo_ms is None or record.tpot_s is None or record.tpot_s * 1000 <= tpot_slo_ms)


def span_s(records: Sequence[Record]) -> float:
    """From the first request sent to the last ended."""
    if not records:
        return 0.0
    return max(record.ended_s for record in records) - min(record.sent_s for record in records)


def summarise(
    records: Sequence[Record],
    output_tokens: int,
    ttft_slo_ms: float | None = None,
    tpot_slo_ms: float | None = None,
) -> dict[str, Any]:
    """All figures of a run. Latencies and tokens are those of answered requests, rates are over the whole span."""
    answered = [record for record in records if record.error is None]
    failed = [record for record in records if record.error is not None]
    seconds = span_s(records) or float("inf")
    prompt_tokens = sum(record.prompt_tokens or 0 for record in answered)
    completion_tokens = sum(record.completion_tokens for record in answered)
    return {
        "requests": len(records),
        "answered": len(answered),
        "errors": dict(Counter(record.error for record in failed).most_common()),
        "error_messages": {record.error: record.message for record in reversed(failed)},
        "breaks": sum(record.breaks for record in records),
        "short_answers": sum(record.completion_tokens < output_tokens for record in answered),
        "duration_s": round(span_s(records), 3),
        "ttft_ms": spread(_known(record.ttft_s for record in answered)),
        **_by_turn(answered),
        "tpot_ms": spread(_known(record.tpot_s for record in answered)),
        "gap_ms": spread(itertools.chain.from_iterable(record.gaps_s for record in answered)),
        "latency_ms": spread(record.latency_s for record in answered),
        "late_ms": spread(record.late_s for record in records),
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "requests_per_s": round(len(answered) / seconds, 3),
        "input_tokens_per_s": round(prompt_tokens / seconds, 1),
        "output_tokens_per_s": round(completion_tokens / seconds, 1),
        "goodput": _goodput(records, seconds, ttft_slo_ms, tpot_slo_ms),
        "cached_fraction": cached_fraction(answered),
    }


def cached_fraction(records: Iterable[Record]) -> float | None:
    """Cached prompt tokens over prompt tokens; None where the server does not report them."""
    reported = [record for record in records if record.cached_tokens is not None and record.prompt_tokens]
    total = sum(record.prompt_tokens or 0 for record in reported)
    return round(sum(record.cached_tokens or 0 for record in reported) / total, 4) if total else None


def timeline(records: Sequence[Record]) -> dict[str, Any]:
    """Output tokens per second and requests under way, in at most TIMELINE_BINS steps of at least 0.1 s."""
    end_s = max((record.ended_s for record in records), default=0.0)
    bin_s = max(0.1, end_s / TIMELINE_BINS)
    edges = np.arange(0, end_s + 2 * bin_s, bin_s)
    tokens, running = np.zeros(len(edges) - 1), np.zeros(len(edges) - 1)
    for record in records:
        tokens += np.histogram(record.arrivals, edges, weights=_tokens_per_read(record))[0]
        overlap = np.minimum(edges[1:], record.ended_s) - np.maximum(edges[:-1], record.sent_s)
        running += np.maximum(overlap, 0) / bin_s
    return {
        "step_s": round(bin_s, 4),
        "output_tokens_per_s": [round(float(value) / bin_s, 1) for value in tokens],
        "running": [round(float(value), 2) for value in running],
    }


def _tokens_per_read(record: Record) -> Any:
    """Events of each read, scaled so that they sum to the tokens counted by the server."""
    events = np.asarray(record.events, float)
    return events * (record.completion_tokens / events.sum()) if events.size else events


def _by_turn(answered: Sequence[Record]) -> dict[str, Spread | None]:
    """TTFT of conversations' first turns and of later ones; nothing where there are no conversations."""
    if all(record.user is None for record in answered):
        return {}
    first = spread(_known(record.ttft_s for record in answered if record.turn == 0))
    later = spread(_known(record.ttft_s for record in answered if record.turn > 0))
    return {"first_turn_ttft_ms": first, "later_turn_ttft_ms": later}


def _goodput(
    records: Sequence[Record], seconds: float, ttft_slo_ms: float | None, tpot_slo_ms: float | None
) -> dict[str, float] | None:
    if ttft_slo_ms is None and tpot_slo_ms is None:
        return None
    good = sum(is_good(record, ttft_slo_ms, tpot_slo_ms) for record in records)
    return {"requests_per_s": round(good / seconds, 3), "fraction": round(good / max(1, len(records)), 4)}


def _known(values: Iterable[float | None]) -> Iterable[float]:
    return (value for value in values if value is not None)
