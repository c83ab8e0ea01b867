"""Cost of everything around the model: tokens per second through HTTP with a model that returns at once.

    python -m benchmarks.stack [--streams 1 16 64 256] [--tokens 1000] [--config cpu_mixed] [--json FILE]

Starts a server of its own whose engine does everything but compute (`model.source: "null:..."`), on this machine and
with the load generator beside it, and measures:

* tokens per second of that many concurrent streams of server-sent events;
* the time to the first token of one stream, all of it added by the stack;
* admissions per second through the manager actor, in batches;
* the hand-over of KV through the object store beside the prefill that made it, on the real model: seconds, and copies
  of each byte.
"""

import asyncio
import json
import multiprocessing
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks.command import begin, command_parser
from benchmarks.stepping import make_engine, whole
from raydix.cli.cluster import LocalCluster, free_port
from raydix.configs import load_config
from raydix.engine.core.types import AdmitRequest
from raydix.engine.model.engine import Engine
from raydix.engine.model.exchange import BlockStore
from raydix.engine.model.segments import Bytes
from raydix.engine.model.sources import DEFAULT_MODEL, NULL, model_name

PROMPT_TOKENS = 32
NUM_FIRST_TOKENS = 200
NUM_ADMIT_BATCHES = 150
ADMIT_BATCH = 64
ADMIT_BLOCKS = 64


class Stream(asyncio.Protocol):
    """One request: counts nothing but its end, so that the load generator costs as little as possible."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sent_at = 0.0
        self.first_at: float | None = None
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.sent_at = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.first_at is None and b"data: " in data:
            self.first_at = time.perf_counter()
        # The end of the stream may come in two pieces; no more than its length has to be kept.
        self._tail = (self._tail + data)[-64:]
        if b"data: [DONE]" in self._tail:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if b"data: [DONE]" in self._tail:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error or ConnectionError(self._tail.decode(errors="replace")))


async def stream(port: int, num_tokens: int) -> Stream:
    """Run one request to its end."""
    # Drawn anew, so that nothing of the prompt is found in the cache.
    prompt = [random.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)]
    fields = {"model": model_name(DEFAULT_MODEL), "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True}
    body = json.dumps({**fields, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
    request = head.encode() + b"content-type: application/json\r\n\r\n" + body
    _, protocol = await asyncio.get_running_loop().create_connection(lambda: Stream(request), "127.0.0.1", port)
    await protocol.ended
    return protocol


async def tokens_per_s(port: int, num_streams: int, num_tokens: int) -> float:
    """All streams begin together; the rate over the time until the last one ends."""
    started = time.perf_counter()
    await asyncio.gather(*(stream(port, num_tokens) for _ in range(num_streams)))
    return num_streams * num_tokens / (time.perf_counter() - started)


async def first_token_ms(port: int) -> dict[str, float]:
    """Latency of one request at a time."""
    taken = []
    for _ in range(NUM_FIRST_TOKENS):
        done = await stream(port, 1)
        assert done.first_at is not None
        taken.append((done.first_at - done.sent_at) * 1e3)
    quantiles = statistics.quantiles(taken, n=100)
    return {"p50": quantiles[49], "p90": quantiles[89], "p99": quantiles[98]}


def load(port: int, streams: Sequence[int], num_tokens: int, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Medians of the rates by number of streams, and the times to the first token; runs in a process of its own."""
    # Not counted: the first requests of a server are slower.
    asyncio.run(tokens_per_s(port, 4, 100))
    first = asyncio.run(first_token_ms(port))
    rates = {
        str(count): statistics.median(asyncio.run(tokens_per_s(port, count, num_tokens)) for _ in range(rounds))
        for count in streams
    }
    return rates, first


def admits_per_s(manager: Any) -> float:
    """Admissions of prompts of 64 blocks, half of them known, in batches of 64, two under way as from two ingress
    replicas; each releases the one before the last. A client's own work before, such as hashing, is not included."""
    import ray

    shared = tuple(random.randbytes(16) for _ in range(ADMIT_BLOCKS // 2))
    batches = [
        [
            AdmitRequest(
                f"benchmark-{number % 2}-{index}",
                0,
                shared + tuple(random.randbytes(16) for _ in range(ADMIT_BLOCKS // 2)),
                ADMIT_BLOCKS * 16,
                ingress_id="benchmark",
            )
            for index in range(ADMIT_BATCH)
        ]
        for number in range(NUM_ADMIT_BATCHES)
    ]
    started = time.perf_counter()
    under_way: list[Any] = []
    for batch in batches:
        under_way.append(manager.admit.remote(batch))
        # Two at a time: with one the manager would rest while the answer travels.
        if len(under_way) == 2:
            assert None not in ray.get(under_way.pop(0))

    assert all(None not in ray.get(call) for call in under_way)
    return NUM_ADMIT_BATCHES * ADMIT_BATCH / (time.perf_counter() - started)


class CountingStore:
    """A block store that counts the bytes copied out of it and into it."""

    def __init__(self, store: BlockStore) -> None:
        self.store = store
        self.block_bytes = store.block_bytes
        self.num_bytes = 0

    def export_blocks(self, block_ids: Sequence[int]) -> Bytes:
        payload = self.store.export_blocks(block_ids)
        self.num_bytes += payload.nbytes
        return payload

    def start_export(self, block_ids: Sequence[int]) -> Bytes:
        return self.export_blocks(block_ids)

    def import_blocks(self, buffer: Bytes, block_ids: Sequence[int]) -> None:
        self.num_bytes += buffer.nbytes
        self.store.import_blocks(buffer, block_ids)

    def copy_block(self, source: int, target: int) -> None:
        self.num_bytes += self.block_bytes
        self.store.copy_block(source, target)


def move_blocks(engine: Engine, put: Callable[[Bytes], Any], get: Callable[[Any], Bytes]) -> tuple[float, float]:
    """Take all cached blocks of `engine` through an object store, as one worker exports and another imports them.

    Returns the duration in seconds and the copies of each byte of KV. `put` copies its argument; the result of `get` is
    a copy, too, unless it is a view of the store's memory.
    """
    hashes = engine.pool.hashes()
    counting = CountingStore(engine.exchange.store)
    started = time.perf_counter()
    engine.exchange.store = counting
    [segment], missing = engine.exchange.export(hashes, 0.0)
    assert not missing
    ref = put(segment.payload)
    export_s = time.perf_counter() - started
    engine.pool.reset()  # from here on it is another worker, which has none of the blocks
    started = time.perf_counter()
    payload = get(ref)
    assert engine.exchange.import_segment(segment.header, payload, 0.0)
    import_s = time.perf_counter() - started
    engine.exchange.store = counting.store
    assert engine.pool.hashes() == hashes
    num_copied = counting.num_bytes + segment.payload.nbytes + (payload.nbytes if payload.flags.owndata else 0)
    return export_s + import_s, num_copied / segment.payload.nbytes


def hand_over(num_tokens: int = 2048, rounds: int = 5) -> dict[str, float]:
    """Medians: prefill seconds, seconds to take its KV from one pool through the object store into another, and copies
    of each byte of KV on the way."""
    import ray

    engine = make_engine(max_requests=16, pool_gib=0.5)
    prefills, moves, copies = [], [], []

    for index in range(rounds):
        prompt = [random.randrange(100, 40_000) for _ in range(num_tokens)]
        engine.submit(whole(f"r{index}", prompt, 1), 0.0)
        started = time.perf_counter()
        while engine.step(0.0) is not None:
            pass
        prefills.append(time.perf_counter() - started)
        taken_s, num_copies = move_blocks(engine, ray.put, ray.get)
        moves.append(taken_s)
        copies.append(num_copies)
        engine.pool.reset()

    prefill_s, move_s = statistics.median(prefills), statistics.median(moves)
    return {
        "tokens": num_tokens,
        "prefill_s": prefill_s,
        "hand_over_s": move_s,
        "share": move_s / prefill_s,
        "copies_per_byte": statistics.median(copies),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("benchmarks.stack", __doc__)
    parser.add_argument("--config", default="cpu_mixed", help="configuration of the server")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256], help="concurrent streams")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of each stream")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions; the medians are reported")
    options, output = begin(parser, arguments)

    port = free_port()
    workers = {"max_requests": 256, "token_budget": 512}
    overrides = {"model": {"source": NULL + DEFAULT_MODEL}, "http": {"port": port}, "workers": {"mixed": workers}}
    cluster = LocalCluster(load_config(options.config, overrides))
    cluster.start()

    try:
        cluster.deploy(lambda progress: None, threading.Event())
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as generator:
            rates, first = generator.submit(load, port, options.streams, options.tokens, options.rounds).result()
        admits = admits_per_s(cluster.manager())
        moved = hand_over()
    finally:
        cluster.stop()

    result = {
        "load_average_1min_after": round(os.getloadavg()[0], 2),
        "tokens_per_s": rates,
        "first_token_ms": first,
        "admits_per_s": admits,
        "hand_over": moved,
    }
    for count, rate in rates.items():
        print(f"{count:>4} streams: {rate:>8,.0f} tokens/s")

    print(f"first token of one stream: p50 {first['p50']:.2f}, p90 {first['p90']:.2f}, p99 {first['p99']:.2f} ms")
    print(f"admissions: {admits:,.0f}/s")
    print(
        f"hand-over of {moved['tokens']} tokens' KV: {moved['hand_over_s'] * 1e3:.1f} ms, "
        f"{moved['share']:.1%} of the prefill's {moved['prefill_s'] * 1e3:.0f} ms, "
        f"{moved['copies_per_byte']:.2f} copies of each byte"
    )
    output.write(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
