"""Replay a trace in virtual time through the engine's own placement, pools and eviction.

    python -m benchmarks.replay TRACE [--workers 8] [--roles P:D] [--capacity-blocks 2500] [--policy adaptive]
        [--router directory] [--costs FILE] [--json FILE]
    python -m benchmarks.replay TRACE --shared-cache 1000 10000 [--json FILE]

What is real: `Directory.admit` and its cost model, `BlockPool` and the eviction queue of every worker. What is
pretended: prefill and decode take the time that the options say, hand-overs cost their bytes, and prefill handles one
request at a time. At the options' constant rates KV moves only from prefill to decode workers.

With `--costs FILE` workers and placement reckon with the costs that a server has fitted to one of its workers, from
`/v1/cache`: prefill depends on what is cached before it and on the decodes beside it, a decode step on how many decode,
and KV moves between all pools where the directory says so. Such an import takes the worker's time, and promised blocks
that are nowhere when the prefill begins are computed instead of awaited.

Hits are counted per block of 512 tokens, beside what one cache of all workers' blocks together would hit;
`--shared-cache` compares policies in such a cache alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

from benchmarks.command import ResultFile, begin, command_parser
from benchmarks.replaying.bounds import hit_rates
from benchmarks.replaying.cluster import Cluster
from benchmarks.replaying.report import summarise, text
from benchmarks.replaying.routers import ROUTERS, make_router
from benchmarks.replaying.speeds import ConstantSpeeds, FittedSpeeds, Speeds, jittered, read_costs
from benchmarks.replaying.traces import MOONCAKE_BLOCK_TOKENS, ReplayError, TraceRequest, read_trace
from benchmarks.replaying.worker import ReplayedRequest, ReplayWorker
from raydix.engine.core.eviction.policies import EvictionPolicy, make_queue
from raydix.engine.core.types import Role
from raydix.engine.core.worker.block_pool import BlockPool

RATES = {"prefill_rate": 10_000.0, "decode_step_ms": 20.0, "handover_gib_per_s": 10.0}
KV_KIB_PER_TOKEN = 128.0
TOKEN_BUDGET = 512
EVERY_S = 0.5  # seconds between two lines of progress


def replay(
    trace: Sequence[TraceRequest],
    roles: Sequence[Role],
    capacity_blocks: int,
    policy: EvictionPolicy,
    router: str,
    speeds: Speeds,
    jitter: float = 0.0,
    seed: int = 0,
) -> tuple[list[ReplayedRequest], list[ReplayWorker]]:
    """Run a trace on one worker per role. Each worker's speed is off by up to `jitter`, and its fit by as much again,
    which is the spread that it reports.

    Raises:
        ReplayError: there is no such router.
    """
    random = Random(seed)
    workers = [
        ReplayWorker(
            f"{role}-{number}",
            role,
            BlockPool(capacity_blocks, MOONCAKE_BLOCK_TOKENS, make_queue(policy, num_blocks=capacity_blocks)),
            *jittered(speeds, jitter, random),
        )
        for number, role in enumerate(roles)
    ]
    cluster = Cluster(workers, make_router(router, workers, speeds, jitter))
    started = drawn = time.monotonic()
    jobs = []

    for job in cluster.run(trace):
        jobs.append(job)
        if sys.stderr.isatty() and time.monotonic() - drawn >= EVERY_S:
            drawn = time.monotonic()
            line = f"{len(jobs):,} of {len(trace):,} requests, {drawn - started:.0f} s"
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    return jobs, workers


def parse_roles(workers: int, split: str | None) -> list[Role]:
    """`workers` mixed ones, or P prefill and D decode workers from `P:D`.

    Raises:
        ReplayError: there would be none, or the split is no pair of whole numbers.
    """
    if split is None:
        if workers < 1:
            raise ReplayError("--workers must be at least 1")
        return [Role.MIXED] * workers
    parts = split.split(":")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise ReplayError(f"--roles must be P:D with whole numbers from 1, such as 4:4, not {split!r}")
    return [Role.PREFILL] * int(parts[0]) + [Role.DECODE] * int(parts[1])


def parse_policy(name: str) -> EvictionPolicy:
    """Return the policy of this name.

    Raises:
        ReplayError: there is none.
    """
    try:
        return EvictionPolicy(name)
    except ValueError as error:
        raise ReplayError(f"unknown policy {name!r}; there are {', '.join(EvictionPolicy)}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2 for a mistake of the user's."""
    options, output = begin(_parser(), arguments, ("raydix",))
    try:
        _run(options, output)
    except ReplayError as error:
        print(f"replay: {error}", file=sys.stderr)
        return 2
    return 0


def _run(options: argparse.Namespace, output: ResultFile) -> None:
    policy, roles = parse_policy(options.policy), parse_roles(options.workers, options.roles)
    if options.capacity_blocks < 1:
        raise ReplayError("--capacity-blocks must be at least 1")
    if not 0 <= options.jitter < 1:
        raise ReplayError("--jitter must be from 0 to below 1")

    speeds = speeds_of(options)
    trace = read_trace(options.trace, options.requests)
    if options.shared_cache:
        _compare_policies(trace, options.shared_cache, output)
        return

    started = time.perf_counter()
    jobs, workers = replay(
        trace, roles, options.capacity_blocks, policy, options.router, speeds, options.jitter, options.seed
    )
    took_s = time.perf_counter() - started
    result = summarise(jobs, workers, options.ttft_slo_ms / 1000, options.tpot_slo_ms / 1000)
    bounds = {} if options.no_bounds else hit_rates(trace, options.capacity_blocks * len(roles))
    print(text(result, bounds))
    print(f"replayed in           {took_s:.1f} s")

    output.write({"replay_took_s": round(took_s, 2), "one_shared_cache": bounds, **result})


def speeds_of(options: argparse.Namespace) -> Speeds:
    """The machine that the options describe (`add_machine`).

    Raises:
        ReplayError: an option is out of range, or the costs cannot be read.
    """
    given = {name: getattr(options, name) for name in RATES if getattr(options, name) is not None}
    rates = RATES | given
    if min(options.kv_kib_per_token, *rates.values()) <= 0:
        raise ReplayError("rates, times and sizes must be above 0")
    if options.costs is not None and given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ReplayError(f"--costs stands instead of {names}")
    block_kib = options.kv_kib_per_token * MOONCAKE_BLOCK_TOKENS
    if options.costs is not None:
        return FittedSpeeds(read_costs(options.costs), options.token_budget, int(block_kib * 1024))
    return constant_speeds(rates, options.token_budget, block_kib)


def constant_speeds(
    rates: Mapping[str, float] = RATES,
    token_budget: int = TOKEN_BUDGET,
    block_kib: float = KV_KIB_PER_TOKEN * MOONCAKE_BLOCK_TOKENS,
) -> ConstantSpeeds:
    """The machine of the options, or of their defaults."""
    return ConstantSpeeds(
        rates["prefill_rate"],
        rates["decode_step_ms"] / 1000,
        token_budget,
        rates["handover_gib_per_s"] / (block_kib / (1 << 20)),
    )


def _compare_policies(trace: Sequence[TraceRequest], capacities: Sequence[int], output: ResultFile) -> None:
    if min(capacities) < 1:
        raise ReplayError("--shared-cache takes numbers of blocks from 1")
    rates = {capacity: hit_rates(trace, capacity) for capacity in capacities}
    print(f"{'blocks hit (%)':<15}" + "".join(f"{capacity:>10,}" for capacity in rates))
    for name in next(iter(rates.values())):
        print(f"{name:<15}" + "".join(f"{100 * at[name]:>10.1f}" for at in rates.values()))
    output.write({"one_shared_cache": rates})


def add_machine(parser: argparse.ArgumentParser) -> None:
    """The options that describe a worker, and the objectives."""
    parser.add_argument("--prefill-rate", type=float, help="tokens per second and worker (10000)")
    parser.add_argument("--decode-step-ms", type=float, help="one step without prefill beside it (20)")
    parser.add_argument("--handover-gib-per-s", type=float, help="rate of hand-overs (10)")
    parser.add_argument("--costs", type=Path, help="instead of these three: a worker's costs as /v1/cache shows them")
    parser.add_argument(
        "--token-budget", type=int, default=TOKEN_BUDGET, help="prefill tokens that ride along in a decode step"
    )
    parser.add_argument("--kv-kib-per-token", type=float, default=KV_KIB_PER_TOKEN, help="size of KV, for hand-overs")
    parser.add_argument("--ttft-slo-ms", type=float, default=5000.0, help="objective for the first token")
    parser.add_argument("--tpot-slo-ms", type=float, default=100.0, help="objective for each further token")


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("benchmarks.replay", __doc__)
    parser.add_argument("trace", type=Path, help="Mooncake's JSON lines or Azure's CSV")
    parser.add_argument("--requests", type=int, help="replay only the first so many")
    parser.add_argument("--workers", type=int, default=8, help="mixed workers")
    parser.add_argument("--roles", metavar="P:D", help="prefill and decode workers instead of mixed ones")
    parser.add_argument("--capacity-blocks", type=int, default=2500, help="blocks of 512 tokens in each worker's pool")
    parser.add_argument("--policy", default="adaptive", help=f"eviction: {', '.join(EvictionPolicy)}")
    parser.add_argument("--router", default="directory", help=f"placement: {', '.join(ROUTERS)}")
    parser.add_argument(
        "--jitter", type=float, default=0.0, help="each worker is off by up to this share, its fit by as much again"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the jitter")
    add_machine(parser)
    parser.add_argument("--shared-cache", type=int, nargs="+", help="only compare policies in one cache of these sizes")
    parser.add_argument("--no-bounds", action="store_true", help="skip the comparison with one shared cache")
    return parser


if __name__ == "__main__":
    sys.exit(main())
