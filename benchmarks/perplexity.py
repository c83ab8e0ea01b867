"""Cost of int8 weights in quality: the perplexity of real text, beside bfloat16 and float32.

    python -m benchmarks.perplexity [--text FILE] [--windows 64] [--window 1024] [--json FILE]

One engine for each variant in this process, no Ray, no HTTP. The text is cut into windows of consecutive tokens, spread
evenly over it, and each engine scores each window alone (`prompt_logprobs`), all tokens but the first. Without --text
it is the help texts of Python's language reference (`pydoc_data.topics`), which come with every Python. The variants
score the same tokens, so the standard error of a difference is that of the windows' differences, and much smaller than
that of a perplexity itself.
"""

import hashlib
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer

from benchmarks.command import begin, command_parser
from benchmarks.machine import public_name
from benchmarks.stepping import make_engine, whole
from raydix.engine.core.settings import Quantization
from raydix.engine.core.types import SamplingParams
from raydix.engine.model.engine import Engine
from raydix.engine.model.sources import DEFAULT_MODEL, resolve_model

BASE = "bfloat16"
VARIANTS: dict[str, tuple[str, Quantization | None]] = {
    BASE: ("bfloat16", None),
    "int8": ("bfloat16", "int8"),
    "float32": ("float32", None),
}
"""Dtype and quantisation of each."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("benchmarks.perplexity", __doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--text", type=Path, help="a UTF-8 file; otherwise Python's own help texts")
    parser.add_argument("--windows", type=int, default=64, help="at most so many")
    parser.add_argument("--window", type=int, default=1024, help="tokens of each")
    options, output = begin(parser, arguments)

    text = python_help() if options.text is None else options.text.read_text(encoding="utf-8")
    folder = resolve_model(options.model)
    token_ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    chosen = windows(token_ids, options.window, options.windows)
    if len(chosen) < 2:
        parser.error(f"the text has {len(token_ids)} tokens, and two windows of {options.window} are needed")

    engines = {name: _engine(options.model, options.window, *variant) for name, variant in VARIANTS.items()}
    losses: dict[str, list[float]] = {name: [] for name in engines}
    for window in track(chosen, "scoring", console=Console(stderr=True)):
        for name, engine in engines.items():
            losses[name].append(mean_loss(engine, window))

    result: dict[str, Any] = {
        "model": public_name(options.model),
        "text": {
            "name": "pydoc_data.topics" if options.text is None else options.text.name,
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "tokens": len(token_ids),
        },
        "windows": len(chosen),
        "window": options.window,
        "variants": report(losses),
    }
    print(f"{len(chosen)} windows of {options.window} tokens of {result['text']['name']}")
    print(f"{'':<10} {'perplexity':>10} {'over ' + BASE:>16} {'standard error':>16}")

    for name, figures in result["variants"].items():
        print(
            f"{name:<10} {figures['perplexity']:>10.3f} {figures['over_percent']:>+14.2f} % "
            f"{figures['over_standard_error_percent']:>14.2f} %"
        )

    output.write(result)
    return 0


def python_help() -> str:
    """Texts of `help("while")` and the like, in alphabetical order of their topics."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def windows(token_ids: Sequence[int], size: int, count: int) -> list[Sequence[int]]:
    """At most `count` disjoint windows of `size` tokens, evenly spread."""
    there = len(token_ids) // size
    count = min(count, there)
    firsts = [index * there // count * size for index in range(count)]
    return [token_ids[first : first + size] for first in firsts]


def mean_loss(engine: Engine, window: Sequence[int]) -> float:
    """The mean negative log-probability of the tokens behind the first, in nats."""
    engine.submit(whole("window", window, SamplingParams(max_tokens=0, prompt_logprobs=0)), time.monotonic())
    scores: list[float] = []
    while (step := engine.step(time.monotonic())) is not None:
        scores += [at.chosen for event in step.scores for at in event.logprobs]
    assert len(scores) == len(window) - 1
    return -statistics.fmean(scores)


def report(losses: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Each variant's perplexity, and by how much it exceeds `BASE`'s, from the mean loss of each window."""
    figures = {}
    for name, values in losses.items():
        differences = [value - other for value, other in zip(values, losses[BASE], strict=True)]
        figures[name] = {
            "perplexity": math.exp(statistics.fmean(values)),
            "over_percent": math.expm1(statistics.fmean(differences)) * 100,
            "over_standard_error_percent": statistics.stdev(differences) / math.sqrt(len(differences)) * 100,
        }
    return figures


def _engine(model: str, window: int, dtype: str, quantization: Quantization | None) -> Engine:
    return make_engine(
        model,
        max_requests=1,
        dtype=dtype,
        max_model_len=window,
        num_blocks=-(-window // 16),
        pool_gib=0,
        quantization=quantization,
    )


if __name__ == "__main__":
    sys.exit(main())
