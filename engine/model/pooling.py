"""Pools a prompt's hidden states to one: sums in float64, row after row
(`raydix.engine.core.worker.prompt_results`)."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from raydix.engine.core.types import Pooling
from raydix.engine.core.worker.step import ScheduledChunk


def sums_of(chunk: ScheduledChunk, rows: npt.NDArray[np.float32]) -> list[bytes]:
    """Return the sums of a chunk, as `RunnerOutput.sums`. `rows` are the hidden states of its pooled positions,
    [num_pooled, hidden_size]."""
    start, stop, block_size = chunk.pooled.start, chunk.pooled.stop, chunk.request.block_size
    before = np.frombuffer(chunk.request.pooled_sum) if chunk.request.pooled_sum else np.zeros(rows.shape[1])
    totals = np.add.accumulate(np.vstack((before, rows)))  # [n] includes the first n rows
    ends = dict.fromkeys([*range((start // block_size + 1) * block_size, stop + 1, block_size), stop])
    return [totals[end - start].tobytes() for end in ends]


def pooled_states(chunks: Iterable[ScheduledChunk], sums: Mapping[str, Sequence[bytes]]) -> dict[str, bytes]:
    """Return the pooled hidden states that are known after a step with these `sums`, as `RunnerOutput.pooled`."""
    states = {}
    for chunk in chunks:
        if chunk.ends_pooled:
            request = chunk.request
            total = sums[request.request_id][-1] if chunk.pooled else request.pooled_sum
            is_mean = request.assignment.sampling.pooling is Pooling.MEAN
            state = np.frombuffer(total) / (request.num_to_pool if is_mean else 1)
            states[request.request_id] = state.astype("<f4").tobytes()
    return states
