"""The recurrent states of requests: where each goes on from, which states a step writes, and which stay as snapshots.

Snapshots are taken where somebody will want to go on:

| position | for |
|---|---|
| the last full block before a prompt's last token | the same prompt again |
| the last full block of a request, moving on with it | its next turn, and itself after a preemption |
| the end of the public prefix, and of cache marks | prompts with the same beginning |
| the block where the prompt parts from what the pool has, or the manager knows | the next one that parts there |
| the block where a waiting request's prompt parts from one that is computed | the waiting one |

A step writes the state behind a row wherever such a position lies within a chunk, so chunks are not cut there. Of a
drafted chunk it writes the state behind every row, of which the one behind the last accepted token stays: a rejected
token has left no trace in it.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from raydix.engine.core.types import BlockHash, EvictionReason, Stage
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.core.worker.request import Request
from raydix.engine.core.worker.states import States
from raydix.engine.core.worker.step import ScheduledChunk, StateMoves


class Snapshots:
    """Owner of `state`, `parted_at` and `rolling` of a worker's requests, and of the slots that a step writes."""

    def __init__(self, pool: BlockPool, states: States) -> None:
        self._pool = pool
        self._states = states
        self._written: list[int] = []  # slots that the step under way writes, each held once
        # Blocks at whose end a waiting request would go on, with the number of blocks up to there.
        self._wanted: dict[BlockHash, int] = {}
        # Snapshots that a running request will take behind blocks that are in the pool.
        self._coming: dict[BlockHash, Request] = {}
        # Snapshots that go when the running request that took them takes the next one.
        self._rolling: dict[BlockHash, Request] = {}

    @property
    def most_requests(self) -> int:
        """Requests that may run at the same time: each reads a state and writes another in one step."""
        return self._states.num_slots // 2

    # Start and end of running

    def is_coming(self, request: Request, num_matched: int) -> bool:
        """True if a running request is about to take a snapshot from which a waiting one, with so many blocks in the
        pool, would go on further than it could now."""
        hashes, num_usable = request.full_hashes(), _num_usable(request, num_matched)
        # Few snapshots are coming, where prompts may have thousands of blocks.
        places = ((name, each.parted_at) for name, each in self._coming.items())
        coming = max((at for name, at in places if at and at <= num_usable and hashes[at - 1] == name), default=0)
        return coming > 0 and not any(map(self._states.has, hashes[coming - 1 : num_usable]))

    def want(self, request: Request, num_matched: int, computing: Mapping[BlockHash, Request]) -> None:
        """Ask for a snapshot where the prompt of a waiting request, with so many blocks in the pool and the next one
        among those that are being `computing`, parts from these."""
        hashes, num_usable = request.full_hashes(), _num_usable(request, len(request.hashes))
        # A running request computes its blocks in their order, so those of this prompt follow each other.
        num_common = bisect_left(hashes, True, num_matched, num_usable, key=lambda name: name not in computing)
        if num_common > num_matched:
            self._wanted[hashes[num_common - 1]] = num_common

    def begin(self, request: Request) -> None:
        """Go on from the last snapshot before `num_computed`; without one from the beginning."""
        self.end(request)
        hashes = request.full_hashes()[: request.num_computed // request.block_size]
        num_blocks, slot = self._states.longest(hashes)
        request.num_computed = num_blocks * request.block_size
        if slot is not None:
            self._states.go_on_from(slot)
            request.state = slot
            # Somebody goes on from there, so it stays when the request that took it moves on.
            self._stays(hashes[num_blocks - 1])
        # What the pool has behind the snapshot is computed again, not to be stored: whoever parts there, too, shall
        # find a snapshot.
        num_usable = _num_usable(request, request.num_shared // request.block_size)
        if num_usable > num_blocks:
            request.parted_at = num_usable
            self._coming.setdefault(request.full_hashes()[num_usable - 1], request)

    def take(self, request: Request, name: BlockHash) -> bool:
        """Have a request go on from the snapshot of this name, behind all its blocks; False if it is not there."""
        self.end(request)
        slot = self._states.slot_of(name)
        if slot is None:
            return False
        self._states.go_on_from(slot)
        request.state = slot
        return True

    def end(self, request: Request) -> None:
        """Release the state of a request that stops running; its snapshots stay."""
        if request.state is not None:
            self._states.release(request.state)
            request.state = None
        self._has_come(request)
        if request.rolling is not None and self._rolling.get(request.rolling) is request:
            self._stays(request.rolling)
        request.rolling = None

    # A step

    def forget_wishes(self) -> None:
        """Begin a step: waiting requests ask anew. What a step that failed had written is dropped."""
        self._wanted.clear()
        self._drop_written()

    def plan(self, chunks: Sequence[ScheduledChunk]) -> list[ScheduledChunk]:
        """The chunks of a step with the states that they read and write; a draft is cut to the states that are
        there."""
        # First what every chunk needs, then what is worth keeping as far as there are slots.
        ends = [self._take() for _ in chunks]
        planned = []
        for chunk, slot in zip(chunks, ends, strict=True):
            assert slot is not None, "more requests run than there are states for"
            planned.append(self._with_drafts(chunk, slot) if chunk.draft else self._with_snapshots(chunk, slot))
        return planned

    def computed(self, request: Request, moves: StateMoves) -> None:
        """Take over the state behind `num_computed`, and keep snapshots of what the step passed."""
        written = dict(moves.writes)
        slot = written[request.num_computed]
        # Held before the step lets go of it, and the old one released behind: a slot is never free between.
        self._states.hold(slot)
        if request.state is not None:
            self._states.release(request.state)
        request.state = slot
        passed = [at for at in written if at % request.block_size == 0 and at <= request.num_computed]
        # Where no KV is kept, or it has no name, a snapshot could never be found with its blocks.
        if not passed or not request.is_named or not self._pool.keeps_blocks:
            return
        stay = self._places(request)
        for position in passed:
            self._keep(request, written[position], position // request.block_size, stays=position in stay)
        if request.parted_at is not None and request.parted_at * request.block_size <= request.num_computed:
            self._has_come(request)

    def end_step(self) -> None:
        """Release the slots of a step whose states nobody kept."""
        self._drop_written()

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Assert that each running request has the state behind its computed positions, that nothing else is held, and
        that the pool has every block that a snapshot needs which was taken here, or from which somebody went on."""
        requests = list(running)
        for request in requests:
            assert (request.state is None) == (request.num_computed == 0)
        held = [request.state for request in requests if request.state is not None]
        self._states.check_integrity([*held, *self._written])
        assert all(self._pool.lookup(block_hash) is not None for block_hash in self._states.blocks_on_paths())
        assert all(self._states.is_told(name) or name in self._rolling for name in self._states.names())
        assert all(request in requests for request in (*self._coming.values(), *self._rolling.values()))

    def _keep(self, request: Request, slot: int, num_blocks: int, *, stays: bool) -> None:
        """Make the state behind a request's first blocks a snapshot; unless it `stays`, until the next one."""
        path = request.full_hashes()[:num_blocks]
        for block_hash in reversed(path):
            if self._states.is_on_path(block_hash) and not self._states.has_ahead:
                break  # with all blocks before it: what a snapshot needs is in the pool
            # A block that was computed beside another request's of the same name, which has gone since.
            if self._pool.lookup(block_hash) is None:
                return
        name = path[-1]
        is_new = self._states.keep(slot, path, is_told=stays)
        if request.rolling is not None and self._rolling.get(request.rolling) is request and request.rolling != name:
            # Nobody but its request went on from it: the next one takes its place.
            del self._rolling[request.rolling]
            if self._states.has(request.rolling):
                self._states.drop(request.rolling, EvictionReason.TAKEN)
        request.rolling = None
        if stays:
            self._stays(name)
            # The worker that decodes gets these along with the KV.
            if is_new and request.assignment.stage is Stage.PREFILL:
                request.snapshots.append(name)
        elif is_new:
            request.rolling = name
            self._rolling[name] = request

    def _stays(self, name: BlockHash) -> None:
        """A snapshot stays when the request that took it moves on, so that other processes may know of it."""
        self._rolling.pop(name, None)
        self._states.tell(name)

    def _has_come(self, request: Request) -> None:
        """Nobody need wait any longer for the snapshot where a request's prompt parts from the pool's."""
        if request.parted_at is not None:
            name = request.hashes[request.parted_at - 1]
            if self._coming.get(name) is request:
                del self._coming[name]
            request.parted_at = None

    def _with_drafts(self, chunk: ScheduledChunk, slot: int) -> ScheduledChunk:
        """A drafted chunk with the state behind each row, its draft cut where there are no more free slots."""
        first = chunk.start + chunk.num_tokens - len(chunk.draft)
        writes = [(first, slot)]
        for position in range(first + 1, first + len(chunk.draft) + 1):
            # A draft is a guess: no snapshot is given up for it.
            if (more := self._take(may_drop=False)) is None:
                break
            writes.append((position, more))
        num_drafted = len(writes) - 1
        return replace(
            chunk,
            num_tokens=chunk.num_tokens - len(chunk.draft) + num_drafted,
            draft=chunk.draft[:num_drafted],
            states=StateMoves(chunk.request.state, tuple(writes)),
        )

    def _with_snapshots(self, chunk: ScheduledChunk, slot: int) -> ScheduledChunk:
        request, end = chunk.request, chunk.start + chunk.num_tokens
        writes = [(end, slot)]
        # Within a chunk of one token, as most are, lies no position but its end.
        if chunk.num_tokens > 1 and request.is_named and self._pool.keeps_blocks:
            last = end // request.block_size * request.block_size
            # The last one first: it is of most use where there is one slot left.
            for position in sorted({*self._places(request), last}, reverse=True):
                if chunk.start < position < end and (more := self._take()) is not None:
                    writes.append((position, more))
        return replace(chunk, states=StateMoves(request.state, tuple(sorted(writes))))

    def _places(self, request: Request) -> set[int]:
        """Positions at ends of blocks at which this request's snapshots stay."""
        assignment, block_size = request.assignment, request.block_size
        num_blocks = {
            (assignment.num_prompt_tokens - 1) // block_size,
            request.chain.num_public_blocks,
            assignment.parts_at,
            *(mark.num_blocks for mark in assignment.cache.marks),
        }
        if request.parted_at is not None:
            num_blocks.add(request.parted_at)
        hashes = request.hashes
        num_blocks |= {at for name, at in self._wanted.items() if at <= len(hashes) and hashes[at - 1] == name}
        return {number * block_size for number in num_blocks if number <= len(hashes)}

    def _take(self, *, may_drop: bool = True) -> int | None:
        slot = self._states.allocate(may_drop=may_drop)
        if slot is not None:
            self._written.append(slot)
        return slot

    def _drop_written(self) -> None:
        written, self._written = self._written, []
        for slot in written:
            self._states.release(slot)


def _num_usable(request: Request, num_blocks: int) -> int:
    """Of so many blocks those behind which a request may go on: the last token is computed in any case."""
    return min(num_blocks, (len(request.token_ids) - 1) // request.block_size)
