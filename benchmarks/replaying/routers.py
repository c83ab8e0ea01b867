"""Routers of requests: the manager's directory, and others to compare with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from benchmarks.replaying.speeds import Speeds
from benchmarks.replaying.traces import ReplayError
from benchmarks.replaying.worker import ReplayedRequest, ReplayWorker
from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.hashing import preferred
from raydix.engine.core.manager.directory import Directory
from raydix.engine.core.manager.instructions import Export, Instruction
from raydix.engine.core.manager.turns import NO_TURNS, PausedError, TurnLimits
from raydix.engine.core.types import AdmitRequest, Role, SegmentHeader


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


class Managed:
    """The manager: `Directory.admit`, by predicted time to first token."""

    def __init__(
        self,
        workers: Sequence[ReplayWorker],
        speeds: Speeds,
        spread: float = 0.0,
        turns: TurnLimits = NO_TURNS,
    ) -> None:
        self._block_size = workers[0].pool.block_size
        model, self._block_bytes = speeds.cost_model(self._block_size)
        self._directory = Directory(model, segment_budget_bytes=0, turns=turns)
        self._imports = speeds.imports
        self._token_budget = speeds.token_budget
        self._spread = spread
        for worker in workers:
            self._register(worker)
        for worker in workers:
            self._report_costs(worker)

    def route(self, job: ReplayedRequest, now: float) -> tuple[str, str] | None:
        request = job.request
        asking = AdmitRequest(
            request_id=str(job.number),
            attempt=0,
            hashes=request.hashes,
            num_tokens=request.num_prompt_tokens,
            session=request.session or None,
        )
        try:
            admission, instructions = self._directory.admit(asking, now)
        except PausedError:
            return None
        self._export(instructions)
        if self._imports:
            job.promised = frozenset(admission.prefill_awaited)
        return admission.prefill, admission.decode

    def num_reachable(self, job: ReplayedRequest) -> int:
        count = 0
        for block_hash, record in zip(
            job.request.hashes, self._directory.stock.blocks.leading(job.request.hashes), strict=False
        ):
            is_here = job.prefill in record.workers
            if not is_here and not (block_hash in job.promised and record.workers):
                break
            count += 1
        return count

    def first_token(self, job: ReplayedRequest) -> None:
        self._directory.first_token(str(job.number), 0, 0.0)

    def ended(self, job: ReplayedRequest, now: float) -> None:
        self._directory.sessions.stopped(str(job.number), job.request.stop)
        self._export(self._directory.end_request(str(job.number), now))

    def pool_changed(self, worker: ReplayWorker) -> None:
        sealed, evicted = worker.pool.drain_journal()
        if sealed or evicted:
            self._export(self._directory.blocks_changed(worker.worker_id, 0, sealed, evicted))
            self._measured(worker, None)

    def _register(self, worker: ReplayWorker) -> None:
        self._directory.register(worker.worker_id, worker.role, 0, self._block_bytes, (), self._token_budget)

    def _report_costs(self, worker: ReplayWorker) -> None:
        fitted = worker.fitted.cost_model(self._block_size)[0].prior
        self._measured(worker, replace(fitted, spread=max(fitted.spread, self._spread)))

    def _measured(self, worker: ReplayWorker, costs: WorkerCosts | None) -> None:
        num_available = worker.pool.num_available
        num_empty = num_available - worker.pool.num_cached
        self._directory.fleet.measured(
            worker.worker_id, 0, costs, num_available, num_empty, num_blocks=worker.pool.num_blocks
        )

    def _export(self, instructions: Sequence[Instruction]) -> None:
        """Workers export at once the blocks they are asked for; the cost of a move includes the time."""
        for each in instructions:
            if isinstance(each, Export):
                header = SegmentHeader("", each.hashes, len(each.hashes) * self._block_bytes, 0)
                self._export(self._directory.segment_exported(each.worker_id, 0, header, None, 0.0))


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


RULES: Mapping[str, Callable[[Sequence[ReplayWorker]], Rule]] = {
    "round-robin": RoundRobin,
    "session-hash": SessionHash,
    "longest-prefix": LongestPrefix,
}
ROUTERS = ("directory", *RULES)


def make_router(name: str, workers: Sequence[ReplayWorker], speeds: Speeds, spread: float = 0.0) -> Router:
    """Return the router of this name. `spread`: deviation of the workers' fits, as the workers report it.

    Raises:
        ReplayError: there is none.
    """
    if name == "directory":
        return Managed(workers, speeds, spread)
    if name not in RULES:
        raise ReplayError(f"unknown router {name!r}; there are {', '.join(ROUTERS)}")
    return RULES[name](workers)
