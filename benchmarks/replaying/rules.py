"""Interface of a router, and simple ones to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from benchmarks.replaying.worker import ReplayedRequest, ReplayWorker
from raydix.engine.core.hashing import preferred
from raydix.engine.core.types import Role


class Router(Protocol):
    """Places jobs and hears of their progress."""

    def route(self, job: ReplayedRequest, now: float) -> tuple[str, str] | None:
        """Ids of the workers that prefill and decode; None for a job that is to ask again."""
        ...

    def num_reachable(self, job: ReplayedRequest) -> int:
        """Leading blocks of a job that its prefill worker holds or, as promised, gets from the pools of others."""
        ...

    def first_token(self, job: ReplayedRequest) -> None: ...

    def ended(self, job: ReplayedRequest, now: float) -> None: ...

    def pool_changed(self, worker: ReplayWorker) -> None: ...


class Rule:
    """A router without memory: a rule that orders workers, applied to prefill and to decode workers."""

    def __init__(self, workers: Sequence[ReplayWorker]) -> None:
        self._prefillers = [worker for worker in workers if worker.role is not Role.DECODE]
        self._decoders = [worker for worker in workers if worker.role is not Role.PREFILL]
        self._splits = any(worker.role is not Role.MIXED for worker in workers)

    def route(self, job: ReplayedRequest, now: float) -> tuple[str, str]:
        prefill = self.choose(job, self._prefillers)
        return prefill, self.choose(job, self._decoders) if self._splits else prefill

    def choose(self, job: ReplayedRequest, workers: Sequence[ReplayWorker]) -> str:
        raise NotImplementedError

    def num_reachable(self, job: ReplayedRequest) -> int:
        return 0

    def first_token(self, job: ReplayedRequest) -> None:
        pass

    def ended(self, job: ReplayedRequest, now: float) -> None:
        pass

    def pool_changed(self, worker: ReplayWorker) -> None:
        worker.pool.drain_journal()


class RoundRobin(Rule):
    """Takes the workers in turn."""

    def choose(self, job: ReplayedRequest, workers: Sequence[ReplayWorker]) -> str:
        return workers[job.number % len(workers)].worker_id


class SessionHash(Rule):
    """Rendezvous hashing of the conversation."""

    def choose(self, job: ReplayedRequest, workers: Sequence[ReplayWorker]) -> str:
        return preferred(job.request.session, [worker.worker_id for worker in workers])


class LongestPrefix(Rule):
    """Greedy: the worker that holds most of the prompt; of equals the one with the fewest jobs waiting."""

    def choose(self, job: ReplayedRequest, workers: Sequence[ReplayWorker]) -> str:
        hashes = job.request.hashes
        return min(workers, key=lambda w: (-len(w.pool.match(hashes)), len(w.waiting), w.worker_id)).worker_id
