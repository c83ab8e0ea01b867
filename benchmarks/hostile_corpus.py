"""Pauses of eight running streams beside each hostile body (`benchmarks.hostile_bodies`), and what the bodies cost.

    python -m benchmarks.hostile_corpus --port 8000 [--pid N] [--only TEXT] [--every N] [--seconds S] [--json FILE]

The server runs on this machine and is idle: `raydix serve --local --port 8000` is one process, found by its port;
`--pid` names another one, such as an ingress replica behind HAProxy. Figures include the process' children. Bodies go
one at a time; the baseline is the longest gap of an equally long look at the streams without a body. The wall time of
a gap counts what else runs on the machine; the processor time, which the streams use as well, stands beside it.
"""

import argparse
import json
import os
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import psutil

from benchmarks.hostile import Memory, Streams, post
from benchmarks.hostile_bodies import HostileBody, Sizes, hostile_bodies
from benchmarks.machine import describe

LOOK_S = 0.3
"""Time behind an answer in which a gap that it has caused ends."""
QUIET_S = 3.0
BASELINE_EVERY = 50
"""Bodies between two looks at the streams alone."""


@dataclass(frozen=True)
class Outcome:
    """One body. Times in seconds, memory in MiB."""

    body: str
    num_bytes: int
    status: str
    wall_s: float
    gap_s: float
    baseline_gap_s: float
    cpu_s: float
    baseline_cpu_per_s: float
    memory_before: float
    memory_after: float


def listening(port: int) -> psutil.Process:
    """The process that listens on a port. Raises LookupError if none of this user does."""
    for process in psutil.process_iter():
        try:
            if any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in process.net_connections()):
                return process
        except psutil.Error:
            continue
    raise LookupError(f"no process listens on port {port}; name the server's with --pid")


def cpu_s(process: psutil.Process) -> float:
    """Processor time of a process and its children, in seconds, also of children that have ended."""
    total = 0.0
    for each in [process, *process.children(recursive=True)]:
        try:
            times = each.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
        if each == process:
            total += times.children_user + times.children_system
    return total


class Run:
    """Sends bodies to a server, one at a time beside streams."""

    def __init__(self, port: int, process: psutil.Process) -> None:
        self._port = port
        self._process = process
        self._memory = Memory(process)
        self._streams = Streams(port)
        self._baseline_gap_s = self._baseline_cpu = 0.0

    def look(self) -> None:
        """Measure the streams without a body."""
        self._streams.take_longest()
        used, started = cpu_s(self._process), time.monotonic()
        time.sleep(QUIET_S)
        self._baseline_cpu = (cpu_s(self._process) - used) / (time.monotonic() - started)
        self._baseline_gap_s = self._streams.take_longest()

    def send(self, body: HostileBody) -> Outcome:
        """Send one body and return what it did."""
        data = body.data()
        before, used, started = self._memory.now(), cpu_s(self._process), time.monotonic()
        self._streams.take_longest()
        status = post(self._port, body.path, data, body.content_type)
        wall_s = time.monotonic() - started
        time.sleep(LOOK_S)
        return Outcome(
            body=body.name,
            num_bytes=len(data),
            status=status,
            wall_s=wall_s,
            gap_s=self._streams.take_longest(),
            baseline_gap_s=self._baseline_gap_s,
            cpu_s=cpu_s(self._process) - used,
            baseline_cpu_per_s=self._baseline_cpu,
            memory_before=before,
            memory_after=self._memory.now(),
        )

    def stop(self) -> None:
        self._streams.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.hostile_corpus", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--port", type=int, default=8000, help="the server's, on 127.0.0.1")
    parser.add_argument("--pid", type=int, help="the process to measure, if not the one that listens")
    parser.add_argument("--only", default="", help="text that a body's name must have")
    parser.add_argument("--every", type=int, default=1, help="N: send every Nth body")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="send no further body after this time")
    parser.add_argument("--max-body-bytes", type=int, default=4 << 20, help="the server's http.max_body_bytes")
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args(arguments)

    process = listening(options.port) if options.pid is None else psutil.Process(options.pid)
    document, models = (_read(options.port, path) for path in ("/openapi.json", "/v1/models"))
    sizes = Sizes(options.max_body_bytes, models["data"][0]["max_model_len"])
    outcomes: list[Outcome] = []
    run, ends = Run(options.port, process), time.monotonic() + options.seconds

    bodies = (body for body in hostile_bodies(document, sizes) if options.only in body.name)
    for number, body in enumerate(islice(bodies, 0, None, options.every)):
        if time.monotonic() > ends or not process.is_running():
            break
        if number % BASELINE_EVERY == 0:
            run.look()
        outcomes.append(run.send(body))
    run.stop()

    longest = sorted(outcomes, key=lambda each: each.gap_s - each.baseline_gap_s, reverse=True)
    for each in longest[:20]:
        print(
            f"gap {each.gap_s * 1e3:6,.0f} ms ({each.baseline_gap_s * 1e3:,.0f} without), processor {each.cpu_s:.2f} s "
            f"of {each.wall_s:.2f}, memory {each.memory_before:,.0f} to {each.memory_after:,.0f} MiB, {each.status}: "
            f"{each.body}, {each.num_bytes:,} bytes"
        )
    print(f"{len(outcomes)} bodies; the server runs: {process.is_running()}")
    if options.json is not None:
        result = {
            **describe("benchmarks.hostile_corpus", sys.argv[1:] if arguments is None else list(arguments)),
            "load_average_1min_after": round(os.getloadavg()[0], 2),
            "server_runs": process.is_running(),
            "bodies": [asdict(each) for each in outcomes],
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if process.is_running() else 1


def _read(port: int, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as reply:
        return json.load(reply)


if __name__ == "__main__":
    sys.exit(main())
