"""Made traces, each with one property that is hard on some eviction policy. The same name gives the same trace."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import accumulate, islice
from random import Random

from benchmarks.replaying.traces import MOONCAKE_BLOCK_TOKENS, TraceRequest
from raydix.engine.core.types import BlockHash

NUM_REQUESTS = 10_000
_Use = tuple[float, list[int]]
"""Arrival of a request, and the numbers of its blocks."""


def make_trace(name: str) -> list[TraceRequest]:
    """Make the trace of this name in `SYNTHETIC`."""
    uses = [use for use, _ in zip(SYNTHETIC[name](Random(name)), range(NUM_REQUESTS), strict=False)]
    return [
        TraceRequest(arrival_s, tuple(_hash(block) for block in blocks), len(blocks) * MOONCAKE_BLOCK_TOKENS, 1)
        for arrival_s, blocks in uses
    ]


def _chat(random: Random, think_s: Callable[[Random], float], continues: float = 0.7) -> Iterator[_Use]:
    """Conversations behind one system prompt of 2 blocks; one starts each second, and grows with each turn."""
    blocks = iter(range(2, 1 << 62))
    started_s, number = 0.0, 0
    due: list[tuple[float, int, list[int]]] = []
    while True:
        while not due or started_s <= due[0][0]:
            number += 1
            heapq.heappush(due, (started_s, number, [0, 1]))
            started_s += random.expovariate(1.0)
        now, conversation, path = heapq.heappop(due)
        path = path + _take(blocks, _size(random, 12 if len(path) == 2 else 3))
        yield now, path
        if random.random() < continues:
            heapq.heappush(due, (now + think_s(random), conversation, path))


def _memoryless(random: Random) -> float:
    return random.expovariate(1 / 60)


def _lognormal(random: Random) -> float:
    return random.lognormvariate(math.log(60), 1)


def _heavy_tailed(random: Random) -> float:
    return 10 * random.paretovariate(1)


def _loop(random: Random) -> Iterator[_Use]:
    """A loop: 400 documents of 8 blocks, over and over in the same order."""
    return ((float(number), _document(number % 400)) for number in range(NUM_REQUESTS))


def _scan(random: Random) -> Iterator[_Use]:
    """Each third request is of 100 hot documents; the others are never seen again."""
    for number in range(NUM_REQUESTS):
        yield float(number), _document(random.randrange(100) if number % 3 == 0 else 100 + number)


def _popularity(random: Random, num_requests_each: int) -> Iterator[_Use]:
    """Questions about 2,000 documents of Zipf's popularity, which is dealt out anew every so many requests."""
    weights = list(accumulate(1 / rank for rank in range(1, 2001)))
    documents = list(range(2000))
    for number in range(NUM_REQUESTS):
        if number % num_requests_each == 0:
            random.shuffle(documents)
        [document] = random.choices(documents, cum_weights=weights)
        yield float(number), [*_document(document), (1 << 40) + number]


def _in_turn(random: Random) -> Iterator[_Use]:
    """A loop for 2,000 requests, then chat for as many, and so on: no one order is right all the time."""
    chat, started_s = _chat(random, _memoryless), 0.0
    now = 0.0
    for number in range(NUM_REQUESTS):
        if number // 2000 % 2:
            arrival_s, path = next(chat)
            now = started_s + arrival_s
        else:
            now += 1
            started_s, path = now, [(1 << 41) + block for block in _document(number % 400)]
        yield now, path


def _agents(random: Random) -> Iterator[_Use]:
    """Agents of 5 kinds, each behind its tools' 10 blocks: bursts of short turns seconds apart, then often silence."""
    blocks = iter(range(50, 1 << 62))
    started_s, number = 0.0, 0
    due: list[tuple[float, int, list[int]]] = []

    while True:
        while not due or started_s <= due[0][0]:
            number += 1
            kind = random.randrange(5)
            path = [*range(10 * kind, 10 * kind + 10), *_take(blocks, _size(random, 4))]
            heapq.heappush(due, (started_s, number, path))
            started_s += random.expovariate(1 / 10)

        now, agent, path = heapq.heappop(due)
        yield now, path
        path = path + _take(blocks, _size(random, 1))
        if random.random() < 0.9:
            heapq.heappush(due, (now + random.lognormvariate(math.log(4), 0.5), agent, path))
        elif random.random() < 0.6:
            heapq.heappush(due, (now + random.expovariate(1 / 600), agent, path))


def _few_shot(random: Random) -> Iterator[_Use]:
    """Half the requests put a question behind one of 200 prompts of Zipf's popularity; the others come once."""
    weights = list(accumulate(1 / rank for rank in range(1, 201)))
    fresh = iter(range(1 << 40, 1 << 62))
    for number in range(NUM_REQUESTS):
        if random.random() < 0.5:
            [prompt] = random.choices(range(200), cum_weights=weights)
            yield float(number), _document(prompt) + _take(fresh, 1)
        else:
            yield float(number), _take(fresh, _size(random, 20))


def _phases(random: Random) -> Iterator[_Use]:
    """Chat at first, then a scan past a hot set for good."""
    end_s = 0.0
    for end_s, path in islice(_chat(random, _memoryless), NUM_REQUESTS // 2):
        yield end_s, path
    for arrival_s, path in _scan(random):
        yield end_s + arrival_s, [(1 << 41) + block for block in path]


def _tenants(random: Random) -> Iterator[_Use]:
    """Three tenants' chats at once, with think times of 10, 60 and 600 s."""
    return heapq.merge(*(_apart(_chat(random, partial(_around, mean_s=mean_s)), mean_s) for mean_s in (10, 60, 600)))


def _retrieval(random: Random) -> Iterator[_Use]:
    """Questions behind one instruction of 2 blocks and 3 of 500 passages of Zipf's popularity, in any order."""
    weights = list(accumulate(1 / rank for rank in range(1, 501)))
    numbers: dict[tuple[int, ...], int] = {}
    for number in range(NUM_REQUESTS):
        passages = random.choices(range(500), cum_weights=weights, k=3)
        path = [0, 1]
        for end in range(1, 4):  # a block is named by all before it
            first = 10 + 4 * numbers.setdefault(tuple(passages[:end]), len(numbers))
            path += range(first, first + 4)
        yield float(number), [*path, (1 << 40) + number]


def _periodic(random: Random) -> Iterator[_Use]:
    """60 jobs that come every 100 to 1,000 s with a prompt of 30 blocks and 2 new ones, and chats between them."""
    fresh = iter(range(1 << 40, 1 << 62))
    jobs = [(random.uniform(0, 1000), random.uniform(100, 1000), number) for number in range(60)]
    heapq.heapify(jobs)
    chat = _apart(_chat(random, _lognormal), 7)
    now, talk = next(chat)
    while True:
        if now <= jobs[0][0]:
            yield now, talk
            now, talk = next(chat)
            continue
        due, period_s, number = jobs[0]
        yield due, [*range(30 * number, 30 * number + 30), *_take(fresh, 2)]
        heapq.heapreplace(jobs, (due + period_s, period_s, number))


def _edits(random: Random) -> Iterator[_Use]:
    """Editors that ask again 5 s after each change, at a random place in a file of 20 blocks, and in the end leave."""
    blocks = iter(range(1 << 62))
    started_s, number = 0.0, 0
    due: list[tuple[float, int, list[int]]] = []
    while True:
        while not due or started_s <= due[0][0]:
            number += 1
            heapq.heappush(due, (started_s, number, _take(blocks, 20)))
            started_s += random.expovariate(1 / 30)
        now, editor, path = heapq.heappop(due)
        yield now, path
        if random.random() < 0.95:
            kept = random.randrange(len(path))
            path = path[:kept] + _take(blocks, 20 - kept)
            heapq.heappush(due, (now + random.expovariate(1 / 5), editor, path))


def _samples(random: Random) -> Iterator[_Use]:
    """Problems of 10 blocks answered 8 times within 10 s, of which half are asked again an hour later."""
    events: list[tuple[float, int, list[int]]] = []
    fresh = iter(range(1 << 40, 1 << 62))
    started_s, problem = 0.0, 0

    while True:
        while not events or started_s <= events[0][0]:
            problem += 1
            again_s = [0.0, 3600.0] if random.random() < 0.5 else [0.0]
            for later_s in again_s:
                for _ in range(8):
                    at = started_s + later_s + random.uniform(0, 10)
                    path = [*range(10 * problem, 10 * problem + 10), *_take(fresh, 1)]
                    heapq.heappush(events, (at, path[-1], path))
            started_s += random.expovariate(1 / 8)
        now, _, path = heapq.heappop(events)
        yield now, path


def _around(random: Random, mean_s: int) -> float:
    return random.lognormvariate(math.log(mean_s), 0.5)


def _apart(uses: Iterable[_Use], number: int) -> Iterator[_Use]:
    """The same requests, each with blocks of its own."""
    return ((now, [(number << 41) + block for block in path]) for now, path in uses)


def _document(number: int) -> list[int]:
    return list(range(8 * number, 8 * number + 8))


def _size(random: Random, mean: int) -> int:
    return 1 + int(random.expovariate(1 / mean))


def _take(blocks: Iterator[int], count: int) -> list[int]:
    return [block for block, _ in zip(blocks, range(count), strict=False)]


def _hash(block: int) -> BlockHash:
    return block.to_bytes(16, "big")


SYNTHETIC: Mapping[str, Callable[[Random], Iterable[_Use]]] = {
    "chat-memoryless": partial(_chat, think_s=_memoryless),
    "chat-lognormal": partial(_chat, think_s=_lognormal),
    "chat-heavy-tailed": partial(_chat, think_s=_heavy_tailed),
    "chat-loyal": partial(_chat, think_s=_memoryless, continues=0.95),
    "loop": _loop,
    "scan": _scan,
    "popularity": partial(_popularity, num_requests_each=NUM_REQUESTS),
    "popularity-shifting": partial(_popularity, num_requests_each=1000),
    "loop-and-chat": _in_turn,
    "agents": _agents,
    "few-shot": _few_shot,
    "chat-then-scan": _phases,
    "tenants": _tenants,
    "retrieval": _retrieval,
    "periodic": _periodic,
    "edits": _edits,
    "samples": _samples,
}
