"""Choice of blocks for export to the disk."""

from engine.core.manager.block_index import BlockIndex
from engine.core.manager.reservations import WorkerRecord
from engine.core.types import BlockHash

MIN_SAVED_BLOCKS = 16
"""Minimum of blocks for which a busy worker is asked."""
MAX_SAVED_BLOCKS = 64
"""Maximum of blocks at a time."""


def blocks_to_save(worker: WorkerRecord, blocks: BlockIndex) -> list[BlockHash]:
    """Blocks of a worker without a segment and without a producer; none while a busy worker has few of them."""
    worker.unsaved = [h for h in worker.unsaved if h in worker.blocks and blocks[h].segment is None]
    ready = [h for h in worker.unsaved if blocks[h].producer is None][:MAX_SAVED_BLOCKS]
    return [] if worker.requests and len(ready) < MIN_SAVED_BLOCKS else ready
