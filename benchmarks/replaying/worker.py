"""One worker in virtual time: prefills one after the other, decodes all at once, blocks by the engine's own pool.

While a prefill runs beside decodes, each step carries a chunk of it as well, so every decoding request waits one chunk
per token. The duration of a prefill is computed at its start, with the decodes at this time. All decodes of a worker
progress alike, so one clock of decoded tokens serves them all.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from benchmarks.replaying.speeds import Speeds
from benchmarks.replaying.traces import TraceRequest
from raydix.engine.core.types import BlockHash, Role
from raydix.engine.core.worker.block_pool import BlockPool


@dataclass(slots=True, eq=False)
class ReplayedRequest:
    """A request on its way. Times are virtual seconds; `blocks` are held at its current worker."""

    number: int
    request: TraceRequest
    prefill: str = ""
    decode: str = ""
    blocks: list[int] = field(default_factory=list)
    promised: frozenset[BlockHash] = frozenset()
    """Blocks that the prefill worker was to import when the job was placed."""
    num_hits: int = 0
    """Leading blocks found by the job, imported ones included."""
    num_imported: int = 0
    num_computed_tokens: int = 0
    first_token_s: float | None = None
    finished_s: float | None = None


class ReplayWorker:
    """State of one worker; `Cluster` moves it on."""

    def __init__(
        self,
        worker_id: str,
        role: Role,
        pool: BlockPool,
        speeds: Speeds,
        fitted: Speeds | None = None,
        *,
        protects: bool = False,
    ) -> None:
        """`protects`: the blocks of waiting jobs are evicted late, as a scheduler has it."""
        self.worker_id = worker_id
        self.role = role
        self.pool = pool
        self.speeds = speeds
        self.fitted = fitted or speeds
        """Speeds reported by the worker."""
        self.protects = protects
        self.waiting: deque[ReplayedRequest] = deque()
        self.incoming: deque[ReplayedRequest] = deque()
        """Handed over and waiting for blocks."""
        self.prefilling: ReplayedRequest | None = None
        self._chunk_s = 0.0
        self.busy_s = 0.0
        self.timer = 0
        """Number of the latest decode event; older ones are void."""
        self._decoding: list[tuple[float, int, ReplayedRequest]] = []
        self._decoded = 0.0
        self._since = 0.0

    def enqueue(self, job: ReplayedRequest) -> None:
        """Have a job wait for its prefill."""
        self.waiting.append(job)
        if self.protects:
            self.pool.protect(job.request.hashes)

    def take_blocks(self, job: ReplayedRequest, now: float, num_reachable: int = 0) -> bool:
        """Give a job the cached prefix and room for the remaining blocks, its answer included where it decodes; False
        if full.

        Of the first `num_reachable` blocks, missing ones are imported.
        """
        pool, request = self.pool, job.request
        matched = pool.match(request.hashes)
        num_answer = -(-request.num_output_tokens // pool.block_size) if job.decode == self.worker_id else 0
        num_missing = len(request.hashes) - len(matched) + num_answer
        # Matched blocks without a holder are available now, and not any more once this job holds them.
        if num_missing > pool.num_available - sum(pool.is_cached(block) for block in matched):
            return False

        pool.acquire(matched)
        job.blocks = matched + pool.allocate(num_missing, now)

        if job.prefill == self.worker_id:
            if self.protects:
                self.pool.unprotect(request.hashes)
            job.num_hits = max(len(matched), num_reachable)
            job.num_imported = job.num_hits - len(matched)
            # The last token of a prompt is computed in any case: the answer's first token is sampled behind it.
            cached = min(job.num_hits * pool.block_size, request.num_prompt_tokens - 1)
            job.num_computed_tokens = request.num_prompt_tokens - cached

        return True

    def publish(self, job: ReplayedRequest) -> None:
        """Name the blocks of a complete prompt."""
        for block, block_hash in zip(job.blocks, job.request.hashes, strict=False):
            if self.pool.hash_of(block) is None:
                self.pool.seal(block, block_hash)

    def give_back(self, job: ReplayedRequest, now: float) -> None:
        self.pool.retire(job.blocks, now, stop=job.request.stop)
        job.blocks = []

    def start_prefill(self, job: ReplayedRequest, now: float) -> float:
        """Time at which the job will be done."""
        self._advance(now)
        self.prefilling = job
        num_tokens = job.num_computed_tokens
        shape = num_tokens, job.request.num_prompt_tokens - num_tokens, len(self._decoding)
        self._chunk_s = self.speeds.chunk_s(*shape)
        took_s = self.speeds.prefill_s(*shape)
        if job.num_imported:
            took_s += self.speeds.move_s(job.num_imported)
        self.busy_s += took_s
        return now + took_s

    def end_prefill(self, now: float) -> None:
        self._advance(now)
        self.prefilling = None

    def start_decode(self, job: ReplayedRequest, now: float) -> None:
        """The first token is there; the others follow."""
        self._advance(now)
        heapq.heappush(self._decoding, (self._decoded + job.request.num_output_tokens - 1, job.number, job))

    def next_decoded_s(self, now: float) -> float | None:
        """When the next answer is complete, if nothing else happens."""
        if not self._decoding:
            return None
        self._advance(now)
        return now + max(0.0, self._decoding[0][0] - self._decoded) * self._step_s

    def pop_decoded(self, now: float) -> ReplayedRequest:
        """Return the answer that is complete now."""
        self._advance(now)
        target, _, job = heapq.heappop(self._decoding)
        # Set and not left as computed: errors of rounding would add up over all answers.
        self._decoded = target
        return job

    @property
    def _step_s(self) -> float:
        chunk_s = self._chunk_s if self.prefilling is not None else 0.0
        return self.speeds.decode_step_s(max(1, len(self._decoding))) + chunk_s

    def _advance(self, now: float) -> None:
        self._decoded += (now - self._since) / self._step_s
        self._since = now
