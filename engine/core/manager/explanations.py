"""Explains admissions: the source of each block of a prompt, or the reason for computing the block."""

from collections.abc import Mapping, Sequence
from itertools import chain

from raydix.engine.core.manager.block_index import BlockIndex, BlockNotes, BlockRecord
from raydix.engine.core.manager.cache_statistics import CacheStatistics
from raydix.engine.core.manager.explain import (
    BlockSource,
    Decision,
    Decisions,
    Eviction,
    best_considered,
    runs_of,
)
from raydix.engine.core.manager.placement import Placement, PredictedTimes
from raydix.engine.core.manager.records import WorkerRecord
from raydix.engine.core.objectives import WhenLate
from raydix.engine.core.types import AdmitRequest, BlockHash, Role


class Explanations:
    """Writes `decisions` and the `statistics` of admissions; owner of the notes about blocks that explain misses."""

    def __init__(
        self,
        blocks: BlockIndex,
        statistics: CacheStatistics,
        decisions: Decisions,
        *,
        block_size: int,
        keeps_segments: bool,
    ) -> None:
        self._blocks = blocks
        self._statistics = statistics
        self._decisions = decisions
        self._block_size = block_size
        self._keeps_segments = keeps_segments
        # The block that followed a block in the tenant's last prompt with new blocks.
        self._continuations: BlockNotes[BlockHash] = BlockNotes()
        # The last turn with an answer behind a block, of a model with reasoning.
        self._reasoned: BlockNotes[int] = BlockNotes()

    def record(
        self,
        request: AdmitRequest,
        records: Sequence[BlockRecord | None],
        placement: Placement,
        workers: Mapping[str, WorkerRecord],
        now: float,
        objective_ttft_s: float | None = None,
        when_late: WhenLate | None = None,
        *,
        num_with_state: int | None = None,
    ) -> Decision:
        """Keep the decision behind a placement, count it, and return it. `records`: of the blocks of `request.hashes`;
        `now`: seconds since the epoch; `when_late`: of a request that is predicted to be late; `num_with_state`:
        leading blocks that the cluster has with a recurrent state behind them, None for a model without such states."""
        num_local = placement.chosen.num_local_blocks
        num_cached = num_local + placement.chosen.num_imported_blocks
        prefill = placement.prefill
        imported = [_source(record, prefill) for record in records[num_local:num_cached] if record is not None]
        computed = self._misses(request, records, num_cached, num_with_state)
        # Before the request's own blocks come and leave.
        eviction = self._eviction(request.hashes[num_cached:])
        runs = runs_of(chain(imported, computed))
        if runs and runs[0][0] is BlockSource.LOCAL:
            num_local, runs = num_local + runs[0][1], runs[1:]
        if num_local:
            runs = ((BlockSource.LOCAL, num_local), *runs)

        self._note_turn(request)
        considered = best_considered(placement)
        worker = workers[placement.prefill]
        uncached_s = worker.costs.prefill_s(request.num_tokens, 0, worker.token_budget, len(worker.decoding))
        saved_s = max(0.0, uncached_s - placement.chosen.compute_s - placement.chosen.import_s) if num_cached else 0.0
        decision = Decision(
            attempt=request.attempt,
            tenant=request.cache.tenant,
            num_tokens=request.num_tokens,
            block_size=self._block_size,
            runs=runs,
            eviction=eviction,
            admitted_at=now,
            prefill=placement.prefill,
            decode=placement.decode,
            predicted_ttft_s=placement.chosen.ttft_s,
            uncached_s=uncached_s,
            saved_s=saved_s,
            predicted_handover_s=placement.handover_s if request.generates else None,
            considered=considered,
            prefix_caching=self._keeps_segments,
            duties=_duties(placement, considered, workers),
            objective_ttft_s=objective_ttft_s,
            when_late=when_late,
            adapter=request.adapter,
        )
        self._decisions.admitted(request.request_id, decision)
        self._statistics.admitted(
            request.cache.tenant, request.num_tokens, request.hashes, runs, request.preview, saved_s=saved_s
        )
        return decision

    def _note_turn(self, request: AdmitRequest) -> None:
        """Note the last block before an answer with reasoning, maybe."""
        if request.reasoning_turn is not None and request.hashes and request.attempt == 0:
            self._reasoned.note(request.cache.tenant, {request.hashes[-1]: request.reasoning_turn})

    def _misses(
        self,
        request: AdmitRequest,
        records: Sequence[BlockRecord | None],
        num_cached: int,
        num_with_state: int | None,
    ) -> list[BlockSource]:
        """The reasons for computing the blocks behind the first `num_cached`; notes the order of blocks in the
        prompt."""
        if num_cached == len(request.hashes):
            return []
        tenant, turn = request.cache.tenant, request.reasoning_turn or 0
        hashes, parents = request.hashes[num_cached:], (b"", *request.hashes)[num_cached:-1]
        followers = self._continuations.of(tenant, parents)
        reasoned = self._reasoned.of(tenant, parents)
        gone = self._blocks.gone
        reasons: list[BlockSource] = []
        links: dict[BlockHash, BlockHash] = {}

        for number, (parent, block_hash, record, follower, earlier) in enumerate(
            zip(parents, hashes, records[num_cached:], followers, reasoned, strict=True), num_cached
        ):
            # The block is somewhere, but was not worth fetching, lies behind a missing one, or has no state behind it.
            if record is not None:
                has_state = num_with_state is None or number < num_with_state
                reasons.append(BlockSource.RECOMPUTED if has_state else BlockSource.NO_STATE)
                continue
            if block_hash in gone:
                made_room = gone[block_hash] is not None
                reasons.append(BlockSource.EVICTED if made_room else BlockSource.LOST)
                self._statistics.num_returned_blocks += made_room
            # Another block followed here after an answer with reasoning: the template has left the reasoning out since.
            elif earlier is not None and earlier < turn and follower != block_hash:
                reasons.append(BlockSource.REASONING_LEFT_OUT)
            # Another block followed here in an earlier prompt.
            elif follower is not None and follower != block_hash:
                reasons.append(BlockSource.DIVERGED)
            else:
                reasons.append(BlockSource.NEVER_SEEN)
            if parent:
                links[parent] = block_hash

        self._continuations.note(tenant, links)
        return reasons

    def _eviction(self, missing: Sequence[BlockHash]) -> Eviction | None:
        """What is known of the eviction of a prompt's blocks behind its hits; None unless the first one was evicted."""
        gone, displacements = self._blocks.gone, self._blocks.displacements
        if not missing or (first := gone.get(missing[0])) is None:
            return None
        # A prefix is evicted from its end: the last of its blocks left first, and must have stayed for all to stay.
        numbers = (gone.get(block_hash) for block_hash in missing)
        earliest = min(number for number in numbers if number is not None)
        return Eviction(displacements.time_of(first), displacements.num - earliest + 1)


def _duties(
    placement: Placement, considered: Sequence[PredictedTimes], workers: Mapping[str, WorkerRecord]
) -> dict[str, Role]:
    """Duties of the elastic ones among the workers of a placement and the considered ones."""
    names = dict.fromkeys([placement.prefill, placement.decode, *chain(*(each.worker_ids for each in considered))])
    return {name: workers[name].duty for name in names if workers[name].is_elastic}


def _source(record: BlockRecord, worker_id: str) -> BlockSource:
    """The source of a block that the request's worker does not compute."""
    # Its own pool may have the blocks, and lack the recurrent state behind them.
    if worker_id in record.workers:
        return BlockSource.LOCAL
    if record.segment is not None:
        return BlockSource.STORE if record.segment.is_in_store else BlockSource.DISK
    return BlockSource.WORKER if record.workers else BlockSource.PENDING
