"""Choice of blocks for export: to the disk, and out of the pool of a worker that leaves."""

from collections.abc import Iterable
from itertools import islice

from raydix.engine.core.manager.block_index import BlockIndex
from raydix.engine.core.manager.instructions import Instruction
from raydix.engine.core.manager.reservations import WorkerRecord
from raydix.engine.core.manager.supply import Supply
from raydix.engine.core.types import BlockHash

MIN_SAVED_BLOCKS = 16
"""Minimum of blocks for which a busy worker is asked."""
MAX_SAVED_BLOCKS = 64
"""Maximum of blocks at a time."""


def ask_for_blocks(workers: Iterable[WorkerRecord], blocks: BlockIndex, supply: Supply) -> list[Instruction]:
    """Ask each of the workers for the next blocks that are to be exported, no two of them for the same block."""
    instructions: list[Instruction] = []
    for worker in workers:
        if hashes := blocks_to_save(worker, blocks):
            instructions.append(supply.ask(worker.worker_id, hashes))
    return instructions


def blocks_to_save(worker: WorkerRecord, blocks: BlockIndex) -> list[BlockHash]:
    """Blocks of a worker without a segment and without a producer; none while a busy worker that stays has few."""
    worker.unsaved = [h for h in worker.unsaved if h in worker.blocks and blocks[h].segment is None]
    ready = [h for h in worker.unsaved if blocks[h].producer is None][:MAX_SAVED_BLOCKS]
    is_too_early = worker.requests and not worker.is_leaving and len(ready) < MIN_SAVED_BLOCKS
    return [] if is_too_early else ready


def give_away(worker: WorkerRecord, blocks: BlockIndex, leaving: frozenset[str], limit: int) -> None:
    """Have a leaving worker export at most `limit` blocks that no worker which stays holds, beside the blocks that were
    to go to the disk anyway. The longest known come first: a block comes before the blocks behind it, and beginnings
    that many prompts share before what followed once."""
    only_here = (
        block_hash
        for block_hash, record in blocks.items()
        if record.segment is None and block_hash in worker.blocks and record.workers <= leaving
    )
    worker.unsaved = list(dict.fromkeys([*islice(only_here, limit), *worker.unsaved]))
