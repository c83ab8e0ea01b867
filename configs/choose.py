"""Choice of one of raydix's own configurations for a machine, for `raydix serve` without `--config`."""

from dataclasses import dataclass

SPLIT_CORES = 4
"""From so many cores on prefill and decode get workers of their own. On two, one worker for both was the faster."""
SPLIT_MEMORY_GIB = 12.0
"""Least memory of two workers: each has weights and a KV pool of its own, beside the object store and Ray."""
GPU_GIB = 24.0
"""GPU memory that the configurations for GPUs need of each: a KV pool of 20 GiB, and the weights."""
GPU_MEMORY_GIB = 16.0
"""Main memory that two workers on GPUs need: 8 GiB of exported KV, staging buffers and Ray."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Resources of a machine."""

    num_cores: int
    memory_gib: float
    gpu_gib: tuple[float, ...] = ()
    """The memory of each GPU."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Name of a configuration, and the reason of the choice."""

    config: str
    reason: str


def choose(machine: Machine) -> Choice:
    """Choose the configuration for one machine that serves alone."""
    large_gpus = sum(gib >= GPU_GIB for gib in machine.gpu_gib)
    if large_gpus >= 2 and machine.num_cores >= SPLIT_CORES and machine.memory_gib >= GPU_MEMORY_GIB:
        return Choice("gpu_disaggregated", f"{large_gpus} GPUs, one for prefill and one for decode")
    if large_gpus:
        return Choice("gpu_single", "one GPU for prefill and decode")

    if machine.gpu_gib:
        gib = max(machine.gpu_gib)
        return Choice(
            "cpu_mixed", f"a GPU of {gib:.0f} GiB, less than gpu_single needs: one worker with a small KV pool"
        )

    if machine.num_cores < SPLIT_CORES:
        return Choice("cpu_mixed", f"{_cores(machine.num_cores)} and no GPU: one worker prefills and decodes")
    if machine.memory_gib < SPLIT_MEMORY_GIB:
        return Choice("cpu_mixed", f"{machine.memory_gib:.0f} GiB of memory: one worker prefills and decodes")

    return Choice("cpu", f"{_cores(machine.num_cores)} and no GPU: a worker for prefill and one for decode")


def _cores(number: int) -> str:
    return "one core" if number == 1 else f"{number} cores"
