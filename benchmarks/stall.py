"""Pauses of decoding streams while a long prompt is prefilled beside them, for several token budgets.

    python -m benchmarks.stall [--budgets 128 512 2048] [--streams 8] [--prompt 2048] [--drafts] [--json FILE]

One engine in this process, no Ray, no HTTP: streams decode, the prompt arrives, and the gaps between the streams'
tokens are recorded until the prompt has its first token.
"""

import random
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.command import begin, command_parser
from benchmarks.stepping import make_engine, whole
from raydix.engine.core.costs import CostFit
from raydix.engine.core.settings import DraftLimits
from raydix.engine.model.engine import Engine
from raydix.engine.model.sources import DEFAULT_MODEL


def measure(engine: Engine, num_streams: int, prompt_len: int) -> dict[str, float]:
    """Gaps in milliseconds without and with the prompt, and the prompt's time to first token in seconds."""
    generator = random.Random(time.time_ns())
    for index in range(num_streams):
        prompt = [generator.randrange(100, 40_000) for _ in range(64)]
        engine.submit(whole(f"stream {index}", prompt, 4000), time.monotonic())

    for _ in range(10):
        engine.step(time.monotonic())

    costs = CostFit(engine.first_costs)
    quiet = [_step_ms(engine, costs) for _ in range(20)]
    arrived = time.perf_counter()
    prompt = [generator.randrange(100, 40_000) for _ in range(prompt_len)]
    engine.submit(whole("prompt", prompt, 1), time.monotonic())
    gaps = []
    while engine.scheduler.requests.get("prompt") is not None:
        gaps.append(_step_ms(engine, costs))

    ttft_s = time.perf_counter() - arrived
    engine.abort([f"stream {index}" for index in range(num_streams)], 0.0)
    return {
        "quiet_gap_ms": sorted(quiet)[len(quiet) // 2],
        "median_gap_ms": sorted(gaps)[len(gaps) // 2],
        "longest_gap_ms": max(gaps),
        "prompt_ttft_s": ttft_s,
    }


def _step_ms(engine: Engine, costs: CostFit) -> float:
    """Run a step; the engine learns its costs as in a worker."""
    started = time.perf_counter()
    result = engine.step(time.monotonic())
    step_s = time.perf_counter() - started
    if result is not None:
        costs.step(result.shape, step_s)
        engine.scheduler.learn_costs(costs.costs())
    return step_s * 1e3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("benchmarks.stall", __doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--budgets", type=int, nargs="+", default=[128, 512, 2048], help="token budgets to compare")
    parser.add_argument("--streams", type=int, default=8, help="streams that decode")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the prompt that arrives")
    parser.add_argument("--drafts", action="store_true", help="the streams, whose texts soon repeat, have drafts")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved repetitions; the medians are reported")
    options, output = begin(parser, arguments)

    engines = {
        budget: make_engine(
            options.model,
            token_budget=budget,
            max_requests=32,
            device="auto",
            pool_gib=0.5,
            drafts=DraftLimits() if options.drafts else None,
        )
        for budget in options.budgets
    }
    rounds: dict[int, list[dict[str, float]]] = {budget: [] for budget in options.budgets}
    for _ in range(options.rounds):
        for budget, engine in engines.items():
            rounds[budget].append(measure(engine, options.streams, options.prompt))

    result: dict[str, Any] = {
        "streams": options.streams,
        "prompt": options.prompt,
        "budgets": {str(budget): _medians(runs) for budget, runs in rounds.items()},
    }
    print(f"{options.streams} streams decode, a prompt of {options.prompt} tokens arrives (milliseconds)")
    print(f"{'budget':>8} {'quiet gap':>10} {'median gap':>11} {'longest gap':>12} {'prompt TTFT':>12}")

    for budget, figures in result["budgets"].items():
        print(
            f"{budget:>8} {figures['quiet_gap_ms']:>10.1f} {figures['median_gap_ms']:>11.1f} "
            f"{figures['longest_gap_ms']:>12.1f} {figures['prompt_ttft_s'] * 1e3:>12.0f}"
        )

    output.write(result)
    return 0


def _medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {key: sorted(run[key] for run in runs)[len(runs) // 2] for key in runs[0]}


if __name__ == "__main__":
    sys.exit(main())
