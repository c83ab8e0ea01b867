"""Next turns' KV computed at idle priority: the hits that it keeps, and its cost to running streams.

    python -m benchmarks.next_turn [--chats 96] [--tokens 100] [--rounds 3] [--config cpu_mixed] [--json FILE]

Starts a server. Chats are answered at temperature 1, eight at a time, and each is then asked for a next turn with its
answer's text. Every round does so twice, with the same seeds and so the same answers: as by default; and with `store`,
for whose answers nothing is computed beforehand, because their clients are to go on from the ids.
"""

import argparse
import json
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from raydix.cli.cluster import LocalCluster, free_port
from raydix.configs import load_config
from raydix.engine.core.answers.transcripts import first_difference
from raydix.engine.model.sources import DEFAULT_MODEL, model_name, resolve_model
from raydix.engine.model.tokenizer import Tokenizer

NUM_USERS = 8
PAUSE_S = 2.0
"""Between a chat's turns."""
QUESTIONS = (
    "Tell me a short story about {}.",
    "Explain {} to a child.",
    "What is special about {}?",
    "List facts: {}.",
)
TOPICS = (
    *("the sea", "a clock", "Brazil", "snow", "an old house", "jazz", "volcanoes", "tea", "the moon", "a lost key"),
    *("bridges", "wolves", "a market in Cairo", "glass", "chess", "rain", "the number seven", "paper", "a lighthouse"),
    *("mushrooms", "trains", "honey", "the alphabet", "winter in Oslo"),
)


@dataclass(frozen=True, slots=True)
class FirstTurn:
    """First answer of a chat, and the cache hits of its second turn."""

    num_generated: int
    differs: bool
    """True if the answer's text has other ids than were generated."""
    num_behind: int
    """Tokens in the full blocks of the next prompt, up to the answer's end, from the first difference on."""
    num_possible: int
    """Tokens in all full blocks of the next prompt up to the answer's end."""
    num_hit: int


class BenchedChats:
    """The chats of a benchmark on one server."""

    def __init__(self, port: int, num_chats: int, num_tokens: int, block_size: int) -> None:
        self._url = f"http://127.0.0.1:{port}/v1/chat/completions"
        self._questions = [question.format(topic) for topic, question in islice(product(TOPICS, QUESTIONS), num_chats)]
        self._num_tokens = num_tokens
        self._block_size = block_size
        self._tokenizer = Tokenizer(resolve_model(DEFAULT_MODEL))

    def run(self, salt: str, *, store: bool) -> tuple[float, list[FirstTurn]]:
        """Tokens per second of the first turns, and the hits of the second ones."""
        with ThreadPoolExecutor(NUM_USERS) as users:
            started = time.perf_counter()
            firsts = list(users.map(lambda index: self._first(index, salt, store), range(len(self._questions))))
            took = time.perf_counter() - started
            time.sleep(PAUSE_S)
            turns = list(users.map(lambda index: self._second(index, salt, firsts[index]), range(len(firsts))))
        return sum(turn.num_generated for turn in turns) / took, turns

    def _first(self, index: int, salt: str, store: bool) -> dict[str, Any]:
        messages = [{"role": "user", "content": self._questions[index]}]
        return self._ask(messages, salt, max_tokens=self._num_tokens, seed=index, store=store)

    def _second(self, index: int, salt: str, first: dict[str, Any]) -> FirstTurn:
        [choice] = first["choices"]
        messages = [
            {"role": "user", "content": self._questions[index]},
            {"role": "assistant", "content": choice["message"]["content"]},
        ]
        closed = self._tokenizer.encode_chat(messages)
        canonical = closed.token_ids[: closed.borders[-1][1]]  # without the header of the answer that is asked for
        difference = first_difference(canonical, first["prompt_token_ids"] + choice["token_ids"])
        num_possible = len(canonical) // self._block_size * self._block_size
        second = self._ask([*messages, {"role": "user", "content": "Go on."}], salt, max_tokens=1)
        hit = min(second["usage"]["prompt_tokens_details"]["cached_tokens"], num_possible)
        same = num_possible if difference is None else difference // self._block_size * self._block_size
        return FirstTurn(
            num_generated=len(choice["token_ids"]),
            differs=difference is not None,
            num_behind=max(0, num_possible - same),
            num_possible=num_possible,
            num_hit=hit,
        )

    def _ask(self, messages: list[dict[str, str]], salt: str, **fields: Any) -> dict[str, Any]:
        body = {"model": model_name(DEFAULT_MODEL), "messages": messages, "cache_salt": salt, "return_token_ids": True}
        data = json.dumps({**body, "temperature": 1, **fields}).encode()
        request = urllib.request.Request(self._url, data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as response:
            answer: dict[str, Any] = json.load(response)
        return answer


def summary(rates: Sequence[float], turns: Sequence[FirstTurn]) -> dict[str, float]:
    """Figures of one way to answer, over all rounds."""
    differing = [turn for turn in turns if turn.differs]
    return {
        "tokens_per_s": statistics.median(rates),
        "answers": len(turns),
        "answers_that_differ": len(differing),
        "tokens_generated": sum(turn.num_generated for turn in turns),
        "tokens_behind_differences": sum(turn.num_behind for turn in turns),
        "hits_kept": sum(turn.num_hit for turn in turns) / sum(turn.num_possible for turn in turns),
        "hits_kept_where_ids_differ": sum(turn.num_hit for turn in differing)
        / max(1, sum(turn.num_possible for turn in differing)),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.next_turn", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", default="cpu_mixed", help="configuration of the server")
    parser.add_argument("--chats", type=int, default=96, help="conversations, at most 96")
    parser.add_argument("--tokens", type=int, default=100, help="most tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of both ways, in turns")
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args(arguments)

    port = free_port()
    config = load_config(options.config, {"http": {"port": port}})
    cluster = LocalCluster(config)
    cluster.start()
    rates: dict[str, list[float]] = {"computed": [], "stored": []}
    turns: dict[str, list[FirstTurn]] = {"computed": [], "stored": []}

    try:
        cluster.deploy(lambda progress: None, threading.Event())
        chats = BenchedChats(port, options.chats, options.tokens, config.cache.block_size)
        BenchedChats(port, NUM_USERS, options.tokens, config.cache.block_size).run("warm", store=True)
        for number in range(options.rounds):
            for way in ("computed", "stored") if number % 2 else ("stored", "computed"):
                rate, done = chats.run(f"{number}-{way}", store=way == "stored")
                rates[way].append(rate)
                turns[way] += done
                print(way, json.dumps(summary([rate], done)), flush=True)
    finally:
        cluster.stop()

    result: dict[str, Any] = describe("benchmarks.next_turn", sys.argv[1:] if arguments is None else list(arguments))
    for way in rates:
        result[way] = summary(rates[way], turns[way])
        print("all", way, json.dumps(result[way]))

    pairs = zip(rates["computed"], rates["stored"], strict=True)
    result["rate_ratio"] = statistics.median(computed / stored for computed, stored in pairs)
    print("tokens/s computed over stored, median of the rounds:", round(result["rate_ratio"], 3))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")

    return 0


if __name__ == "__main__":
    raise SystemExit(main())
