"""One worker's engine: scheduler, runner and KV pool behind `submit`, `abort`, `exchange` and `step`.

Single-threaded: an engine's owner calls it from one thread. Nothing here knows of Ray, and no decision uses a clock:
the owner brings `now` and moves the results of `step`. Durations of swapping are only counted.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from raydix.engine.core.costs import StepShape, WorkerCosts
from raydix.engine.core.hashing import root_hash
from raydix.engine.core.log_fields import about
from raydix.engine.core.settings import SchedulerLimits
from raydix.engine.core.tenants import Tenant
from raydix.engine.core.types import (
    Assignment,
    BlockHash,
    EvictionReason,
    FinishReason,
    NoteWork,
    PromptEvent,
    TokenEvent,
    note_nothing,
)
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.core.worker.drafts.drafter import Drafter
from raydix.engine.core.worker.request import Request
from raydix.engine.core.worker.scheduler import Scheduler
from raydix.engine.core.worker.step import CopyBlock, Move, ScheduledChunk, SchedulerOutput, SwapDrop, SwapIn, SwapOut
from raydix.engine.core.worker.swaps import SwapPolicy
from raydix.engine.model.adapter_store import AdapterStore
from raydix.engine.model.exchange import BlockStore, Exchange, ExportedSegment, StateStore
from raydix.engine.model.grammars import Grammars
from raydix.engine.model.isolation import run_isolated, still_runs
from raydix.engine.model.runner import Runner
from raydix.engine.model.swap_space import ProcessMemory, SwapSpace

logger = logging.getLogger(__name__)


NOTHING_COMPUTED = StepShape(num_prefill_tokens=0, num_decodes=0, num_pairs=0.0)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Changes by a step, and since the step before, that processes outside the engine must hear of."""

    scores: tuple[PromptEvent, ...] = ()
    events: tuple[TokenEvent, ...] = ()
    segments: tuple[ExportedSegment, ...] = ()
    finished: tuple[Request, ...] = ()
    answered: tuple[Request, ...] = ()
    """Requests whose prompt was completed in the step."""
    chunks: tuple[ScheduledChunk, ...] = ()
    """Parts of the requests in the step."""
    shape: StepShape = NOTHING_COMPUTED
    """Work in the step; nothing where only requests have failed, or the pool has changed."""
    failures: tuple[TokenEvent, ...] = ()
    """Ends of requests that the model cannot compute."""
    is_typical: bool = True
    """True if the step's time is typical of a step of its shape."""
    started_at: float = 0.0
    """Monotonic time of the step's beginning."""
    step_s: float = 0.0
    sealed: tuple[BlockHash, ...] = ()
    """Blocks that were filled in the pool."""
    evicted: tuple[tuple[BlockHash, EvictionReason], ...] = ()

    @property
    def has_computed(self) -> bool:
        return self.shape is not NOTHING_COMPUTED

    @property
    def ended_at(self) -> float:
        """Monotonic time of the step's end."""
        return self.started_at + self.step_s


@dataclass(slots=True)
class PreemptionCounts:
    """Counts of preemptions and of swapped KV since the engine began."""

    num_swapped: int = 0
    """Preemptions after which the KV was kept outside the pool."""
    num_recomputed: int = 0
    """Preemptions after which the KV was dropped, to be recomputed."""
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
        grammars: Grammars | None = None,
        drafter: Drafter | None = None,
        tenants: Sequence[Tenant] = (),
        pair_share: float = 0.0,
        adapters: AdapterStore | None = None,
        states: StateStore | None = None,
    ) -> None:
        """`pair_share`: of the model (`WorkerCosts.pair_share`); `states`: of a model with recurrent layers."""
        self.runner = runner
        self.store = store
        self.pool = pool
        self.swap_space: SwapSpace = ProcessMemory() if swap_space is None else swap_space
        self.grammars = grammars
        """None: this model's answers follow no grammar."""
        self.drafter = drafter
        """None: no drafts."""
        self.adapters = adapters
        """None: nothing is computed, with adapters or without."""
        self._refusals: list[TokenEvent] = []
        self._note_work: NoteWork = note_nothing

        self.first_costs = WorkerCosts(pair_share=pair_share)
        """Assumed until steps have been measured."""
        swap_policy = SwapPolicy(
            swap_bytes // store.block_bytes,
            store.block_bytes,
            0 if states is None else states.state_bytes,
            self.first_costs,
        )
        self.scheduler = Scheduler(pool, limits, max_model_len, swap_policy, tenants=tenants)
        self.exchange = Exchange(store, self.scheduler.transfers, self.scheduler.imports, fingerprint, states)
        self.preemptions = PreemptionCounts()
        self.fingerprint = fingerprint
        self.root = root_hash(fingerprint)

    def change_limits(self, limits: SchedulerLimits, tenants: Sequence[Tenant]) -> None:
        """Take other bounds from the next step on (`Scheduler.change_limits`), with a model that is warm for them. If
        steps of that size cannot be, raises, and keeps the old bounds."""
        # Before the scheduler knows of them: a step of that size may not fit into memory.
        self.runner.warm_up(limits.token_budget)
        self.scheduler.change_limits(limits, tenants)

    def tell_work(self, note_work: NoteWork) -> None:
        """Have the requests noted that each thread computes for, from now on; before the first of them."""
        self._note_work = note_work
        if self.grammars is not None:
            self.grammars.note_work = self.grammars.compiler.note_work = note_work

    def prepare(self) -> None:
        """Do what a first request of some kind would make others wait for, as nobody waits now."""
        if self.grammars is not None:
            self.grammars.compiler.prepare()

    def submit(self, assignment: Assignment, now: float) -> None:
        """Queue a request; its events come out of later steps."""
        self._note_work((assignment.request_id,))
        try:
            self._submit(assignment, now)
        finally:
            self._note_work(())

    def _submit(self, assignment: Assignment, now: float) -> None:
        if assignment.adapter is not None and self.adapters is not None:
            self.adapters.require(assignment.adapter)
        self.scheduler.submit(assignment, self.root, now)
        grammar = assignment.sampling.grammar
        if grammar is None:
            return
        if self.grammars is None:
            self._refuse_all(grammar.digest, "this model has none", now)
        # Otherwise the grammar is being compiled beside the steps, and the request waits (`hear_of_grammars`).
        elif self.grammars.compiler.require(grammar, assignment.request_id):
            self.scheduler.imports.grammar_settled(grammar.digest)

    def abort(self, request_ids: Iterable[str], now: float, *, has_ended: bool = False) -> None:
        """Forget requests and free their blocks (`Scheduler.abort`). Unknown ids are requests that ended already.

        Where nobody has got the whole answer, the drafts of others get nothing of it: another attempt may follow, which
        brings its tokens along.
        """
        for request_id in request_ids:
            # A request that is cut short may go on elsewhere, and would be learnt twice.
            if has_ended:
                self._remember(self.scheduler.requests.get(request_id))
            self.scheduler.abort(request_id, now, has_ended=has_ended)
            self._forget_grammar(request_id)

    def reset_cache(self) -> int:
        """Forget every block that no request holds, stored results of prompts, and past answers; returns the number of
        blocks."""
        if self.drafter is not None:
            self.drafter.reset()
        return self.scheduler.reset()

    def drop_adapter(self, digest: bytes, now: float) -> bool:
        """Free the memory of an adapter that was loaded at run time; False while a request of it is left. Work that no
        client waits for is given up."""
        requests = [each for each in self.scheduler.requests.values() if _digest_of(each) == digest]
        idle = {each.request_id for each in requests if each.assignment.is_idle}
        self.abort(idle, now)
        if any(each.request_id not in idle for each in requests):
            return False
        if self.adapters is not None:
            self.adapters.drop(digest)
        return True

    def hear_of_grammars(self, now: float) -> list[TokenEvent]:
        """Let requests go on whose grammar has been compiled since the last call; returns the ends of those whose
        grammar cannot be."""
        if self.grammars is not None:
            for news in self.grammars.compiler.news():
                if news.error is None:
                    self.scheduler.imports.grammar_settled(news.digest)
                else:
                    self._refuse_all(news.digest, news.error, now)
        refusals, self._refusals = self._refusals, []
        return refusals

    def step(self, now: float) -> StepResult | None:
        """Schedule, run, record. None if there was nothing to compute.

        Raises:
            Exception: a decision could not be carried out, or the model computes nothing any more (`still_runs`).
        """
        drafts = () if self.drafter is None else self.drafter.propose(self.scheduler)
        output = self.scheduler.schedule(now, drafts)
        # Copies precede the computation, which may write over the blocks that they read.
        for move in output.moves:
            output = self._move(move, output, now)

        self._count(output.preempted)
        if not output.chunks:
            return None

        step = run_isolated(self.runner, output, self._note_work)
        self._note_work(())
        failures = tuple(self._fail(request_id, error, now) for request_id, error in step.failed.items())
        # A fault of the model may be tried elsewhere; a refusal is the request's own fault and ends it for good.
        failures += tuple(self._refuse(request_id, why, now) for request_id, why in step.computed.refused.items())
        outcome = self.scheduler.update(output, step.computed, now)
        for request in outcome.finished:
            self._remember(request)
            self._forget_grammar(request.request_id)
        segments = self.exchange.pack_all(outcome.exports, now)
        return StepResult(
            scores=outcome.scores,
            events=outcome.events,
            segments=segments,
            finished=outcome.finished,
            answered=outcome.answered,
            chunks=output.chunks,
            shape=_shape(output, self.store.block_bytes, self.exchange.state_bytes),
            failures=failures,
            is_typical=step.is_whole,
        )

    def still_runs(self) -> bool:
        """Check whether the model computes anything; if not, only a new process will."""
        return still_runs(self.runner)

    def fail_all(self, error: Exception, now: float) -> list[TokenEvent]:
        """End every request with an error event: the decisions for a step could not be carried out."""
        self.scheduler.swaps.forget_moves()
        return [self._fail(request.request_id, error, now) for request in list(self.scheduler.requests.values())]

    def _fail(self, request_id: str, error: Exception, now: float) -> TokenEvent:
        return self._end(request_id, f"{type(error).__name__}: {error}", now)

    def _refuse(self, request_id: str, reason: str, now: float) -> TokenEvent:
        """End a request that cannot be answered, by its own fault."""
        return self._end(request_id, reason, now)._replace(is_refusal=True)

    def _refuse_all(self, digest: bytes, reason: str, now: float) -> None:
        """End the requests that wait for a grammar that will not come."""
        waiting = self.scheduler.imports.grammar_settled(digest)
        self._refusals += [self._refuse(request.request_id, reason, now) for request in waiting]

    def _end(self, request_id: str, detail: str, now: float) -> TokenEvent:
        request = self.scheduler.requests.get(request_id)
        assert request is not None
        event = error_event(request.assignment, request.num_output, detail)
        self.scheduler.abort(request_id, now)
        self.swap_space.drop(request_id)
        self._forget_grammar(request_id)
        return event

    def _remember(self, request: Request | None) -> None:
        """Keep the answer of a request that ends for the drafts of others."""
        if self.drafter is not None and request is not None:
            self.drafter.ended(request)

    def _forget_grammar(self, request_id: str) -> None:
        if self.grammars is not None:
            self.grammars.forget(request_id)

    def _move(self, move: Move, output: SchedulerOutput, now: float) -> SchedulerOutput:
        """Carry out one decision that precedes the computation; returns the step, without the request if its swapping
        failed. KV that cannot be moved costs its request the time to recompute it, and no more."""
        match move:
            case CopyBlock(source, target):
                self.store.copy_block(source, target)
            case SwapDrop(request_id):
                self.swap_space.drop(request_id)
            case SwapOut(request_id) | SwapIn(request_id):
                try:
                    self._swap(move)
                except Exception:  # of any kind: swap spaces differ
                    extra = about("not_swapped", request=request_id, blocks=len(move.blocks))
                    logger.exception("%d blocks of %s not swapped", len(move.blocks), request_id, extra=extra)
                    return self.scheduler.swap_failed(request_id, output, now)
        return output

    def _swap(self, move: SwapOut | SwapIn) -> None:
        num_bytes, started = len(move.blocks) * self.store.block_bytes, time.perf_counter()
        if isinstance(move, SwapOut):
            kept = self.store.export_blocks(move.blocks)
            if move.state is not None:
                state = self._states.export_states([move.state])
                kept, num_bytes = np.concatenate((kept, state)), num_bytes + state.nbytes
            self.swap_space.put(move.request_id, kept)
            self.preemptions.swapped_out_bytes += num_bytes
            self.preemptions.swapped_out_s += time.perf_counter() - started
        else:
            payload = self.swap_space.take(move.request_id)
            if move.state is not None:
                blocks_end = payload.nbytes - self._states.state_bytes
                payload, state = payload[:blocks_end], payload[blocks_end:]
                self._states.import_states(state, [move.state])
            self.store.import_blocks(payload[payload.nbytes - num_bytes :], move.blocks)
            num_bytes += 0 if move.state is None else self._states.state_bytes
            self.preemptions.swapped_in_bytes += num_bytes
            self.preemptions.swapped_in_s += time.perf_counter() - started

    @property
    def _states(self) -> StateStore:
        assert self.exchange.states is not None, "only a model with recurrent layers has states"
        return self.exchange.states

    def _count(self, preempted: Iterable[str]) -> None:
        for request_id in preempted:
            request = self.scheduler.requests.get(request_id)
            assert request is not None
            self.preemptions.num_swapped += request.swapped is not None
            self.preemptions.num_recomputed += request.swapped is None


def _digest_of(request: Request) -> bytes | None:
    """Digest of the adapter that a request is computed with; None: the model alone."""
    adapter = request.assignment.adapter
    return None if adapter is None else adapter.digest


def error_event(assignment: Assignment, position: int, detail: str) -> TokenEvent:
    """End of a request that this worker cannot compute."""
    return TokenEvent(
        request_id=assignment.request_id,
        attempt=assignment.attempt,
        position=position,
        token_id=None,
        finish=FinishReason.ERROR,
        logprobs=None,
        cached_tokens=0,
        detail=detail,
    )


def _shape(output: SchedulerOutput, block_bytes: int, state_bytes: int) -> StepShape:
    num_tokens = num_decodes = num_drafted = 0
    num_pairs = 0.0
    for chunk in output.chunks:
        num_decodes += chunk.start >= chunk.request.assignment.num_prompt_tokens
        num_tokens += chunk.num_tokens
        num_drafted += len(chunk.draft)
        num_pairs += chunk.num_tokens * (chunk.start + (chunk.num_tokens + 1) / 2)
    swaps = [move for move in output.moves if isinstance(move, SwapOut | SwapIn)]
    num_bytes = sum(len(move.blocks) * block_bytes + (move.state is not None) * state_bytes for move in swaps)
    return StepShape(
        num_prefill_tokens=num_tokens - num_decodes - num_drafted,
        num_decodes=num_decodes,
        num_pairs=num_pairs,
        num_swaps=len(swaps),
        num_swapped_bytes=num_bytes,
        num_draft_tokens=num_drafted,
    )
