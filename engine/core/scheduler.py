"""What one worker computes in its next step.

One token budget covers a step. Running decodes come first, one token each, so that nobody's stream waits for more than
one budget of somebody else's prefill (the stall-free schedule of Sarathi-Serve, OSDI '24). What is left goes to
prefills in chunks: half of it to the oldest, the other half to the one with the least left to do, so that a short
prompt is not stuck behind a long one and a long one always moves. Waiting requests start as soon as their blocks fit,
preempted ones first.

When blocks run out, the latest request is preempted: its blocks are released (the full ones stay cached until they are
needed). If that is predicted to be quicker than computing them again (`engine.core.swapping`), their bytes are kept
outside the pool, and it goes on where it was; otherwise it is computed again from where the cache ends.

A request that wants log-probabilities of its prompt (it *scores* it) shares cached blocks like any other, but starts at
the first position whose next token is not scored yet: what lies in shared blocks is computed and not stored.

Pure logic: no tensors, no clock. `schedule(now)` says what to compute; `update` takes the sampled tokens.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from engine.core.block_pool import BlockContent, BlockPool
from engine.core.early import EarlyMessages
from engine.core.moves import CopyBlock, Move, SwapDrop, SwapIn, SwapOut
from engine.core.request import Request
from engine.core.score_store import ScoreStore
from engine.core.scoring import report_scores, take_scores
from engine.core.swapping import Swapped, SwapPolicy
from engine.core.types import (
    DEFAULT_RETENTION,
    Assignment,
    BlockHash,
    FinishReason,
    Handover,
    PromptEvent,
    Retention,
    Stage,
    TokenEvent,
    TokenLogprobs,
)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of one step."""

    token_budget: int
    """Tokens computed in one step, decodes and prefill chunks together."""
    max_requests: int
    """Requests that hold blocks at the same time."""


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Consecutive positions of one request to compute in this step."""

    request: Request
    start: int
    num_tokens: int
    store_from: int
    """Positions below it are in shared blocks already: computed for their output, not stored."""
    samples: bool
    """Whether the chunk reaches the last token, so that the next one is sampled from it."""
    scored: range = range(0)
    """Positions of the chunk that are computed for the log-probability of the prompt token behind each."""


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's work. `preempted` lost their blocks to make room for it."""

    chunks: tuple[ScheduledChunk, ...]
    preempted: tuple[str, ...]
    moves: tuple[Move, ...] = ()
    """To be done before anything is computed, in this order."""

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The runner's answer for one sampling chunk."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class RunnerOutput:
    """The runner's answer to a step, by request id."""

    sampled: Mapping[str, SampledToken] = field(default_factory=dict)
    """One for each chunk that samples."""
    scores: Mapping[str, Sequence[TokenLogprobs]] = field(default_factory=dict)
    """One for each position of a chunk's `scored`, where there are any."""


@dataclass(frozen=True, slots=True)
class ExportedBlocks:
    """Blocks to be sent out, held for the exporter until it has copied them and released them."""

    request_id: str
    hashes: tuple[BlockHash, ...]
    blocks: tuple[int, ...]
    handover: Handover | None = None
    retention: Retention = DEFAULT_RETENTION


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What became of a step: events for the ingress, blocks for other workers."""

    scores: tuple[PromptEvent, ...]
    events: tuple[TokenEvent, ...]
    exports: tuple[ExportedBlocks, ...]
    finished: tuple[Request, ...]


class Scheduler:
    """Owns the requests of one worker and decides each step."""

    def __init__(
        self, pool: BlockPool, limits: SchedulerLimits, max_model_len: int, swapping: SwapPolicy | None = None
    ) -> None:
        assert max_model_len <= pool.num_blocks * pool.block_size, "the longest request must fit into the pool"
        self.pool = pool
        self.limits = limits
        self.swapping = SwapPolicy() if swapping is None else swapping
        self.max_model_len = max_model_len
        self.scores = ScoreStore()
        self.waiting: deque[Request] = deque()
        self.preempted: deque[Request] = deque()
        self.running: dict[str, Request] = {}
        self._requests: dict[str, Request] = {}
        self._computing: dict[BlockHash, Request] = {}
        """Blocks that a running prefill is about to fill; whoever else needs one waits for it."""
        self._early = EarlyMessages()
        self._moves: list[Move] = []
        """Decided since the last step's."""
        self._num_submitted = 0

    # Requests come and go

    def submit(self, assignment: Assignment, root: BlockHash, now: float) -> None:
        """Queue an assignment. A newer attempt of a known request replaces the older one."""
        known = self._requests.get(assignment.request_id)
        if known is not None:
            if known.assignment.attempt >= assignment.attempt:
                return
            self.abort(assignment.request_id)
        request = Request(assignment, root, self.pool.block_size, self._num_submitted, submitted_at=now)
        self._num_submitted += 1
        for block_hash in assignment.awaited:
            self._hold_if_here(request, block_hash)
            if self._early.is_settled(block_hash, now):
                request.awaited.discard(block_hash)
        request.await_deadline = now + assignment.await_timeout_s
        self._requests[request.request_id] = request
        self.waiting.append(request)
        handover = self._early.take_handover(assignment.request_id, assignment.attempt)
        if handover is not None:
            self.handed_over(handover, now)

    def abort(self, request_id: str, *, has_ended: bool = False) -> bool:
        """Forget a request and release what it holds; False if it is not here. `has_ended`: it has got all it wanted,
        at a stop string say, which to eviction is an end like any other."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._remove(request, has_ended=has_ended)
        return True

    def blocks_settled(self, hashes: Iterable[BlockHash], now: float) -> None:
        """Promised blocks have come, or will not come. Those in the pool are held for who waits for them; what is not
        there, its requests compute."""
        settled = set(hashes)
        self._early.settle(settled, now)
        self._blocks_here(settled, now)
        for request in self._awaiting():
            request.awaited -= settled

    def keep_awaiting(self, request_ids: Iterable[str], now: float) -> None:
        """Whoever is to send these requests their KV is alive, only busy: wait as long again."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                request.await_deadline = now + request.assignment.await_timeout_s

    def stop_awaiting(self, request_ids: Iterable[str]) -> None:
        """Whoever was to send these requests their KV is gone: compute what is missing."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                request.awaited.clear()
                request.awaits_handover = False

    def stop_awaiting_all(self) -> None:
        """Nobody will send anything any more: the manager is gone."""
        self.stop_awaiting([request.request_id for request in self._awaiting()])

    def handed_over(self, handover: Handover, now: float) -> None:
        """The prefill worker is done: the decode assignment goes on from the token it sampled."""
        request = self._requests.get(handover.request_id)
        if request is None or request.assignment.attempt < handover.attempt:
            self._early.hand_over(handover, now)
            return
        if request.assignment.attempt > handover.attempt or not request.awaits_handover:
            return
        request.awaits_handover = False
        request.num_to_score = 0
        request.token_ids.append(handover.token_id)

    # One step

    def forget_moves(self) -> None:
        """What a step that failed had decided must not be done in a later one; what is kept outside may be dropped."""
        self._moves = [move for move in self._moves if isinstance(move, SwapDrop)]

    def schedule(self, now: float) -> SchedulerOutput:
        """Choose the next step's chunks and make sure that each has its blocks."""
        self.pool.now = now
        budget = self.limits.token_budget
        preempted: list[str] = []
        chunks: list[ScheduledChunk] = []
        for request in [request for request in self.running.values() if request.num_remaining == 1]:
            if budget > 0 and self._make_room(request, 1, preempted):
                chunks.append(_chunk(request, 1))
                budget -= 1
        if not preempted:
            self._admit(now)
        self._want_for_waiting()
        scheduled = {chunk.request.request_id for chunk in chunks}
        prefills = [request for request in self.running.values() if request.request_id not in scheduled]
        for request, share in share_budget(prefills, budget):
            if self._make_room(request, share, preempted):
                chunks.append(_chunk(request, share))
        moves, self._moves = self._moves, []
        for move in moves:
            if isinstance(move, SwapIn):
                self._requests[move.request_id].swapped = None
        return SchedulerOutput(
            tuple(chunk for chunk in chunks if chunk.request.request_id in self.running),
            tuple(preempted),
            tuple(moves),
        )

    def swap_failed(self, request_id: str, output: SchedulerOutput) -> SchedulerOutput:
        """A request's KV could not be copied out of the pool, or back: compute it again. What remains of the step."""
        request = self._requests[request_id]
        request.swapped = None
        if request_id in self.running:
            self._leave_running(request, has_ended=False)
            self.preempted.appendleft(request)
        chunks = tuple(chunk for chunk in output.chunks if chunk.request is not request)
        return replace(output, chunks=chunks)

    def update(self, output: SchedulerOutput, computed: RunnerOutput, now: float) -> StepOutcome:
        """Record a step's results: seal what is full, report scores, append sampled tokens, finish who is done."""
        scores: list[PromptEvent] = []
        events: list[TokenEvent] = []
        exports: list[ExportedBlocks] = []
        finished: list[Request] = []
        for chunk in output.chunks:
            request = chunk.request
            if self._requests.get(request.request_id) is not request:
                continue  # aborted while the step ran
            request.num_computed = chunk.start + chunk.num_tokens
            first_new = self._seal_full_blocks(request)
            self._blocks_here(request.hashes[first_new : request.num_sealed], now)
            scores += report_scores(self.scores, request, computed.scores.get(request.request_id, ()))
            event = None
            if chunk.samples:
                event = self._append(request, computed.sampled[request.request_id])
            elif request.num_remaining == 0:
                event = _event(request, None, FinishReason.LENGTH)
            if event is not None:
                events.append(event)
            if request.assignment.stage is Stage.PREFILL:
                exports += self._export(request, first_new, event)
            if event is not None and (event.finish is not None or request.assignment.stage is Stage.PREFILL):
                self._remove(request, has_ended=True)
                finished.append(request)
        return StepOutcome(tuple(scores), tuple(events), tuple(exports), tuple(finished))

    # What others may ask

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks to compute with: waiting and preempted ones."""
        return len(self.waiting) + len(self.preempted)

    @property
    def num_swapped(self) -> int:
        """Preempted requests whose KV is kept outside the pool."""
        return sum(request.swapped is not None for request in self.preempted)

    def requests(self) -> Iterable[Request]:
        return self._requests.values()

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def next_deadline(self) -> float | None:
        """When the next waiting request gives up on its imports; None if nobody waits for any."""
        return min((request.await_deadline for request in self._awaiting()), default=None)

    def check_integrity(self, extra_held: Iterable[int] = ()) -> None:
        """Assert that each request is in one place and that the pool's references are theirs and `extra_held`."""
        places = [*self.waiting, *self.preempted, *self.running.values()]
        assert len(places) == len(self._requests) == len({request.request_id for request in places})
        assert all(owner.request_id in self.running for owner in self._computing.values())
        held = list(extra_held)
        for request in places:
            running = request.request_id in self.running
            assert request.num_computed <= len(request.blocks) * self.pool.block_size
            assert request.num_computed < len(request.token_ids)
            assert running or not request.blocks
            assert not running or not (request.held or request.wanted)
            assert request.swapped is None or request in self.preempted
            held += request.blocks + request.held
            assert 0 <= request.num_reported <= len(request.scores)
            assert not request.num_to_score or request.num_scored <= request.num_to_score
            assert request.num_scored >= request.num_to_score or request.num_computed <= request.num_scored
        assert self._num_swapped_blocks() <= self.swapping.max_blocks
        self.scores.check_integrity()
        self.pool.check_integrity(held, [block_hash for request in places for block_hash in request.wanted])

    # Admission

    def _admit(self, now: float) -> None:
        """Start requests while their blocks fit: swapped ones, then those to be computed again, then waiting ones.
        Nobody overtakes an earlier kind, except while its next request is about to find its blocks computed."""
        room = self.pool.num_available - sum(self._num_missing_blocks(request) for request in self.running.values())
        preempted = sorted(self.preempted, key=lambda request: request.swapped is None)
        for queue, candidates in ((self.preempted, preempted), (self.waiting, list(self.waiting))):
            for request in candidates:
                if len(self.running) >= self.limits.max_requests:
                    return
                if not _is_ready(request, now):
                    continue
                matched = self.pool.match(request.full_hashes())
                if request.swapped is None and self._is_being_computed(request, len(matched)):
                    continue
                num_taken = sum(self.pool.is_cached(block) for block in matched)
                num_missing = self._num_blocks(request) - len(matched)
                if num_taken + num_missing > room and self.running:
                    return
                room -= num_taken + num_missing
                queue.remove(request)
                self._start(request, matched, now)
            if queue:
                return

    def _is_being_computed(self, request: Request, num_matched: int) -> bool:
        """Whether a running prefill is about to fill the first block that `request` lacks."""
        hashes = request.full_hashes()
        return num_matched < len(hashes) and hashes[num_matched] in self._computing

    def _start(self, request: Request, matched: list[int], now: float) -> None:
        self.pool.acquire(matched)
        self._stop_waiting(request)
        request.awaited.clear()
        request.awaits_handover = False  # one that comes now comes too late: its token may have been sampled here
        block_size, last = self.pool.block_size, len(request.token_ids) - 1
        request.blocks = list(matched)
        request.num_sealed = len(matched)
        request.num_shared = len(matched) * block_size
        request.num_computed = min(request.num_shared, last)
        if not self._swap_in(request):
            self._take_tail(request)
            self._copy_beginning(request)
        for block_hash in request.full_hashes()[len(matched) :]:
            self._computing.setdefault(block_hash, request)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(request.num_computed, request.assignment.num_prompt_tokens)
            request.started_at = now
        take_scores(self.scores, request)
        self.running[request.request_id] = request

    def _take_tail(self, request: Request) -> None:
        """Take up the imported partial block before the handed-over token, if it is here and nobody's."""
        num_sent = len(request.assignment.token_ids)
        if request.assignment.stage is not Stage.DECODE or len(request.blocks) != num_sent // self.pool.block_size:
            return
        tail = request.tail_hash(num_sent)
        block = None if tail is None else self.pool.lookup(tail)
        if block is not None and len(request.token_ids) > num_sent and self.pool.take_over(block):
            request.blocks.append(block)
            request.num_computed = request.num_shared = num_sent

    def _copy_beginning(self, request: Request) -> None:
        """Begin the first block that is missing with what it shares with a block of another continuation.

        The copy happens before the step computes, so it does no harm if the other block is evicted meanwhile.
        """
        num_matched = len(request.blocks)
        start = num_matched * self.pool.block_size
        if request.num_computed != start or not self.pool.num_available:
            return
        parent = request.chain.parent(request.full_hashes(), num_matched)
        end = min(start + self.pool.block_size, len(request.token_ids) - 1)
        similar = self.pool.similar(parent, request.token_ids[start:end])
        if similar is not None:
            source, num_same = similar
            [target] = self.pool.allocate(1)
            self._moves.append(CopyBlock(source, target))
            request.blocks.append(target)
            request.num_computed += num_same

    # Blocks

    def _num_blocks(self, request: Request) -> int:
        """Blocks the request needs to sample its next token and store that token's KV."""
        return len(request.token_ids) // self.pool.block_size + 1

    def _num_missing_blocks(self, request: Request) -> int:
        return max(0, self._num_blocks(request) - len(request.blocks))

    def _make_room(self, request: Request, num_tokens: int, preempted: list[str]) -> bool:
        """Give `request` the blocks for its next `num_tokens`, preempting later requests; False if it had to go."""
        if request.request_id not in self.running:
            return False
        block_size = self.pool.block_size
        missing = -(-(request.num_computed + num_tokens) // block_size) - len(request.blocks)
        while missing > self.pool.num_available:
            if self._drop_all_holds():
                continue
            victim = max(self.running.values(), key=lambda candidate: candidate.arrival)
            self._preempt(victim)
            preempted.append(victim.request_id)
            if victim is request:
                return False
        if missing > 0:
            request.blocks += self.pool.allocate(missing)
        return True

    def _preempt(self, request: Request) -> None:
        if request.swapped is None:
            self._swap_out(request)
        else:  # it would have come back in this step: what is kept stays where it is
            self._moves = [move for move in self._moves if not _swaps_in(move, request)]
        self._leave_running(request, has_ended=False)
        request.num_preemptions += 1
        self.preempted.appendleft(request)

    def _leave_running(self, request: Request, *, has_ended: bool) -> None:
        """Release its blocks. Only the end of a request teaches eviction who comes back, and when."""
        del self.running[request.request_id]
        for block_hash in request.hashes[request.num_sealed :]:
            if self._computing.get(block_hash) is request:
                del self._computing[block_hash]
        let_go = self.pool.retire if has_ended else self.pool.pause
        let_go(request.blocks, self._retention(request))
        request.blocks = []
        request.num_computed = request.num_shared = request.num_sealed = 0

    def _swap_out(self, request: Request) -> None:
        """Have a victim's blocks that nobody else holds kept outside, if there is room and that is the quicker way."""
        block_size = self.pool.block_size
        computed = request.blocks[: -(-request.num_computed // block_size)]
        first = next((i for i, block in enumerate(computed) if not self.pool.is_shared(block)), len(computed))
        own = tuple(computed[first:])
        num_kept = first * block_size
        if (
            own
            and self._num_swapped_blocks() + len(own) <= self.swapping.max_blocks
            and self.swapping.pays(len(own), request.num_computed - num_kept, num_kept, self.limits.token_budget)
        ):
            request.swapped = Swapped(first, len(own), request.num_computed)
            self._moves.append(SwapOut(request.request_id, own))

    def _swap_in(self, request: Request) -> bool:
        """Go on from what is kept outside; False, and it is dropped, if the pool has as much or the two do not meet."""
        swapped, num_matched = request.swapped, len(request.blocks)
        if swapped is None:
            return False
        num_missing = swapped.first_block + swapped.num_blocks - num_matched
        if (
            num_matched < swapped.first_block
            or request.num_computed >= swapped.num_computed
            or num_missing > self.pool.num_available
        ):
            self._drop_swapped(request)
            return False
        blocks = self.pool.allocate(num_missing)
        request.blocks += blocks
        request.num_computed = swapped.num_computed
        self._moves.append(SwapIn(request.request_id, tuple(blocks)))
        return True

    def _drop_swapped(self, request: Request) -> None:
        if request.swapped is not None:
            request.swapped = None
            self._moves.append(SwapDrop(request.request_id))

    def _num_swapped_blocks(self) -> int:
        return sum(request.swapped.num_blocks for request in self.preempted if request.swapped is not None)

    def _retention(self, request: Request) -> Retention:
        wish = request.assignment.cache
        return Retention(wish.tenant, wish.priority, None if wish.ttl_s is None else self.pool.now + wish.ttl_s)

    def _remove(self, request: Request, *, has_ended: bool) -> None:
        self._drop_swapped(request)
        if request.request_id in self.running:
            self._leave_running(request, has_ended=has_ended)
        else:
            (self.preempted if request in self.preempted else self.waiting).remove(request)
        self._stop_waiting(request)
        del self._requests[request.request_id]

    def _awaiting(self) -> list[Request]:
        return [request for request in self.waiting if request.awaited or request.awaits_handover]

    def _blocks_here(self, hashes: Iterable[BlockHash], now: float) -> None:
        """Hold blocks that came into the pool for those who wait, and let those wait on for the others."""
        here = set(hashes)
        if not here:
            return
        for request in self._awaiting():
            for block_hash in request.awaited & here:
                self._hold_if_here(request, block_hash)
                request.await_deadline = now + request.assignment.await_timeout_s

    def _hold_if_here(self, request: Request, block_hash: BlockHash) -> None:
        block = self.pool.lookup(block_hash)
        if block is not None:
            self.pool.acquire([block])
            request.held.append(block)
            request.awaited.discard(block_hash)

    def _want_for_waiting(self) -> None:
        """Have the blocks that requests will use evicted late while they wait for their turn."""
        for request in (*self.waiting, *self.preempted):
            if not request.wanted and request.swapped is None:
                request.wanted = tuple(request.full_hashes())
                self.pool.want(request.wanted)

    def _stop_waiting(self, request: Request) -> None:
        self._drop_holds(request)
        self.pool.unwant(request.wanted)
        request.wanted = ()

    def _drop_holds(self, request: Request) -> bool:
        held, request.held = request.held, []
        self.pool.release(held)
        return bool(held)

    def _drop_all_holds(self) -> bool:
        """Let the pool evict what waiting requests were keeping; they compute it again if it comes to that."""
        dropped = [self._drop_holds(request) for request in self.waiting]
        return any(dropped)

    # Results

    def _seal_full_blocks(self, request: Request) -> int:
        """Publish the blocks that are full now; returns the index of the first of them."""
        first = request.num_sealed
        hashes = request.full_hashes()
        full = range(first, request.num_computed // self.pool.block_size)
        retention = self._retention(request) if full else DEFAULT_RETENTION
        for index in full:
            self._computing.pop(hashes[index], None)
            tokens = request.token_ids[index * self.pool.block_size : (index + 1) * self.pool.block_size]
            content = BlockContent(request.chain.parent(hashes, index), tuple(tokens))
            self.pool.seal(request.blocks[index], hashes[index], content, retention)
            request.num_sealed = index + 1
        return first

    def _append(self, request: Request, sampled: SampledToken) -> TokenEvent:
        position = request.num_output
        sampling = request.assignment.sampling
        finish = None
        if sampled.token_id in sampling.stop_token_ids and position + 1 > sampling.min_tokens:
            finish = FinishReason.STOP
        elif position + 1 >= sampling.max_tokens or len(request.token_ids) + 1 >= self.max_model_len:
            finish = FinishReason.LENGTH
        event = _event(request, sampled, finish)
        request.token_ids.append(sampled.token_id)
        return event

    def _export(self, request: Request, first_new: int, event: TokenEvent | None) -> list[ExportedBlocks]:
        """What a prefill assignment sends out after a step: its new full blocks, at its end also the partial one."""
        new = slice(first_new, request.num_sealed)
        hashes, blocks = request.hashes[new], request.blocks[new]
        handover = None
        if event is not None and event.finish is None:
            assert event.token_id is not None
            num_prompt = len(request.token_ids) - 1
            tail = request.tail_hash(num_prompt)
            if tail is not None:
                hashes, blocks = [*hashes, tail], [*blocks, request.blocks[num_prompt // self.pool.block_size]]
            handover = Handover(request.request_id, request.assignment.attempt, event.token_id, tail)
        if not blocks and handover is None:
            return []
        self.pool.acquire(blocks)
        return [ExportedBlocks(request.request_id, tuple(hashes), tuple(blocks), handover, self._retention(request))]


def share_budget(requests: list[Request], budget: int) -> list[tuple[Request, int]]:
    """Divide the tokens of one step among prefills: half for the oldest, the rest for the shortest first."""
    if not requests or budget <= 0:
        return []
    oldest = min(requests, key=lambda request: request.arrival)
    shares = {oldest.arrival: min(oldest.num_remaining, budget - budget // 2)}
    left = budget - shares[oldest.arrival]
    for request in sorted(requests, key=lambda request: (request.num_remaining, request.arrival)):
        already = shares.get(request.arrival, 0)
        more = min(request.num_remaining - already, left)
        shares[request.arrival] = already + more
        left -= more
    return [(request, shares[request.arrival]) for request in requests if shares[request.arrival]]


def _swaps_in(move: Move, request: Request) -> bool:
    return isinstance(move, SwapIn) and move.request_id == request.request_id


def _is_ready(request: Request, now: float) -> bool:
    return not (request.awaited or request.awaits_handover) or now >= request.await_deadline


def _event(request: Request, sampled: SampledToken | None, finish: FinishReason | None) -> TokenEvent:
    """The next token of a request, or its end without one."""
    return TokenEvent(
        request.request_id,
        request.assignment.attempt,
        request.num_output,
        None if sampled is None else sampled.token_id,
        finish,
        None if sampled is None else sampled.logprobs,
        request.num_cached_tokens or 0,
        num_preemptions=request.num_preemptions,
    )


def _chunk(request: Request, num_tokens: int) -> ScheduledChunk:
    start, end = request.num_computed, request.num_computed + num_tokens
    return ScheduledChunk(
        request,
        start,
        num_tokens,
        store_from=request.num_shared,
        samples=end == len(request.token_ids) and request.assignment.sampling.max_tokens > 0,
        scored=range(max(start, request.num_scored), min(end, request.num_to_score)),
    )
