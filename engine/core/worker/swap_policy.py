"""Choice between keeping a preempted request's KV outside the pool and recomputing: the quicker one by prediction.

Blocks that other running requests hold, too, stay in the pool. All others are assumed to be evicted: a request is
preempted because the pool has nothing else to give.
"""

from dataclasses import dataclass, field

from raydix.engine.core.costs import WorkerCosts


@dataclass(frozen=True, slots=True)
class Swapped:
    """Record of a preempted request's KV outside the pool."""

    first_block: int
    """Index in the sequence of the first kept block; the blocks before it must be found in the pool."""
    num_blocks: int
    num_computed: int
    """Leading positions whose KV lies in the kept blocks or the blocks before them."""


@dataclass(slots=True)
class SwapPolicy:
    """Decides for one worker. The engine updates `costs` as measured."""

    max_blocks: int = 0
    """Limit of blocks kept outside the pool for all requests together; 0: never swap."""
    block_bytes: int = 0
    costs: WorkerCosts = field(default_factory=WorkerCosts)

    def pays(self, num_blocks: int, num_lost: int, num_kept: int, token_budget: int) -> bool:
        """True if copying `num_blocks` out and in is quicker than computing `num_lost` tokens after `num_kept`."""
        swap_s = 2 * self.costs.swap_once_s(num_blocks * self.block_bytes)
        return swap_s < self.costs.prefill_s(num_lost, num_kept, token_budget, num_decodes=0)
