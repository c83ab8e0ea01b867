"""Pauses of eight running streams beside each hostile body (`benchmarks.hostile_bodies`), and what the bodies cost.

    raydix serve --port 8000 --kv-cache-gib 0.4
    python -m benchmarks.hostile_corpus --port 8000 --pid PID_OF_RAYDIX_SERVE [--only TEXT] [--every N] [--first N]
        [--seconds S] [--json FILE]

The server runs on this machine and is idle. Bodies go one at a time; the baseline is the longest gap of a look at the
streams without a body. The wall time of a gap counts what else runs on the machine, the load generator among it. So the
gap is also measured in processor time of the way that a token takes: of all threads of the ingress replica and of the
worker, but for those that compute beside the engine's. A step that others' prompts make longer counts, and so does
whatever else these processes compute meanwhile, in the way or not. Failovers, and holds of event loops and
interpreters, are the server's own counts. A worker touches its pool's memory as it is filled: `--kv-cache-gib 0.4` is
full soon.
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
from operator import attrgetter
from pathlib import Path
from typing import Any

import psutil

from benchmarks.hostile import Streams, post, resident
from benchmarks.hostile_bodies import HostileBody, Sizes, hostile_bodies
from benchmarks.machine import describe

LOOK_S = 0.3
"""Time behind an answer in which a gap that it has caused ends."""
QUIET_S = 3.0
HELPER_SHARE = 0.3
"""Processor time of a thread that helps to compute, as a share of that of the thread that it helps, or more."""
SETTLE_S = 10.0
"""Time behind the last body after which memory is looked at."""
COUNTED = ("raydix_failovers_total", "raydix_holds_total")
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
    gap_cpu_s: float
    """The longest gap in processor time of a token's way."""
    baseline_gap_cpu_s: float
    cpu_s: float
    memory_before: float
    memory_after: float
    """Of both processes and their children."""

    @property
    def growth_s(self) -> float:
        return self.gap_cpu_s - self.baseline_gap_cpu_s


class Way:
    """The processes that a stream's tokens pass: the worker that computes them, and the ingress replica. In a server
    of one process both are this process."""

    def __init__(self, server: psutil.Process) -> None:
        found = [server, *server.children(recursive=True)]
        self.ingress = next((each for each in found if _has_title(each, "ServeReplica:raydix:ingress")), server)
        self.worker = next((each for each in found if _has_title(each, "MixedWorker")), server)
        self._helpers: list[Path] = []
        """Times of the worker's threads that help another one to compute."""

    def processes(self) -> list[psutil.Process]:
        return [self.worker] if self.worker == self.ingress else [self.ingress, self.worker]

    def find_helpers(self, seconds: float) -> None:
        """Tell the worker's thread that computes, and its helpers, from other threads: by what they use meanwhile."""
        tasks = [path / "schedstat" for path in Path(f"/proc/{self.worker.pid}/task").iterdir()]
        before = [_used_s(task) for task in tasks]
        time.sleep(seconds)
        used = sorted(((_used_s(task) - start, task) for task, start in zip(tasks, before, strict=True)), reverse=True)
        self._helpers = [task for used_s, task in used[1:] if used_s > HELPER_SHARE * used[0][0]]

    def clock(self) -> float:
        """Processor time of both processes without what goes on beside the thread that computes, in seconds."""
        used_s = sum(time.clock_gettime(_clock_id(each.pid)) for each in self.processes())
        return used_s - sum(map(_used_s, self._helpers))

    def memory(self) -> float:
        """Resident memory of the processes and their children, in MiB."""
        return sum(map(resident, self.processes()))

    def memories(self) -> dict[str, int]:
        """The same of each process."""
        names = {self.worker.pid: "worker", self.ingress.pid: "ingress"}
        return {names[each.pid]: round(resident(each)) for each in self.processes()}

    def is_running(self) -> bool:
        return all(each.is_running() for each in self.processes())


def _clock_id(pid: int) -> int:
    """The clock of a process' processor time, as `clock_getcpuclockid` makes it."""
    return (~pid << 3) | 2


def _used_s(schedstat: Path) -> float:
    return int(schedstat.read_text().split()[0]) / 1e9


def _has_title(process: psutil.Process, title: str) -> bool:
    try:
        return title in " ".join(process.cmdline())
    except psutil.Error:
        return False


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

    def __init__(self, port: int, way: Way) -> None:
        self._port = port
        self._way = way
        self._streams = Streams(port, way.clock)
        self._baseline = 0.0, 0.0
        time.sleep(QUIET_S)  # the streams have begun
        way.find_helpers(QUIET_S)

    def look(self) -> None:
        """Measure the streams without a body."""
        self._streams.take_longest()
        time.sleep(QUIET_S)
        self._baseline = self._streams.take_longest_two()

    def send(self, body: HostileBody) -> Outcome:
        """Send one body and return what it did."""
        data = body.data()
        before, started = self._way.memory(), time.monotonic()
        used = sum(map(cpu_s, self._way.processes()))
        self._streams.take_longest()
        status = post(self._port, body.path, data, body.content_type)
        wall_s = time.monotonic() - started
        time.sleep(LOOK_S)
        gap_s, gap_cpu_s = self._streams.take_longest_two()
        return Outcome(
            body=body.name,
            num_bytes=len(data),
            status=status,
            wall_s=wall_s,
            gap_s=gap_s,
            baseline_gap_s=self._baseline[0],
            gap_cpu_s=gap_cpu_s,
            baseline_gap_cpu_s=self._baseline[1],
            cpu_s=sum(map(cpu_s, self._way.processes())) - used,
            memory_before=before,
            memory_after=self._way.memory(),
        )

    def stop(self) -> None:
        self._streams.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.hostile_corpus", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--port", type=int, default=8000, help="the server's, on 127.0.0.1")
    parser.add_argument("--pid", type=int, required=True, help="the process of raydix serve")
    parser.add_argument("--only", default="", help="text that a body's name must have")
    parser.add_argument("--every", type=int, default=1, help="N: send every Nth body")
    parser.add_argument("--first", type=int, default=0, help="number of the first body to send, from 0")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="send no further body after this time")
    parser.add_argument("--max-body-bytes", type=int, default=4 << 20, help="the server's http.max_body_bytes")
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args(arguments)

    way = Way(psutil.Process(options.pid))
    document, models = (_read(options.port, path) for path in ("/openapi.json", "/v1/models"))
    sizes = Sizes(options.max_body_bytes, models["data"][0]["max_model_len"])
    outcomes: list[Outcome] = []
    run, ends = Run(options.port, way), time.monotonic() + options.seconds
    counts, memory_before = _counts(options.port), way.memories()

    bodies = (body for body in hostile_bodies(document, sizes) if options.only in body.name)
    for number, body in enumerate(islice(bodies, options.first, None, options.every)):
        if time.monotonic() > ends or not way.is_running():
            break
        if number % BASELINE_EVERY == 0:
            run.look()
        outcomes.append(run.send(body))
    run.stop()
    time.sleep(SETTLE_S)
    grown = {name: value - counts.get(name, 0.0) for name, value in _counts(options.port).items()}

    longest = sorted(outcomes, key=attrgetter("growth_s"), reverse=True)
    for each in longest[:20]:
        print(
            f"gap {each.gap_cpu_s * 1e3:6,.0f} ms of processor time ({each.baseline_gap_cpu_s * 1e3:,.0f} without), "
            f"{each.gap_s * 1e3:,.0f} ms ({each.baseline_gap_s * 1e3:,.0f}), processor {each.cpu_s:.2f} s of "
            f"{each.wall_s:.2f}, memory {each.memory_before:,.0f} to {each.memory_after:,.0f} MiB, {each.status}: "
            f"{each.body}, {each.num_bytes:,} bytes"
        )
    memory_after, server_runs = way.memories(), way.is_running()
    print(f"{len(outcomes)} bodies; memory in MiB {memory_before} to {memory_after}; live: {server_runs}")
    print(", ".join(f"{name} {value:g}" for name, value in sorted(grown.items())))
    if options.json is not None:
        result = {
            **describe("benchmarks.hostile_corpus", sys.argv[1:] if arguments is None else list(arguments)),
            "load_average_1min_after": round(os.getloadavg()[0], 2),
            "processes_live": server_runs,
            "memory_before": memory_before,
            "memory_after": memory_after,
            "grown": grown,
            "bodies": [asdict(each) for each in outcomes],
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if server_runs else 1


def _counts(port: int) -> dict[str, float]:
    """The server's own counts of failovers, and of turns and holds that were too long."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    return {
        name: float(value) for name, _, value in (line.rpartition(" ") for line in lines) if name.startswith(COUNTED)
    }


def _read(port: int, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as reply:
        return json.load(reply)


if __name__ == "__main__":
    sys.exit(main())
