"""Memory, descriptors, threads, logs and blocks of a running server under a mixed load of steady rate, for an hour.

    raydix serve --config small_pool.yaml --port 8000
    python -m benchmarks.soak --pid PID_OF_RAYDIX_SERVE [--url http://127.0.0.1:8000] [--minutes 60] [--per-minute 40]
        [--json FILE]

Requests of every kind (`mixed_bodies`), batches, and streams that their clients leave are sent at a steady rate, not as
fast as possible: what grows with the time and what grows with the requests are told apart by a second run at another
rate. Half of the requests are asked again later, some of them as streams, and both answers must be equal. Every
`--every` seconds each process of the server is looked at. The report shows each process at the beginning, in the middle
and at the end, and the slope of its own memory (USS, without what it shares with others) in the second half. Exit code
1 if an answer differs, a request fails or a block does not come back.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.command import ResultFile, begin, command_parser, markdown
from benchmarks.mixed_bodies import (
    JSON,
    KINDS,
    Asked,
    answered,
    as_collected,
    ask,
    collected,
    essence,
    json_of,
    streamed,
)

MIB = 1 << 20
NUM_WORDS, NUM_TOKENS = (20, 300), (6, 20)  # bounds of the words of prompts and of the tokens of answers
# Requests that may be asked again: more than the pool holds, so that some find their blocks and others do not.
REMEMBERED = 400
BATCH_LINES = 6
EXTRA = ("batch", "left stream", "chained response")  # kinds of requests beside those of `mixed_bodies`
TIMEOUT_S = 300.0
SETTLE_S = 120.0


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """One process at one time. Memory in MiB."""

    rss: float
    uss: float
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True)
class ServerSample:
    """The server at one time."""

    at_s: float
    processes: dict[str, ProcessSample]
    """Processes by name and process id."""
    log_mib: float
    cache: Mapping[str, Any]
    """What `/v1/cache` says of blocks, segments and stores."""
    answered: int


@dataclass(slots=True)
class Tally:
    """What became of the requests."""

    answered: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    differing: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def title_of(process: psutil.Process) -> str:
    """A short name of the process, the same during its whole life."""
    words = process.cmdline() or [process.name()]
    if words[0].startswith("ray::"):  # Ray appends the method that an actor runs
        return words[0].removeprefix("ray::").split(".")[0]
    return "raydix serve" if "serve" in words[1:6] else process.name()


def processes_of(server: psutil.Process) -> dict[str, ProcessSample]:
    """Each process of the server. Those that end meanwhile are left out."""
    found = {}
    for process in [server, *server.children(recursive=True)]:
        try:
            memory = process.memory_full_info()
            name = f"{title_of(process)} {process.pid}"
            found[name] = ProcessSample(
                round(memory.rss / MIB, 1), round(memory.uss / MIB, 1), process.num_fds(), process.num_threads()
            )
        except psutil.Error:
            continue
    return found


def log_folder(server: psutil.Process) -> Path:
    """Folder of the logs of the server's cluster, which Ray's processes have in their command lines."""
    option = "--log_dir="
    for process in server.children():
        for word in process.cmdline():
            if word.startswith(option):
                return Path(word.removeprefix(option))
    raise LookupError(f"process {server.pid} is no `raydix serve` with a cluster")


def bytes_of(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


class Soak:
    """The load, and what was seen under it."""

    def __init__(self, session: aiohttp.ClientSession, url: str, server: psutil.Process) -> None:
        self._session = session
        self._url = url
        self._server = server
        self._logs = log_folder(server)
        self._chance = random.Random(7)
        self._asked: deque[tuple[Asked, Any]] = deque(maxlen=REMEMBERED)
        self._number = 0
        self._started = time.monotonic()
        self._last_response: str | None = None
        self.tally = Tally()
        self.samples: list[ServerSample] = []

    async def run(self, minutes: float, per_minute: float, every_s: float, note: Callable[[], None]) -> None:
        """Send requests at the given rate, each when it is due and beside those that still run, and take samples.

        `note` is called after each sample.
        """
        running: set[asyncio.Task[None]] = set()
        due = sampled = time.monotonic()
        end = due + minutes * 60
        while due < end:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            task = asyncio.create_task(self._send())
            running.add(task)
            task.add_done_callback(running.discard)
            due += self._chance.expovariate(per_minute / 60)
            if time.monotonic() - sampled >= every_s:
                sampled = time.monotonic()
                await self.sample()
                note()
        await asyncio.gather(*running)
        await self.sample()

    async def sample(self) -> ServerSample:
        # Reading the maps of a process of a gigabyte takes some milliseconds of the kernel's time: not in the loop.
        processes, log_bytes = await asyncio.to_thread(lambda: (processes_of(self._server), bytes_of(self._logs)))
        at_s = round(time.monotonic() - self._started, 1)
        log_mib = round(log_bytes / MIB, 2)
        sample = ServerSample(
            at_s=at_s,
            processes=processes,
            log_mib=log_mib,
            cache=await self.cache(),
            answered=self.tally.answered.total(),
        )
        self.samples.append(sample)
        total = sum(process.uss for process in processes.values())
        print(
            f"{at_s:7.0f} s: {sample.answered} answered, {self.tally.compared} compared, "
            f"{len(self.tally.differing)} differ, {len(self.tally.errors)} errors; "
            f"{total:,.0f} MiB in {len(processes)} processes, logs {sample.log_mib:.1f} MiB",
            file=sys.stderr,
            flush=True,
        )
        return sample

    async def cache(self) -> dict[str, Any]:
        """What the manager reports; nothing while it does not answer, which is an error of its own."""
        try:
            async with self._session.get(f"{self._url}/v1/cache") as response:
                report = await json_of(response)
        except (aiohttp.ClientError, TimeoutError, RuntimeError) as error:
            self.tally.errors.append(f"{time.monotonic() - self._started:.0f} s, /v1/cache: {error!r}"[:300])
            return {}
        return {
            "known_blocks": report["known_blocks"],
            "object_store": {key: report["object_store"][key] for key in ("segments", "bytes")},
            "disk_bytes": report["disk"]["bytes"],
            "available_blocks": {worker["id"]: worker["available_blocks"] for worker in report["workers"]},
        }

    async def blocks_back(self, expected: Mapping[str, int]) -> bool:
        """Wait until every worker that was there at the beginning has as many blocks available as then."""
        deadline = time.monotonic() + SETTLE_S
        while (await self.cache()).get("available_blocks") != expected:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(1)
        return True

    async def _send(self) -> None:
        kind = self._chance.choice([*KINDS, *KINDS, *EXTRA])
        try:
            if kind == "batch":
                await self._batch()
            elif kind == "left stream":
                await self._leave()
            elif kind == "chained response":
                await self._chain()
            else:
                await self._ask(kind)
            self.tally.answered[kind] += 1
        except (aiohttp.ClientError, TimeoutError, OSError, RuntimeError) as error:
            self.tally.errors.append(f"{time.monotonic() - self._started:.0f} s, {kind}: {error!r}"[:300])

    def _next(self, kind: str) -> Asked:
        self._number += 1
        num_words, num_tokens = self._chance.randint(*NUM_WORDS), self._chance.randint(*NUM_TOKENS)
        return ask(kind, self._number, num_words, num_tokens)

    async def _ask(self, kind: str) -> None:
        """Ask a new question, or one that was asked before, whose answer must be the same."""
        if self._asked and self._chance.random() < 0.5:
            asked, expected = self._chance.choice(self._asked)
            if asked.streams and self._chance.random() < 0.5:
                same = collected(await streamed(self._session, self._url, asked)) == as_collected(expected)
            else:
                same = essence(await answered(self._session, self._url + asked.path, asked.data())) == essence(expected)
            self.tally.compared += 1
            if not same:
                self.tally.differing.append(asked.name)
            return
        asked = self._next(kind)
        self._asked.append((asked, await answered(self._session, self._url + asked.path, asked.data())))

    async def _leave(self) -> None:
        """A client that goes after a few tokens of an answer that would be long."""
        asked = ask("completion", self._next("completion").number, 100, 400)
        async with self._session.post(self._url + asked.path, data=asked.data(stream=True), headers=JSON) as response:
            for _ in range(self._chance.randint(1, 12)):
                await response.content.readline()
            response.close()

    async def _chain(self) -> None:
        """A stored response that goes on from the one before it; now and then a new conversation."""
        body: dict[str, Any] = {"input": self._next("response").body["input"], "max_output_tokens": 8, "store": True}
        if self._last_response is not None and self._number % 3:
            body["input"] = "And then?"
            body["previous_response_id"] = self._last_response
        answer = await answered(self._session, f"{self._url}/v1/responses", json.dumps(body).encode())
        self._last_response = answer["id"]

    async def _batch(self) -> None:
        """A file of requests, its batch, and its answers; then both files are deleted."""
        lines = []
        for index in range(BATCH_LINES):
            asked = self._next("sampled chat")
            line = {"custom_id": str(index), "method": "POST", "url": asked.path, "body": dict(asked.body)}
            lines.append(json.dumps(line))
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", "\n".join(lines), filename="lines.jsonl")
        async with self._session.post(f"{self._url}/v1/files", data=form) as response:
            uploaded = await json_of(response)
        request = {"input_file_id": uploaded["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = await answered(self._session, f"{self._url}/v1/batches", json.dumps(request).encode())
        while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
            await asyncio.sleep(2)
            async with self._session.get(f"{self._url}/v1/batches/{batch['id']}") as response:
                batch = await json_of(response)
        if batch["request_counts"]["completed"] != BATCH_LINES:
            raise RuntimeError(f"a batch ended with {batch['status']}, {batch['request_counts']}")
        for file_id in (batch["output_file_id"], uploaded["id"]):
            async with self._session.delete(f"{self._url}/v1/files/{file_id}") as response:
                await json_of(response)


def slope_per_hour(samples: Sequence[ServerSample], name: str) -> float:
    """MiB that a process's own memory grows in an hour: the slope of the least squares' line."""
    points = [(sample.at_s / 3600, sample.processes[name].uss) for sample in samples if name in sample.processes]
    if len(points) < 3:
        return 0.0
    mean_at, mean = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((at - mean_at) ** 2 for at, _ in points)
    return float(sum((at - mean_at) * (uss - mean) for at, uss in points) / spread)


def summary(samples: Sequence[ServerSample]) -> list[dict[str, Any]]:
    """A row for each process that lived from the beginning to the end, the largest first."""
    third = (
        samples[min(1, len(samples) - 1)],
        samples[len(samples) // 2],
        samples[-1],
    )  # the first sample is before any request
    names = [name for name in third[0].processes if all(name in sample.processes for sample in third)]
    rows = []
    for name in sorted(names, key=lambda name: -third[2].processes[name].uss):
        row: dict[str, Any] = {"process": name.rsplit(" ", 1)[0]}
        for key in ("uss", "rss", "descriptors", "threads"):
            row[key] = [getattr(sample.processes[name], key) for sample in third]
        row["slope_mib_per_h"] = round(slope_per_hour(samples[len(samples) // 2 :], name), 1)
        rows.append(row)
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    keys = ("uss", "rss", "descriptors", "threads")
    cells = [[", ".join(f"{value:,.0f}" for value in row[key]) for key in keys] for row in rows]
    lines = [[row["process"], *cell, f"{row['slope_mib_per_h']:+.1f}"] for row, cell in zip(rows, cells, strict=True)]
    header = ["process", "USS, MiB: start, middle, end", "RSS", "descriptors", "threads", "MiB per hour, second half"]
    return markdown(header, lines)


def figures(soak: Soak) -> dict[str, Any]:
    """What is known so far."""
    tally = soak.tally
    return {
        "load_average_1min_after": round(os.getloadavg()[0], 2),
        "answered": dict(tally.answered),
        "compared": tally.compared,
        "differing": tally.differing,
        "errors": tally.errors,
        "log_mib": [soak.samples[at].log_mib for at in (0, len(soak.samples) // 2, -1)],
        "processes": summary(soak.samples),
        "samples": [
            {
                "at_s": sample.at_s,
                "answered": sample.answered,
                "log_mib": sample.log_mib,
                "cache": sample.cache,
                "uss": {name: process.uss for name, process in sample.processes.items()},
            }
            for sample in soak.samples
        ],
    }


async def soak(options: argparse.Namespace, output: ResultFile) -> bool:
    """Whether all was well."""
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        run = Soak(session, options.url, psutil.Process(options.pid))
        blocks = (await run.sample()).cache["available_blocks"]
        # Written after each sample, so that a run that is ended early has its result, too.
        note = lambda: output.write(figures(run))  # noqa: E731
        await run.run(options.minutes, options.per_minute, options.every, note)
        back = await run.blocks_back(blocks)
    tally = run.tally
    print(table(summary(run.samples)))
    print(
        f"{tally.answered.total()} answered, {tally.compared} compared, {len(tally.differing)} differ, "
        f"{len(tally.errors)} errors, all blocks back: {back}; logs "
        f"{run.samples[0].log_mib:.2f} -> {run.samples[-1].log_mib:.2f} MiB",
        *tally.errors[:10],
        sep="\n",
    )
    output.write({**figures(run), "blocks_back": back})
    return back and not tally.differing and not tally.errors


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("benchmarks.soak", __doc__)
    parser.add_argument("--pid", type=int, required=True, help="process of `raydix serve`")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the server answers")
    parser.add_argument("--minutes", type=float, default=60.0, help="time of the load")
    parser.add_argument("--per-minute", type=float, default=40.0, help="requests per minute")
    parser.add_argument("--every", type=float, default=30.0, help="seconds between samples")
    options, output = begin(parser, arguments)
    return 0 if asyncio.run(soak(options, output)) else 1


if __name__ == "__main__":
    sys.exit(main())
