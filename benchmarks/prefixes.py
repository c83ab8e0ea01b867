"""Attention of streams that begin alike on the CPU: a layer's time with their beginning in the same blocks and apart.

`python -m benchmarks.prefixes [--json FILE] [--streams 16] [--common 4096] [--own 100]` runs on one thread and counts
its processor time. The two take turns, and the least of each is reported. Outputs of the two are compared bit for bit
first; exit code 1 if they differ.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from benchmarks.command import begin, command_parser, markdown
from raydix.kernels.paged_attention import paged_attention

BLOCK_SIZE = 16
HEADER = ("heads, KV heads, size", "rows of a stream", "window", "shared", "blocks apart", "times")


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer's heads, the newest tokens of each stream that it attends for, and its sliding window."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_queries: int = 1
    sliding_window: int | None = None


@dataclass(frozen=True, slots=True)
class Streams:
    """`count` streams that have `common` tokens in common, and `own` tokens of their own behind these."""

    count: int
    common: int
    own: int


SHAPES = (
    Shape(9, 3, 64),
    Shape(9, 3, 64, num_queries=5),
    Shape(9, 3, 64, sliding_window=1024),
    Shape(32, 8, 128),
    Shape(32, 8, 128, num_queries=5),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    parser = command_parser("benchmarks.prefixes", __doc__)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--common", type=int, default=4096, help="tokens that all have in common")
    parser.add_argument("--own", type=int, default=100, help="tokens of each stream behind them")
    parser.add_argument("--rounds", type=int, default=12)
    arguments, output = begin(parser, argv)
    streams = Streams(arguments.streams, arguments.common // BLOCK_SIZE * BLOCK_SIZE, arguments.own)
    torch.set_num_threads(1)
    torch.manual_seed(0)

    results = [measured(shape, streams, arguments.rounds) for shape in SHAPES]
    print(markdown(HEADER, [cells(shape, *result) for shape, result in zip(SHAPES, results, strict=True) if result]))
    output.write(
        {
            "streams": asdict(streams),
            "results": [
                {**asdict(shape), "shared_ms": result and result[0], "apart_ms": result and result[1]}
                for shape, result in zip(SHAPES, results, strict=True)
            ],
        }
    )
    return 0 if all(results) else 1


def measured(shape: Shape, streams: Streams, rounds: int) -> tuple[float, float] | None:
    """Milliseconds with the common blocks shared and apart; none if the outputs differ."""
    inputs = shared, apart = batches(shape, streams)
    if not torch.equal(attend(shape, shared), attend(shape, apart)):
        print(f"the bits of {shape} differ", file=sys.stderr)
        return None
    least = [float("inf"), float("inf")]
    for _ in range(rounds):
        for index, each in enumerate(inputs):
            start = time.thread_time()
            attend(shape, each)
            least[index] = min(least[index], (time.thread_time() - start) * 1e3)
    return least[0], least[1]


def attend(shape: Shape, inputs: tuple[Tensor, ...]) -> Tensor:
    """Attention of one layer: [num_tokens, num_heads, head_dim]."""
    query, keys, values, tables, starts, contexts = inputs
    scale = shape.head_dim**-0.5
    return paged_attention(
        query, keys, values, tables, starts, contexts, scale=scale, sliding_window=shape.sliding_window
    )


def batches(shape: Shape, streams: Streams) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The arguments of `paged_attention` of streams that share blocks, and of the same streams with copies of them."""
    num_common, num_own = streams.common // BLOCK_SIZE, -(-streams.own // BLOCK_SIZE)
    num_blocks = streams.count * (num_common + num_own)
    pool = torch.randn((num_blocks, 2, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)).bfloat16()
    apart = torch.randperm(num_blocks, dtype=torch.int32).view(streams.count, num_common + num_own)
    shared = apart.clone()
    shared[:, :num_common] = apart[0, :num_common]
    for table in apart[1:]:
        pool[table[:num_common].long()] = pool[apart[0, :num_common].long()]

    query = torch.randn((streams.count * shape.num_queries, shape.num_heads, shape.head_dim)).bfloat16()
    starts = torch.arange(streams.count + 1, dtype=torch.int32) * shape.num_queries
    contexts = torch.full((streams.count,), streams.common + streams.own, dtype=torch.int32)
    keys, values = pool[:, 0], pool[:, 1]
    return (query, keys, values, shared, starts, contexts), (query, keys, values, apart, starts, contexts)


def cells(shape: Shape, shared_ms: float, apart_ms: float) -> tuple[object, ...]:
    """A line of the table."""
    heads = f"{shape.num_heads}, {shape.num_kv_heads}, {shape.head_dim}"
    window = f"{shape.sliding_window:,}" if shape.sliding_window else ""
    times = f"{apart_ms / shared_ms:.2f}"
    return heads, shape.num_queries, window, f"{shared_ms:.1f} ms", f"{apart_ms:.1f} ms", times


if __name__ == "__main__":
    sys.exit(main())
