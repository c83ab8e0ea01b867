"""Generated answers of every kind, compared bit by bit in every circumstance in which a server may compute them.

    python -m benchmarks.exact [--bodies 25] [--json FILE]

Each body (`mixed_bodies`) is answered alone, by a server without prefix caching and without drafts: that is the
reference. Then all bodies are asked again in the circumstances of `main`, and every answer must have the reference's
tokens, texts and log-probabilities. A circumstance that did not come about would prove nothing, so cached tokens,
accepted drafts, kills and failovers are counted, and none of the counts may be 0. Exit code 1 if an answer differs,
a request fails, or a circumstance did not come about.
"""

import asyncio
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import yaml

from benchmarks.command import begin, command_parser
from benchmarks.mixed_bodies import (
    GENERATED,
    Asked,
    answered,
    as_collected,
    ask,
    collected,
    essence,
    num_tokens,
    streamed,
)
from benchmarks.served import Server, running

TIMEOUT_S = 300.0
# Requests that run at the same time. Workers make drafts where few do: beside many rows drafts would not pay.
CROWD, FEW = 24, 3
BETWEEN_KILLS = 12  # answers between the return of a killed worker and the next kill
VICTIMS = ("DecodeWorker", "PrefillWorker")  # workers that are killed, in turns
NUM_WORKERS = len(VICTIMS)
LIMITS = {"token_budget": 256, "max_requests": 32}
# Counts of the circumstances, and the server's counters of them.
COUNTERS = {
    "cached_tokens": "raydix_cache_hit_tokens",
    "drafted_tokens": "raydix_accepted_draft_tokens",
    "failovers": "raydix_failovers",
}


def split(folder: Path) -> dict[str, Any]:
    """A prefill and a decode worker with drafts, and pools that hold a part of the load; all of it is on disk."""
    cache = {"num_blocks": 700, "segment_gib": 0.25, "swap_gib": 0.1, "disk_gib": 2, "disk_path": str(folder)}
    return {"model": {"max_model_len": 2048}, "cache": cache, "workers": {"prefill": LIMITS, "decode": LIMITS}}


# Nothing is cached, guessed, moved or split.
PLAIN: dict[str, Any] = {
    "model": {"max_model_len": 2048},
    "cache": {"prefix_caching": False, "num_blocks": 2000},
    "speculation": {"mode": "off"},
    "workers": {"mixed": LIMITS},
}


@dataclass(slots=True)
class CircumstanceResult:
    """One circumstance, and how its answers compare with the reference."""

    circumstance: str
    answers: int = 0
    tokens: int = 0
    differing: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    """What shows that the circumstance came about; none may be 0."""
    seconds: float = 0.0

    @property
    def is_well(self) -> bool:
        return self.answers > 0 and not self.differing and not self.errors and all(self.counts.values())


class ExactClient:
    """Asks one running server."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def answer(self, asked: Asked) -> dict[str, Any]:
        return await answered(self._session, self._url + asked.path, asked.data())

    async def stream(self, asked: Asked) -> list[dict[str, Any]]:
        return await streamed(self._session, self._url, asked)

    async def counters(self) -> dict[str, int]:
        """The server's counters of `COUNTERS`, each the sum over its tags."""
        async with self._session.get(f"{self._url}/metrics") as response:
            text = await response.text()
        return {
            name: int(sum(float(value) for value in re.findall(rf"^(?:\w+_)?{metric}_total\S* (\S+)", text, re.M)))
            for name, metric in COUNTERS.items()
        }

    async def num_workers(self) -> int:
        """Registered workers; 0 while no manager answers."""
        async with self._session.get(f"{self._url}/v1/cache") as response:
            return len((await response.json())["workers"]) if response.status == 200 else 0

    async def until_written(self) -> None:
        """Wait until the disk has as many bytes as a second before."""
        before, now = -1, 0
        while now != before:
            await asyncio.sleep(1)
            async with self._session.get(f"{self._url}/v1/cache") as response:
                before, now = now, (await response.json())["disk"]["bytes"]


async def kill_workers(client: ExactClient, result: CircumstanceResult) -> None:
    """Kill a worker with SIGKILL again and again, each time as soon as all are at work, and some answers have come."""
    result.counts["kills"] = 0
    while True:
        while await client.num_workers() < NUM_WORKERS:
            await asyncio.sleep(0.2)
        enough = result.answers + BETWEEN_KILLS
        while result.answers < enough:
            await asyncio.sleep(0.02)
        os.kill(pid_of(VICTIMS[result.counts["kills"] % NUM_WORKERS]), signal.SIGKILL)
        result.counts["kills"] += 1
        while await client.num_workers() == NUM_WORKERS:  # until the manager has noticed
            await asyncio.sleep(0.05)


def pid_of(title: str) -> int:
    """The process of this kind of actor, of the one server that this process has started."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith(f"ray::{title}"):
                return process.pid
    raise LookupError(title)


class ExactComparison:
    """The bodies, their reference answers, and the results so far."""

    def __init__(self, bodies: Sequence[Asked]) -> None:
        self.bodies = bodies
        self.results: list[CircumstanceResult] = []
        self._expected: dict[str, dict[str, Any]] = {}

    async def refer(self, client: ExactClient) -> None:
        """Ask each body alone."""
        result = self._begin("alone: the reference")
        for asked in self.bodies:
            self._expected[asked.name] = answer = await client.answer(asked)
            result.answers += 1
            result.tokens += num_tokens(answer)
        self._end(result)

    async def compare(
        self,
        circumstance: str,
        client: ExactClient,
        *counted: str,
        crowd: int = CROWD,
        streamed: bool = False,
        kill: bool = False,
    ) -> None:
        """Ask all bodies, `crowd` at a time, streamed where that is possible; `counted` are names of `COUNTERS`."""
        result = self._begin(circumstance)
        before = await client.counters()
        killing = asyncio.create_task(kill_workers(client, result)) if kill else None
        waiting = iter([asked for asked in self.bodies if asked.streams or not streamed])

        async def ask_on() -> None:
            for asked in waiting:
                await self._ask(asked, client, result, streamed)

        await asyncio.gather(*(ask_on() for _ in range(crowd)))
        after = await client.counters()
        result.counts |= {name: after[name] - before[name] for name in counted}
        if killing is not None and not killing.cancel():
            killing.result()  # only an exception ends it by itself
        self._end(result)

    async def _ask(self, asked: Asked, client: ExactClient, result: CircumstanceResult, streamed: bool) -> None:
        expected = self._expected[asked.name]
        try:
            if streamed:
                same = collected(await client.stream(asked)) == as_collected(expected)
            else:
                same = essence(await client.answer(asked)) == essence(expected)
        except (aiohttp.ClientError, TimeoutError, RuntimeError) as error:
            result.errors.append(f"{asked.name}: {error!r}"[:300])
            return
        result.answers += 1
        result.tokens += num_tokens(expected)
        if not same:
            result.differing.append(asked.name)

    def _begin(self, circumstance: str) -> CircumstanceResult:
        self.results.append(CircumstanceResult(circumstance, seconds=time.monotonic()))
        return self.results[-1]

    def _end(self, result: CircumstanceResult) -> None:
        result.seconds = round(time.monotonic() - result.seconds, 1)
        print(
            f"{result.circumstance}: {result.answers} answers, {result.tokens} tokens in {result.seconds} s, "
            f"{len(result.differing)} differ, {len(result.errors)} errors, {result.counts}",
            *result.errors[:5],
            sep="\n",
            file=sys.stderr,
            flush=True,
        )


@asynccontextmanager
async def served(settings: Mapping[str, Any], folder: Path) -> AsyncIterator[ExactClient]:
    """A server with these settings, until the block ends."""
    file = folder / "server.yaml"
    file.write_text(yaml.safe_dump(dict(settings)))
    command = (sys.executable, "-m", "raydix.cli.main", "serve", "--config", str(file), "--port")
    with running(Server("raydix", command, os.environ), folder / "server.log") as url:
        timeout, connector = aiohttp.ClientTimeout(total=TIMEOUT_S), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            yield ExactClient(session, url)


async def compare_all(comparison: ExactComparison, folder: Path) -> None:
    """The reference, and every circumstance."""
    async with served(PLAIN, folder) as client:
        await comparison.refer(client)
        await comparison.compare("in a crowd", client)

    async with served(split(folder / "kv"), folder) as client:
        await comparison.compare("in a crowd, with hand-overs", client, "cached_tokens")
        counted = ("cached_tokens", "drafted_tokens")
        await comparison.compare("again, cached, with drafts", client, *counted, crowd=FEW)
        await comparison.compare("again, streamed, with drafts", client, *counted, crowd=FEW, streamed=True)
        await client.until_written()
    async with served(split(folder / "kv"), folder) as client:
        # No prompt that begins like this one has been computed since the start.
        questions = [asked for asked in comparison.bodies if asked.kind == "completion"]
        answer = await client.answer(max(questions, key=lambda asked: len(asked.data())))
        await comparison.compare("after a restart, from disk", client, "cached_tokens")
        comparison.results[-1].counts["from_disk"] = answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    async with served(split(folder / "another"), folder) as client:
        await comparison.compare("while workers are killed", client, "failovers", kill=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("benchmarks.exact", __doc__)
    parser.add_argument("--bodies", type=int, default=25, help="bodies of each kind")
    options, output = begin(parser, arguments)
    # Lengths of prompts and answers follow from the number, so that a body is the same in every run.
    bodies = [
        ask(kind, number, 20 + number * 37 % 160, 16 + number * 7 % 17)
        for number in range(options.bodies)
        for kind in GENERATED
    ]
    comparison = ExactComparison(bodies)
    with tempfile.TemporaryDirectory(prefix="raydix-exact-") as folder:
        asyncio.run(compare_all(comparison, Path(folder)))

    compared = comparison.results[1:]
    total = {
        "kinds": len(GENERATED),
        "compared": sum(result.answers for result in compared),
        "tokens": sum(result.tokens for result in compared),
        "differing": sum(len(result.differing) for result in compared),
        "errors": sum(len(result.errors) for result in compared),
    }
    print(total)
    output.write({**total, "circumstances": [asdict(result) for result in comparison.results]})
    return 0 if all(result.is_well for result in comparison.results) else 1


if __name__ == "__main__":
    sys.exit(main())
