"""The KV pool of a GPU: blocks travel through pinned memory on streams of their own, beside the computation.

On their way out, blocks are gathered in the order of the computation into a buffer on the device. So the blocks may be
given to others at once: any overwriting comes behind the gathering. The slow half of the way, from the device to the
host, is waited for by the reader of the bytes, in the reader's own thread. On the way in, computation asked for
afterwards waits on the device, and the host waits only until the last piece is under way.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from raydix.engine.model.config import ModelConfig
from raydix.engine.model.cuda import CopyQueue, CudaCopyQueue
from raydix.engine.model.kv_pool import ByteArray, KVPool, as_tensor
from raydix.kernels.kv_pack import kv_pack
from raydix.kernels.kv_unpack import kv_unpack

PIECE_BYTES = 16 << 20


class Staging:
    """A copy in pieces through two pinned buffers: while one is between host and device, the other is being filled or
    emptied. Calls of several threads take turns."""

    def __init__(self, queue: CopyQueue, piece_bytes: int = PIECE_BYTES) -> None:
        self._queue = queue
        self._piece_bytes = piece_bytes
        self._buffers = [queue.pinned(piece_bytes) for _ in range(2)]
        # Until the last copy from or to the buffer is done.
        self._waits: list[Callable[[], None]] = [_nothing, _nothing]
        self._lock = threading.Lock()

    def to_host(self, source: Tensor, target: Tensor, after: Callable[[], None]) -> None:
        """Copy `source` on the device, [num_bytes] uint8, with its content at the point `after`; returns at the copy's
        end."""
        with self._lock:
            after()
            empty = _nothing
            for index, piece in enumerate(self._pieces(source)):
                buffer = self._buffers[index % 2][: source[piece].numel()]
                self._copy(index, buffer, source[piece])
                empty()  # the other buffer, meanwhile
                empty = partial(self._empty, index, buffer, target[piece])
            empty()

    def to_device(self, source: Tensor, target: Tensor) -> None:
        """Copy `source` on the host, [num_bytes] uint8. On return `source` is free again, and `target` is complete for
        all computation asked for from then on."""
        with self._lock:
            self._queue.computed()()  # what `target` was before is done with
            for index, piece in enumerate(self._pieces(source)):
                self._waits[index % 2]()
                buffer = self._buffers[index % 2][: source[piece].numel()]
                buffer.copy_(source[piece])
                self._copy(index, target[piece], buffer)
            self._queue.finish_before_computing()

    def _copy(self, index: int, target: Tensor, source: Tensor) -> None:
        self._waits[index % 2] = self._queue.copy(target, source)

    def _empty(self, index: int, buffer: Tensor, target: Tensor) -> None:
        self._waits[index % 2]()
        target.copy_(buffer)

    def _pieces(self, tensor: Tensor) -> list[slice]:
        return [slice(first, first + self._piece_bytes) for first in range(0, tensor.numel(), self._piece_bytes)]


class CudaKVPool(KVPool):
    """A KV pool on a GPU. The engine's thread alone calls it, except the function returned by `start_export`."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        queues: Callable[[torch.device], CopyQueue] = CudaCopyQueue,
    ) -> None:
        super().__init__(config, num_blocks, block_size, dtype, device)
        self._out_queue = queues(self.device)
        self._out, self._in = Staging(self._out_queue), Staging(queues(self.device))

    def start_export(self, block_ids: Sequence[int]) -> Callable[[], ByteArray]:
        """Gather the given blocks, which are free for others then; any thread may call for their bytes, once."""
        packed = [kv_pack(self.data, block_ids)]
        gathered = self._out_queue.computed()

        def arrived() -> ByteArray:
            source = packed.pop()
            target = torch.empty(source.shape, dtype=torch.uint8)
            self._out.to_host(source, target, gathered)
            return target.numpy()

        return arrived

    def export_blocks(self, block_ids: Sequence[int]) -> ByteArray:
        return self.start_export(block_ids)()

    def import_blocks(self, buffer: ByteArray, block_ids: Sequence[int]) -> None:
        if block_ids:
            staged = torch.empty(buffer.nbytes, dtype=torch.uint8, device=self.device)
            self._in.to_device(as_tensor(buffer), staged)
            kv_unpack(staged, self.data, block_ids)


def _nothing() -> None:
    pass
