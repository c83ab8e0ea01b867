"""Grammars: compiling, masks, and decoding with and without them, in one engine without HTTP.

    python -m benchmarks.grammar [--schemas 200] [--streams 64] [--tokens 64] [--rounds 3] [--json FILE]

Schemas are made (`benchmarks.made_schemas`). Masks are timed one by one along random valid answers. For decoding, as
many streams as asked for generate the same number of tokens freely and under a schema that never ends before, in turns;
the ratio of the medians is the cost of grammars. Streams of both kinds have the same prompts and lengths.
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.command import begin, command_parser, distribution
from benchmarks.machine import public_name
from benchmarks.made_schemas import made_schema
from benchmarks.stepping import whole
from raydix.engine.core.settings import SchedulerLimits
from raydix.engine.core.types import Grammar, GrammarKind, SamplingParams
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.model.build import make_grammars, make_pool, make_runner
from raydix.engine.model.decoder import Decoder
from raydix.engine.model.engine import Engine
from raydix.engine.model.grammar_source import GrammarError
from raydix.engine.model.grammar_tokenizer import load_tokenizer
from raydix.engine.model.grammars import Grammars
from raydix.engine.model.matcher import Matcher
from raydix.engine.model.sources import DEFAULT_MODEL, resolve_model

BLOCK_SIZE = 16
PROMPT_TOKENS = 64
ANSWER_TOKENS = 40
"""Masks timed for each schema, at most."""
ENDLESS = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 10_000}),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("benchmarks.grammar", __doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--schemas", type=int, default=200, help="schemas compiled and followed")
    parser.add_argument("--streams", type=int, default=64, help="answers decoded at the same time")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of decoding; medians are reported")
    options, output = begin(parser, arguments)

    folder = resolve_model(options.model)
    decoder = Decoder.from_folder(folder, torch.bfloat16, "cpu", 1 << 12)

    figures = compiling_and_masks(folder, decoder.config.vocab_size, options.schemas)
    figures |= decoding(decoder, folder, options.streams, options.tokens, options.rounds)
    for name, value in figures.items():
        print(f"{name:32} {value:12,.3f}")
    output.write({"model": public_name(options.model), **figures})
    return 0


def compiling_and_masks(folder: Path, vocab_size: int, count: int) -> dict[str, float]:
    """Times of loading the tokenizer, of compiling, and of single masks, over made schemas."""
    started = time.perf_counter()
    tokenizer = load_tokenizer(folder, vocab_size)
    load_s = time.perf_counter() - started

    grammars = Grammars(lambda: tokenizer, vocab_size)
    compiles, firsts, masks = [], [], []
    num_refused = 0
    for number in range(count):
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(made_schema(number)))
        started = time.perf_counter()
        try:
            compiled = grammars.compile(grammar)
        except GrammarError:
            num_refused += 1
            continue
        compiles.append(time.perf_counter() - started)
        first, *rest = mask_times(Matcher(compiled), random.Random(number))
        firsts.append(first)
        masks += rest

    return {
        "refused_schemas": num_refused,
        "tokenizer_s": load_s,
        **distribution("compile_ms", compiles, 1e3),
        **distribution("first_mask_ms", firsts, 1e3),
        **distribution("mask_us", masks, 1e6),
    }


def mask_times(matcher: Matcher, chance: random.Random) -> list[float]:
    """The seconds of each mask along a random answer."""
    times: list[float] = []
    while len(times) < ANSWER_TOKENS and not matcher.state.is_stopped():
        started = time.perf_counter()
        mask = matcher.state.compute_bitmask()
        times.append(time.perf_counter() - started)
        allowed = [8 * byte + bit for byte, bits in enumerate(mask) if bits for bit in range(8) if bits >> bit & 1]
        if not allowed or not matcher.consume([chance.choice(allowed)]):
            break
    return times


def decoding(decoder: Decoder, folder: Path, num_streams: int, num_tokens: int, rounds: int) -> dict[str, float]:
    """Tokens per second of streams without and with a grammar, and their ratio."""
    speeds: dict[str, list[float]] = {"free": [], "constrained": []}
    engine = make_engine(decoder, folder, num_streams, num_tokens)
    decode(engine, ENDLESS, 1, 2)  # loads the tokenizer and compiles
    for _ in range(rounds):
        for name, grammar in (("free", None), ("constrained", ENDLESS)):
            speeds[name].append(decode(engine, grammar, num_streams, num_tokens))

    free, constrained = (statistics.median(speeds[name]) for name in ("free", "constrained"))
    return {"free_tokens_per_s": free, "constrained_tokens_per_s": constrained, "ratio": constrained / free}


def make_engine(decoder: Decoder, folder: Path, num_streams: int, num_tokens: int) -> Engine:
    """An engine that runs all streams at once."""
    num_blocks = (num_streams + 1) * (-(-(PROMPT_TOKENS + num_tokens) // BLOCK_SIZE) + 1)
    store = make_pool(decoder.config, num_blocks, BLOCK_SIZE, torch.bfloat16, decoder.device)
    limits = SchedulerLimits(max(512, num_streams), num_streams)
    grammars = make_grammars(folder, decoder.config.vocab_size)
    runner = make_runner(decoder, store, limits, grammars)
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    return Engine(runner, store, pool, limits, num_blocks * BLOCK_SIZE, "benchmark", grammars=grammars)


def decode(engine: Engine, grammar: Grammar | None, num_streams: int, num_tokens: int) -> float:
    """Tokens per second from the step on in which all streams decode."""
    chance = random.Random(0)
    for number in range(num_streams):
        prompt = tuple(chance.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS))
        sampling = SamplingParams(max_tokens=num_tokens, temperature=1.0, seed=number, grammar=grammar)
        engine.submit(whole(f"{number}", prompt, sampling), 0.0)
    if engine.grammars is not None:
        engine.grammars.settle()
    engine.hear_of_grammars(0.0)

    num_decoded, started = 0, time.perf_counter()
    while (step := engine.step(0.0)) is not None:
        if step.shape.num_prefill_tokens:
            num_decoded, started = 0, time.perf_counter()
        num_decoded += step.shape.num_decodes
        assert not step.failures, step.failures
    return num_decoded / (time.perf_counter() - started)


if __name__ == "__main__":
    sys.exit(main())
