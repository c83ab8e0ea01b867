"""Memory for a worker's KV pool, measured when its weights are loaded.

On a GPU a step of the largest budget is run over a small pool first. The pool gets what then remains of 90 % of the
device's memory (or of this engine's share of it): the weights, the step's peak, CUDA's context and other processes are
all in the measured numbers. The last tenth is for graphs and for fragments.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from raydix.engine.model.host import host_memory

SHARE = 0.9  # share of a GPU's memory that may be used
# Share of a node's free memory that a worker on a CPU takes where no launcher has planned: others may do the same.
UNPLANNED_SHARE = 0.25


class DeviceMemory(Protocol):
    """Memory of one device, in bytes. Tests replace CUDA here."""

    def total(self) -> int: ...

    def free(self) -> int:
        """What no process has taken."""
        ...

    def reserved(self) -> int:
        """What this process has taken for tensors, in use or not."""
        ...

    def peak(self) -> int:
        """The most that tensors of this process have used at a time since `begin`."""
        ...

    def begin(self) -> None:
        """Begin to measure a peak."""
        ...

    def release(self) -> None:
        """Give back what no tensor uses."""
        ...


class CudaMemory:
    """The numbers of torch.cuda."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def free(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device)

    def begin(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def release(self) -> None:
        torch.cuda.empty_cache()


def measured_pool_bytes(memory: DeviceMemory, run_step: Callable[[], int], share: float = 1.0) -> int:
    """Memory that a pool may have; negative if the rest alone needs more than there may be.

    `run_step` runs the largest step and returns the bytes of the pool that it ran over, which is gone then.
    """
    memory.begin()
    trial_bytes = run_step()
    own = memory.peak() - trial_bytes
    others = memory.total() - memory.free() - memory.reserved()
    memory.release()
    return int(SHARE * share * memory.total()) - others - own


def unplanned_pool_bytes() -> int:
    """Memory of a pool on a CPU, where no launcher has planned the node."""
    return int(UNPLANNED_SHARE * host_memory().free)
