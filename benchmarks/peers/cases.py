"""Cases of the comparison. Every engine gets the same prompts: random tokens, different in each case, round and
repetition.

* prefill: one prompt that no engine has seen, one token.
* decode: the time for 65 tokens less the time for one, over 64, with the same prompts in both. The prompts were
  submitted once before, so that an engine with a prefix cache prefills neither time and only decoding is left in the
  difference; an engine without one prefills both times.
* prefix hit: a prompt for the second time, one token.
"""

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

Generate: TypeAlias = Callable[[list[list[int]], int], float]
"""Seconds for prompts and a number of tokens of each."""

DECODE_STEPS = 64
DECODE_PROMPT = 128
TOKEN_IDS = range(100, 40_000)


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the comparison. `measure` gives seconds, `figures` the reported values, by name with unit."""

    name: str
    measure: Callable[[Generate, random.Random], float]
    figures: Callable[[float], dict[str, float]]
    repetitions: int
    """Measurements in each round, of which the median counts: more for short ones."""
    streams: int = 1
    needs_prefix_cache: bool = False

    def run(self, generate: Generate, seed: str) -> float:
        """Seconds, the median of the repetitions."""
        return statistics.median(
            self.measure(generate, random.Random(f"{seed}/{self.name}/{repetition}"))
            for repetition in range(self.repetitions)
        )


def prompts(generator: random.Random, count: int, length: int) -> list[list[int]]:
    return [generator.sample(TOKEN_IDS, length) for _ in range(count)]


def prefill(length: int, repetitions: int) -> Case:
    def measure(generate: Generate, generator: random.Random) -> float:
        return generate(prompts(generator, 1, length), 1)

    return Case(f"prefill {length:,}", measure, lambda seconds: {"tokens_per_s": length / seconds}, repetitions)


def decode(streams: int, repetitions: int) -> Case:
    def measure(generate: Generate, generator: random.Random) -> float:
        asked = prompts(generator, streams, DECODE_PROMPT)
        generate(asked, 1)
        first = generate(asked, 1)
        return (generate(asked, 1 + DECODE_STEPS) - first) / DECODE_STEPS

    def figures(seconds: float) -> dict[str, float]:
        return {"tokens_per_s": streams / seconds, "ms_per_step": seconds * 1e3}

    return Case(
        name=f"decode {streams} streams", measure=measure, figures=figures, repetitions=repetitions, streams=streams
    )


def prefix_hit(length: int, repetitions: int) -> Case:
    def measure(generate: Generate, generator: random.Random) -> float:
        asked = prompts(generator, 1, length)
        generate(asked, 1)
        return generate(asked, 1)

    def figures(seconds: float) -> dict[str, float]:
        return {"first_token_ms": seconds * 1e3}

    return Case(f"prefix hit of {length:,}", measure, figures, repetitions, needs_prefix_cache=True)


CASES = (
    prefill(512, repetitions=5),
    prefill(2048, repetitions=2),
    decode(1, repetitions=3),
    decode(16, repetitions=2),
    decode(64, repetitions=1),
    prefix_hit(2048, repetitions=2),
)
