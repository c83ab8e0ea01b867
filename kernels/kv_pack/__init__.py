"""Blocks of a pool to one contiguous segment buffer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from raydix.kernels.cpp import cpu_ops
from raydix.kernels.kv_pack.reference import kv_pack_reference

__all__ = ["kv_pack"]


def kv_pack(pool: Tensor, block_ids: Sequence[int] | Tensor, out: Tensor | None = None) -> Tensor:
    """Copies whole blocks, in the order given, into a uint8 tensor [len(block_ids) * block_bytes].

    `pool`: [num_blocks, ...] contiguous, of any dtype; `block_ids`: a sequence or an int64 tensor; `out`: the buffer to
    fill, of exactly that size (for example a view of shared memory). Raises `ValueError` on a wrong size or
    `IndexError` on an unknown block.
    """
    ids = block_ids if isinstance(block_ids, Tensor) else torch.tensor(block_ids, dtype=torch.int64)
    block_bytes = pool.stride(0) * pool.element_size()
    if out is None:
        out = torch.empty(ids.numel() * block_bytes, dtype=torch.uint8, device=pool.device)
    elif out.dtype != torch.uint8 or out.numel() != ids.numel() * block_bytes:
        raise ValueError(f"out must be uint8 of {ids.numel() * block_bytes} bytes")
    if pool.is_cuda:
        from raydix.kernels.kv_pack.triton import kv_pack_triton

        return kv_pack_triton(pool, ids, out)
    ops = cpu_ops()
    if ops is not None:
        ops.kv_copy(pool, ids, out, False)
        return out
    if ids.numel() and int(ids.min()) < 0:
        raise IndexError("block_ids names a block outside the pool")
    return out.copy_(kv_pack_reference(pool, ids))
