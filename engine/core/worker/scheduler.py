"""Chooses the computation of one worker's next step.

One token budget covers a step:

1. running decodes, one token each, so that a stream waits for at most one budget of other requests' prefill (the
   stall-free schedule of Sarathi-Serve, OSDI '24);
2. prefills in chunks: half of the rest for the oldest, the other half for the shortest remainder first, so that a short
   prompt does not wait for a long one and a long one always moves. Beside decodes a token behind many others counts as
   several, as many as its computation takes by the fitted costs, and a quarter of that where no request decodes;
3. drafts of the decodes (`drafts`), as far as they make decoding quicker;
4. idle work (`raydix.engine.core.worker.idle`), if no request waits or prefills.

Waiting requests start as soon as their blocks fit, preempted ones first. When blocks run out, the latest request is
preempted: its blocks are released, and their contents are kept outside the pool where that is predicted to be quicker
than recomputing from the end of the cached blocks (`swaps`). Among all these, priorities come first (`order`).

Requests of several tenants take turns by what was computed for each (`virtual_time`): in starting, in the budget for
prefills, and in the choice of what is preempted. A tenant that has less than its share of the room gets it back from
the tenant that has most above its own: the latest request of that tenant is preempted.

A request with log-probabilities of its prompt (it is *scored*), or the mean of its hidden states, shares cached blocks
like any other, but starts at the first position that is missing in these: shared positions are computed and not stored.

| part | owns |
|---|---|
| `Scheduler` | the queues of requests and the step |
| `imports` | waiting for KV from elsewhere and for grammars, held and protected blocks |
| `contents` | sealing, exports, copies between blocks |
| `swaps` | the moves of a step, contents kept outside the pool |
| `transfers` | blocks that enter and leave in segments |
| `drafting` | blocks of drafts |
| `snapshots` | recurrent states, of models that have them |
| `prompt_results` | stored log-probabilities and sums of hidden states |
| `idle` | requests computed ahead |
| `virtual_time` | computing by tenant |
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil

from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.hashing import BlockChain
from raydix.engine.core.settings import SchedulerLimits
from raydix.engine.core.shares import weights_of
from raydix.engine.core.tenants import Tenant, quotas
from raydix.engine.core.types import Assignment, BlockHash, FinishReason, PromptEvent, Stage, TokenEvent
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.core.worker.contents import Contents
from raydix.engine.core.worker.drafts.draft import Draft
from raydix.engine.core.worker.drafts.drafting import Drafting
from raydix.engine.core.worker.idle import IdleWork
from raydix.engine.core.worker.imports import EarlyMessages, Imports, is_ready
from raydix.engine.core.worker.order import StartTurns, VirtualTime, rank, share_budget, start_order, weigh_contexts
from raydix.engine.core.worker.prompt_results import PromptResults
from raydix.engine.core.worker.request import Request
from raydix.engine.core.worker.snapshots import Snapshots
from raydix.engine.core.worker.step import (
    ExportedBlocks,
    RunnerOutput,
    ScheduledChunk,
    SchedulerOutput,
    StepOutcome,
    SwapIn,
    chunk_of,
    event_of,
    events_of,
)
from raydix.engine.core.worker.swaps import SwapPolicy, Swaps, num_swapped_blocks
from raydix.engine.core.worker.transfers import Transfers


class Scheduler:
    """Owns the requests of one worker and decides each step. No tensors, no clock: `now` is in monotonic seconds."""

    def __init__(
        self,
        pool: BlockPool,
        limits: SchedulerLimits,
        max_model_len: int,
        swap_policy: SwapPolicy | None = None,
        tenants: Sequence[Tenant] = (),
    ) -> None:
        """`tenants`: those with weights."""
        assert max_model_len <= pool.num_blocks * pool.block_size, "the longest request must fit into the pool"
        self.pool = pool
        self.limits = limits
        self.max_model_len = max_model_len
        self.swap_policy = SwapPolicy() if swap_policy is None else swap_policy
        self.prompt_results = PromptResults()

        # Each request of `requests` is in exactly one of these, or idle.
        self.waiting: deque[Request] = deque()
        self.preempted: deque[Request] = deque()
        self.running: dict[str, Request] = {}
        self.requests: dict[str, Request] = {}
        """All requests of the worker, by id, to be read by others."""
        self._num_submitted = 0

        self._time = VirtualTime(weights_of(tenants))
        self.idle = IdleWork(pool, limits.token_budget, self.requests)
        self.early = EarlyMessages()
        self.imports = Imports(pool, self.waiting, self.requests, self.early)
        self.swaps = Swaps(pool, self.swap_policy, limits.token_budget)
        self._contents = Contents(pool, self.swaps)
        self.transfers = Transfers(pool, self.requests)
        self.drafting = Drafting(pool, self.swap_policy, limits.token_budget, max_model_len)
        self.snapshots = None if pool.states is None else Snapshots(pool, pool.states)

    # Requests

    def submit(self, assignment: Assignment, root: BlockHash, now: float) -> None:
        """Queue an assignment. A newer attempt of a known request replaces the older one."""
        known = self.requests.get(assignment.request_id)
        if known is not None:
            # Calls may overtake each other: an older attempt comes too late.
            if known.assignment.attempt >= assignment.attempt:
                return
            self.abort(assignment.request_id, now)

        request = Request(
            assignment=assignment,
            chain=BlockChain(root, assignment.salt, self.pool.block_size),
            arrival=self._num_submitted,
            await_deadline=now + assignment.await_timeout_s,
            submitted_at=now,
        )
        # Blocks need names where others may use them: from the cache, or by a hand-over.
        request.is_named = self.pool.keeps_blocks or assignment.stage is not Stage.WHOLE
        self._num_submitted += 1
        if assignment.is_idle:
            self.idle.add(request, now)
            return
        self.requests[request.request_id] = request
        self._time.joined(request.tenant)
        self.waiting.append(request)
        self.imports.begin(request, now)

    def abort(self, request_id: str, now: float, *, has_ended: bool = False) -> bool:
        """Forget a request and release its blocks; False if it is unknown.

        `has_ended`: all its tokens were delivered, for example up to a stop string; a normal end for eviction.
        """
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._remove(request, now, has_ended=has_ended)
        return True

    def reset(self) -> int:
        """Forget every block without a holder, and stored results of prompts; returns the number of blocks."""
        self.prompt_results.clear()
        return self.pool.reset()

    def learn_costs(self, costs: WorkerCosts) -> None:
        """Decide by measured costs from now on: swapping or recomputing, and how much to prefill beside decodes."""
        self.swap_policy.costs = costs

    def change_limits(self, limits: SchedulerLimits, tenants: Sequence[Tenant]) -> None:
        """Take other bounds, and tenants other shares of the pool and of computing, from the next step on.
        Requests that run beyond a lowered `max_requests` run to their end, and a step has room for all of them that
        decode."""
        self.limits = limits
        for part in (self.idle, self.swaps, self.drafting):
            part.token_budget = limits.token_budget
        self.pool.limit(quotas(tenants, self.pool.num_blocks))
        self._time.weigh(weights_of(tenants))

    # One step

    def schedule(self, now: float, drafts: Sequence[Draft] = ()) -> SchedulerOutput:
        """Choose the next step's chunks, and allocate their blocks. `drafts`: guesses of decoding requests' tokens."""
        if self.snapshots is not None:
            self.snapshots.forget_wishes()
        preempted: list[str] = []
        chunks: list[ScheduledChunk] = []

        # Room for a tenant that has less than its share, before anything is chosen: what is preempted computes nothing.
        self._give_back(preempted, now)
        places = self._time.places()

        # Decodes first: more than the budget only while more requests run than a lowered `max_requests`.
        budget = self.limits.token_budget
        decodes = [request for request in self.running.values() if request.num_remaining == 1]
        if len(self.running) > self.limits.max_requests:
            budget = max(budget, len(decodes))
        for request in decodes:
            if budget > 0 and self._make_room(request, 1, places, preempted, now):
                chunks.append(chunk_of(request, 1))
                budget -= 1

        # New requests, unless blocks are short.
        if not preempted:
            self._admit(now)
        self.imports.protect((*self.waiting, *self.preempted))

        # Prefills share the rest of the budget. Long contexts count, most beside decodes, which wait for the step.
        scheduled = {chunk.request.request_id for chunk in chunks}
        prefills = [request for request in self.running.values() if request.request_id not in scheduled]
        weigh = weigh_contexts(self.swap_policy.costs, self.limits.token_budget, is_alone=not chunks)
        for request, share in share_budget(prefills, budget, weigh, places):
            if self._make_room(request, share, places, preempted, now):
                chunks.append(chunk_of(request, share))
                budget -= ceil(share * weigh(request))

        # A later request may have preempted an earlier chunk's.
        chunks = [chunk for chunk in chunks if chunk.request.request_id in self.running]
        if not preempted:
            chunks = self.drafting.add(chunks, drafts, budget, self._room, now)
            chunks += self._idle_chunks(chunks, now)
        if self.snapshots is not None:
            chunks = self.snapshots.plan(chunks)

        moves = self.swaps.take_moves()
        for move in moves:
            if isinstance(move, SwapIn):
                self.requests[move.request_id].swapped = None
        return SchedulerOutput(tuple(chunks), tuple(preempted), moves)

    def swap_failed(self, request_id: str, output: SchedulerOutput, now: float) -> SchedulerOutput:
        """Recompute a request whose KV could not be copied out of the pool, or back; returns the rest of the step."""
        request = self.requests[request_id]
        request.swapped = None
        if request_id in self.running:
            self._leave_running(request, now, has_ended=False)
            self.preempted.appendleft(request)
        # The others' chunks are computed as decided.
        chunks = tuple(chunk for chunk in output.chunks if chunk.request is not request)
        return replace(output, chunks=chunks)

    def update(self, output: SchedulerOutput, computed: RunnerOutput, now: float) -> StepOutcome:
        """Record a step's results: seal full blocks, report scores, append sampled tokens, end finished requests."""
        scores: list[PromptEvent] = []
        events: list[TokenEvent] = []
        exports: list[ExportedBlocks] = []
        answered: list[Request] = []
        finished: list[Request] = []

        # Aborted requests' tenants may be gone, and nobody waits for idle work.
        here = [chunk for chunk in output.chunks if self.requests.get(chunk.request.request_id) is chunk.request]
        here = [chunk for chunk in here if not chunk.request.assignment.is_idle]
        self._time.computed(here, self.swap_policy.costs)
        for chunk in output.chunks:
            request = chunk.request
            if self.requests.get(request.request_id) is not request:
                continue  # aborted while the step ran

            # Accepted draft tokens, and new full blocks, for all requests that wait for them.
            sampled = computed.sampled[request.request_id] if chunk.samples else ()
            new = events_of(chunk, sampled, self.max_model_len)
            self.drafting.accept(chunk, sampled, new, now)
            first_new = self._contents.seal_full_blocks(request, now)
            if self.snapshots is not None and chunk.states is not None:
                self.snapshots.computed(request, chunk.states)
            self.imports.arrived(request.hashes[first_new : request.num_sealed], now)
            if request.assignment.is_idle:
                self.idle.computed(request, chunk.num_tokens, now)
                continue

            # Results of the prompt, and the last sampled token, or the end of a request without tokens.
            scores += self.prompt_results.record(chunk, computed)
            if new:
                request.token_ids.append(sampled[len(new) - 1].token_id)
            elif request.num_remaining == 0:
                pooled = computed.pooled.get(request.request_id)
                new = [event_of(request, None, FinishReason.LENGTH, pooled=pooled)]
            # The first event tells of the beginning; requests that decode cost one look here.
            if not request.has_answered:
                request.num_chunks += 1
                if new:
                    request.has_answered = True
                    new[0] = new[0]._replace(start=request.start)
            event = new[-1] if new else None
            events += new
            # The first token behind those that the assignment brought: the prompt was computed here, and not by another
            # worker, whose hand-over brings that token.
            if new and new[0].position == request.num_given:
                answered.append(request)

            # Exports and the end.
            if request.assignment.stage is Stage.PREFILL:
                exports += self._contents.export(request, first_new, event, now)
            if event is not None and (event.finish is not None or request.assignment.stage is Stage.PREFILL):
                self._remove(request, now, has_ended=True)
                finished.append(request)

        if self.snapshots is not None:
            self.snapshots.end_step()
        return StepOutcome(
            scores=tuple(scores),
            events=tuple(events),
            exports=tuple(exports),
            finished=tuple(finished),
            answered=tuple(answered),
        )

    # Queries

    @property
    def num_waiting(self) -> int:
        """Requests without blocks to compute with: waiting and preempted ones."""
        return len(self.waiting) + len(self.preempted)

    @property
    def num_swapped(self) -> int:
        """Preempted requests whose KV is kept outside the pool."""
        return sum(request.swapped is not None for request in self.preempted)

    def check_integrity(self, extra_held: Iterable[int] = ()) -> None:
        """Assert that each request is in one place, and that all references are the requests' or in `extra_held`."""
        places = [*self.waiting, *self.preempted, *self.running.values()]
        _check_places(places, self.running, self.idle, self.requests)
        _check_references(self.pool, places, self.idle, extra_held)
        assert all(owner.request_id in self.running for owner in self._contents.computing.values())
        assert all(request.swapped is None or request in self.preempted for request in places)
        assert num_swapped_blocks(self.preempted) <= self.swap_policy.max_blocks
        if self.snapshots is not None:
            self.snapshots.check_integrity(self.running.values())
        self.prompt_results.check_integrity()
        self._time.check_integrity(places)

    # Start

    def _idle_chunks(self, chunks: Sequence[ScheduledChunk], now: float) -> list[ScheduledChunk]:
        """Idle work beside `chunks` of all running requests, if these decode and no other request could start."""
        if (
            not self.idle
            or self.preempted
            or any(request.num_remaining > 1 for request in self.running.values())
            or any(is_ready(request, now) for request in self.waiting)
        ):
            return []
        num_left = max(0, self.limits.token_budget - sum(chunk.num_tokens for chunk in chunks))
        taken = self.idle.take(now, num_left, self._room(), is_alone=not chunks)
        return [] if taken is None else [chunk_of(*taken)]

    def _startable(self, turns: StartTurns | None, now: float) -> Iterator[tuple[deque[Request], Request, list[int]]]:
        """Requests that could start if there is room, in order, each with its queue and its cached blocks: of each
        priority swapped, then other preempted, then waiting ones, and of several tenants in `turns`.

        A preempted request is overtaken by others of its tenant only while another is about to compute its next block.
        """
        held_up: dict[str, int] = {}
        """Tenants with a preempted request that cannot start yet, and its priority."""
        for queue, request in start_order(self.preempted, self.waiting, turns.choose if turns else None):
            priority = held_up.get(request.tenant)
            # A preempted request of this tenant goes before those that wait, and before other priorities.
            if priority is not None and (queue is self.waiting or priority != request.assignment.priority):
                if turns is None:
                    return
                continue
            if not is_ready(request, now):
                continue
            matched = self.pool.match(request.full_hashes())
            # A running request is about to compute what this one needs: waiting costs less than computing it twice.
            if request.swapped is None and self._is_better_later(request, matched):
                if queue is self.preempted:
                    held_up[request.tenant] = request.assignment.priority
                continue
            yield queue, request, matched

    def _is_better_later(self, request: Request, matched: Sequence[int]) -> bool:
        """True if a running prefill is about to fill the next block behind `matched`, or to take a snapshot there."""
        is_being_computed = self._contents.is_being_computed(request, len(matched))
        if self.snapshots is None:
            return is_being_computed
        if is_being_computed:
            self.snapshots.want(request, len(matched), self._contents.computing)
        return is_being_computed or self.snapshots.is_coming(request, len(matched))

    @property
    def _most_running(self) -> int:
        """Requests that may run at the same time."""
        most = self.limits.max_requests
        return most if self.snapshots is None else min(most, self.snapshots.most_requests)

    def _num_taken(self, request: Request, matched: Sequence[int]) -> int:
        """Blocks by which the room shrinks when a request starts: matched ones without a holder, and new ones."""
        return sum(self.pool.is_cached(block) for block in matched) + request.num_needed_blocks - len(matched)

    def _admit(self, now: float) -> None:
        """Start requests while there are places and their blocks fit."""
        if len(self.running) >= self._most_running:
            return
        room = self._room()
        turns = self._time.turns(self.running.values(), self.swap_policy.costs)
        for queue, request, matched in self._startable(turns, now):
            num_taken = self._num_taken(request, matched)
            # Nobody overtakes the first that does not fit, or a long request would wait for ever. With nothing running
            # it has all the room there is.
            if num_taken > room and self.running:
                return
            room -= num_taken
            queue.remove(request)
            self._start(request, matched, now)
            if turns is not None:
                turns.started(request)
            if len(self.running) >= self._most_running:
                return

    def _give_back(self, preempted: list[str], now: float) -> None:
        """Have tenants above their share of the room give back what the next request of another one needs.

        The request starts in the next step, since nothing starts in a step that preempts. The last running request
        stays, so that each step computes something.
        """
        turns = self._time.turns(self.running.values(), self.swap_policy.costs) if self.num_waiting else None
        if turns is None or len(self.running) < 2:
            return
        _, request, matched = next(self._startable(turns, now), (None, None, ()))
        while request is not None and len(self.running) > 1:
            has_place = len(self.running) < self._most_running
            # The request starts without anybody giving way.
            if has_place and self._num_taken(request, matched) <= self._room():
                return
            victim = self._above_share(request, turns)
            if victim is None:
                return
            self._preempt(victim, now)
            preempted.append(victim.request_id)

    def _above_share(self, request: Request, turns: StartTurns) -> Request | None:
        """The running request that gives way to one of another tenant: the last one of the tenant with the most above
        its share. None if nobody is above, or this tenant would be itself, so that no room goes back and forth."""

        def part(running: Request) -> float:
            # A request's part is of the places or of the blocks, whichever is more.
            return max(1 / self.limits.max_requests, running.num_needed_blocks / self.pool.num_blocks)

        used: dict[str, float] = {}
        for other in self.running.values():
            used[other.tenant] = used.get(other.tenant, 0.0) + part(other)
        shares = self._time.shares()
        # With this request the tenant would be above its own share, and would have to give back.
        if used.get(request.tenant, 0.0) + part(request) > shares[request.tenant]:
            return None

        # What is preempted waits at the head of its tenant's queue: it must not be that tenant's turn next.
        victims = [
            other
            for other in self.running.values()
            if used[other.tenant] > shares[other.tenant] and turns.is_before(request.tenant, other.tenant)
            if other.assignment.priority >= request.assignment.priority
        ]
        excess = {tenant: part - shares[tenant] for tenant, part in used.items()}
        return max(victims, key=lambda other: (excess[other.tenant], other.tenant, *rank(other)), default=None)

    def _start(self, request: Request, matched: list[int], now: float) -> None:
        """Run a request from the `matched` blocks on."""
        self.pool.acquire(matched)
        self.imports.end(request, now)

        # KV from the cache, from outside the pool, from a handover, or from a similar block.
        request.begin_with(matched)
        if not self.swaps.swap_in(request, now) and not self._contents.take_tail(request, self.snapshots):
            if self.snapshots is not None:
                self.snapshots.begin(request)
            else:
                self._contents.copy_beginning(request, now)
        self._contents.begin(request, len(matched))

        request.note_start(now)
        num_computed = request.num_computed
        self.prompt_results.take(request)
        if self.snapshots is not None and request.num_computed < num_computed:
            self.snapshots.begin(request)
        request.is_named = self.pool.keeps_blocks or request.assignment.stage is Stage.PREFILL
        self.running[request.request_id] = request

    # Blocks

    def _room(self) -> int:
        """Blocks beyond the next needs of running requests."""
        return self.pool.num_available - sum(request.num_missing_blocks for request in self.running.values())

    def _make_room(
        self, request: Request, num_tokens: int, places: Mapping[str, int] | None, preempted: list[str], now: float
    ) -> bool:
        """Allocate blocks for a request's next `num_tokens`, preempting later requests; False if preempted itself.

        `places` of tenants are the same for the whole step: the first request by `rank` stays, so it is computed.
        """
        if request.request_id not in self.running:
            return False

        missing = request.num_missing_for(num_tokens)
        if missing <= 0:
            return True
        while missing > self.pool.num_available:
            # Before a running request is preempted, waiting ones give up the blocks held for them.
            if self.imports.drop_all_holds(now):
                continue
            # The last by rank, be it this request itself.
            victim = max(self.running.values(), key=lambda each: rank(each, places))
            self._preempt(victim, now)
            preempted.append(victim.request_id)
            if victim is request:
                return False

        request.blocks += self.pool.allocate(missing, now)
        return True

    def _preempt(self, request: Request, now: float) -> None:
        if request.swapped is None:
            self.swaps.swap_out(request, self.preempted)
        else:  # it was to come back in this step: its contents stay outside
            self.swaps.cancel_swap_in(request)
        self._leave_running(request, now, has_ended=False)
        request.num_preemptions += 1
        self.preempted.appendleft(request)

    def _leave_running(self, request: Request, now: float, *, has_ended: bool) -> None:
        """Release the request's blocks. Eviction learns from the end of a request only."""
        del self.running[request.request_id]
        self._contents.end(request)
        if self.snapshots is not None:
            self.snapshots.end(request)
        blocks, retention, marked = request.give_up_blocks(), request.retention(now), request.marked(now)
        if has_ended:
            self.pool.retire(blocks, now, retention, marked, request.stop)
        else:
            self.pool.pause(blocks, now, retention, marked)

    def _remove(self, request: Request, now: float, *, has_ended: bool) -> None:
        if request.assignment.is_idle:
            self.idle.drop(request, now)
            return
        self.swaps.drop(request)
        if request.request_id in self.running:
            self._leave_running(request, now, has_ended=has_ended)
        else:
            (self.preempted if request in self.preempted else self.waiting).remove(request)
            self._contents.drop_tail(request, now)
        self.imports.end(request, now)
        del self.requests[request.request_id]
        self._time.left(request.tenant)


def _check_places(
    places: Sequence[Request], running: Collection[str], idle: IdleWork, registry: Mapping[str, Request]
) -> None:
    """Assert that each request of `registry` is in one of `places` or idle, and right for its place."""
    ids = {request.request_id for request in (*places, *idle)}
    assert len(places) + len(idle) == len(registry) == len(ids)
    idle.check_integrity()
    for request in places:
        request.check_integrity(is_running=request.request_id in running)


def _check_references(pool: BlockPool, places: Iterable[Request], idle: IdleWork, extra_held: Iterable[int]) -> None:
    """Assert that all references are the requests' or in `extra_held`, and that waiting requests protect blocks."""
    held = [*extra_held, *(block for request in idle for block in request.blocks)]
    protected: list[BlockHash] = []
    for request in places:
        held += request.blocks + request.held
        protected += request.protected
    pool.check_integrity(held, protected)
