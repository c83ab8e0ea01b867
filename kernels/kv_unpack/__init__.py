"""Copies a contiguous segment buffer to blocks of a pool."""

from collections.abc import Sequence

import torch
from torch import Tensor

from raydix.kernels.cpp import cpu_ops
from raydix.kernels.kv_unpack.reference import kv_unpack_reference

__all__ = ["kv_unpack"]


def kv_unpack(buffer: Tensor, pool: Tensor, block_ids: Sequence[int] | Tensor) -> None:
    """Copies `buffer` (uint8, [len(block_ids) * block_bytes]) into the given blocks of `pool`, in order.

    The inverse of `kv_pack`. The buffer may be read-only memory. Raises `ValueError` on a wrong size or `IndexError` on
    an unknown block.
    """
    ids = block_ids if isinstance(block_ids, Tensor) else torch.tensor(block_ids, dtype=torch.int64)
    if buffer.dtype != torch.uint8 or buffer.numel() != ids.numel() * pool.stride(0) * pool.element_size():
        raise ValueError(f"buffer must be uint8 of {ids.numel() * pool.stride(0) * pool.element_size()} bytes")
    if pool.is_cuda:
        from raydix.kernels.kv_unpack.triton import kv_unpack_triton

        kv_unpack_triton(buffer, pool, ids)
        return
    ops = cpu_ops()
    if ops is not None:
        ops.kv_copy(pool, ids, buffer, True)
        return
    if ids.numel() and int(ids.min()) < 0:
        raise IndexError("block_ids names a block outside the pool")
    kv_unpack_reference(buffer, pool, ids)
