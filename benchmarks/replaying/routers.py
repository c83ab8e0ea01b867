"""Who gets a request: the manager's directory, and what it is to be compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from benchmarks.replaying.traces import ReplayError
from benchmarks.replaying.worker import Job, ReplayWorker, Speeds
from engine.core.costs import WorkerCosts
from engine.core.directory import Directory
from engine.core.placement import CostModel, preferred
from engine.core.types import AdmitRequest, Role

DECODES_PER_STEP = 16
"""Decodes that the directory thinks a step's time is made of; in the replay it does not depend on them."""


class Router(Protocol):
    """Places jobs and hears what becomes of them."""

    def route(self, job: Job) -> tuple[str, str]:
        """Ids of the workers that prefill and decode."""
        ...

    def first_token(self, job: Job) -> None: ...

    def ended(self, job: Job) -> None: ...

    def pool_changed(self, worker: ReplayWorker) -> None: ...


class Rule:
    """A router without memory: a rule that orders workers, applied to prefill and to decode workers."""

    def __init__(self, workers: Sequence[ReplayWorker]) -> None:
        self._prefillers = [worker for worker in workers if worker.role is not Role.DECODE]
        self._decoders = [worker for worker in workers if worker.role is not Role.PREFILL]
        self._splits = any(worker.role is not Role.MIXED for worker in workers)

    def route(self, job: Job) -> tuple[str, str]:
        prefill = self.choose(job, self._prefillers)
        return prefill, self.choose(job, self._decoders) if self._splits else prefill

    def choose(self, job: Job, workers: Sequence[ReplayWorker]) -> str:
        raise NotImplementedError

    def first_token(self, job: Job) -> None:
        pass

    def ended(self, job: Job) -> None:
        pass

    def pool_changed(self, worker: ReplayWorker) -> None:
        worker.pool.drain_journal()


class RoundRobin(Rule):
    """In turn."""

    def choose(self, job: Job, workers: Sequence[ReplayWorker]) -> str:
        return workers[job.number % len(workers)].worker_id


class SessionHash(Rule):
    """Rendezvous hashing of the conversation."""

    def choose(self, job: Job, workers: Sequence[ReplayWorker]) -> str:
        return preferred(job.request.session, [worker.worker_id for worker in workers])


class LongestPrefix(Rule):
    """Greedy: whoever holds most of the prompt; of equals the one with the fewest jobs waiting."""

    def choose(self, job: Job, workers: Sequence[ReplayWorker]) -> str:
        hashes = job.request.hashes
        return min(workers, key=lambda w: (-len(w.pool.match(hashes)), len(w.waiting), w.worker_id)).worker_id


class Managed:
    """The manager: `Directory.admit`, by predicted time to first token. Imports between pools are not replayed."""

    def __init__(self, workers: Sequence[ReplayWorker], speeds: Speeds) -> None:
        block_size, token_s = workers[0].pool.block_size, 1 / speeds.prefill_tokens_per_s
        costs = WorkerCosts(
            step_s=0.0,
            prefill_token_s=token_s,
            decode_token_s=speeds.decode_step_s / DECODES_PER_STEP,
            import_byte_s=1.01 * block_size * token_s,  # a block has one byte here: computing it is always cheaper
        )
        self._directory = Directory(CostModel(block_size, prior=costs), segment_budget_bytes=0)
        for worker in workers:
            self._directory.register(worker.worker_id, worker.role, 0, 1, (), speeds.token_budget)

    def route(self, job: Job) -> tuple[str, str]:
        request = job.request
        admission, _ = self._directory.admit(
            AdmitRequest(str(job.number), 0, request.hashes, request.num_prompt_tokens, request.session)
        )
        return admission.prefill, admission.decode

    def first_token(self, job: Job) -> None:
        self._directory.first_token(str(job.number), 0, 0.0)

    def ended(self, job: Job) -> None:
        self._directory.release(str(job.number))

    def pool_changed(self, worker: ReplayWorker) -> None:
        sealed, evicted = worker.pool.drain_journal()
        if sealed or evicted:
            self._directory.blocks_changed(worker.worker_id, 0, sealed, evicted)


ROUTERS: Mapping[str, Callable[[Sequence[ReplayWorker], Speeds], Router]] = {
    "directory": Managed,
    "round-robin": lambda workers, _: RoundRobin(workers),
    "session-hash": lambda workers, _: SessionHash(workers),
    "longest-prefix": lambda workers, _: LongestPrefix(workers),
}


def make_router(name: str, workers: Sequence[ReplayWorker], speeds: Speeds) -> Router:
    """The router of that name.

    Raises:
        ReplayError: there is none.
    """
    if name not in ROUTERS:
        raise ReplayError(f"unknown router {name!r}; there are {', '.join(ROUTERS)}")
    return ROUTERS[name](workers, speeds)
