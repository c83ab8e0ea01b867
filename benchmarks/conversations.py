"""Load of conversations that grow: the first token of later turns, whose prompts begin with what was computed before.

    python -m benchmarks.conversations [--url http://127.0.0.1:8000] [--users 8] [--turns 5] [--think 1] [--json FILE]

Each user sends a turn, reads the streamed answer, pauses, and sends the next turn behind the whole conversation so far,
all users at the same time. Any server with OpenAI's API can be loaded; its key is read from OPENAI_API_KEY.
"""

import asyncio
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.command import begin, command_parser
from benchmarks.mixed_bodies import WORDS, Asked, chunks_of, json_of

WORDS_OF_A_TURN = 32
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class ConversationLoad:
    """Users that converse at the same time."""

    users: int = 8
    turns: int = 5
    think_s: float = 1.0
    """Mean pause of a user between an answer and the next turn."""
    output_tokens: int = 64
    """Tokens of each answer."""


@dataclass(slots=True)
class ConversationTurn:
    """One answer. Times in seconds of `time.perf_counter`."""

    number: int
    sent_s: float
    arrivals: list[float] = field(default_factory=list)
    """Arrivals of the pieces of text."""
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def first_token_s(self) -> float:
        return self.arrivals[0] - self.sent_s

    @property
    def time_per_token_s(self) -> float:
        num_tokens: int = self.usage["completion_tokens"]
        return (self.arrivals[-1] - self.arrivals[0]) / max(1, num_tokens - 1)

    @property
    def longest_gap_s(self) -> float:
        return max((later - earlier for earlier, later in itertools.pairwise(self.arrivals)), default=0.0)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the server says it had; 0 where the server does not say."""
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


async def converse(
    session: aiohttp.ClientSession, url: str, model: str, user: int, load: ConversationLoad
) -> list[ConversationTurn]:
    """The turns of one user. Raises RuntimeError if an answer fails or has no text."""
    chance = random.Random(user)
    messages: list[dict[str, str]] = []
    turns: list[ConversationTurn] = []
    for number in range(load.turns):
        if number:
            await asyncio.sleep(chance.uniform(0.5, 1.5) * load.think_s)
        messages.append({"role": "user", "content": " ".join(chance.choices(WORDS, k=WORDS_OF_A_TURN))})
        body = {
            "model": model,
            "messages": messages,
            "max_tokens": load.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        turn = ConversationTurn(number, time.perf_counter())
        async for chunk in chunks_of(session, url, Asked("conversation", user, "/v1/chat/completions", body)):
            pieces = [choice["delta"].get("content") for choice in chunk["choices"]]
            if text := "".join(piece or "" for piece in pieces):
                turn.arrivals.append(time.perf_counter())
                turn.text += text
            turn.usage = chunk.get("usage") or turn.usage
        if not turn.text or not turn.usage:
            raise RuntimeError(f"user {user}, turn {number}: the stream had no text, or did not say how many tokens")
        messages.append({"role": "assistant", "content": turn.text})
        turns.append(turn)
    return turns


async def measure(url: str, load: ConversationLoad) -> dict[str, float]:
    """Converse with the server; returns the figures of all turns together."""
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout, connector = aiohttp.ClientTimeout(total=TIMEOUT_S), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers) as session:
        async with session.get(f"{url}/v1/models") as response:
            model = (await json_of(response))["data"][0]["id"]
        started = time.perf_counter()
        users = [converse(session, url, model, user, load) for user in range(load.users)]
        turns = list(itertools.chain.from_iterable(await asyncio.gather(*users)))
        return figures(turns, time.perf_counter() - started)


def figures(turns: Sequence[ConversationTurn], seconds: float) -> dict[str, float]:
    """Medians of the turns, the longest gap of all, and what was generated in these seconds."""
    later = [turn.first_token_s for turn in turns if turn.number] or [0.0]
    prompt_tokens = sum(turn.usage["prompt_tokens"] for turn in turns)
    found = {
        "first_token_ms": 1e3 * statistics.median(turn.first_token_s for turn in turns),
        "later_first_token_ms": 1e3 * statistics.median(later),
        "ms_per_token": 1e3 * statistics.median(turn.time_per_token_s for turn in turns),
        "longest_gap_ms": 1e3 * max(turn.longest_gap_s for turn in turns),
        "output_tokens_per_s": sum(turn.usage["completion_tokens"] for turn in turns) / seconds,
        "cached_share": sum(turn.cached_tokens for turn in turns) / prompt_tokens,
    }
    return {name: round(value, 3) for name, value in found.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    default = ConversationLoad()
    parser = command_parser("benchmarks.conversations", __doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server's")
    parser.add_argument("--users", type=int, default=default.users, help="conversations at the same time")
    parser.add_argument("--turns", type=int, default=default.turns, help="of each conversation")
    parser.add_argument("--think", type=float, default=default.think_s, help="mean pause before a further turn, s")
    parser.add_argument("--output-tokens", type=int, default=default.output_tokens, help="of each answer")
    options, output = begin(parser, arguments)

    found = asyncio.run(
        measure(
            options.url.rstrip("/"),
            ConversationLoad(options.users, options.turns, options.think, options.output_tokens),
        )
    )
    for name, value in found.items():
        print(f"{name:24} {value:10,.3f}")
    output.write(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
