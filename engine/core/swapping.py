"""Whether a preempted request's KV is kept outside the pool or computed again: what is predicted to be quicker.

The blocks that other running requests hold, too, stay in the pool. Of the others it is taken that they will be evicted:
a request is preempted because the pool has nothing else to give.
"""

from dataclasses import dataclass, field

from engine.core.costs import WorkerCosts


@dataclass(frozen=True, slots=True)
class Swapped:
    """What is kept outside the pool for a preempted request."""

    first_block: int
    """Index in its sequence of the first block that is kept; those before it must be found in the pool."""
    num_blocks: int
    num_computed: int
    """Positions from 0 on whose KV lies in these blocks or in blocks before them."""


@dataclass(slots=True)
class SwapPolicy:
    """Decides for one worker. `costs` is set anew by whoever measures them."""

    max_blocks: int = 0
    """Blocks kept outside the pool for all requests together; 0: none is ever swapped."""
    block_bytes: int = 0
    costs: WorkerCosts = field(default_factory=WorkerCosts)

    def pays(self, num_blocks: int, num_lost: int, num_kept: int, token_budget: int) -> bool:
        """Whether copying `num_blocks` out and in is quicker than computing `num_lost` tokens after `num_kept`."""
        swap_s = 2 * self.costs.swap_once_s(num_blocks * self.block_bytes)
        return swap_s < self.costs.prefill_s(num_lost, num_kept, token_budget, num_decodes=0)
