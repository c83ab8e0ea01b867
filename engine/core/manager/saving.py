"""Choice of blocks for export: to the disk, and out of the pool of a worker that leaves."""

from itertools import islice

from engine.core.manager.block_index import BlockIndex
from engine.core.manager.reservations import WorkerRecord
from engine.core.types import BlockHash

MIN_SAVED_BLOCKS = 16
"""Minimum of blocks for which a busy worker is asked."""
MAX_SAVED_BLOCKS = 64
"""Maximum of blocks at a time."""


def blocks_to_save(worker: WorkerRecord, blocks: BlockIndex) -> list[BlockHash]:
    """Blocks of a worker without a segment and without a producer; none while a busy worker that stays has few."""
    worker.unsaved = [h for h in worker.unsaved if h in worker.blocks and blocks[h].segment is None]
    ready = [h for h in worker.unsaved if blocks[h].producer is None][:MAX_SAVED_BLOCKS]
    is_too_early = worker.requests and not worker.is_leaving and len(ready) < MIN_SAVED_BLOCKS
    return [] if is_too_early else ready


def only_here(worker: WorkerRecord, blocks: BlockIndex, leaving: frozenset[str], limit: int) -> list[BlockHash]:
    """At most `limit` blocks of a leaving worker that no worker which stays holds, the longest known first: a block
    comes before the blocks behind it, and beginnings that many prompts share before what followed once."""
    found = (
        block_hash
        for block_hash, record in blocks.items()
        if record.segment is None and block_hash in worker.blocks and record.workers <= leaving
    )
    return list(islice(found, limit))
