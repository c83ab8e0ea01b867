"""A server's start by process: from the command to the first token, then at rest.

    python -m benchmarks.start [--config cpu_mixed] [--model SOURCE] [--settle 20] [--idle 20] [--json FILE]

Starts `raydix serve`, looks at all its processes again and again, and asks for one token as soon as the server answers.
Processor time is what each process had used by the first token, or by its end; a process that lives shorter than the
time between two looks may be missed. Behind the first token the start goes on: the manager's standby, the template of
readers and Ray's spare worker begin. What they use in the `--settle` seconds is reported by itself (`tail_cpu_s`); the
idle share is the processor time of all processes over the seconds behind these, in parts of one core. Memory is what
would be free again without the processes (their unique sets), and the shared memory beside it, with the object store
in it.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.command import begin, command_parser, markdown
from raydix.cli.cluster import free_port

# Environment variable by which a process of the server is known, also under another parent.
MARK = "RAYDIX_BENCHMARK_START"
LOOK_S = 0.1
READY_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Seen:
    """A process as it was last seen. Times are seconds: processor time, and the beginning since the command."""

    name: str
    began_s: float
    cpu_s: float
    unique_mib: float = 0.0
    shared_mib: float = 0.0
    idle_share: float = 0.0
    """Processor time at rest, in parts of one core."""


class Watch:
    """Follows the processes of one server."""

    def __init__(self, mark: str, root: int, began_at: float) -> None:
        self._mark = mark
        self._root = root
        self._began_at = began_at  # seconds since the epoch
        self._foreign: set[tuple[int, float]] = set()
        self.seen: dict[tuple[int, float], Seen] = {}
        """Processes by process id and start."""
        self.alive: set[tuple[int, float]] = set()

    def look(self, *, memory: bool = False) -> None:
        """See all processes as they are now."""
        self.alive = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                key = (process.pid, process.create_time())
                # Asked once of each process: reading an environment at every look would be most of the load that is
                # measured.
                if key in self._foreign:
                    continue
                if key not in self.seen and not self._is_ours(process):
                    self._foreign.add(key)
                    continue
                self.seen[key] = self._look_at(process, memory=memory)
                self.alive.add(key)

    def _is_ours(self, process: psutil.Process) -> bool:
        return process.pid == self._root or process.environ().get(MARK) == self._mark

    def _look_at(self, process: psutil.Process, *, memory: bool) -> Seen:
        times = process.cpu_times()
        unique = shared = 0.0
        if memory:
            full = process.memory_full_info()
            unique, shared = full.uss / MIB, getattr(full, "shared", 0) / MIB
        began_s = max(process.create_time() - self._began_at, 0.0)
        return Seen(
            name=name_of(process.cmdline(), process.name()),
            began_s=began_s,
            cpu_s=times.user + times.system,
            unique_mib=unique,
            shared_mib=shared,
        )


def name_of(command: list[str], name: str) -> str:
    """A short name for a process, by its command line: Ray's workers say what they are, others run a program."""
    if not command:
        return name
    if command[0].startswith("ray::"):
        return command[0].split("(")[0].split("#")[0].strip()
    program = Path(command[0]).name
    if not program.startswith("python"):
        return program
    words = [word for word in command[1:] if not word.startswith("-")]
    if "-c" in command:
        return f"{program} -c"
    if "-m" in command:
        return f"{program} -m {command[command.index('-m') + 1]}"
    return Path(words[0]).name if words else program


def by_name(seen: Iterable[Seen]) -> list[dict[str, Any]]:
    """A row for each name: its processes together, those first that took the most processor time."""
    groups: dict[str, list[Seen]] = defaultdict(list)
    for each in seen:
        groups[each.name].append(each)
    rows = [
        {
            "name": name,
            "processes": len(group),
            "began_s": round(min(each.began_s for each in group), 2),
            "cpu_s": round(sum(each.cpu_s for each in group), 2),
            "unique_mib": round(sum(each.unique_mib for each in group)),
            "idle_share": round(sum(each.idle_share for each in group), 4),
        }
        for name, group in groups.items()
    ]
    return sorted(rows, key=lambda row: -float(row["cpu_s"]))


def measure(arguments: list[str], settle_s: float, idle_s: float) -> dict[str, Any]:
    """Start a server with these options, and stop it; returns the report.

    Raises:
        RuntimeError: the server ended, or was not ready in time.
    """
    port, mark = free_port(), uuid.uuid4().hex
    began_at, began = time.time(), time.monotonic()
    command = [sys.executable, "-m", "raydix.cli.main", "serve", "--port", str(port), *arguments]
    server = subprocess.Popen(
        command, env={**os.environ, MARK: mark}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    watch = Watch(mark, server.pid, began_at)
    try:
        while not _answers(port):
            watch.look()
            if server.poll() is not None or time.monotonic() - began > READY_TIMEOUT_S:
                raise RuntimeError(f"the server did not start: {server.communicate()[1] if server.poll() else ''}")
            time.sleep(LOOK_S)
        healthy_s = time.monotonic() - began
        _ask(port)
        first_token_s = time.monotonic() - began
        watch.look()
        started = dict(watch.seen)

        # What goes on after the first token, such as a standby manager, is counted apart.
        time.sleep(settle_s)
        watch.look()
        settled = dict(watch.seen)
        tail_cpu_s = sum(each.cpu_s for each in settled.values()) - sum(each.cpu_s for each in started.values())

        time.sleep(idle_s)
        watch.look(memory=True)
        rest = [watch.seen[key] for key in watch.alive]
        idle = {
            key: (watch.seen[key].cpu_s - (settled[key].cpu_s if key in settled else 0.0)) / idle_s
            for key in watch.alive
        }
        memory = {key: watch.seen[key] for key in watch.alive}
    finally:
        stopping = time.monotonic()
        # Also after a failure: a server left over would disturb the next measurement.
        server.send_signal(signal.SIGTERM)
        try:
            server.communicate(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.communicate()
        stop_s = time.monotonic() - stopping

    rows = by_name(
        replace(
            each,
            unique_mib=memory[key].unique_mib if key in memory else 0.0,
            cpu_s=started[key].cpu_s if key in started else 0.0,
            idle_share=idle.get(key, 0.0),
        )
        for key, each in watch.seen.items()
        if key in started or key in idle
    )
    return {
        "options": arguments,
        "healthy_s": round(healthy_s, 2),
        "first_token_s": round(first_token_s, 2),
        "cpu_s": round(sum(each.cpu_s for each in started.values()), 2),
        "processes": len(watch.alive),
        "unique_mib": round(sum(each.unique_mib for each in rest)),
        "shared_mib": round(max((each.shared_mib for each in rest), default=0.0)),
        "tail_cpu_s": round(tail_cpu_s, 2),
        "idle_share": round(sum(idle.values()), 3),
        "stop_s": round(stop_s, 2),
        "by_process": rows,
    }


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as reply:
            return bool(reply.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _ask(port: int) -> None:
    body = json.dumps({"prompt": "One, two,", "max_tokens": 1, "temperature": 0}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=READY_TIMEOUT_S) as reply:
        reply.read()


def show(report: Mapping[str, Any]) -> None:
    """Print a report as tables."""
    header = ("process", "number", "begins after s", "processor s", "unique MiB", "idle")
    keys = ("name", "processes", "began_s", "cpu_s", "unique_mib", "idle_share")
    print(markdown(header, [[row[key] for key in keys] for row in report["by_process"]]), end="\n\n")
    for key in (
        "first_token_s",
        "cpu_s",
        "processes",
        "unique_mib",
        "shared_mib",
        "tail_cpu_s",
        "idle_share",
        "stop_s",
    ):
        print(f"{key}: {report[key]}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the report."""
    options = command_parser("benchmarks.start", __doc__)
    options.add_argument("--config", help="as of raydix serve")
    options.add_argument("--model", help="as of raydix serve")
    options.add_argument(
        "--settle", type=float, default=20.0, help="seconds until it is at rest (default: %(default)s)"
    )
    options.add_argument("--idle", type=float, default=20.0, help="seconds at rest (default: %(default)s)")
    chosen, output = begin(options, arguments)
    given = {"--config": chosen.config, "--model": chosen.model}
    report = measure(
        [word for name, value in given.items() if value for word in (name, value)], chosen.settle, chosen.idle
    )
    show(report)
    output.write(report)


if __name__ == "__main__":
    main()
