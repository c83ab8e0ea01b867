"""The states of recurrent layers: a pool of slots, each with what all these layers keep of a sequence at one position.

This module knows places in memory only; `raydix.engine.core.worker.states` knows whose state a slot holds.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from raydix.engine.model.config import ModelConfig
from raydix.engine.model.kv_pool import untouched
from raydix.engine.model.segments import Bytes


class StatePool:
    """`num_slots` states in float32; a slot is one contiguous run of memory, layer by layer."""

    def __init__(self, config: ModelConfig, num_slots: int) -> None:
        recurrent = config.recurrent
        assert recurrent is not None
        memory, tail = recurrent.memory_size, recurrent.tail_size
        self.num_slots = num_slots
        self.data = untouched((num_slots, len(recurrent.layers), memory + tail), torch.float32)
        self.memories: tuple[Tensor, ...] = ()
        """[num_slots, num_heads, rows, columns] of each recurrent layer, in the layers' order; none where heads have no
        memory."""
        if recurrent.memory is not None:
            self.memories = tuple(
                self.data[:, place, :memory].view(num_slots, *recurrent.memory.shape)
                for place in range(len(recurrent.layers))
            )
        self.tails: tuple[Tensor, ...] = tuple(
            self.data[:, place, memory:].view(num_slots, recurrent.kernel_size - 1, recurrent.channels)
            for place in range(len(recurrent.layers))
        )
        """[num_slots, kernel_size - 1, channels] of each recurrent layer: the convolution's last inputs, oldest
        first."""
        self._bytes: Bytes = self.data.numpy().reshape(num_slots, -1).view(np.uint8)
        self.state_bytes = self._bytes.shape[1]

    def export_states(self, slots: Sequence[int]) -> Bytes:
        """The bytes of the given states one after the other: [len(slots) * state_bytes] uint8."""
        found: Bytes = self._bytes[list(slots)].reshape(-1)
        return found

    def import_states(self, buffer: Bytes, slots: Sequence[int]) -> None:
        """Fill the given slots, in order, with bytes that `export_states` gave. The buffer may be read-only."""
        self._bytes[list(slots)] = buffer.reshape(len(slots), self.state_bytes)
