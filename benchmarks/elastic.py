"""Elastic workers beside fixed splits: goodput per worker-second.

    python -m benchmarks.elastic TRACE [TRACE ...] [--day 0.25] [--faster 4] [--most 8] [--fixed 4 6 8 3:1 6:2]
        [--costs FILE] [--ttft-slo-ms 2000] [--tpot-slo-ms 50] [--json FILE]

Several traces are played one after the other. `--faster 4` plays a trace in a quarter of the time; with several numbers
each trace has its own. `--day 0.25` gives each trace the curve of a day, whose lowest rate is a quarter of the highest:
arrivals keep their order, and the day is as long as the trace, so the load changes far quicker than on a real day.
Workers are those of `benchmarks.replay`, behind the server's own directory:

| row | |
|---|---|
| `8`, `6:2` | mixed workers; prefill and decode workers |
| `elastic 8` | so many elastic workers, whose duties follow the load |
| `elastic 1-8` | elastic workers, whose number follows the load, too; a worker takes 30 s to start |

Where numbers follow the load, all workers are there at the beginning. The last lines say for each elastic row which
fixed cluster needs the least worker-seconds for as much goodput, and how many of them the row saves.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.command import begin, command_parser
from benchmarks.replay import add_machine, parse_policy, parse_roles, speeds_of
from benchmarks.replaying.cluster import Cluster
from benchmarks.replaying.fleets import Fixed, Planned, ReplayedFleet
from benchmarks.replaying.report import summarise
from benchmarks.replaying.routers import Managed
from benchmarks.replaying.speeds import Speeds
from benchmarks.replaying.traces import MOONCAKE_BLOCK_TOKENS, ReplayError, TraceRequest, read_trace
from benchmarks.replaying.worker import ReplayWorker
from raydix.engine.core.eviction.policies import make_queue
from raydix.engine.core.objectives import Objectives
from raydix.engine.core.types import Role
from raydix.engine.core.worker.block_pool import BlockPool

DAY_STEPS = 2000
ELASTIC = "elastic"


@dataclass(frozen=True, slots=True)
class Machines:
    """The workers of all rows, and the objectives."""

    speeds: Speeds
    capacity_blocks: int
    policy: str
    objectives: Objectives
    most: int

    def maker(self) -> Callable[[Role], ReplayWorker]:
        """Makes workers with names of their own."""
        numbers = count()
        policy, blocks = parse_policy(self.policy), self.capacity_blocks

        def make(role: Role) -> ReplayWorker:
            pool = BlockPool(blocks, MOONCAKE_BLOCK_TOKENS, make_queue(policy, num_blocks=blocks))
            return ReplayWorker(f"{role}-{next(numbers)}", role, pool, self.speeds)

        return make


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2 for a mistake of the user's."""
    options, output = begin(_parser(), arguments, ("raydix",))
    try:
        trace = joined(
            [
                shaped(read_trace(path, options.requests), faster, options.day)
                for path, faster in zip(options.traces, _one_each(options.faster, options.traces), strict=True)
            ]
        )
        objectives = Objectives(options.ttft_slo_ms / 1000, options.tpot_slo_ms / 1000)
        machines = Machines(speeds_of(options), options.capacity_blocks, options.policy, objectives, options.most)
        names = [*options.fixed, f"{ELASTIC} {options.most}", f"{ELASTIC} 1-{options.most}"]
        print(f"{len(trace):,} requests in {trace[-1].arrival_s:,.0f} s")
        rows = [_printed(run(trace, name, machines)) for name in (options.only or names)]
        if any(map(_is_fixed, rows)):
            for row in rows:
                if not _is_fixed(row):
                    print(_compared(row, rows))
    except ReplayError as error:
        print(f"elastic: {error}", file=sys.stderr)
        return 2
    output.write({"rows": rows})
    return 0


def run(trace: Sequence[TraceRequest], name: str, machines: Machines) -> dict[str, Any]:
    """The figures of one row.

    Raises:
        ReplayError: there is no such row.
    """
    fleet, roles = _fleet(name, machines)
    workers = fleet.first(roles)
    router = Managed(workers, machines.speeds, objectives=machines.objectives)
    jobs = list(Cluster(workers, router, fleet.look).run(trace))
    end_s = max(job.finished_s or 0.0 for job in jobs)
    ttft_s, tpot_s = machines.objectives.ttft_s, machines.objectives.tpot_s
    assert ttft_s is not None and tpot_s is not None
    result = summarise(jobs, fleet.every, ttft_s, tpot_s)
    worker_s = fleet.worker_seconds(end_s)
    num_good = result["goodput_share"] * len(jobs)
    return {
        "workers": name,
        "goodput_share": round(result["goodput_share"], 4),
        "worker_seconds": round(worker_s),
        "mean_workers": round(worker_s / end_s, 2),
        "goodput_per_worker_second": round(num_good / worker_s, 4),
        "hit_rate": round(result["hit_rate"], 4),
        "ttft_ms": {quantile: round(result["ttft_ms"][quantile]) for quantile in ("p50", "p90", "p99")},
        "tpot_ms": {quantile: round(result["tpot_ms"][quantile], 1) for quantile in ("p50", "p90", "p99")},
    }


def joined(traces: Sequence[Sequence[TraceRequest]]) -> list[TraceRequest]:
    """The traces one after the other."""
    whole: list[TraceRequest] = []
    for trace in traces:
        start_s = whole[-1].arrival_s if whole else 0.0
        whole += [replace(request, arrival_s=start_s + request.arrival_s) for request in trace]
    return whole


def shaped(trace: Sequence[TraceRequest], faster: float, day: float | None) -> Sequence[TraceRequest]:
    """The trace played faster, and with the curve of a day."""
    if faster <= 0 or (day is not None and not 0 < day <= 1):
        raise ReplayError("--faster must be above 0, and --day above 0 and at most 1")
    played = [replace(request, arrival_s=request.arrival_s / faster) for request in trace]
    return played if day is None else as_day(played, day)


def cheapest(row: Mapping[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The fixed cluster among `rows` of the least worker-seconds for the goodput of `row`; None if none has as much."""
    enough = [each for each in rows if _is_fixed(each) and each["goodput_share"] >= row["goodput_share"]]
    return min(enough, key=lambda each: int(each["worker_seconds"]), default=None)


def as_day(trace: Sequence[TraceRequest], lowest: float) -> list[TraceRequest]:
    """The trace with a rate that goes from `lowest` of the highest at midnight to the highest at noon and back."""
    length_s = trace[-1].arrival_s
    rates = [
        (1 + lowest) / 2 - (1 - lowest) / 2 * math.cos(2 * math.pi * step / DAY_STEPS) for step in range(DAY_STEPS)
    ]
    total, passed, step = sum(rates), 0.0, 0
    warped = []
    for request in trace:
        due = request.arrival_s / length_s * total if length_s else 0.0
        while step < DAY_STEPS - 1 and passed + rates[step] < due:
            passed += rates[step]
            step += 1
        within = min(1.0, (due - passed) / rates[step])
        warped.append(replace(request, arrival_s=(step + within) / DAY_STEPS * length_s))
    return warped


def _fleet(name: str, machines: Machines) -> tuple[ReplayedFleet, list[Role]]:
    kind, _, numbers = name.partition(" ")
    make = machines.maker()
    if kind == ELASTIC and "-" in numbers:
        return Planned(make, 1, machines.most), [Role.ELASTIC] * machines.most
    if kind == ELASTIC and numbers.isdecimal():
        return Fixed(make), [Role.ELASTIC] * int(numbers)
    if ":" in name:
        return Fixed(make), parse_roles(0, name)
    if name.isdecimal():
        return Fixed(make), parse_roles(int(name), None)
    raise ReplayError(f"a number of workers, P:D, '{ELASTIC} N' or '{ELASTIC} 1-N', not {name!r}")


def _one_each(factors: Sequence[float], traces: Sequence[Path]) -> Sequence[float]:
    if len(factors) not in (1, len(traces)):
        raise ReplayError("--faster takes one number, or one for each trace")
    return factors if len(factors) == len(traces) else list(factors) * len(traces)


def _is_fixed(row: Mapping[str, Any]) -> bool:
    return not str(row["workers"]).startswith(ELASTIC)


def _compared(row: Mapping[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """How many worker-seconds a row saves beside the cheapest fixed cluster with as much goodput."""
    fixed = cheapest(row, rows)
    if fixed is None:
        return f"{row['workers']:<13} has more goodput than each fixed cluster of this run"
    more = row["worker_seconds"] / fixed["worker_seconds"] - 1
    word = "more" if more > 0 else "fewer"
    return f"{row['workers']:<13} needs {abs(more):.1%} {word} worker-s than {fixed['workers']}, for as much goodput"


def _printed(row: dict[str, Any]) -> dict[str, Any]:
    print(
        f"{row['workers']:<13} {row['goodput_share']:6.1%} good, {row['worker_seconds']:>8,} worker-s "
        f"({row['mean_workers']:5.2f}), {row['goodput_per_worker_second']:.4f} good/worker-s, "
        f"hits {row['hit_rate']:5.1%}, TTFT p50 {row['ttft_ms']['p50']:,} p99 {row['ttft_ms']['p99']:,} ms, "
        f"TPOT p50 {row['tpot_ms']['p50']} p99 {row['tpot_ms']['p99']} ms",
        flush=True,
    )
    return row


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("benchmarks.elastic", __doc__)
    parser.add_argument("traces", type=Path, nargs="+", help="Mooncake's JSON lines or Azure's CSV")
    parser.add_argument("--requests", type=int, help="replay only the first so many of each trace")
    parser.add_argument("--day", type=float, help="curve of a day: lowest rate as a share of the highest")
    parser.add_argument("--faster", type=float, nargs="+", default=[1.0], help="play each trace so many times as fast")
    parser.add_argument("--most", type=int, default=8, help="limit of the elastic workers")
    parser.add_argument("--fixed", nargs="*", default=["4", "8", "6:2"], help="fixed clusters to compare with")
    parser.add_argument("--only", nargs="*", help="only these rows, by name")
    parser.add_argument("--capacity-blocks", type=int, default=2500, help="blocks of 512 tokens in each worker's pool")
    parser.add_argument("--policy", default="lru", help="eviction")
    add_machine(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
