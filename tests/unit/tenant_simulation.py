"""Shares of computing among tenants, in virtual time: one tenant asks for many times its share, another for little.
The room of the ingress, the manager's placement and the workers' schedulers are the production ones; a step lasts as
long as the costs say. Deterministic: the same arguments give the same figures on every machine. `blind` has all
requests in one tenant's name, as a scheduler that does not look at tenants has them.
"""

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.errors import OverloadedError
from raydix.engine.core.hashing import root_hash
from raydix.engine.core.ingress.room import Permit, Room
from raydix.engine.core.manager.directory import Directory
from raydix.engine.core.manager.placement import CostModel
from raydix.engine.core.settings import SchedulerLimits
from raydix.engine.core.tenants import Tenant, Tenants, salt_of
from raydix.engine.core.types import AdmitRequest, Assignment, CacheHints, Role, Sampling, Stage
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.core.worker.order import chunk_s
from raydix.engine.core.worker.scheduler import Scheduler
from raydix.engine.core.worker.step import RunnerOutput, SampledToken, SchedulerOutput

COSTS = WorkerCosts(step_s=5e-3, prefill_token_s=1e-4, decode_token_s=2e-4, pair_s=1e-8)
"""A small GPU's."""
BLOCK_SIZE, NUM_BLOCKS, BLOCK_BYTES = 16, 2048, 1 << 16
LIMITS = SchedulerLimits(token_budget=512, max_requests=32)
NUM_WORKERS, MAX_QUEUED = 2, 512
PROMPT, ANSWER = (128, 1024), (16, 160)
"""Bounds of the numbers of tokens."""
ROOT = root_hash("benchmark")
HEAVY, LIGHT = Tenant("heavy"), Tenant("light")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request before it is admitted."""

    at_s: float
    number: int
    tenant: Tenant
    token_ids: tuple[int, ...]
    num_output: int


@dataclass(slots=True)
class Figures:
    """What one run shows."""

    light_p90_ms: float = 0.0
    """90 % of the light tenant's first tokens came in so many milliseconds."""
    computed_tokens_per_s: float = 0.0
    refused: dict[str, int] = field(default_factory=dict)


def arrivals(tenant: Tenant, rate: float, seconds: float, seed: int) -> Iterator[Arrival]:
    """Poisson arrivals of one tenant; the same for a seed, whatever other tenants do."""
    chance, now, number = random.Random(seed), 0.0, seed
    while rate and (now := now + chance.expovariate(rate)) < seconds:
        token_ids = tuple(chance.randrange(30_000) for _ in range(chance.randint(*PROMPT)))
        yield Arrival(now, number, tenant, token_ids, chance.randint(*ANSWER))
        number += 2


class FairWorker:
    """A production scheduler, and the time at which its step ends."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.scheduler = Scheduler(self.pool, LIMITS, 4096)
        self.scheduler.learn_costs(COSTS)
        self.step: SchedulerOutput | None = None


class Simulation:
    """Two mixed workers behind one manager and one ingress replica."""

    def __init__(self, *, is_blind: bool) -> None:
        self._is_blind = is_blind
        self._room = Room(MAX_QUEUED, None if is_blind else Tenants((HEAVY, LIGHT)))
        self._directory = Directory(CostModel(BLOCK_SIZE, prior=COSTS), 0)
        self._workers = {f"w{number}": FairWorker(f"w{number}") for number in range(NUM_WORKERS)}
        for worker in self._workers.values():
            self._directory.register(worker.name, Role.MIXED, 0, BLOCK_BYTES, (), LIMITS.token_budget)
            self._measure(worker)
        self._ends: list[tuple[float, str]] = []
        self._open: dict[str, tuple[Arrival, Permit]] = {}
        self.light_ttft_s: list[float] = []
        self.num_computed = 0
        self.figures = Figures(refused={HEAVY.name: 0, LIGHT.name: 0})

    def run(self, requests: Sequence[Arrival], seconds: float) -> Figures:
        """Serve until the time is over; what is under way then does not count."""
        for arrival in requests:
            self._until(arrival.at_s)
            self._arrive(arrival)
        self._until(seconds)
        self.figures.light_p90_ms = _p90_ms(self.light_ttft_s)
        self.figures.computed_tokens_per_s = round(self.num_computed / seconds, 1)
        for _, permit in self._open.values():
            permit.release()
        return self.figures

    def _until(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            ended_at, name = heapq.heappop(self._ends)
            self._end_step(self._workers[name], ended_at)
            self._begin_step(self._workers[name], ended_at)

    def _arrive(self, arrival: Arrival) -> None:
        try:
            [permit] = self._room.acquire(1, arrival.tenant)
        except OverloadedError:
            self.figures.refused[arrival.tenant.name] += 1
            return
        request_id, now, salt = str(arrival.number), arrival.at_s, salt_of(arrival.tenant.name, None)
        self._open[request_id] = arrival, permit
        assignment = Assignment(
            request_id,
            0,
            Stage.WHOLE,
            arrival.token_ids,
            len(arrival.token_ids),
            Sampling(arrival.num_output),
            "ingress",
            salt,
            cache=CacheHints(tenant="" if self._is_blind else arrival.tenant.name),
        )
        admission, _ = self._directory.admit(AdmitRequest(request_id, 0, (), len(arrival.token_ids)), now)
        worker = self._workers[admission.decode]
        worker.scheduler.submit(assignment, ROOT, now)
        if worker.step is None:
            self._begin_step(worker, now)

    def _begin_step(self, worker: FairWorker, now: float) -> None:
        output = worker.scheduler.schedule(now)
        worker.step = output if output.chunks else None
        if worker.step is not None:
            took_s = COSTS.step_s + sum(chunk_s(chunk, COSTS) for chunk in output.chunks)
            heapq.heappush(self._ends, (now + took_s, worker.name))

    def _end_step(self, worker: FairWorker, now: float) -> None:
        assert worker.step is not None
        sampled = {chunk.request.request_id: (SampledToken(1),) for chunk in worker.step.chunks if chunk.samples}
        self.num_computed += sum(chunk.num_tokens for chunk in worker.step.chunks)
        outcome = worker.scheduler.update(worker.step, RunnerOutput(sampled=sampled), now)
        for event in outcome.events:
            arrival, permit = self._open[event.request_id]
            if event.position == 0:
                if arrival.tenant is LIGHT:
                    self.light_ttft_s.append(now - arrival.at_s)
                self._directory.first_token(event.request_id, 0, now - arrival.at_s)
            if event.finish is not None:
                permit.release()
                del self._open[event.request_id]
                self._directory.end_request(event.request_id, now)
        worker.pool.drain_journal()
        self._measure(worker)

    def _measure(self, worker: FairWorker) -> None:
        num_available = worker.pool.num_available
        num_empty = num_available - worker.pool.num_cached
        self._directory.fleet.measured(worker.name, 0, COSTS, num_available, num_empty)


def _p90_ms(values: Sequence[float]) -> float:
    """The 90th percentile of values in seconds, in milliseconds; 0 without values."""
    return round(1000 * sorted(values)[int(0.9 * (len(values) - 1))], 1) if values else 0.0


def capacity() -> float:
    """Requests per second that all workers serve at most, of the mean lengths."""
    prompt, answer, beside = sum(PROMPT) / 2, sum(ANSWER) / 2, LIMITS.max_requests / 2
    decode_s = COSTS.decode_token_s + COSTS.step_s / beside
    return NUM_WORKERS / (prompt * COSTS.prefill_token_s + answer * decode_s)


def measure(seconds: float, times: float) -> dict[str, Figures]:
    """All runs. The light tenant asks for a tenth of what there is, the heavy one for half of it, or `times` that."""
    most = capacity()
    light = list(arrivals(LIGHT, 0.1 * most, seconds, 1))
    share = list(arrivals(HEAVY, 0.5 * most, seconds, 2))
    flood = list(arrivals(HEAVY, 0.5 * most * times, seconds, 2))
    runs = {
        "light alone": (False, light),
        "heavy at its share": (False, chain(light, share)),
        f"heavy {times:g} times, blind": (True, chain(light, flood)),
        f"heavy {times:g} times, shared": (False, chain(light, flood)),
    }
    return {
        name: Simulation(is_blind=is_blind).run(sorted(requests, key=lambda each: each.at_s), seconds)
        for name, (is_blind, requests) in runs.items()
    }
