"""The moves of a step, and the swaps of preempted requests among them.

A preempted request's KV is kept outside the pool or computed again, whichever is predicted to be quicker. Blocks that
other running requests hold, too, stay in the pool. All others are assumed to be evicted: a request is preempted because
the pool has nothing else to give.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.core.worker.request import Request, Swapped
from raydix.engine.core.worker.step import CopyBlock, Move, SwapDrop, SwapIn, SwapOut


@dataclass(slots=True)
class SwapPolicy:
    """Decides for one worker. The engine updates `costs` as measured."""

    max_blocks: int = 0
    """Limit of blocks kept outside the pool for all requests together; 0: never swap."""
    block_bytes: int = 0
    state_bytes: int = 0
    """Of a model with recurrent layers."""
    costs: WorkerCosts = field(default_factory=WorkerCosts)

    @property
    def num_extra(self) -> int:
        """Room that a request's recurrent state takes, in blocks."""
        return -(-self.state_bytes // self.block_bytes) if self.block_bytes else 0

    def pays(self, num_blocks: int, num_lost: int, num_kept: int, token_budget: int) -> bool:
        """True if copying `num_blocks` and a recurrent state out and in is quicker than computing `num_lost` tokens
        after `num_kept`."""
        swap_s = 2 * self.costs.swap_once_s(num_blocks * self.block_bytes + self.state_bytes)
        return swap_s < self.costs.prefill_s(num_lost, num_kept, token_budget, num_decodes=0)


class Swaps:
    """Owner of `swapped` of a worker's requests, and of the moves decided since the last step."""

    def __init__(self, pool: BlockPool, policy: SwapPolicy, token_budget: int) -> None:
        self._pool = pool
        self._policy = policy
        self.token_budget = token_budget
        self._moves: list[Move] = []

    def take_moves(self) -> tuple[Move, ...]:
        """The moves for the next step, in order; none are left."""
        moves, self._moves = self._moves, []
        return tuple(moves)

    def forget_moves(self) -> None:
        """Forget the moves of a step that failed, except the dropping of kept contents."""
        self._moves = [move for move in self._moves if isinstance(move, SwapDrop)]

    def copy(self, source: int, target: int) -> None:
        """Copy a block before the next step."""
        self._moves.append(CopyBlock(source, target))

    def swap_out(self, request: Request, preempted: Iterable[Request]) -> None:
        """Keep a request's own blocks and its recurrent state outside the pool, if they fit beside `preempted` and
        recomputing is slower.

        Own blocks are the computed ones from the first block on that no other request holds.
        """
        block_size = self._pool.block_size
        computed = request.blocks[: -(-request.num_computed // block_size)]
        first = next((i for i, block in enumerate(computed) if not self._pool.is_shared(block)), len(computed))
        own = tuple(computed[first:])
        num_kept = first * block_size  # positions in shared blocks, which stay in the pool

        # Room outside the pool is bounded, and short contents are computed more quickly than copied.
        if (
            own
            and num_swapped_blocks(preempted) + len(own) + self._policy.num_extra <= self._policy.max_blocks
            and self._policy.pays(len(own), request.num_computed - num_kept, num_kept, self.token_budget)
        ):
            request.swapped = Swapped(first, len(own), request.num_computed, self._policy.num_extra)
            # The slot may be given to others at once: they write it in the step, after all moves.
            self._moves.append(SwapOut(request.request_id, own, request.state))

    def swap_in(self, request: Request, now: float) -> bool:
        """Continue from the kept contents.

        False, and the contents are dropped, if the pool has as much, or lacks blocks between its own and the kept ones.
        """
        swapped, num_matched = request.swapped, len(request.blocks)
        if swapped is None:
            return False

        # Blocks [num_matched, first_block + num_blocks) of the sequence come back from outside; none where the pool has
        # all of them, but no recurrent state as far on.
        num_missing = max(0, swapped.first_block + swapped.num_blocks - num_matched)
        state = None
        if (
            num_matched < swapped.first_block
            or self._num_reached(request) >= swapped.num_computed
            or num_missing > self._pool.num_available
            or (self._pool.states is not None and (state := self._pool.states.allocate()) is None)
        ):
            self.drop(request)
            return False

        blocks = self._pool.allocate(num_missing, now)
        request.blocks += blocks
        request.num_computed = swapped.num_computed
        request.state = state
        self._moves.append(SwapIn(request.request_id, tuple(blocks), state))
        return True

    def _num_reached(self, request: Request) -> int:
        """Positions of a request that starts from which it could go on with what the pool has."""
        if self._pool.states is None:
            return request.num_computed
        hashes = request.full_hashes()[: request.num_computed // request.block_size]
        return self._pool.states.longest(hashes)[0] * request.block_size

    def cancel_swap_in(self, request: Request) -> None:
        """Leave the contents of a request outside that was preempted again before the step."""
        self._moves = [move for move in self._moves if not _swaps_in(move, request)]

    def drop(self, request: Request) -> None:
        """Drop the kept contents of a request, if any."""
        if request.swapped is not None:
            request.swapped = None
            self._moves.append(SwapDrop(request.request_id))


def num_swapped_blocks(preempted: Iterable[Request]) -> int:
    """Room taken outside the pool for preempted requests, in blocks."""
    swapped = (request.swapped for request in preempted if request.swapped is not None)
    return sum(each.num_blocks + each.num_extra for each in swapped)


def _swaps_in(move: Move, request: Request) -> bool:
    return isinstance(move, SwapIn) and move.request_id == request.request_id
