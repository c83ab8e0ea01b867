"""Agents at work on a pool for some of them, on a server without Ray's cluster: with sessions in turns, and without.

    python -m benchmarks.agents_live [--agents 12] [--fit 4] [--steps 6] [--words 500] [--quantum 20] [--rounds 2]
        [--model SOURCE] [--json FILE]

Each agent has a prompt of its own, asks, waits as a tool would take, and sends the answer back with a result, until it
has made its steps; it names no session. The pool has the blocks of `--fit` whole sessions. In each round the same
agents work with `placement.session_quantum_s` at 0 (`off`) and at `--quantum` (`on`), every other round the other way
round, each time on an empty cache. Answers must be the same each time, whoever worked beside.

A first token counts from the request on, with the time for which the session paused.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import orjson
import yaml

from benchmarks.command import begin, command_parser
from benchmarks.served import Server, running
from benchmarks.words import WORDS
from raydix.engine.model.sources import DEFAULT_MODEL

BLOCK = 16
"""Tokens of a block."""
RESULT_WORDS = 30
ANSWER_TOKENS = 16
TOOL_S = 0.5
"""Mean time that a tool takes."""
SESSION_TOKENS = 1.25
"""Times the words of a session: most are one token, and the template's own come with each message."""
TIMEOUT_S = 3600.0
QUANTILES = {"p50": 0.5, "p90": 0.9, "max": 1.0}


@dataclass(slots=True)
class LiveAgent:
    """One agent, and what it has seen."""

    number: int
    answers: list[str] = field(default_factory=list)
    first_tokens_s: list[float] = field(default_factory=list)
    num_prompt: int = 0
    """Tokens of all its prompts."""
    num_cached: int = 0
    num_pauses: int = 0
    """Requests that waited for the session's turn."""

    async def work(self, session: aiohttp.ClientSession, url: str, num_steps: int, num_words: int) -> None:
        """Make so many steps, the first with a prompt of so many words. Raises RuntimeError if an answer fails."""
        random = Random(self.number)
        messages = [{"role": "user", "content": " ".join(random.choices(WORDS, k=num_words))}]
        for step in range(num_steps):
            if step:
                await asyncio.sleep(random.uniform(0.5, 1.5) * TOOL_S)
                messages.append({"role": "user", "content": " ".join(random.choices(WORDS, k=RESULT_WORDS))})
            answer = await self._ask(session, url, messages)
            messages.append({"role": "assistant", "content": answer})
            self.answers.append(answer)

    async def _ask(self, session: aiohttp.ClientSession, url: str, messages: list[dict[str, str]]) -> str:
        asked = {
            "messages": messages,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        begun, pieces, is_paused = time.perf_counter(), list[str](), False
        first: float | None = None
        async with session.post(f"{url}/v1/chat/completions", json=asked) as response:
            if response.status != 200:
                raise RuntimeError(f"agent {self.number}: {(await response.text())[:500]}")
            async for line in response.content:
                is_paused = is_paused or line.startswith(b": x-raydix-paused")
                data = line.removeprefix(b"data: ").strip()
                if data == line.strip() or data == b"[DONE]":
                    continue
                first = time.perf_counter() - begun if first is None else first
                pieces.append(self._piece(orjson.loads(data)))
        if first is None:
            raise RuntimeError(f"agent {self.number}: the stream had no event")
        self.first_tokens_s.append(first)
        self.num_pauses += is_paused
        return "".join(pieces)

    def _piece(self, chunk: dict[str, Any]) -> str:
        """The text of a chunk; counts the tokens of the last one's usage."""
        if "error" in chunk:
            raise RuntimeError(f"agent {self.number}: {chunk['error']}")
        if usage := chunk.get("usage"):
            self.num_prompt += usage["prompt_tokens"]
            self.num_cached += usage["prompt_tokens_details"]["cached_tokens"]
        return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])


def settings_of(options: argparse.Namespace, quantum_s: float) -> dict[str, Any]:
    """The configuration of a server with a pool for some of the agents."""
    words = options.words + options.steps * (RESULT_WORDS + ANSWER_TOKENS)
    session_blocks = int(words * SESSION_TOKENS) // BLOCK + 1
    return {
        "model": {"source": options.model, "max_model_len": 2 * session_blocks * BLOCK},
        # Nothing but the pool keeps KV: what is evicted is computed again.
        "cache": {
            "block_size": BLOCK,
            "num_blocks": options.fit * session_blocks,
            "segment_gib": 0.0,
            "swap_gib": 0.0,
        },
        "placement": {"session_quantum_s": quantum_s},
        "batches": {"gib": 0},
    }


async def work(url: str, options: argparse.Namespace) -> tuple[list[LiveAgent], float]:
    """Let all agents work on a server; returns them, and the seconds until the last one was done."""
    agents = [LiveAgent(number) for number in range(options.agents)]
    timeout, connector = aiohttp.ClientTimeout(total=TIMEOUT_S), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        begun = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for agent in agents:
                group.create_task(agent.work(session, url, options.steps, options.words))
        return agents, time.perf_counter() - begun


def run(options: argparse.Namespace, quantum_s: float) -> tuple[list[LiveAgent], float]:
    """Let all agents work on a new server, as `work`."""
    with tempfile.TemporaryDirectory(prefix="raydix-agents-") as name:
        file = Path(name) / "server.yaml"
        file.write_text(yaml.safe_dump(settings_of(options, quantum_s)))
        command = (sys.executable, "-m", "raydix.cli.main", "serve", "--local", "--config", str(file), "--port")
        with running(Server("raydix", command, os.environ), Path(name) / "server.log") as url:
            return asyncio.run(work(url, options))


def figures(agents: Sequence[LiveAgent], seconds: float) -> dict[str, float]:
    """Steps per hour, times to first token in seconds, tokens computed, and pauses."""
    first_tokens = sorted(each for agent in agents for each in agent.first_tokens_s)
    num_prompt = sum(agent.num_prompt for agent in agents)
    num_cached = sum(agent.num_cached for agent in agents)
    at = {name: first_tokens[min(int(q * len(first_tokens)), len(first_tokens) - 1)] for name, q in QUANTILES.items()}
    return {
        "steps_per_h": 3600 * len(first_tokens) / seconds,
        **{f"first_token_{name}_s": value for name, value in at.items()},
        "computed_tokens": num_prompt - num_cached,
        "cached_share": num_cached / num_prompt,
        "pauses": sum(agent.num_pauses for agent in agents),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 for answers that differ."""
    options, output = begin(_parser(), arguments, ("raydix",))
    rows: list[dict[str, Any]] = []
    known: list[list[str]] = []
    print(f"{'round':>5} {'turns':>6}{'steps/h':>9}{'p50 s':>8}{'p90 s':>8}{'max s':>8}{'computed':>10}{'pauses':>8}")
    for number in range(options.rounds):
        ways = [("off", 0.0), ("on", options.quantum)]
        for name, quantum_s in ways if number % 2 == 0 else reversed(ways):
            agents, seconds = run(options, quantum_s)
            answers = [agent.answers for agent in agents]
            known = known or answers
            if answers != known:
                print("agents_live: an agent got other answers than before", file=sys.stderr)
                return 1
            row = {"round": number, "turns": name, **figures(agents, seconds)}
            rows.append(row)
            print(
                f"{number:>5} {name:>6}{row['steps_per_h']:>9,.0f}{row['first_token_p50_s']:>8.1f}"
                f"{row['first_token_p90_s']:>8.1f}{row['first_token_max_s']:>8.1f}{row['computed_tokens']:>10,}"
                f"{row['pauses']:>8}",
                flush=True,
            )
    output.write({"runs": rows})
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("benchmarks.agents_live", __doc__)
    parser.add_argument("--agents", type=int, default=12, help="agents at work")
    parser.add_argument("--fit", type=int, default=4, help="whole sessions that the pool has room for, 2 at least")
    parser.add_argument("--steps", type=int, default=6, help="steps of each agent")
    parser.add_argument("--words", type=int, default=500, help="of each agent's first prompt")
    parser.add_argument("--quantum", type=float, default=20.0, help="placement.session_quantum_s with turns")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each way")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="as model.source")
    return parser


if __name__ == "__main__":
    sys.exit(main())
