"""Results of a replay: figures for JSON and the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from benchmarks.replaying.worker import ReplayedRequest, ReplayWorker

QUANTILES = {"p50": 50, "p90": 90, "p99": 99}


def summarise(
    jobs: Sequence[ReplayedRequest], workers: Sequence[ReplayWorker], ttft_slo_s: float, tpot_slo_s: float
) -> dict[str, Any]:
    """Hits, latencies, goodput and balance of a replay."""
    done = [job for job in jobs if job.finished_s is not None]
    ttfts = {job.number: _ttft_s(job) for job in done}
    tpots = {job.number: _tpot_s(job) for job in done if job.request.num_output_tokens > 1}
    good = [n for n, ttft in ttfts.items() if ttft <= ttft_slo_s and tpots.get(n, 0.0) <= tpot_slo_s]
    duration_s = max((job.finished_s or 0.0 for job in done), default=0.0)
    busy = [worker.busy_s for worker in workers]
    busy = [seconds for seconds, worker in zip(busy, workers, strict=True) if worker.role != "decode"] or busy
    num_blocks = sum(len(job.request.hashes) for job in done)
    return {
        "requests": len(jobs),
        "refused": len(jobs) - len(done),
        "hit_rate": sum(job.num_hits for job in done) / max(1, num_blocks),
        "imported": sum(job.num_imported for job in done) / max(1, num_blocks),
        "ttft_ms": spread(ttfts.values()),
        "tpot_ms": spread(tpots.values()),
        "goodput_share": len(good) / max(1, len(jobs)),
        "goodput_per_s": len(good) / duration_s if duration_s else 0.0,
        "imbalance": max(busy) / (sum(busy) / len(busy)) if sum(busy) else 1.0,
        "utilisation": sum(busy) / len(busy) / duration_s if duration_s else 0.0,
        "busy_s": [round(seconds, 1) for seconds in sorted(busy, reverse=True)],
    }


def text(result: dict[str, Any], bounds: dict[str, float]) -> str:
    """Format the figures for a reader."""
    lines = [
        f"requests              {result['requests']:,}, of which {result['refused']:,} were too long for a pool",
        f"prompt blocks hit     {result['hit_rate']:.1%}, {result['imported']:.1%} imported",
    ]
    if bounds:
        lines.append("  one shared cache    " + ", ".join(f"{name} {rate:.1%}" for name, rate in bounds.items()))

    for key, name in (("ttft_ms", "time to first token"), ("tpot_ms", "time per token")):
        if result[key]:
            figures = ", ".join(f"{q} {result[key][q]:,.0f}" for q in ("p50", "p90", "p99"))
            lines.append(f"{name:<21} {figures} ms")

    share, per_s = result["goodput_share"], result["goodput_per_s"]
    lines += [
        f"goodput               {share:.1%} within the objectives, {per_s:.2f}/s",
        f"busiest worker        {result['imbalance']:.2f} times the mean of {result['utilisation']:.0%}",
    ]
    return "\n".join(lines)


def spread(values_s: Iterable[float]) -> dict[str, float] | None:
    """Mean, p50, p90, p99 and max in milliseconds of times in seconds; None of none.

    Percentiles interpolate linearly between the two nearest values.
    """
    values = np.fromiter(values_s, float) * 1000
    if not values.size:
        return None
    quantiles = np.percentile(values, list(QUANTILES.values()))
    figures = {"mean": values.mean(), **dict(zip(QUANTILES, quantiles, strict=True)), "max": values.max()}
    return {name: round(float(figure), 3) for name, figure in figures.items()} | {"count": float(values.size)}


def _ttft_s(job: ReplayedRequest) -> float:
    assert job.first_token_s is not None
    return job.first_token_s - job.request.arrival_s


def _tpot_s(job: ReplayedRequest) -> float:
    assert job.first_token_s is not None and job.finished_s is not None
    return (job.finished_s - job.first_token_s) / (job.request.num_output_tokens - 1)
