"""One worker's engine: scheduler, runner and KV pool behind `submit`, `abort`, `import_segment` and `step`.

Single-threaded: whoever owns an engine calls it from one thread. Nothing here knows of Ray, and nothing is decided by a
clock: the owner brings `now` and moves what `step` returns. How long swapping took is only counted.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from engine.core.block_pool import BlockPool
from engine.core.costs import StepShape
from engine.core.hashing import root_hash
from engine.core.moves import CopyBlock, Move, SwapDrop, SwapIn, SwapOut
from engine.core.request import Request
from engine.core.scheduler import ExportedBlocks, Scheduler, SchedulerLimits, SchedulerOutput
from engine.core.swapping import SwapPolicy
from engine.core.types import Assignment, BlockHash, FinishReason, PromptEvent, Retention, SegmentHeader, TokenEvent
from engine.model.runner import Runner
from engine.model.segments import Bytes, checksum
from engine.model.swap_space import ProcessMemory, SwapSpace

logger = logging.getLogger(__name__)


class BlockStore(Protocol):
    """The bytes of the blocks; `engine.model.kv_pool.KVPool` is the one with a model behind it."""

    block_bytes: int

    def export_blocks(self, block_ids: Sequence[int]) -> Bytes: ...

    def start_export(self, block_ids: Sequence[int]) -> Bytes | Callable[[], Bytes]: ...

    def import_blocks(self, buffer: Bytes, block_ids: Sequence[int]) -> None: ...

    def copy_block(self, source: int, target: int) -> None: ...


@dataclass(frozen=True, slots=True)
class ExportedSegment:
    """A segment ready to be sent: header and payload, `num_blocks * block_bytes` bytes (empty for a bare handover).

    While a device still copies it, `arriving` waits for the payload, and that and the checksum are missing.
    """

    header: SegmentHeader
    payload: Bytes
    arriving: Callable[[], Bytes] | None = None

    def arrived(self) -> "ExportedSegment":
        """The complete segment. Waits for it if need be; any thread may call it, once."""
        if self.arriving is None:
            return self
        payload = self.arriving()
        return ExportedSegment(replace(self.header, checksum=checksum(payload)), payload)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Everything that a step changed and that others must hear of."""

    scores: tuple[PromptEvent, ...]
    events: tuple[TokenEvent, ...]
    segments: tuple[ExportedSegment, ...]
    finished: tuple[Request, ...]
    shape: StepShape


@dataclass(slots=True)
class PreemptionCounts:
    """What has become of preempted requests since the engine began."""

    num_swapped: int = 0
    """Preemptions after which the KV was kept outside the pool."""
    num_recomputed: int = 0
    """Preemptions after which it was not."""
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    swapped_out_s: float = 0.0
    swapped_in_s: float = 0.0


class Engine:
    """Scheduler, runner and pool of one worker. Up to `swap_bytes` of preempted requests' KV go to `swap_space`."""

    def __init__(
        self,
        runner: Runner,
        store: BlockStore,
        pool: BlockPool,
        limits: SchedulerLimits,
        max_model_len: int,
        fingerprint: str,
        swap_space: SwapSpace | None = None,
        swap_bytes: int = 0,
    ) -> None:
        self.runner = runner
        self.store = store
        self.pool = pool
        self.swap_space: SwapSpace = ProcessMemory() if swap_space is None else swap_space
        swapping = SwapPolicy(swap_bytes // store.block_bytes, store.block_bytes)
        self.scheduler = Scheduler(pool, limits, max_model_len, swapping)
        self.preemptions = PreemptionCounts()
        self.fingerprint = fingerprint
        self._root = root_hash(fingerprint)

    def submit(self, assignment: Assignment, now: float) -> None:
        """Queue a request; its events come out of later steps."""
        self.scheduler.submit(assignment, self._root, now)

    def abort(self, request_ids: Iterable[str], *, has_ended: bool = False) -> None:
        """Forget requests and free their blocks (`Scheduler.abort`). Unknown ids are requests that ended already."""
        for request_id in request_ids:
            self.scheduler.abort(request_id, has_ended=has_ended)

    def import_segment(self, header: SegmentHeader, payload: Bytes | None, now: float) -> bool:
        """Take a segment's blocks into the pool, then its handover; False if its content was not what it says.

        `payload` None stands for a segment that could not be fetched. Blocks that are here already, and those for
        which there is no room, are passed over: their requests compute them.
        """
        intact = header.num_bytes == 0 or (payload is not None and self._is_intact(header, payload))
        if intact and payload is not None:
            goes_on_here = header.handover is not None and self.scheduler.get(header.handover.request_id) is not None
            hashes = header.hashes if goes_on_here else header.full_hashes
            if hashes:
                self._import_blocks(hashes, payload[: len(hashes) * self.store.block_bytes])
        self.scheduler.blocks_settled(header.hashes, now)
        if header.handover is not None:
            self.scheduler.handed_over(header.handover, now)
        return intact

    def export(self, hashes: Iterable[BlockHash]) -> tuple[list[ExportedSegment], tuple[BlockHash, ...]]:
        """Segments of those of `hashes` that are here, and the ones that are not. A segment is kept as a whole, so its
        blocks have one tenant and one priority, and all expire, with the last of them, or none does."""
        wanted = list(hashes)
        blocks = {block_hash: self.pool.lookup(block_hash) for block_hash in wanted}
        here = [(block_hash, block) for block_hash, block in blocks.items() if block is not None]
        missing = tuple(block_hash for block_hash, block in blocks.items() if block is None)
        alike: dict[tuple[str, int, bool], list[tuple[BlockHash, int, Retention]]] = {}
        for block_hash, block in here:
            wish = self.pool.retention_of(block)
            key = wish.tenant, wish.priority, wish.expires_at is None
            alike.setdefault(key, []).append((block_hash, block, wish))
        segments = []
        for group in alike.values():
            found, block_ids, wishes = zip(*group, strict=True)
            retention = max(wishes, key=lambda wish: wish.expires_at or 0.0)
            self.pool.acquire(block_ids)
            segments.append(self._pack(ExportedBlocks("", found, block_ids, retention=retention)))
        return segments, missing

    def step(self, now: float) -> StepResult | None:
        """Schedule, run, record. None if there was nothing to compute."""
        output = self.scheduler.schedule(now)
        for move in output.moves:
            output = self._move(move, output)
        self._count(output.preempted)
        if not output.chunks:
            return None
        outcome = self.scheduler.update(output, self.runner.run(output), now)
        segments = self._pack_all(outcome.exports)
        return StepResult(
            outcome.scores,
            outcome.events,
            segments,
            outcome.finished,
            _shape(output, self.store.block_bytes),
        )

    def fail_all(self, detail: str) -> list[TokenEvent]:
        """End every request with an error event: a step could not be computed."""
        requests = list(self.scheduler.requests())
        events = [error_event(request.assignment, request.num_output, detail) for request in requests]
        self.scheduler.forget_moves()
        for request in requests:
            self.scheduler.abort(request.request_id)
            self.swap_space.drop(request.request_id)
        return events

    def _move(self, move: Move, output: SchedulerOutput) -> SchedulerOutput:
        """Do what was decided before the step computes. Returns what remains of the step: KV that cannot be moved costs
        its request the time to compute it again, and no more."""
        match move:
            case CopyBlock(source, target):
                self.store.copy_block(source, target)
            case SwapDrop(request_id):
                self.swap_space.drop(request_id)
            case SwapOut(request_id) | SwapIn(request_id):
                try:
                    self._swap(move)
                except Exception:  # wherever it is kept may fail as it likes
                    logger.exception("%d blocks of %s not swapped", len(move.blocks), request_id)
                    return self.scheduler.swap_failed(request_id, output)
        return output

    def _swap(self, move: SwapOut | SwapIn) -> None:
        num_bytes, started = len(move.blocks) * self.store.block_bytes, time.perf_counter()
        if isinstance(move, SwapOut):
            self.swap_space.put(move.request_id, self.store.export_blocks(move.blocks))
            self.preemptions.swapped_out_bytes += num_bytes
            self.preemptions.swapped_out_s += time.perf_counter() - started
        else:
            payload = self.swap_space.take(move.request_id)
            self.store.import_blocks(payload[payload.nbytes - num_bytes :], move.blocks)
            self.preemptions.swapped_in_bytes += num_bytes
            self.preemptions.swapped_in_s += time.perf_counter() - started

    def _count(self, preempted: Iterable[str]) -> None:
        for request_id in preempted:
            request = self.scheduler.get(request_id)
            assert request is not None
            self.preemptions.num_swapped += request.swapped is not None
            self.preemptions.num_recomputed += request.swapped is None

    def _is_intact(self, header: SegmentHeader, payload: Bytes) -> bool:
        expected = len(header.hashes) * self.store.block_bytes
        intact = (
            header.fingerprint == self.fingerprint
            and payload.nbytes == expected
            and checksum(payload) == header.checksum
        )
        if not intact:
            logger.warning("segment of %d blocks refused: model, size or checksum differ", len(header.hashes))
        return intact

    def _import_blocks(self, hashes: Sequence[BlockHash], payload: Bytes) -> None:
        missing = [index for index, block_hash in enumerate(hashes) if self.pool.lookup(block_hash) is None]
        missing = missing[: self.pool.num_available]
        blocks: list[int] = []
        try:
            blocks = self.pool.allocate(len(missing))
            rows = payload.reshape(len(hashes), -1)
            self.store.import_blocks(rows[missing].reshape(-1) if len(missing) < len(hashes) else payload, blocks)
            for index, block in zip(missing, blocks, strict=True):
                self.pool.seal(block, hashes[index])
        except Exception:  # whoever waits for these blocks must go on without them
            logger.exception("%d blocks not imported", len(missing))
        finally:
            self.pool.release(blocks)

    def _pack_all(self, exports: Iterable[ExportedBlocks]) -> tuple[ExportedSegment, ...]:
        """The segments of a step. One that cannot be made is sent without its blocks; the pool still has them."""
        segments = []
        for export in exports:
            try:
                segments.append(self._pack(export))
            except Exception:  # the step itself went well, and its tokens must go out
                logger.exception("%d blocks of %s not exported", len(export.blocks), export.request_id)
                if export.handover is not None:
                    segments.append(self._pack(replace(export, blocks=(), hashes=())))
        return tuple(segments)

    def _pack(self, export: ExportedBlocks) -> ExportedSegment:
        """Copy blocks out, or begin to, and release them."""
        nothing = np.empty(0, np.uint8)
        try:
            payload = self.store.start_export(export.blocks) if export.blocks else nothing
        finally:
            self.pool.release(export.blocks)
        retention = export.retention
        if retention.expires_at is not None:
            retention = replace(retention, expires_at=time.time() + retention.expires_at - self.pool.now)
        num_bytes = len(export.blocks) * self.store.block_bytes
        header = SegmentHeader(self.fingerprint, export.hashes, num_bytes, 0, export.handover, retention)
        if isinstance(payload, np.ndarray):
            return ExportedSegment(replace(header, checksum=checksum(payload)), payload)
        return ExportedSegment(header, nothing, payload)


def error_event(assignment: Assignment, position: int, detail: str) -> TokenEvent:
    """The end of a request that this worker cannot compute."""
    return TokenEvent(assignment.request_id, assignment.attempt, position, None, FinishReason.ERROR, None, 0, detail)


def _shape(output: SchedulerOutput, block_bytes: int) -> StepShape:
    num_tokens = num_decodes = 0
    num_pairs = 0.0
    for chunk in output.chunks:
        num_decodes += chunk.start >= chunk.request.assignment.num_prompt_tokens
        num_tokens += chunk.num_tokens
        num_pairs += chunk.num_tokens * (chunk.start + (chunk.num_tokens + 1) / 2)
    swaps = [move for move in output.moves if isinstance(move, SwapOut | SwapIn)]
    num_bytes = sum(len(move.blocks) for move in swaps) * block_bytes
    return StepShape(num_tokens - num_decodes, num_decodes, num_pairs, len(swaps), num_bytes)
