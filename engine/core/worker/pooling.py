"""Pooling of a request's prompt: sums taken from the store, added to chunk by chunk, kept for other requests.

A pooled hidden state is a sum of the hidden states of some positions, divided by their number: of all positions for the
mean, of the last one alone otherwise. The sum is in float64, its rows added one after the other in the order of the
positions, so its bits do not depend on where chunks begin; only the runner reads its bytes.

A sum up to the end of a block depends on that block's tokens and those before, as the block's KV does, so a mean goes
on from the sum of a prefix whose KV is cached.
"""

from collections.abc import Sequence

from raydix.engine.core.types import Pooling
from raydix.engine.core.worker.request import Request
from raydix.engine.core.worker.step import ScheduledChunk
from raydix.engine.core.worker.sum_store import SumStore


def take_sum(store: SumStore, request: Request) -> None:
    """Take the stored sum of the longest prefix, and go back to the first position that must be computed for the
    sum."""
    if request.num_pooled == request.num_to_pool:
        return
    if request.assignment.sampling.pooling is Pooling.MEAN:
        num_blocks, stored = store.match(request.full_hashes())
        if num_blocks * request.block_size > request.num_pooled:
            request.num_pooled, request.pooled_sum = num_blocks * request.block_size, stored
    if request.num_pooled < request.num_to_pool:
        request.num_computed = min(request.num_computed, request.num_pooled)


def keep_sums(store: SumStore, chunk: ScheduledChunk, sums: Sequence[bytes]) -> None:
    """Record the sums that came of a chunk, and keep those of whole blocks for other requests."""
    if not chunk.pooled:
        return
    request, block_size = chunk.request, chunk.request.block_size
    request.num_pooled, request.pooled_sum = chunk.pooled.stop, sums[-1]
    if request.assignment.sampling.pooling is Pooling.MEAN and request.is_named:
        hashes = request.full_hashes()
        for index in range(chunk.pooled.start // block_size, chunk.pooled.stop // block_size):
            store.put(hashes[index], sums[index - chunk.pooled.start // block_size])
