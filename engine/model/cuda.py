"""CUDA's services to the engine: graphs, copies beside the computation, and transfers without waiting.

`Graphs` and `CopyQueue` are the borders at which tests replace CUDA. `upload` and `download` are the identity on a CPU.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


class Graphs(Protocol):
    """Work that is recorded once and run again and again, on the same memory."""

    def capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Record `work`. The returned function repeats the work and returns the same tensor each time."""
        ...

    def wait(self) -> None:
        """Wait until the device has done all work asked of it."""
        ...


class CopyQueue(Protocol):
    """Copies between the device and pinned memory, one after the other, beside the computation."""

    def pinned(self, num_bytes: int) -> Tensor:
        """Host memory that the device can read and write by itself, [num_bytes] uint8."""
        ...

    def computed(self) -> Callable[[], None]:
        """Mark a point in the computation asked for so far. The returned function, callable in any thread, makes all
        later copies wait for the point."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        """Queue a copy; the returned function waits for the copy."""
        ...

    def finish_before_computing(self) -> None:
        """Make computation asked for from now on wait for all copies queued so far."""
        ...


class CudaGraphs:
    """CUDA graphs that share one pool of memory: no two of them run at once, and one may overwrite memory of another,
    except the returned tensor."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: Any = None

    def capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Run `work` once, which compiles its kernels, then record it."""
        current, side = torch.cuda.current_stream(self._device), _stream(self._device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            work()

        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            output = work()

        self._memory = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay

    def wait(self) -> None:
        """Until the current stream is done."""
        torch.cuda.current_stream(self._device).record_event().synchronize()


class CudaCopyQueue:
    """A CUDA stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _stream(device)

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def computed(self) -> Callable[[], None]:
        point = torch.cuda.current_stream(self._device).record_event()
        return lambda: self._stream.wait_event(point)

    def copy(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        wait: Callable[[], None] = self._stream.record_event().synchronize
        return wait

    def finish_before_computing(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def upload(values: Sequence[Any] | np.ndarray[Any, Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `values` on the device, without waiting for the device's work. On a CPU an array's memory is shared."""
    host = torch.as_tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def download(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in host memory, after waiting once for all of them; on a CPU themselves."""
    if not tensors or not tensors[0].is_cuda:
        return list(tensors)
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensors[0].device).record_event().synchronize()
    return copies


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
