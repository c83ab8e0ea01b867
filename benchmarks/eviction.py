"""Compare eviction in one cache: the policies, the two simple orders and Belady's, over made traces and given ones.

    python -m benchmarks.eviction [TRACE ...] [--made chat-memoryless loop] [--capacities 500 1000 2000 4000]
        [--json FILE]

A trace is a file as for `benchmarks.replay`, or made by `benchmarks.replaying.synthetic`: all of those unless some are
named. Hits are the leading blocks of a prompt that are in the cache.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command import begin, command_parser
from benchmarks.replaying.bounds import hit_rates
from benchmarks.replaying.synthetic import SYNTHETIC, make_trace
from benchmarks.replaying.traces import ReplayError, read_trace

COLUMNS = ("lru", "once_first", "adaptive", "belady", "infinite")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2 for a mistake of the user's."""
    options, output = begin(_parser(), arguments, ("raydix",))
    try:
        traces = {path.name: read_trace(path) for path in options.traces}
    except ReplayError as error:
        print(f"eviction: {error}", file=sys.stderr)
        return 2

    traces |= {name: make_trace(name) for name in options.made}
    results: dict[str, dict[int, dict[str, float]]] = {}
    print(f"{'blocks hit (%)':<28}{'blocks':>8}" + "".join(f"{name:>12}" for name in (*COLUMNS, "to simple")))

    for name, trace in traces.items():
        results[name] = {}
        for capacity in options.capacities:
            rates = results[name][capacity] = hit_rates(trace, capacity)
            difference = rates["adaptive"] - max(rates["lru"], rates["once_first"])
            cells = [f"{100 * rates[column]:>12.1f}" for column in COLUMNS]
            print(f"{name:<28}{capacity:>8,}" + "".join(cells) + f"{100 * difference:>+12.1f}", flush=True)

    output.write({"hit_rates": results})
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("benchmarks.eviction", __doc__)
    parser.add_argument("traces", type=Path, nargs="*", metavar="TRACE", help="Mooncake's JSON lines")
    parser.add_argument("--made", nargs="*", choices=list(SYNTHETIC), default=list(SYNTHETIC), help="made traces")
    parser.add_argument("--capacities", type=_capacity, nargs="+", default=[500, 1000, 2000, 4000], help="in blocks")
    return parser


def _capacity(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError("must be a number of blocks from 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
