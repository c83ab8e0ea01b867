"""Specification of scattering one buffer into blocks."""

from torch import Tensor


def kv_unpack_reference(buffer: Tensor, pool: Tensor, block_ids: Tensor) -> None:
    """`pool[block_ids] = buffer`, the buffer holding the blocks' bytes one after the other."""
    pool[block_ids.to(pool.device)] = buffer.to(pool.device).view(pool.dtype).view(-1, *pool.shape[1:])
