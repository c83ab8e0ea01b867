"""Sessions of coding agents that do not all fit into the workers' pools: steps per hour and times to first token.

    python -m benchmarks.agents TRACE [--over 1 2 3 5] [--workers 1 4] [--rules lru adaptive turns] [--hours 1]
        [--capacity-blocks 25000] [--seed 0] [--json FILE]

A closed loop (`benchmarks.replaying.agents`) in virtual time, with the engine's own directory, turns of sessions, pools
and eviction. `--over` is the sum of the sessions' mean prompts over the blocks of all pools. Clients name no sessions.

| rule | |
|---|---|
| `lru`, `adaptive` | every request is admitted at once; the eviction of `cache.eviction` |
| `turns`, `turns-lru` | sessions take turns (`raydix.engine.core.manager.turns`), with `adaptive` or with `lru` |

The first token counts from the call on, with the time for which the session paused. The first `WARM_UP_S` do not count.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from benchmarks.command import begin, command_parser
from benchmarks.replay import TOKEN_BUDGET
from benchmarks.replaying.agents import Agents, AgentStep, AgentTrace, read_agents
from benchmarks.replaying.cluster import Cluster
from benchmarks.replaying.routers import Managed
from benchmarks.replaying.speeds import ConstantSpeeds
from benchmarks.replaying.traces import ReplayError
from benchmarks.replaying.worker import ReplayedRequest, ReplayWorker
from raydix.engine.core.eviction.policies import EvictionPolicy, make_queue
from raydix.engine.core.manager.turns import NO_TURNS, TurnLimits
from raydix.engine.core.types import Role
from raydix.engine.core.worker.block_pool import BlockPool

WARM_UP_S = 1200.0
SPEEDS = ConstantSpeeds(
    prefill_tokens_per_s=20_000.0, step_s=0.02, token_budget=TOKEN_BUDGET, handover_blocks_per_s=1_000.0
)
RULES = {
    "lru": (EvictionPolicy.LRU, NO_TURNS),
    "adaptive": (EvictionPolicy.ADAPTIVE, NO_TURNS),
    "turns": (EvictionPolicy.ADAPTIVE, TurnLimits()),
    "turns-lru": (EvictionPolicy.LRU, TurnLimits()),
}


class RuleRun:
    """One rule with one number of agents."""

    def __init__(self, trace: AgentTrace, num_workers: int, capacity: int, rule: str, seed: int) -> None:
        policy, turns = RULES[rule]
        workers = [
            ReplayWorker(
                f"worker-{number}",
                Role.MIXED,
                BlockPool(capacity, trace.block_size, make_queue(policy, num_blocks=capacity)),
                SPEEDS,
                protects=True,
            )
            for number in range(num_workers)
        ]
        self._cluster = Cluster(workers, Managed(workers, SPEEDS, turns=turns), on_end=self._ended)
        self._agents = Agents(trace, self._submit, Random(seed))
        self._steps: dict[int, AgentStep] = {}
        self.ended: list[tuple[int, ReplayedRequest]] = []
        """Slot and job of the calls that have ended."""

    def run(self, num_slots: int, end_s: float) -> None:
        """Let so many agents work until a time."""
        self._agents.start(num_slots)
        self._cluster.run_until(end_s)

    def _submit(self, step: AgentStep) -> None:
        job = ReplayedRequest(len(self.ended) + len(self._steps), step.request)
        self._steps[job.number] = step
        self._cluster.submit(job)

    def _ended(self, job: ReplayedRequest, now: float) -> None:
        step = self._steps.pop(job.number)
        self.ended.append((step.slot, job))
        step.go_on(now)


def figures(trace: AgentTrace, num_workers: int, over: float, rule: str, options: argparse.Namespace) -> dict[str, Any]:
    """Steps per hour, times to first token, hits, and the steps of the agents that made the fewest."""
    num_slots = max(1, round(over * num_workers * options.capacity_blocks / trace.mean_footprint))
    run = RuleRun(trace=trace, num_workers=num_workers, capacity=options.capacity_blocks, rule=rule, seed=options.seed)
    run.run(num_slots, WARM_UP_S + 3600 * options.hours)

    # The pools are empty at first, and every rule is as good as another until they are full.
    counted = [(slot, job) for slot, job in run.ended if (job.finished_s or 0.0) >= WARM_UP_S]
    ttfts = [(job.first_token_s or 0.0) - job.request.arrival_s for _, job in counted]
    by_slot = Counter(slot for slot, _ in counted)
    quantiles = np.percentile(ttfts, [50, 90, 99, 100]) if ttfts else np.full(4, np.nan)
    return {
        "workers": num_workers,
        "over": over,
        "sessions": num_slots,
        "rule": rule,
        "steps_per_h": len(counted) / options.hours,
        "ttft_s": {
            "mean": round(float(np.mean(ttfts)), 2),
            **{name: round(float(s), 2) for name, s in zip(("p50", "p90", "p99", "max"), quantiles, strict=True)},
        },
        "hit_rate": sum(job.num_hits for _, job in counted) / max(1, sum(len(j.request.hashes) for _, j in counted)),
        "fewest_steps": float(np.percentile([by_slot[slot] for slot in range(num_slots)], 10)),
    }


def text(row: dict[str, Any]) -> str:
    """One line of the table."""
    ttft = "".join(f"{row['ttft_s'][name]:8.1f}" for name in ("mean", "p50", "p90", "p99", "max"))
    return (
        f"{row['workers']:>7}{row['over']:>6g}{row['sessions']:>10}  {row['rule']:<10}"
        f"{row['steps_per_h']:>9,.0f}{ttft}{row['hit_rate']:>8.1%}{row['fewest_steps']:>10.1f}"
    )


HEAD = f"{'workers':>7}{'over':>6}{'sessions':>10}  {'rule':<10}{'steps/h':>9}" + "".join(
    f"{name:>8}" for name in ("mean s", "p50 s", "p90 s", "p99 s", "max s", "hits", "p10 steps")
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2 for a mistake of the user's."""
    options, output = begin(_parser(), arguments, ("raydix",))
    rows = []
    try:
        trace = read_agents(options.trace)
    except ReplayError as error:
        print(f"agents: {error}", file=sys.stderr)
        return 2
    print(HEAD)
    for num_workers in options.workers:
        for over in options.over:
            for rule in options.rules:
                rows.append(figures(trace, num_workers, over, rule, options))
                print(text(rows[-1]), flush=True)
    output.write({"runs": rows})
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("benchmarks.agents", __doc__)
    parser.add_argument("trace", type=Path, help="sessions of agents, compressed JSON lines")
    parser.add_argument("--over", type=float, nargs="+", default=[1.0, 2.0, 3.0, 5.0], help="times that pools hold")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4], help="mixed workers")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=[*RULES])
    parser.add_argument("--hours", type=float, default=1.0, help="virtual hours that count")
    parser.add_argument("--capacity-blocks", type=int, default=25_000, help="blocks in each worker's pool")
    parser.add_argument("--seed", type=int, default=0, help="of the order of sessions and their first calls")
    return parser


if __name__ == "__main__":
    sys.exit(main())
