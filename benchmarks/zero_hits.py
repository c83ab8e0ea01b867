"""Cost of prefix caching where nothing is shared: an engine on unique prompts, with the cache and without, in turns.

    python -m benchmarks.zero_hits [--model MODEL] [--rounds 12] [--json FILE]
    python -m benchmarks.zero_hits --rounds 0                 # the bookkeeping alone, without a model

* Throughput: two engines on the same weights take turns, the one with `prefix_caching` (`adaptive`) first in every
  other round. The time of steps that prefill and of steps that only decode is summed apart. Reported are the medians
  over the rounds of the ratios on / off, with their standard errors, by the clock and in CPU time.
* Bookkeeping: the same engines on a model that returns at once; the CPU time of the cached engine less that of the
  other, per block of the prompts. Beside it what is left without a cache.

Every pool is full before anything is measured, so each new block evicts one.
"""

import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.command import begin, command_parser
from benchmarks.machine import public_name
from benchmarks.stepping import whole
from raydix.engine.core.eviction.policies import EvictionPolicy, make_queue
from raydix.engine.core.eviction.queue import EvictionQueue
from raydix.engine.core.settings import SchedulerLimits
from raydix.engine.core.types import BlockHash
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.model.build import make_pool, make_runner
from raydix.engine.model.decoder import Decoder
from raydix.engine.model.engine import Engine
from raydix.engine.model.exchange import BlockStore
from raydix.engine.model.runner import NullRunner, Runner
from raydix.engine.model.segments import Bytes
from raydix.engine.model.sources import DEFAULT_MODEL, resolve_model

BLOCK_SIZE = 16
NUM_BLOCKS = 4000
MODEL_BLOCKS = 1200
MAX_LEN = 1024
STREAMS, PROMPT, ANSWER = 8, 512, 64
TOKEN_IDS = range(100, 40_000)
GOAL = 0.01
GOAL_US = 8.0
Seconds = dict[str, float]
"""Seconds of the steps of a kind by the clock, and CPU seconds of all of them."""


class NoStore:
    """Blocks without bytes."""

    block_bytes = 1

    def export_blocks(self, block_ids: Sequence[int]) -> Bytes:
        return np.zeros(len(block_ids), np.uint8)

    def start_export(self, block_ids: Sequence[int]) -> Bytes:
        return self.export_blocks(block_ids)

    def import_blocks(self, buffer: Bytes, block_ids: Sequence[int]) -> None:
        pass

    def copy_block(self, source: int, target: int) -> None:
        pass


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("benchmarks.zero_hits", __doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=12, help="of throughput, interleaved; 0: none")
    options, output = begin(parser, arguments)
    costs = bookkeeping()
    result: dict[str, Any] = {"bookkeeping_us_per_block": costs}
    for name, cost in costs.items():
        print(f"{name:<40}{cost:>8.2f} us per block")

    if options.rounds:
        result["model"] = public_name(options.model)
        result["throughput"] = ratios = throughput(resolve_model(options.model), options.rounds)
        for kind, values in ratios.items():
            print(f"{kind:<40}{100 * values['time_over_off'] - 100:>+8.2f} % ± {100 * values['standard_error']:.2f}")

    output.write(result)
    return 0


def bookkeeping(rounds: int = 9, prompts: int = 200) -> dict[str, float]:
    """CPU time in microseconds per block of unique prompts: of the cache by policy, and of the rest of an engine."""
    generator = random.Random(0)
    engines = {policy.value: _engine(NullRunner(), NoStore(), NUM_BLOCKS, policy) for policy in EvictionPolicy}
    engines["without a cache"] = _engine(NullRunner(), NoStore(), NUM_BLOCKS, None)
    spent: dict[str, list[float]] = {name: [] for name in engines}

    for _ in range(rounds):
        asked = [tuple(generator.choices(TOKEN_IDS, k=PROMPT)) for _ in range(prompts)]
        for name, engine in engines.items():
            started = time.process_time()
            for first in range(0, prompts, STREAMS):
                _run(engine, asked[first : first + STREAMS], 1)
            spent[name].append((time.process_time() - started) / (prompts * PROMPT / BLOCK_SIZE) * 1e6)

    off = spent.pop("without a cache")
    costs = {
        f"cache, {name}": statistics.median(on - without for on, without in zip(values, off, strict=True))
        for name, values in spent.items()
    }
    return {name: round(cost, 2) for name, cost in {**costs, "the rest of the engine": statistics.median(off)}.items()}


def throughput(folder: Path, rounds: int) -> dict[str, dict[str, Any]]:
    """Ratios of prefilling and of decoding: the time with the cache over the time without."""
    decoder = Decoder.from_folder(folder, torch.bfloat16, "cpu", MAX_LEN)
    limits = SchedulerLimits(512, 64)
    engines: dict[str, Engine] = {}
    for name, policy in (("on", EvictionPolicy.ADAPTIVE), ("off", None)):
        store = make_pool(decoder.config, MODEL_BLOCKS, BLOCK_SIZE, torch.bfloat16, decoder.device)
        engines[name] = _engine(make_runner(decoder, store, limits), store, MODEL_BLOCKS, policy)

    generator = random.Random(1)
    seconds: dict[str, list[Seconds]] = {name: [] for name in engines}

    for number in range(-1, rounds):  # the first one warms up
        asked = [tuple(generator.choices(TOKEN_IDS, k=PROMPT)) for _ in range(STREAMS)]
        for name in sorted(engines, reverse=number % 2 == 0):
            took = _run(engines[name], asked, ANSWER)
            if number >= 0:
                seconds[name].append(took)

    return {
        kind: _compared([took[kind] for took in seconds["on"]], [took[kind] for took in seconds["off"]])
        for kind in ("prefill", "decode", "CPU time")
    }


def _compared(on: Sequence[float], off: Sequence[float]) -> dict[str, Any]:
    ratios = [cached / plain for cached, plain in zip(on, off, strict=True)]
    error = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan
    return {
        "time_over_off": round(statistics.median(ratios), 4),
        "standard_error": round(error, 4),
        "on_s": [round(value, 4) for value in on],
        "off_s": [round(value, 4) for value in off],
    }


def _engine(runner: Runner, store: BlockStore, num_blocks: int, policy: EvictionPolicy | None) -> Engine:
    """An engine with a full cache of this policy; None: without prefix caching."""
    queue: EvictionQueue[BlockHash] = make_queue(policy or EvictionPolicy.LRU, num_blocks=num_blocks)
    pool = BlockPool(num_blocks, BLOCK_SIZE, queue, keeps_blocks=policy is not None)
    engine = Engine(
        runner=runner,
        store=store,
        pool=pool,
        limits=SchedulerLimits(512, 64),
        max_model_len=MAX_LEN,
        fingerprint="zero hits",
    )
    if policy is not None:
        generator = random.Random(2)
        for _ in range(num_blocks * BLOCK_SIZE // PROMPT + 1):
            blocks = pool.allocate(PROMPT // BLOCK_SIZE, 0.0)
            for block in blocks:
                pool.seal(block, generator.randbytes(16))
            pool.retire(blocks, 0.0)
    return engine


def _run(engine: Engine, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> Seconds:
    """Answer all prompts at once; returns the durations of steps that prefilled, and of steps that only decoded."""
    for number, prompt in enumerate(prompts):
        engine.submit(whole(str(number), prompt, max_tokens), time.monotonic())
    seconds = {"prefill": 0.0, "decode": 0.0}
    cpu_s = time.process_time()
    while True:
        started = time.perf_counter()
        step = engine.step(time.monotonic())
        if step is None:
            return {**seconds, "CPU time": time.process_time() - cpu_s}
        engine.pool.drain_journal()
        seconds["prefill" if step.shape.num_prefill_tokens else "decode"] += time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
