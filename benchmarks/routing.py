"""Routers beside each other on one trace: shares of requests within the objectives, by size of the cluster.

    python -m benchmarks.routing TRACE [--clusters 4 8 6:2] [--routers directory lmetric sglang] [--requests 5000]
        [--jitter 0.1] [--seed 0] [--capacity-blocks 2500] [--policy lru] [--json FILE]

Each cell is a replay (`benchmarks.replay`) at its constant rates and objectives. A cluster is a number of mixed workers
or `P:D`. The others' rules are those of `benchmarks.replaying.published`. With `lru` a replay takes a quarter of the
time that it takes with `adaptive`, and the order of the routers was the same.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from benchmarks.replay import constant_speeds, parse_policy, parse_roles, replay
from benchmarks.replaying.report import summarise
from benchmarks.replaying.routers import ROUTERS
from benchmarks.replaying.traces import ReplayError, TraceRequest, read_trace
from raydix.engine.core.types import Role

TTFT_SLO_S = 5.0
TPOT_SLO_S = 0.1


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2 for a mistake of the user's."""
    options = _parser().parse_args(arguments)
    try:
        trace = read_trace(options.trace, options.requests)
        clusters = {name: _roles(name) for name in options.clusters}
        rows = [_row(trace, router, clusters, options) for router in options.routers]
    except ReplayError as error:
        print(f"routing: {error}", file=sys.stderr)
        return 2
    if options.json is not None:
        described = describe("benchmarks.routing", sys.argv[1:] if arguments is None else list(arguments), ("raydix",))
        options.json.write_text(json.dumps({**described, "routers": rows}, indent=2) + "\n")
    return 0


def _row(
    trace: Sequence[TraceRequest], router: str, clusters: dict[str, list[Role]], options: argparse.Namespace
) -> dict[str, Any]:
    """One router's figures for each cluster, printed as they come."""
    figures: dict[str, Any] = {}
    policy = parse_policy(options.policy)
    print(f"{router:<17}", end="", flush=True)

    for name, roles in clusters.items():
        jobs, workers = replay(
            trace, roles, options.capacity_blocks, policy, router, constant_speeds(), options.jitter, options.seed
        )
        result = summarise(jobs, workers, TTFT_SLO_S, TPOT_SLO_S)
        figures[name] = {
            "goodput_share": round(result["goodput_share"], 4),
            "hit_rate": round(result["hit_rate"], 4),
            "ttft_ms": {quantile: round(result["ttft_ms"][quantile]) for quantile in ("p50", "p90", "p99")},
        }
        print(
            f"  {name:>5}: {result['goodput_share']:6.1%}, hits {result['hit_rate']:5.1%}, "
            f"p99 {result['ttft_ms']['p99'] / 1000:5.1f} s",
            end="",
            flush=True,
        )

    print()
    return {"router": router, "clusters": figures}


def _roles(name: str) -> list[Role]:
    if ":" in name:
        return parse_roles(0, name)
    if not name.isdecimal():
        raise ReplayError(f"--clusters takes numbers of workers and P:D, not {name!r}")
    return parse_roles(int(name), None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.routing", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("trace", type=Path, help="Mooncake's JSON lines or Azure's CSV")
    parser.add_argument("--clusters", nargs="+", default=["4", "8"], help="numbers of mixed workers, or P:D")
    parser.add_argument("--routers", nargs="+", default=list(ROUTERS), help=", ".join(ROUTERS))
    parser.add_argument("--requests", type=int, default=5000, help="replay only the first so many")
    parser.add_argument(
        "--jitter", type=float, default=0.1, help="each worker is off by up to this share, its fit, too"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the jitter")
    parser.add_argument("--capacity-blocks", type=int, default=2500, help="blocks of 512 tokens in each worker's pool")
    parser.add_argument("--policy", default="lru", help="eviction")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    return parser


if __name__ == "__main__":
    sys.exit(main())
