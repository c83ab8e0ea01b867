"""Contents of running requests' blocks: taken over or copied at the start, sealed and exported after a step."""

from raydix.engine.core.eviction.retention import most_generous
from raydix.engine.core.hashing import state_hash
from raydix.engine.core.types import BlockHash, Handover, Snapshot, Stage, TokenEvent
from raydix.engine.core.worker.block_pool import BlockContent, BlockPool
from raydix.engine.core.worker.request import Request
from raydix.engine.core.worker.snapshots import Snapshots
from raydix.engine.core.worker.step import ExportedBlocks
from raydix.engine.core.worker.swaps import Swaps


class Contents:
    """Owner of `num_sealed` of running requests, and of the register of blocks that are being computed."""

    def __init__(self, pool: BlockPool, swaps: Swaps) -> None:
        self._pool = pool
        self._swaps = swaps
        self.computing: dict[BlockHash, Request] = {}
        """Blocks about to be filled by a running prefill; other requests wait instead of computing the same."""

    # Start and end of running

    def is_being_computed(self, request: Request, num_matched: int) -> bool:
        """True if a running prefill is about to fill the first block that `request` lacks."""
        hashes = request.full_hashes()
        return num_matched < len(hashes) and hashes[num_matched] in self.computing

    def begin(self, request: Request, num_matched: int) -> None:
        """Register the blocks behind the first `num_matched`: the request is about to compute them."""
        for block_hash in request.full_hashes()[num_matched:]:
            self.computing.setdefault(block_hash, request)

    def end(self, request: Request) -> None:
        """Unregister the blocks that the request has not sealed."""
        for block_hash in request.hashes[request.num_sealed :]:
            if self.computing.get(block_hash) is request:
                del self.computing[block_hash]

    def take_tail(self, request: Request, snapshots: Snapshots | None = None) -> bool:
        """Take over the imported partial block before the handed-over token, if present and not held, and the
        recurrent state behind it; False without them. `snapshots`: of a model with such states."""
        num_sent = len(request.assignment.token_ids)
        if request.assignment.stage is not Stage.DECODE or len(request.blocks) != num_sent // self._pool.block_size:
            return False
        tail = request.tail_hash(num_sent)
        block = None if tail is None else self._pool.lookup(tail)
        # The block is written further, so it must be this request's alone.
        if tail is None or block is None or len(request.token_ids) <= num_sent or not self._pool.is_cached(block):
            return False
        # The state first: it goes with the name of the block.
        if snapshots is not None and not snapshots.take(request, tail):
            return False
        self._pool.take_over(block)
        request.blocks.append(block)
        request.num_computed = request.num_shared = num_sent
        return True

    def drop_tail(self, request: Request, now: float) -> None:
        """Forget the imported partial block of a request that will not start, where blocks are not kept."""
        if self._pool.keeps_blocks or not request.is_named or request.assignment.stage is not Stage.DECODE:
            return
        tail = request.tail_hash(len(request.assignment.token_ids))
        block = None if tail is None else self._pool.lookup(tail)
        if block is not None and self._pool.is_cached(block):
            self._pool.acquire([block])
            self._pool.release_awaited([block], now)

    def copy_beginning(self, request: Request, now: float) -> None:
        """Begin the first missing block with the tokens shared with a block of another continuation.

        The copy happens before the step computes, so the other block may be evicted meanwhile.
        """
        num_matched = len(request.blocks)
        start = num_matched * self._pool.block_size
        if request.num_computed != start or not self._pool.num_available or not self._pool.keeps_blocks:
            return
        # Tokens [start, end) lie in the first missing block; the last token of all is computed for its output.
        parent = request.chain.parent(request.full_hashes(), num_matched)
        end = min(start + self._pool.block_size, len(request.token_ids) - 1)
        similar = self._pool.similar(parent, request.token_ids[start:end])
        if similar is not None:
            source, num_same = similar
            [target] = self._pool.allocate(1, now)
            self._swaps.copy(source, target)
            request.blocks.append(target)
            request.num_computed += num_same

    # Results of a step

    def seal_full_blocks(self, request: Request, now: float) -> int:
        """Name the newly full blocks; returns the index of the first."""
        first = request.num_sealed
        if not request.is_named:
            return first
        hashes = request.full_hashes()
        full = range(first, request.num_computed // self._pool.block_size)
        if not full:
            return first

        rest, marked, block_size = request.retention(now), request.marked(now), self._pool.block_size
        # Blocks [first, full.stop) are full and have no name yet.
        token_ids = request.token_ids
        for index in full:
            block_hash = hashes[index]
            self.computing.pop(block_hash, None)
            tokens = tuple(token_ids[index * block_size : (index + 1) * block_size])
            content = BlockContent(request.chain.parent(hashes, index), tokens)
            retention = marked[index] if index < len(marked) else rest
            self._pool.seal(request.blocks[index], block_hash, content, retention)
        request.num_sealed = full.stop
        return first

    def export(self, request: Request, first_new: int, event: TokenEvent | None, now: float) -> list[ExportedBlocks]:
        """Export the new full blocks and snapshots of a prefill assignment, and at its end the partial block, the
        recurrent state behind it, and the handover.

        `first_new`: index of the first new block; `event`: the sampled token at the end of the prompt.
        """
        new = slice(first_new, request.num_sealed)
        hashes, blocks = request.hashes[new], request.blocks[new]
        handover = None
        # Of the blocks that are sent a later prompt goes on where a state is behind them.
        states = self._snapshots_of(request)
        if event is not None and event.finish is None:
            assert event.token_id is not None
            num_prompt = len(request.token_ids) - 1
            tail = request.tail_hash(num_prompt)
            if tail is not None:
                hashes, blocks = [*hashes, tail], [*blocks, request.blocks[num_prompt // self._pool.block_size]]
            handover = Handover(request.request_id, request.assignment.attempt, event.token_id, tail)
            if request.state is not None:
                full = request.hashes[: num_prompt // self._pool.block_size]
                path = tuple(full if tail is None else [*full, tail])
                # At the end of a block it may be among the snapshots.
                if all(state.path != path for state, _ in states):
                    states.append((Snapshot(state_hash(path[-1]), path), request.state))

        if not blocks and handover is None and not states:
            return []
        rest, marked = request.retention(now), request.marked(now)[first_new : request.num_sealed]
        # A segment is kept as a whole: the most generous of its blocks' hints counts.
        if marked:
            rest = marked[0] if len(marked) == len(blocks) else most_generous(marked[0], rest)

        # Held until the contents have been copied out (`Transfers.release`).
        self._pool.acquire(blocks)
        for _, slot in states:
            assert self._pool.states is not None
            self._pool.states.hold(slot)
        return [
            ExportedBlocks(
                request_id=request.request_id,
                hashes=tuple(hashes),
                blocks=tuple(blocks),
                handover=handover,
                retention=rest,
                states=tuple(states),
            )
        ]

    def _snapshots_of(self, request: Request) -> list[tuple[Snapshot, int]]:
        """The snapshots that a prefill has taken since its last export, each with its slot."""
        names, request.snapshots = request.snapshots, []
        found = [None if self._pool.states is None else self._pool.states.find(state_hash(name)) for name in names]
        return [each for each in found if each is not None]
