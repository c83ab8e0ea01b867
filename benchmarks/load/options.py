"""The command line of a run: one frozen value, every limit checked before anything is sent."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn
from urllib.parse import urlsplit

import numpy as np
import orjson

from benchmarks.load.arrivals import Arrivals
from benchmarks.load.workload import SMALLEST_VOCAB
from benchmarks.machine import is_loopback

Workload = Literal["unique", "shared", "chat"]

DEFAULT_REQUESTS = 100
DEFAULT_CONCURRENCY = 8
EPILOG = """
Prompts of `unique` and `shared` are random token ids of exact length; those of `chat` are words. Without --seed each
run draws its own and reports it, so that a second run does not find the first one's prompts in the server's cache;
give the same --seed to measure exactly that. Without --requests and --duration, 100 requests are sent; chat sends
users x turns. Exit status: 0 all answered, 1 some requests failed, 2 the run could not be made.
`python -m benchmarks.serve compare A.json B.json` compares reports.
"""


class BenchmarkError(Exception):
    """The run cannot be made; the message is one line for the user."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and exiting."""
        raise BenchmarkError(f"{message} (--help lists the options)")


@dataclass(frozen=True, slots=True)
class Options:
    """A run. Lengths are in tokens, in chat in words; `rate` None means a closed loop of `concurrency`."""

    url: str
    allow_remote: bool
    model: str | None
    api_key_env: str | None
    workload: Workload
    input_tokens: int
    shared_tokens: int
    unique_tokens: int
    prefixes: int
    output_tokens: int
    vocab: int
    users: int
    turns: int
    think: float
    rate: float | None
    arrivals: Arrivals
    concurrency: int
    requests: int | None
    duration: float | None
    timeout: float
    warmup: int
    resume: bool
    seed: int
    extra_body: dict[str, Any]
    ttft_slo_ms: float | None
    tpot_slo_ms: float | None
    label: str
    json: Path | None
    plot: Path | None
    progress: bool


def parse(argv: Sequence[str]) -> Options:
    """Parse the options of a run; raises BenchmarkError with one line for invalid ones."""
    values = vars(_parser().parse_args(argv))
    chat = values["workload"] == "chat"
    if values["rate"] is not None and values["concurrency"] is not None:
        raise BenchmarkError("--rate (open loop) and --concurrency (closed loop) exclude each other")
    _default(values, "input_tokens", 32 if chat else 512)
    _default(values, "shared_tokens", 0 if chat else 1024)
    _default(values, "concurrency", values["users"] if chat else DEFAULT_CONCURRENCY)
    if values["requests"] is None and values["duration"] is None:
        values["requests"] = values["users"] * values["turns"] if chat else DEFAULT_REQUESTS
    _default(values, "seed", int(np.random.SeedSequence().generate_state(1)[0]))
    values["label"] = values["label"] or values["workload"]
    values["url"] = base_url(values["url"], values["allow_remote"])
    return Options(**values)


def base_url(url: str, allow_remote: bool) -> str:
    """Return `url` without a trailing slash or /v1; refuses hosts off this machine unless they are allowed."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BenchmarkError(f"--url {url}: expected something like http://127.0.0.1:8000")
    if not allow_remote and not is_loopback(parts.hostname):
        raise BenchmarkError(f"--url {url}: not on this machine; add --allow-remote to load another one")
    return url.rstrip("/").removesuffix("/v1")


def _default(values: dict[str, Any], name: str, value: object) -> None:
    if values[name] is None:
        values[name] = value


def _number(kind: type[int] | type[float], low: float, above: bool = False) -> Callable[[str], float]:
    """Make an argparse type: a finite number not below `low`, or above it."""

    def convert(text: str) -> float:
        number = kind(text)
        if not (low < number if above else low <= number) or number == float("inf"):
            raise argparse.ArgumentTypeError(f"must be {'above' if above else 'at least'} {low:g}, not {text}")
        return number

    convert.__name__ = "whole number" if kind is int else "number"
    return convert


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def _parser() -> Parser:
    positive, natural = _number(int, 1), _number(int, 0)
    seconds, more_than_zero = _number(float, 0), _number(float, 0, above=True)
    parser = Parser(prog="python -m benchmarks.serve", description="Load an OpenAI-compatible server.", epilog=EPILOG)

    server = parser.add_argument_group("server")
    server.add_argument("--url", default="http://127.0.0.1:8000", help="default: %(default)s")
    server.add_argument("--allow-remote", action="store_true", help="load a server that is not on this machine")
    server.add_argument("--model", help="default: the first the server lists")
    server.add_argument("--api-key-env", metavar="NAME", help="environment variable with the API key (OPENAI_API_KEY)")

    work = parser.add_argument_group("workload")
    work.add_argument("--workload", choices=("unique", "shared", "chat"), default="unique", help="default: %(default)s")
    work.add_argument("--input-tokens", type=positive, help="unique: per prompt (512); chat: words per message (32)")
    work.add_argument("--shared-tokens", type=natural, help="shared: common prefix (1024); chat: system message (0)")
    work.add_argument("--unique-tokens", type=positive, default=64, help="shared: after the prefix (%(default)s)")
    work.add_argument("--prefixes", type=positive, default=1, help="shared: different prefixes (%(default)s)")
    work.add_argument("--output-tokens", type=positive, default=64, help="per answer (%(default)s)")
    work.add_argument("--vocab", type=_number(int, SMALLEST_VOCAB), default=30000, help="ids below it (%(default)s)")
    work.add_argument("--users", type=positive, default=8, help="chat: conversations (%(default)s)")
    work.add_argument("--turns", type=positive, default=4, help="chat: turns of each (%(default)s)")
    work.add_argument("--think", type=seconds, default=1.0, help="chat: mean seconds between turns (%(default)s)")
    work.add_argument("--seed", type=natural, help="of prompts and arrivals (default: drawn and reported)")
    work.add_argument("--extra-body", type=_json_object, default={}, metavar="JSON", help="merged into each request")

    load = parser.add_argument_group("load")
    load.add_argument("--rate", type=more_than_zero, help="open loop: requests (chat: new users) per second")
    load.add_argument("--arrivals", choices=("poisson", "constant"), default="poisson", help="default: %(default)s")
    load.add_argument("--concurrency", type=positive, help="closed loop: at once (8; chat: users at once, all)")
    load.add_argument("--requests", type=positive, help="stop after so many")
    load.add_argument("--duration", type=more_than_zero, help="stop sending after so many seconds")
    load.add_argument("--timeout", type=more_than_zero, default=300.0, help="seconds for one answer (%(default)s)")
    load.add_argument("--warmup", type=natural, default=1, help="unmeasured requests first (%(default)s)")
    load.add_argument("--resume", action="store_true", help="ask for ids, and go on with streams that break")

    report = parser.add_argument_group("report")
    report.add_argument("--ttft-slo-ms", type=more_than_zero, help="goodput: limit on time to first token")
    report.add_argument("--tpot-slo-ms", type=more_than_zero, help="goodput: limit on time per output token")
    report.add_argument("--label", help="name of this run in comparisons (default: the workload)")
    report.add_argument("--json", type=Path, metavar="FILE", help="write the report")
    report.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it")
    report.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar")
    return parser
