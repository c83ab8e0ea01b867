"""Pauses of eight running streams beside requests that are hard to read or answer, and what the requests cost.

    raydix serve --port 8000 --kv-cache-gib 0.4
    python -m benchmarks.hostile --port 8000 --pid PID_OF_RAYDIX_SERVE [--only TEXT] [--every N] [--first N]
        [--seconds S] [--json FILE]
    python -m benchmarks.hostile --port 8000 --pid PID_OF_RAYDIX_SERVE --crowds [--only TEXT] [--json FILE]

The server runs on this machine and is idle. The bodies of a corpus (`benchmarks.hostile_bodies`) go one at a time. With
`--crowds` many clients, in a process of their own, send the same long body at once; bodies that stop before their last
byte, and requests that never end, come last. A gap is the time between two pieces of a stream; the baseline is the
longest gap of any stream in a few seconds without a body, measured every so many bodies and before each crowd.

The wall time of a gap counts what else runs on the machine, the load generator among it. So the gap is also measured in
processor time of the way that a token takes: of all threads of the ingress replica and of the worker. The worker's
threads that compute the model together take pieces of its steps, and on a busy machine whichever has a core takes most:
they count as if each had taken the same part. A step that others' prompts make longer counts, and so does whatever else
these processes compute meanwhile, in the way or not. Failovers, and holds of event loops and interpreters, are the
server's own counts. A worker touches its pool's memory as it is filled: `--kv-cache-gib 0.4` is full soon.
"""

import http.client
import json
import multiprocessing
import os
import socket
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import psutil

from benchmarks.command import begin, command_parser
from benchmarks.hostile_bodies import BodySizes, HostileBody, hostile_bodies
from raydix.engine.model.sources import DEFAULT_MODEL, model_name

MODEL = model_name(DEFAULT_MODEL)
NUM_STREAMS = 8
MIB = 1 << 20
BODY_BYTES = 4 * MIB - 4096  # just below the default limit
GAP_ENDS_S = 0.3  # time behind an answer in which a gap that it has caused ends
QUIET_S = 3.0
SETTLE_S = 10.0  # time behind the last body, or a crowd, after which memory is measured
HELPER_NAME = "raydix kernels"  # name of a thread that helps the engine's to compute (`kernels/cpp/team.cpp`)
COUNTED = ("raydix_failovers_total", "raydix_holds_total")
BASELINE_EVERY = 50  # bodies between two measurements of the baseline
HALF_SENT = 4200
ATTACKER = "127.0.0.2"  # another address of this machine, as connections are counted by address


@dataclass(frozen=True)
class BodyOutcome:
    """One body, or one crowd. Times in seconds, memory in MiB."""

    body: str
    num_bytes: int
    statuses: dict[str, int]
    """Answers by status, or by the name of a failure."""
    wall_s: float
    gap_s: float
    baseline_gap_s: float
    gap_cpu_s: float
    """The longest gap in processor time of a token's way."""
    baseline_gap_cpu_s: float
    cpu_s: float
    memory_before: float
    memory_peak: float
    """The most while a crowd's requests ran."""
    memory_after: float
    """Memory of both processes and their children."""

    @property
    def growth_s(self) -> float:
        return self.gap_cpu_s - self.baseline_gap_cpu_s


class Streams:
    """Clients that stream all the time, and the longest gap between two pieces in any of their streams."""

    def __init__(self, port: int, clock: Callable[[], float]) -> None:
        """`clock` measures the gaps, in seconds, beside the time on the wall."""
        self._port = port
        self._clock = clock
        self._stopped = threading.Event()
        self._longest = self._longest_by_clock = 0.0
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(NUM_STREAMS)]
        for thread in self._threads:
            thread.start()

    def take_longest(self) -> tuple[float, float]:
        """The longest gap since the last call, on the wall and by the clock."""
        longest = self._longest, self._longest_by_clock
        self._longest = self._longest_by_clock = 0.0
        return longest

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        while not self._stopped.is_set():
            body = {"model": MODEL, "prompt": f"Stream {number}", "max_tokens": 400, "ignore_eos": True, "stream": True}
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
            try:
                connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
                last: tuple[float, float] | None = None
                for line in connection.getresponse():
                    if line.startswith(b"data: {"):
                        now = time.monotonic(), self._clock()
                        if last is not None:
                            self._longest = max(self._longest, now[0] - last[0])
                            self._longest_by_clock = max(self._longest_by_clock, now[1] - last[1])
                        last = now
                    if self._stopped.is_set():
                        return
            finally:
                connection.close()


def post(port: int, path: str, body: bytes, content_type: str = "application/json") -> str:
    """Status of a request, or the name of its failure."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("POST", path, body, {"content-type": content_type})
        response = connection.getresponse()
        response.read()
        return str(response.status)
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
    finally:
        connection.close()


def chat(content: Any, **fields: Any) -> tuple[str, bytes]:
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 1, **fields}
    return "/v1/chat/completions", json.dumps(body, separators=(",", ":")).encode()


def completion(prompt: Any) -> tuple[str, bytes]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    return "/v1/completions", json.dumps(body, separators=(",", ":")).encode()


EMPTY = {"role": "user", "content": ""}
# Crowds by name: number of clients that send at the same time, and the request of each.
CROWDS: dict[str, tuple[int, Callable[[], tuple[str, bytes]]]] = {
    "empty-messages": (1, lambda: chat([EMPTY] * 109_000)),
    "empty-messages-16": (16, lambda: chat([EMPTY] * 109_000)),
    "digits-8": (8, lambda: completion("7" * BODY_BYTES)),
    "words-8": (8, lambda: completion("never to end " * (BODY_BYTES // 13))),
    "eight-prompts": (8, lambda: completion(["7" * (BODY_BYTES // 8 - 8)] * 8)),
    "one-word-8": (8, lambda: chat("a" * BODY_BYTES)),
    "empty-lists-8": (8, lambda: chat("hi", metadata=[[]] * (BODY_BYTES // 3 - 100))),
    "token-ids-8": (8, lambda: completion([7] * (BODY_BYTES // 2 - 100))),
    "many-short": (200, lambda: completion("7" * 3900)),
}


@contextmanager
def connections(
    port: int, count: int, data: bytes, source: str = ATTACKER, patience_s: float = 5.0
) -> Iterator[list[socket.socket]]:
    """Opens `count` connections from one address, each with the beginning of a request and nothing else.

    Connections that are not let in, or cannot send within `patience_s`, stay as they are.
    """
    with ExitStack() as stack:
        opened = []
        for _ in range(count):
            connection = stack.enter_context(socket.socket())
            connection.bind((source, 0))
            connection.setblocking(False)
            connection.connect_ex(("127.0.0.1", port))
            opened.append(connection)

        deadline = time.monotonic() + patience_s
        unsent = {connection: memoryview(data) for connection in opened}
        while unsent and time.monotonic() < deadline:
            for connection, rest in list(unsent.items()):
                try:
                    unsent[connection] = rest[connection.send(rest) :]
                except BlockingIOError:
                    continue
                except OSError:
                    unsent[connection] = rest[len(rest) :]
                if not unsent[connection]:
                    del unsent[connection]

        yield opened


def resident(process: psutil.Process) -> float:
    """Resident memory, in MiB, of a process and its children."""
    sizes = 0
    for each in [process, *process.children(recursive=True)]:
        try:
            sizes += each.memory_info().rss
        except psutil.Error:
            continue
    return sizes / MIB


class Way:
    """The processes that a stream's tokens pass: the worker that computes them, and the ingress replica. In a server
    of one process both are this process."""

    def __init__(self, server: psutil.Process) -> None:
        self.ingress = found(server, "ServeReplica:raydix:ingress")
        self.worker = found(server, "MixedWorker")
        # Times of the worker's threads that compute the model: the engine's, and those that help it.
        self._computing: list[Path] = []

    def processes(self) -> list[psutil.Process]:
        return [self.worker] if self.worker == self.ingress else [self.ingress, self.worker]

    def find_threads(self, seconds: float) -> None:
        """Find the worker's threads that compute the model: the one that uses most meanwhile, and its helpers."""
        tasks = [path.parent for path in Path(f"/proc/{self.worker.pid}/task").glob("*/schedstat")]
        helpers = [task for task in tasks if (task / "comm").read_text().strip() == HELPER_NAME]
        before = {task: _used_s(task) for task in tasks if task not in helpers}
        time.sleep(seconds)
        engine = max(before, key=lambda task: _used_s(task) - before[task])
        self._computing = [engine, *helpers]

    def clock(self) -> float:
        """Processor time of both processes, of the threads that compute the model an equal part each, in seconds."""
        used_s = sum(time.clock_gettime(_clock_id(each.pid)) for each in self.processes())
        if not self._computing:
            return used_s
        computing_s = sum(map(_used_s, self._computing))
        return used_s - computing_s + computing_s / len(self._computing)

    def memory(self) -> float:
        """Resident memory of the processes and their children, in MiB."""
        return sum(map(resident, self.processes()))

    def memories(self) -> dict[str, int]:
        """Resident memory of each process and its children, in MiB."""
        names = {self.worker.pid: "worker", self.ingress.pid: "ingress"}
        return {names[each.pid]: round(resident(each)) for each in self.processes()}

    def is_running(self) -> bool:
        return all(each.is_running() for each in self.processes())


def _clock_id(pid: int) -> int:
    """The clock of a process' processor time, as `clock_getcpuclockid` makes it."""
    return (~pid << 3) | 2


def _used_s(task: Path) -> float:
    """Processor time of a thread, by its folder in `/proc`, in seconds; 0 once it has ended."""
    try:
        return int((task / "schedstat").read_text().split()[0]) / 1e9
    except OSError:
        return 0.0


def found(server: psutil.Process, title: str) -> psutil.Process:
    """The descendant of a server with this title; the server where there is none."""
    for process in server.children(recursive=True):
        with suppress(psutil.Error):
            if title in " ".join(process.cmdline()):
                return process
    return server


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


class HostileRun:
    """Sends bodies to a server beside streams."""

    def __init__(self, port: int, way: Way) -> None:
        self._port = port
        self._way = way
        self._streams = Streams(port, way.clock)
        self._baseline = 0.0, 0.0
        time.sleep(QUIET_S)  # the streams have begun
        way.find_threads(QUIET_S)

    def measure_baseline(self) -> None:
        """Measure the longest gap without a body."""
        self._streams.take_longest()
        time.sleep(QUIET_S)
        self._baseline = self._streams.take_longest()

    def corpus(self, bodies: Iterator[HostileBody], ends: float) -> Iterator[BodyOutcome]:
        """Send bodies one at a time, until `ends` on the monotonic clock."""
        for number, body in enumerate(bodies):
            if time.monotonic() > ends or not self._way.is_running():
                return
            if number % BASELINE_EVERY == 0:
                self.measure_baseline()
            yield self._send(body.name, body.path, body.data(), body.content_type)

    def crowd(self, name: str) -> BodyOutcome:
        """Have many clients send the same body at once."""
        self.measure_baseline()
        count, make = CROWDS[name]
        path, data = make()
        return self._send(name, path, data, "application/json", count, SETTLE_S)

    def _send(
        self, name: str, path: str, data: bytes, content_type: str, count: int = 1, settle_s: float = 0.0
    ) -> BodyOutcome:
        """Send a body, from so many clients at once, and return what it did."""
        before, started = self._way.memory(), time.monotonic()
        used = sum(map(cpu_s, self._way.processes()))
        self._streams.take_longest()
        if count == 1:
            statuses, peak = [post(self._port, path, data, content_type)], 0.0
        else:
            statuses, peak = self._send_all(path, data, count)
        wall_s = time.monotonic() - started
        time.sleep(GAP_ENDS_S)
        gap_s, gap_cpu_s = self._streams.take_longest()
        used = sum(map(cpu_s, self._way.processes())) - used
        time.sleep(settle_s)
        after = self._way.memory()
        return BodyOutcome(
            body=name,
            num_bytes=len(data),
            statuses=dict(Counter(statuses)),
            wall_s=wall_s,
            gap_s=gap_s,
            baseline_gap_s=self._baseline[0],
            gap_cpu_s=gap_cpu_s,
            baseline_gap_cpu_s=self._baseline[1],
            cpu_s=used,
            memory_before=before,
            memory_peak=max(before, peak, after),
            memory_after=after,
        )

    def _send_all(self, path: str, data: bytes, count: int) -> tuple[list[str], float]:
        """Statuses of a crowd, and the most memory meanwhile. The crowd is a process: this one measures."""
        peak = 0.0
        with multiprocessing.get_context("spawn").Pool(1) as process:
            sent = process.apply_async(post_all, (self._port, path, data, count))
            while not sent.ready():
                peak = max(peak, self._way.memory())
                sent.wait(0.05)
            return sent.get(), peak

    def stop(self) -> None:
        self._streams.stop()


def post_all(port: int, path: str, data: bytes, count: int) -> list[str]:
    """Send the same body from so many clients at once; returns their statuses."""
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(lambda _: post(port, path, data), range(count)))


def half_sent(port: int) -> dict[str, Any]:
    """Times fresh requests from another address among thousands of requests that never end."""
    _, body = completion("hi")
    with connections(port, HALF_SENT, b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: "):
        times = []
        for _ in range(20):
            started = time.monotonic()
            status = post(port, "/v1/completions", body)
            times.append((status, time.monotonic() - started))
    return {
        "served": sum(status == "200" for status, _ in times),
        "of": len(times),
        "slowest_s": max(t for _, t in times),
    }


def stalled_bodies(port: int, way: Way) -> dict[str, float]:
    """Measures the cost of a hundred bodies that stop before their last byte."""
    before = way.memory()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {4 * MIB}\r\n\r\n".encode()
    with connections(port, 100, head + b" " * (4 * MIB - 1)):
        time.sleep(1)
        held = way.memory()
    time.sleep(SETTLE_S)
    return {"memory_before": before, "memory_held": held, "memory_after": way.memory()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("benchmarks.hostile", __doc__)
    parser.add_argument("--port", type=int, default=8000, help="the server's, on 127.0.0.1")
    parser.add_argument("--pid", type=int, required=True, help="the process of raydix serve")
    parser.add_argument("--crowds", action="store_true", help="many clients with the same body, not the corpus")
    parser.add_argument("--only", default="", help="text that the name of a body or crowd must have")
    parser.add_argument("--every", type=int, default=1, help="N: send every Nth body")
    parser.add_argument("--first", type=int, default=0, help="number of the first body to send, from 0")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="send no further body after this time")
    parser.add_argument("--max-body-bytes", type=int, default=4 << 20, help="the server's http.max_body_bytes")
    options, output = begin(parser, arguments)

    way = Way(psutil.Process(options.pid))
    run, ends = HostileRun(options.port, way), time.monotonic() + options.seconds
    counts, memory_before = _counts(options.port), way.memories()
    more: dict[str, Any] = {}
    if options.crowds:
        outcomes = [run.crowd(name) for name in CROWDS if options.only in name]
        run.stop()
        more = {"stalled_bodies": stalled_bodies(options.port, way), "half_sent": half_sent(options.port)}
    else:
        document, models = (_read(options.port, path) for path in ("/openapi.json", "/v1/models"))
        sizes = BodySizes(options.max_body_bytes, models["data"][0]["max_model_len"])
        bodies = (body for body in hostile_bodies(document, sizes) if options.only in body.name)
        outcomes = list(run.corpus(islice(bodies, options.first, None, options.every), ends))
        run.stop()
    time.sleep(SETTLE_S)
    grown = {name: value - counts.get(name, 0.0) for name, value in _counts(options.port).items()}

    for each in sorted(outcomes, key=attrgetter("growth_s"), reverse=True)[:20]:
        print(
            f"gap {each.gap_cpu_s * 1e3:6,.0f} ms of processor time (baseline {each.baseline_gap_cpu_s * 1e3:,.0f}), "
            f"{each.gap_s * 1e3:,.0f} ms (baseline {each.baseline_gap_s * 1e3:,.0f}), processor {each.cpu_s:.2f} s of "
            f"{each.wall_s:.2f}, memory {each.memory_before:,.0f}, {each.memory_peak:,.0f}, {each.memory_after:,.0f} "
            f"MiB, {each.statuses}: {each.body}, {each.num_bytes:,} bytes"
        )
    memory_after, server_runs = way.memories(), way.is_running()
    print(f"{len(outcomes)} bodies; memory in MiB {memory_before} to {memory_after}; live: {server_runs}")
    print(", ".join(f"{name} {value:g}" for name, value in sorted(grown.items())))
    for name, figures in more.items():
        print(f"{name}: {figures}")
    output.write(
        {
            "load_average_1min_after": round(os.getloadavg()[0], 2),
            "processes_live": server_runs,
            "memory_before": memory_before,
            "memory_after": memory_after,
            "grown": grown,
            "bodies": [asdict(each) for each in outcomes],
            **more,
        }
    )
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
