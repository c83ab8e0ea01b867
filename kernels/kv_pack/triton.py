"""Copying blocks of a pool to and from one contiguous buffer on a GPU; `kv_unpack` is the same kernel the other way."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK_BYTES = 16384
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@triton.jit
def _copy_blocks_kernel(
    pool_ptr, buffer_ptr, block_ids_ptr, num_blocks, block_words, TO_POOL: tl.constexpr, CHUNK: tl.constexpr
):
    """buffer[i] = pool[block_ids[i]], or with TO_POOL pool[block_ids[i]] = buffer[i].

    pool: [num_blocks, block_words]; buffer: [num_ids, block_words], of the same word type; block_ids: [num_ids] int64.
    Ids outside the pool are not copied.

    One program handles CHUNK words of one block.
    """
    index = tl.program_id(1).to(tl.int64)
    block = tl.load(block_ids_ptr + index).to(tl.int64)
    words = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    mask = words < tl.where((block >= 0) & (block < num_blocks), block_words, 0)
    pool_ptrs = pool_ptr + block * block_words + words
    buffer_ptrs = buffer_ptr + index * block_words + words
    if TO_POOL:
        tl.store(pool_ptrs, tl.load(buffer_ptrs, mask=mask), mask=mask)
    else:
        tl.store(buffer_ptrs, tl.load(pool_ptrs, mask=mask), mask=mask)


def copy_blocks(pool: Tensor, block_ids: Tensor, buffer: Tensor, *, to_pool: bool) -> None:
    """Copies whole blocks between a contiguous `pool` [num_blocks, ...] and a uint8 `buffer` on the same device.

    Raises `IndexError` on an unknown block if `block_ids` lies in host memory. Ids on the device are not checked (a
    check would wait for the device), and unknown ones are left out.
    """
    if not pool.is_contiguous():
        raise ValueError("the pool must be contiguous")
    if not block_ids.is_cuda and block_ids.numel():
        low, high = torch.aminmax(block_ids)
        if int(low) < 0 or int(high) >= pool.shape[0]:
            raise IndexError("block_ids names a block outside the pool")
    block_bytes = pool.stride(0) * pool.element_size()
    aligned = (block_bytes, pool.data_ptr(), buffer.data_ptr())
    size = next(size for size in WORDS if all(value % size == 0 for value in aligned))
    ids = _on_device(block_ids.to(torch.int64).contiguous(), pool.device)
    block_words, chunk = block_bytes // size, CHUNK_BYTES // size
    # 65,535 is CUDA's limit on this grid axis.
    for first in range(0, ids.numel(), 65535):
        some = ids[first : first + 65535]
        _copy_blocks_kernel[(triton.cdiv(block_words, chunk), some.numel())](
            pool.view(-1).view(WORDS[size]),
            buffer[first * block_bytes :].view(WORDS[size]),
            some,
            pool.shape[0],
            block_words,
            TO_POOL=to_pool,
            CHUNK=chunk,
            num_warps=4,
            enable_fp_fusion=False,
        )


def kv_pack_triton(pool: Tensor, block_ids: Tensor, out: Tensor) -> Tensor:
    """Do what `kv_pack` does for a pool on a GPU; an `out` in host memory is filled through a buffer on the device."""
    buffer = out if out.device == pool.device else torch.empty(out.shape, dtype=out.dtype, device=pool.device)
    copy_blocks(pool, block_ids, buffer, to_pool=False)
    return out if buffer is out else out.copy_(buffer)


def _on_device(ids: Tensor, device: torch.device) -> Tensor:
    """`ids` on `device`, without waiting for the work queued there."""
    if device.type == "cuda" and not ids.is_cuda:
        return ids.pin_memory().to(device, non_blocking=True)
    return ids.to(device)
