"""Copies a contiguous buffer to blocks of a pool on a GPU."""

from torch import Tensor

from raydix.kernels.kv_pack.triton import copy_blocks


def kv_unpack_triton(buffer: Tensor, pool: Tensor, block_ids: Tensor) -> None:
    """Do what `kv_unpack` does for a pool on a GPU; a `buffer` in host memory is copied to the device first.

    A block named twice gets one of its two contents, whichever is written last.
    """
    copy_blocks(pool, block_ids, buffer.to(pool.device), to_pool=True)
