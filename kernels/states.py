"""States of sequences, for the operations that go from position to position: where a batch takes them, and leaves them.

A state is what a layer knows of a sequence behind one position. A batch reads states and writes others: none is changed
in place, so a batch that is computed twice, or given up half-way, gives the same again.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

NO_STATE = -1  # the source of a sequence that begins: its state is zero


@dataclass(frozen=True, slots=True)
class StateUse:
    """The states of a batch's sequences, as slots of a pool."""

    sources: Tensor
    """[num_sequences] int64: slot with the state before each sequence's rows, or `NO_STATE`."""
    write_rows: Tensor
    """[num_writes] int64: rows of the batch, in order, whose state is kept."""
    write_slots: Tensor
    """[num_writes] int64: slot for the state behind each of these rows, another one for each, and no source of the same
    batch."""


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence of a batch."""

    first: int
    end: int
    source: int
    writes: dict[int, int]
    """Slots by row of the batch."""


def sequences_of(query_start: Tensor, use: StateUse) -> Iterator[SequenceRows]:
    """The sequences of a batch one after the other. Raises `ValueError` where a row to be kept is none of theirs."""
    starts, written = query_start.tolist(), dict(zip(use.write_rows.tolist(), use.write_slots.tolist(), strict=True))
    if any(not 0 <= row < starts[-1] for row in written):
        raise ValueError("a row whose state is kept lies outside the batch")
    for index, source in enumerate(use.sources.tolist()):
        first, end = starts[index], starts[index + 1]
        writes = {row: slot for row, slot in written.items() if first <= row < end}
        yield SequenceRows(first, end, source, writes)


def state_before(pool: Tensor, source: int) -> Tensor:
    """A copy of the state in a slot of `pool` [num_slots, ...], or zeros for `NO_STATE`."""
    return torch.zeros(pool.shape[1:], dtype=torch.float32) if source == NO_STATE else pool[source].clone()
