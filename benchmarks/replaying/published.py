"""Published routing rules of other systems, as they describe them, with their default settings.

Each rule gets the inputs that its description names. Rules that guess a worker's contents from earlier requests have a
`Sent` instead of a look into the pools. A rule made for workers that do everything is asked for the prefill worker, and
takes the decode worker with the fewest requests, unless its description says otherwise.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from random import Random

from benchmarks.replaying.rules import Rule
from benchmarks.replaying.traces import MOONCAKE_BLOCK_TOKENS
from benchmarks.replaying.worker import ReplayedRequest, ReplayWorker
from raydix.engine.core.hashing import preferred
from raydix.engine.core.types import BlockHash


class Counted(Rule):
    """A rule that knows the numbers of requests and uncached tokens at each worker."""

    def __init__(self, workers: Sequence[ReplayWorker]) -> None:
        super().__init__(workers)
        self.num_queued_tokens = dict.fromkeys((worker.worker_id for worker in workers), 0)
        self.num_requests = dict.fromkeys(self.num_queued_tokens, 0)
        self._queued: dict[int, int] = {}

    def route(self, job: ReplayedRequest, now: float) -> tuple[str, str]:
        prefill = self.prefiller(job)
        decode = self.decoder(job) if self._splits else prefill.worker_id
        self._queued[job.number] = num_uncached(prefill, job)
        self.num_queued_tokens[prefill.worker_id] += self._queued[job.number]
        for worker_id in {prefill.worker_id, decode}:
            self.num_requests[worker_id] += 1
        return prefill.worker_id, decode

    def prefiller(self, job: ReplayedRequest) -> ReplayWorker:
        raise NotImplementedError

    def decoder(self, job: ReplayedRequest) -> str:
        return min(self._decoders, key=self.load).worker_id

    def load(self, worker: ReplayWorker) -> tuple[int, str]:
        return self.num_requests[worker.worker_id], worker.worker_id

    def first_token(self, job: ReplayedRequest) -> None:
        self.num_queued_tokens[job.prefill] -= self._queued.pop(job.number)
        if job.decode != job.prefill:
            self.num_requests[job.prefill] -= 1

    def ended(self, job: ReplayedRequest, now: float) -> None:
        self.num_requests[job.decode] -= 1


class LMetric(Counted):
    """LMetric (OSDI 2026, arXiv 2603.15202): least product of the uncached tokens that are queued, the request's own
    among them, and the number of requests."""

    def prefiller(self, job: ReplayedRequest) -> ReplayWorker:
        return min(self._prefillers, key=lambda worker: self._product(worker, job))

    def _product(self, worker: ReplayWorker, job: ReplayedRequest) -> tuple[int, str]:
        num_tokens = self.num_queued_tokens[worker.worker_id] + num_uncached(worker, job)
        return num_tokens * (self.num_requests[worker.worker_id] + 1), worker.worker_id


class Dynamo(Counted):
    """NVIDIA Dynamo's KV router (docs.nvidia.com/dynamo, "KV Router"): least sum of the blocks to be prefilled, queued
    ones included, and the blocks that are active, both weighted 1, without a temperature."""

    def __init__(self, workers: Sequence[ReplayWorker]) -> None:
        super().__init__(workers)
        self._num_active = dict.fromkeys(self.num_requests, 0)

    def route(self, job: ReplayedRequest, now: float) -> tuple[str, str]:
        prefill, decode = super().route(job, now)
        for worker_id in {prefill, decode}:
            self._num_active[worker_id] += len(job.request.hashes)
        return prefill, decode

    def prefiller(self, job: ReplayedRequest) -> ReplayWorker:
        return min(self._prefillers, key=lambda worker: self._sum(worker, job))

    def decoder(self, job: ReplayedRequest) -> str:
        return min(self._decoders, key=lambda worker: (self._num_active[worker.worker_id], worker.worker_id)).worker_id

    def first_token(self, job: ReplayedRequest) -> None:
        super().first_token(job)
        if job.decode != job.prefill:
            self._num_active[job.prefill] -= len(job.request.hashes)

    def ended(self, job: ReplayedRequest, now: float) -> None:
        super().ended(job, now)
        self._num_active[job.decode] -= len(job.request.hashes)

    def _sum(self, worker: ReplayWorker, job: ReplayedRequest) -> tuple[float, str]:
        num_tokens = self.num_queued_tokens[worker.worker_id] + num_uncached(worker, job)
        num_active = self._num_active[worker.worker_id] + len(job.request.hashes)
        return num_tokens / MOONCAKE_BLOCK_TOKENS + num_active, worker.worker_id


class WeightedScores(Counted):
    """llm-d's scheduler (llm-d.ai, "Request Scheduler") with its default profile: 3 for the share of the prompt that is
    cached, 2 for the shortest queue, 2 for the emptiest cache; the highest sum wins."""

    def prefiller(self, job: ReplayedRequest) -> ReplayWorker:
        queues = [len(worker.waiting) for worker in self._prefillers]
        longest, range_ = max(queues), max(queues) - min(queues)
        scores = [
            3 * num_cached(worker, job) / len(job.request.hashes)
            + 2 * ((longest - queue) / range_ if range_ else 1.0)
            + 2 * worker.pool.num_available / worker.pool.num_blocks
            for worker, queue in zip(self._prefillers, queues, strict=True)
        ]
        return self._prefillers[scores.index(max(scores))]


class Sent:
    """Presumed contents of workers: the blocks sent to each, the latest `capacity` of each."""

    def __init__(self, workers: Sequence[ReplayWorker], capacity: int | None) -> None:
        self._blocks: dict[str, OrderedDict[BlockHash, None]] = {w.worker_id: OrderedDict() for w in workers}
        self._capacity = capacity

    def size(self, worker: ReplayWorker) -> int:
        return len(self._blocks[worker.worker_id])

    def num_matched(self, worker: ReplayWorker, job: ReplayedRequest) -> int:
        blocks = self._blocks[worker.worker_id]
        return sum(1 for _ in takewhile(blocks.__contains__, job.request.hashes))

    def add(self, worker: ReplayWorker, job: ReplayedRequest) -> None:
        blocks = self._blocks[worker.worker_id]
        for block_hash in reversed(job.request.hashes):
            blocks[block_hash] = None
            blocks.move_to_end(block_hash)
        while self._capacity is not None and len(blocks) > self._capacity:
            blocks.popitem(last=False)


class SGLang(Counted):
    """SGLang's cache-aware router. While loads are even: the worker sent most of the prompt if that is above 0.3 of it,
    else the worker sent least of all. While loads are uneven (more than 64 apart, and the largest above 1.5 times the
    smallest): the worker with the fewest requests."""

    def __init__(self, workers: Sequence[ReplayWorker]) -> None:
        super().__init__(workers)
        self._sent = Sent(workers, workers[0].pool.num_blocks)

    def prefiller(self, job: ReplayedRequest) -> ReplayWorker:
        chosen = self._chosen(job)
        self._sent.add(chosen, job)
        return chosen

    def _chosen(self, job: ReplayedRequest) -> ReplayWorker:
        loads = [self.num_requests[worker.worker_id] for worker in self._prefillers]
        if max(loads) - min(loads) > 64 and max(loads) > 1.5 * min(loads):
            return min(self._prefillers, key=self.load)
        best = max(self._prefillers, key=lambda worker: self._sent.num_matched(worker, job))
        if self._sent.num_matched(best, job) > 0.3 * len(job.request.hashes):
            return best
        return min(self._prefillers, key=self._sent.size)


class PrefixCacheAffinity(Counted):
    """Ray Serve's PrefixCacheAffinityRouter, queues never counting as uneven: of the replicas sent most of the prompt
    the one with the fewest requests, if they were sent at least 0.1 of it, else of the replicas sent least."""

    def __init__(self, workers: Sequence[ReplayWorker]) -> None:
        super().__init__(workers)
        self._sent = Sent(workers, None)

    def prefiller(self, job: ReplayedRequest) -> ReplayWorker:
        matched = [self._sent.num_matched(worker, job) for worker in self._prefillers]
        marks = [-count for count in matched]
        if max(matched) < 0.1 * len(job.request.hashes):
            marks = [self._sent.size(worker) for worker in self._prefillers]
        best = [worker for worker, mark in zip(self._prefillers, marks, strict=True) if mark == min(marks)]
        chosen = min(best, key=self.load)
        self._sent.add(chosen, job)
        return chosen


class DualMap(Counted):
    """DualMap (ICLR 2026, arXiv 2602.06502), without moving requests later: of the two workers that the beginning of a
    prompt hashes to the one that holds more of it, unless its queue exceeds the objective for first tokens: then the
    one with the shorter queue."""

    SLO_S = 5.0

    def prefiller(self, job: ReplayedRequest) -> ReplayWorker:
        by_id = {worker.worker_id: worker for worker in self._prefillers}
        keys = [f"{number} {job.request.session}" for number in range(min(2, len(by_id)))]
        pair = [by_id.pop(preferred(key, list(by_id))) for key in keys]
        warm = max(pair, key=lambda worker: num_cached(worker, job))
        if self._wait_s(warm, job) <= self.SLO_S:
            return warm
        return min(pair, key=lambda worker: self._wait_s(worker, job))

    def _wait_s(self, worker: ReplayWorker, job: ReplayedRequest) -> float:
        num_tokens = self.num_queued_tokens[worker.worker_id] + num_uncached(worker, job)
        return worker.fitted.prefill_s(num_tokens, 0, 0)


class PrefixOnly(Counted):
    """vLLM production stack's prefix-aware routing: one of the workers sent the longest prefix, at random."""

    def __init__(self, workers: Sequence[ReplayWorker]) -> None:
        super().__init__(workers)
        self._sent = Sent(workers, None)
        self._random = Random(0)

    def prefiller(self, job: ReplayedRequest) -> ReplayWorker:
        matched = [self._sent.num_matched(worker, job) for worker in self._prefillers]
        best = [w for w, count in zip(self._prefillers, matched, strict=True) if count == max(matched)]
        chosen = self._random.choice(best)
        self._sent.add(chosen, job)
        return chosen


def num_cached(worker: ReplayWorker, job: ReplayedRequest) -> int:
    """Leading blocks of the prompt in a worker's pool."""
    return len(worker.pool.match(job.request.hashes))


def num_uncached(worker: ReplayWorker, job: ReplayedRequest) -> int:
    """Tokens that the worker would have to compute."""
    return max(1, job.request.num_prompt_tokens - num_cached(worker, job) * worker.pool.block_size)


PUBLISHED: Mapping[str, Callable[[Sequence[ReplayWorker]], Rule]] = {
    "lmetric": LMetric,
    "dynamo": Dynamo,
    "llm-d": WeightedScores,
    "production-stack": PrefixOnly,
    "sglang": SGLang,
    "ray-prefix": PrefixCacheAffinity,
    "dualmap": DualMap,
}
