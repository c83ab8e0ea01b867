"""Two tenants of one server: one asks for many times its share, and the other shall not notice.

    raydix serve --config tenants.yaml
    python -m benchmarks.tenants --keys HEAVY LIGHT [--url http://127.0.0.1:8000] [--share 4] [--times 20] [--json FILE]

The heavy tenant keeps `share` requests under way, or `times` as many; the light one sends a request now and then, at
times and with prompts that are drawn once and for all. `tests/unit/tenant_simulation.py` asks the same of the
production scheduler in virtual time; here are the processes, the network and the model. The generator takes a part of
the server's own processors, most of it beside the flood.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp

from benchmarks.command import begin, command_parser
from benchmarks.mixed_bodies import Asked, chunks_of, json_of

PROMPT, ANSWER = (32, 256), (8, 32)
"""Bounds of the numbers of tokens of a request."""
IDS = (100, 40_000)
PAUSE_S = 1.5
"""Mean time between two requests of the light tenant."""
TIMEOUT_S = 600.0


@dataclass(slots=True)
class TenantLoad:
    """What one load of both tenants came to."""

    first_token_ms: list[float] = field(default_factory=list)
    """Times to the first token of the light tenant's requests."""
    num_tokens: int = 0
    """Tokens of prompts and answers of both, of answers that ended."""


class TenantClient:
    """The client of one tenant, within `async with`."""

    def __init__(self, url: str, key: str) -> None:
        timeout, connector = aiohttp.ClientTimeout(total=TIMEOUT_S), aiohttp.TCPConnector(limit=0)
        headers = {"Authorization": f"Bearer {key}"}
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers)
        self._url = url
        self._model = ""

    async def __aenter__(self) -> Self:
        async with self._session.get(f"{self._url}/v1/models") as response:
            self._model = (await json_of(response))["data"][0]["id"]
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._session.close()

    async def ask(self, chance: random.Random, load: TenantLoad) -> float:
        """Have one request answered; returns the time to the first token in milliseconds."""
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": [chance.randrange(*IDS) for _ in range(chance.randint(*PROMPT))],
            "max_tokens": chance.randint(*ANSWER),
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": uuid.uuid4().hex,  # another run shall not find this one's prompts
            "stream_options": {"include_usage": True},
        }
        asked, sent, first = Asked("completion", 0, "/v1/completions", body), time.perf_counter(), 0.0
        async for chunk in chunks_of(self._session, self._url, asked):
            first = first or time.perf_counter()
            if usage := chunk.get("usage"):
                load.num_tokens += usage["total_tokens"]
        return 1e3 * (first - sent)


async def put(heavy: TenantClient, light: TenantClient, num_heavy: int, seconds: float) -> TenantLoad:
    """Keep requests of the heavy tenant under way while the light one sends its own."""
    load = TenantLoad()

    async def flood(number: int) -> None:
        chance = random.Random(f"heavy {number}")
        while True:
            await heavy.ask(chance, load)

    async def now_and_then() -> None:
        chance, began = random.Random("light"), time.perf_counter()
        at = 0.0
        async with asyncio.TaskGroup() as group:
            while (at := at + chance.expovariate(1 / PAUSE_S)) < seconds:
                await asyncio.sleep(began + at - time.perf_counter())
                group.create_task(one(random.Random(f"light {at}")))

    async def one(chance: random.Random) -> None:
        load.first_token_ms.append(await light.ask(chance, load))

    under_way = [asyncio.create_task(flood(number)) for number in range(num_heavy)]
    try:
        await asyncio.sleep(seconds / 10 if num_heavy else 0.0)  # its requests wait when the time begins
        load.num_tokens = 0
        await now_and_then()
    finally:
        for task in under_way:
            task.cancel()
        ended = await asyncio.gather(*under_way, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):  # a flood that was refused is none
            raise error
    return load


async def measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The loads in turns; of each the light tenant's first tokens and the tokens of both together."""
    url = options.url.rstrip("/")
    loads = {
        "light alone": 0,
        f"heavy with {options.share} under way": options.share,
        f"heavy with {options.share * options.times} under way": options.share * options.times,
    }
    found: dict[str, list[TenantLoad]] = {name: [] for name in loads}
    async with TenantClient(url, options.keys[0]) as heavy, TenantClient(url, options.keys[1]) as light:
        await put(heavy, light, options.share, options.seconds / 4)  # the server and its costs are warm
        for _ in range(options.rounds):
            for name, num_heavy in loads.items():
                found[name].append(await put(heavy, light, num_heavy, options.seconds))
    return {name: figures(runs, options.seconds) for name, runs in found.items()}


def figures(runs: Sequence[TenantLoad], seconds: float) -> dict[str, float]:
    """The first tokens of all rounds together, and the median of the rounds' tokens per second."""
    firsts = [each for run in runs for each in run.first_token_ms]
    quantiles = statistics.quantiles(firsts, n=10, method="inclusive")
    return {
        "light_requests": len(firsts),
        "light_first_token_p50_ms": round(quantiles[4], 1),
        "light_first_token_p90_ms": round(quantiles[8], 1),
        "tokens_per_s": round(statistics.median(run.num_tokens / seconds for run in runs), 1),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("benchmarks.tenants", __doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server's")
    parser.add_argument("--keys", nargs=2, required=True, metavar=("HEAVY", "LIGHT"), help="keys of the two tenants")
    parser.add_argument("--share", type=int, default=4, help="requests that the heavy tenant has under way")
    parser.add_argument("--times", type=int, default=20, help="as many times its share")
    parser.add_argument("--seconds", type=float, default=30.0, help="time of each load")
    parser.add_argument("--rounds", type=int, default=2, help="of all loads in turns")
    options, output = begin(parser, arguments)

    found = asyncio.run(measure(options))
    print(json.dumps(found, indent=2))
    # The command has the tenants' keys, which are nobody's to read.
    told = {name: getattr(options, name) for name in ("share", "times", "seconds", "rounds")}
    output.write({"command": "python -m benchmarks.tenants", **told, "loads": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
