"""Time of sampling on a CPU: rows of a made-up model's logits, by what is asked for.

`python -m benchmarks.sampling [--rows N] [--vocabulary N]` needs torch alone. A line has the shortest and the median
time of a call in milliseconds, and how much the shortest exceeds that of greedy rows, which draw nothing.
"""

import argparse
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from raydix.kernels.sample import Controls, sample

CASES: tuple[tuple[str, dict[str, float]], ...] = (
    ("greedy", {"temperature": 0.0}),
    ("temperature 0.7", {"temperature": 0.7}),
    ("temperature 1", {"temperature": 1.0}),
    ("temperature 2", {"temperature": 2.0}),
    ("top-k 50", {"temperature": 0.8, "top_k": 50}),
    ("top-p 0.9", {"temperature": 0.8, "top_p": 0.9}),
    ("min-p 0.05", {"temperature": 0.8, "min_p": 0.05}),
)


def controls(rows: int, values: dict[str, float]) -> Controls:
    """Equal rules for all rows, a seed for each."""
    neutral = Controls.neutral(rows)
    columns = {name: torch.full_like(getattr(neutral, name), value) for name, value in values.items()}
    return neutral._replace(**columns, seed=torch.arange(rows))


def times_ms(logits: Tensor, given: Controls, calls: int) -> list[float]:
    """Sorted times of calls at successive positions."""
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        sample(logits, given)
        times.append((time.perf_counter() - started) * 1e3)
        given.position.add_(1)
    return sorted(times)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="benchmarks.sampling", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--calls", type=int, default=200)
    arguments = parser.parse_args(argv)
    torch.manual_seed(0)
    logits = (torch.randn(arguments.rows, arguments.vocabulary) * 3).bfloat16()
    greedy_ms: float | None = None
    print(f"{'':<18}{'shortest':>10}{'median':>10}{'beyond greedy':>15}")
    for name, values in CASES:
        times = times_ms(logits, controls(arguments.rows, values), arguments.calls)
        greedy_ms = times[0] if greedy_ms is None else greedy_ms
        print(f"{name:<18}{times[0]:>10.3f}{times[len(times) // 2]:>10.3f}{times[0] - greedy_ms:>15.3f}")


if __name__ == "__main__":
    main()
