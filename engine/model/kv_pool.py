"""The paged KV cache: one tensor of blocks.

This module knows positions in memory only; the block pool knows the request or prefix of a block
(`raydix.engine.core.worker.block_pool`).
"""

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from raydix.engine.model.config import ModelConfig
from raydix.kernels.cpp import prefer_huge_pages
from raydix.kernels.kv_pack import kv_pack
from raydix.kernels.kv_unpack import kv_unpack
from raydix.kernels.narrow_kv import FACTOR_BYTES

ByteArray: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

ALIGNMENT = 4096  # bytes; the pool begins at a page, so that no vector of the kernels lies across two cache lines


class KVPool:
    """Keys and values of `num_blocks` blocks of `block_size` token positions, for every layer that keeps them.

    The tensor is block-major, [num_blocks, num_attention_layers, 2, num_kv_heads, block_size, head_dim]: a block is one
    contiguous run of `block_bytes` bytes, so exporting and importing blocks are plain copies, whatever the model. Of
    latents there is 1 in the place of 2. Of a model whose layers have different heads it is [num_blocks, numbers], the
    layers of a block one after the other. In int8 a head's row has its numbers and its factor
    (`raydix.kernels.narrow_kv`) in the place of head_dim numbers.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        heads = [config.kv_heads(index) for index in config.attention_layers]
        behind = FACTOR_BYTES if dtype == torch.int8 else 0
        shapes = [(1 + each.has_values, each.num, block_size, each.dim + behind) for each in heads]
        is_uniform = len(set(heads)) == 1
        shape = (num_blocks, len(shapes), *shapes[0]) if is_uniform else (num_blocks, sum(map(math.prod, shapes)))
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = torch.device(device)
        self.data = (
            untouched(shape, dtype) if self.device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
        )
        self.block_bytes = self.data.stride(0) * self.data.element_size()
        flat = self.data.view(num_blocks, -1)
        parts = torch.split(flat, [math.prod(shape) for shape in shapes], dim=1)
        by_layer = [part.view(num_blocks, *shape) for part, shape in zip(parts, shapes, strict=True)]
        self.layers = tuple((layer[:, 0], layer[:, -1]) for layer in by_layer)
        """Keys and values of each layer that keeps them, in the layers' order; latents are both."""

    def export_blocks(self, block_ids: Sequence[int]) -> ByteArray:
        """The bytes of the given blocks one after the other: [len(block_ids) * block_bytes] uint8."""
        return kv_pack(self.data, block_ids).cpu().numpy()

    def start_export(self, block_ids: Sequence[int]) -> ByteArray | Callable[[], ByteArray]:
        """Return the bytes of `export_blocks`; or, where a device copies beside the computation, a function that waits
        for the bytes.

        The function may be called in any thread, once. In both cases the blocks may be given to others at once.
        """
        return self.export_blocks(block_ids)

    def import_blocks(self, buffer: ByteArray, block_ids: Sequence[int]) -> None:
        """Fill the given blocks, in order, with bytes that `export_blocks` gave. The buffer may be read-only."""
        if block_ids:
            kv_unpack(as_tensor(buffer), self.data, block_ids)

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block onto another."""
        self.data[target].copy_(self.data[source])


def untouched(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros in main memory whose pages the system provides at their first use.

    To touch them all beforehand takes about a second of processor time per GiB, for memory that may never be needed.
    The first use of a block in huge pages costs under half a percent of computing its content.
    """
    size = math.prod(shape) * dtype.itemsize
    memory = torch.from_numpy(np.zeros(size + ALIGNMENT, np.uint8))
    first = -memory.data_ptr() % ALIGNMENT
    prefer_huge_pages(memory)
    return memory[first : first + size].view(dtype).view(shape)


def as_tensor(buffer: ByteArray) -> Tensor:
    """View the buffer's own memory as a tensor, which the caller only reads and keeps alive.

    torch has no read-only tensors and warns of read-only arrays, hence the detour by the address.
    """
    contiguous = np.ascontiguousarray(buffer)
    if contiguous.flags.writeable:
        return torch.from_numpy(contiguous)
    memory = (ctypes.c_uint8 * contiguous.size).from_address(contiguous.ctypes.data)
    return torch.frombuffer(memory, dtype=torch.uint8)
