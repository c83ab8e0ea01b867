"""Who gets a request: the manager's directory, and what it is to be compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from benchmarks.replaying.speeds import Speeds
from benchmarks.replaying.traces import ReplayError
from benchmarks.replaying.worker import Job, ReplayWorker
from engine.core.directory import Directory
from engine.core.instructions import Export, Instruction
from engine.core.placement import preferred
from engine.core.types import AdmitRequest, Role, SegmentHeader


class Router(Protocol):
    """Places jobs and hears what becomes of them."""

    def route(self, job: Job) -> tuple[str, str]:
        """Ids of the workers that prefill and decode."""
        ...

    def num_reachable(self, job: Job) -> int:
        """Leading blocks of a job that its prefill worker holds or, as promised, gets from the pools of others."""
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

    def num_reachable(self, job: Job) -> int:
        return 0

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
    """The manager: `Directory.admit`, by predicted time to first token."""

    def __init__(self, workers: Sequence[ReplayWorker], speeds: Speeds) -> None:
        model, self._block_bytes = speeds.cost_model(workers[0].pool.block_size)
        self._directory = Directory(model, segment_budget_bytes=0)
        self._imports = speeds.imports
        for worker in workers:
            self._directory.register(worker.worker_id, worker.role, 0, self._block_bytes, (), speeds.token_budget)

    def route(self, job: Job) -> tuple[str, str]:
        request = job.request
        admission, instructions = self._directory.admit(
            AdmitRequest(str(job.number), 0, request.hashes, request.num_prompt_tokens, request.session)
        )
        self._export(instructions)
        if self._imports:
            job.promised = frozenset(admission.prefill_awaited)
        return admission.prefill, admission.decode

    def num_reachable(self, job: Job) -> int:
        count = 0
        for block_hash, record in zip(job.request.hashes, self._directory.leading(job.request.hashes), strict=False):
            is_here = job.prefill in record.workers
            if not is_here and not (block_hash in job.promised and record.workers):
                break
            count += 1
        return count

    def first_token(self, job: Job) -> None:
        self._directory.first_token(str(job.number), 0, 0.0)

    def ended(self, job: Job) -> None:
        self._export(self._directory.release(str(job.number)))

    def pool_changed(self, worker: ReplayWorker) -> None:
        sealed, evicted = worker.pool.drain_journal()
        if sealed or evicted:
            self._export(self._directory.blocks_changed(worker.worker_id, 0, sealed, evicted))

    def _export(self, instructions: Sequence[Instruction]) -> None:
        """What workers are asked to export they have exported at once; how long that takes is in the cost of a move."""
        for each in instructions:
            if isinstance(each, Export):
                header = SegmentHeader("", each.hashes, len(each.hashes) * self._block_bytes, 0)
                self._export(self._directory.segment_exported(each.worker_id, 0, header, None))


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
