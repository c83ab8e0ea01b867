"""Pauses of running streams during requests that take long to read, and the memory kept afterwards.

    python -m benchmarks.hostile [--config cpu_mixed] [--only empty-messages ...] [--json FILE]

Starts a server of its own, on this machine and with the load generator beside it. Eight clients stream. For each attack
the longest time between two pieces of any stream is reported, beside the longest in an equal time without an attack
before it, and the resident memory of the ingress replica and its children before the attack, at its peak, and ten
seconds after. Attackers are processes of their own.
"""

import argparse
import http.client
import json
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.machine import describe
from raydix.cli.cluster import LocalCluster, free_port
from raydix.configs import load_config
from raydix.engine.model.sources import DEFAULT_MODEL, model_name

MODEL = model_name(DEFAULT_MODEL)
NUM_STREAMS = 8
MIB = 1 << 20
BODY_BYTES = 4 * MIB - 4096
"""Just below the default limit."""
QUIET_S = 5.0
SETTLE_S = 10.0
HALF_SENT = 4200
ATTACKER = "127.0.0.2"
"""Another address of this machine, as connections are counted by address."""


@dataclass(frozen=True)
class Outcome:
    """One attack. Gaps in seconds, memory in MiB."""

    attack: str
    statuses: dict[str, int]
    attack_s: float
    gap_before_s: float
    gap_s: float
    memory_before: float
    memory_peak: float
    memory_after: float


class Streams:
    """Clients that stream all the time, and the longest gap between two pieces in any of their streams."""

    def __init__(self, port: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` measures the gaps, in seconds, beside the time on the wall."""
        self._port = port
        self._clock = clock
        self._stopped = threading.Event()
        self._longest = self._longest_by_clock = 0.0
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(NUM_STREAMS)]
        for thread in self._threads:
            thread.start()

    def take_longest(self) -> float:
        """The longest gap since the last call, on the wall."""
        return self.take_longest_two()[0]

    def take_longest_two(self) -> tuple[float, float]:
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
REQUESTS: dict[str, tuple[int, Callable[[], tuple[str, bytes]]]] = {
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
"""Attacks by name: number of clients that send at the same time, and the request of each."""


def send(port: int, name: str, statuses: Any) -> None:
    """Run one attack; in a process of its own."""
    count, make = REQUESTS[name]
    path, body = make()
    threads = [
        threading.Thread(target=lambda number: statuses.update({number: post(port, path, body)}), args=(number,))
        for number in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


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


def ingress() -> psutil.Process:
    """Process of the server's ingress replica, a descendant of this one."""
    return next(
        process
        for process in psutil.Process().children(recursive=True)
        if "ServeReplica" in " ".join(process.cmdline()) and "ingress" in " ".join(process.cmdline())
    )


def resident(process: psutil.Process) -> float:
    """Resident memory, in MiB, of a process and its children."""
    sizes = 0
    for each in [process, *process.children(recursive=True)]:
        try:
            sizes += each.memory_info().rss
        except psutil.Error:
            continue
    return sizes / MIB


class Memory:
    """Resident memory, in MiB, of a process and its children, and its peak."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self.peak = 0.0
        threading.Thread(target=self._watch, daemon=True).start()

    def now(self) -> float:
        return resident(self._process)

    def _watch(self) -> None:
        while self._process.is_running():
            self.peak = max(self.peak, self.now())
            time.sleep(0.05)


def attack(port: int, name: str, streams: Streams, memory: Memory) -> Outcome:
    """Run one attack with many requests; returns its effects."""
    streams.take_longest()
    time.sleep(QUIET_S)
    gap_before, before = streams.take_longest(), memory.now()
    memory.peak = before
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        statuses = manager.dict()
        process = context.Process(target=send, args=(port, name, statuses))
        started = time.monotonic()
        process.start()
        process.join()
        attack_s = time.monotonic() - started
        counts: dict[str, int] = {}
        for status in statuses.values():
            counts[status] = counts.get(status, 0) + 1

    time.sleep(1)
    gap = streams.take_longest()
    time.sleep(SETTLE_S)
    return Outcome(
        attack=name,
        statuses=counts,
        attack_s=attack_s,
        gap_before_s=gap_before,
        gap_s=gap,
        memory_before=before,
        memory_peak=memory.peak,
        memory_after=memory.now(),
    )


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


def stalled_bodies(port: int, memory: Memory) -> dict[str, Any]:
    """Measures the cost of a hundred bodies that stop before their last byte."""
    before = memory.now()
    memory.peak = before
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {4 * MIB}\r\n\r\n".encode()
    with connections(port, 100, head + b" " * (4 * MIB - 1)):
        time.sleep(1)
        held = memory.now()
    time.sleep(SETTLE_S)
    return {"memory_before": before, "memory_held": held, "memory_peak": memory.peak, "memory_after": memory.now()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.hostile", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--config", default="cpu_mixed", help="configuration of the server")
    parser.add_argument("--only", nargs="+", default=[*REQUESTS], choices=[*REQUESTS], help="attacks")
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args(arguments)

    port = free_port()
    cluster = LocalCluster(load_config(options.config, {"http": {"port": port}}))
    cluster.start()

    try:
        cluster.deploy(lambda progress: None, threading.Event())
        memory, streams = Memory(ingress()), Streams(port)
        time.sleep(QUIET_S)
        outcomes = [attack(port, name, streams, memory) for name in options.only]
        streams.stop()
        stalled, half = stalled_bodies(port, memory), half_sent(port)
    finally:
        cluster.stop()

    for each in outcomes:
        print(
            f"{each.attack:>18}: gap {each.gap_s * 1e3:6,.0f} ms ({each.gap_before_s * 1e3:,.0f} before), memory "
            f"{each.memory_before:,.0f}, {each.memory_peak:,.0f}, {each.memory_after:,.0f} MiB; "
            f"{each.attack_s:.1f} s, {each.statuses}"
        )

    print(f"    stalled bodies: {stalled}\n half-sent requests: {half}")
    if options.json is not None:
        result = {
            **describe("benchmarks.hostile", sys.argv[1:] if arguments is None else list(arguments)),
            "load_average_1min_after": round(os.getloadavg()[0], 2),
            "attacks": [asdict(each) for each in outcomes],
            "stalled_bodies": stalled,
            "half_sent": half,
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n")

    return 0


if __name__ == "__main__":
    sys.exit(main())
