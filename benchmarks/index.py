"""The manager's index by itself: block probes and admissions per second, and memory per block.

    python -m benchmarks.index [--blocks 1000000 10000000] [--workers 8] [--json FILE]

One `Directory` in this process, filled with that many blocks in prompts of 64, spread over the workers. A probe is one
block of a prompt looked up and found.
"""

import gc
import random
import sys
import time
from collections.abc import Sequence

import psutil

from benchmarks.command import begin, command_parser
from raydix.engine.core.manager.block_index import GC_THRESHOLDS
from raydix.engine.core.manager.directory import Directory
from raydix.engine.core.manager.placement import CostModel
from raydix.engine.core.types import AdmitRequest, BlockHash, Role

PROMPT_BLOCKS = 64
BLOCK_SIZE = 16
NUM_ADMISSIONS = 5000


def measure(num_blocks: int, num_workers: int) -> dict[str, float]:
    """Figures of an index of `num_blocks` blocks. Memory is the growth of the process, hashes included."""
    gc.collect()
    gc.set_threshold(*GC_THRESHOLDS)
    before = psutil.Process().memory_info().rss
    directory = Directory(CostModel(BLOCK_SIZE, block_bytes=1), segment_budget_bytes=0)
    workers = [f"worker {index}" for index in range(num_workers)]
    for worker_id in workers:
        directory.register(worker_id, Role.MIXED, 1, 1, ())

    samples: list[tuple[BlockHash, ...]] = []
    started = time.perf_counter()
    num_prompts = num_blocks // PROMPT_BLOCKS
    for index in range(num_prompts):
        hashes = tuple(random.randbytes(16) for _ in range(PROMPT_BLOCKS))
        directory.blocks_changed(workers[index % num_workers], 1, hashes, ())
        if index % max(1, num_prompts // NUM_ADMISSIONS) == 0:
            samples.append(hashes)

    filled_s = time.perf_counter() - started
    grown = psutil.Process().memory_info().rss - before

    started = time.perf_counter()
    for index, hashes in enumerate(samples):
        directory.admit(AdmitRequest(f"hit {index % 64}", 0, hashes, PROMPT_BLOCKS * BLOCK_SIZE + 1), 0.0)

    admitting_s = time.perf_counter() - started

    started = time.perf_counter()
    num_found = sum(sum(1 for _ in directory.stock.blocks.leading(hashes)) for hashes in samples)
    probing_s = time.perf_counter() - started
    assert num_found == len(samples) * PROMPT_BLOCKS
    return {
        "blocks": len(directory.stock.blocks),
        "filled_per_s": num_blocks / filled_s,
        "admits_per_s": len(samples) / admitting_s,
        "probes_per_s": num_found / probing_s,
        "bytes_per_block": grown / num_blocks,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("benchmarks.index", __doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1_000_000, 10_000_000], help="sizes of the index")
    parser.add_argument("--workers", type=int, default=8, help="workers that hold the blocks")
    options, output = begin(parser, arguments)

    sizes = []

    for num_blocks in options.blocks:
        sizes.append(figures := measure(num_blocks, options.workers))
        print(
            f"{num_blocks:>11,} blocks: {figures['probes_per_s']:>10,.0f} probes/s, "
            f"{figures['admits_per_s']:>7,.0f} admissions/s of {PROMPT_BLOCKS} blocks, "
            f"{figures['bytes_per_block']:.0f} bytes per block"
        )

    output.write({"workers": options.workers, "sizes": sizes})
    return 0


if __name__ == "__main__":
    sys.exit(main())
