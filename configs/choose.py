"""Choice of one of raydix's own configurations for a machine, for `raydix serve` without `--config`."""

from collections.abc import Collection
from dataclasses import dataclass

# Number of cores from which on prefill and decode get workers of their own. On two, one worker for both was the faster.
SPLIT_CORES = 4
# Least memory of two workers: each has weights and a KV pool of its own, beside the object store and Ray.
SPLIT_MEMORY_GIB = 12.0
GPU_GIB = 6.0  # GPU memory from which on a GPU is used; whether a model fits into it is found out from the model
GPU_MEMORY_GIB = 16.0  # main memory that two workers on GPUs need: 8 GiB of exported KV, staging buffers and Ray


@dataclass(frozen=True, slots=True)
class Machine:
    """Resources of a machine."""

    num_cores: int
    memory_gib: float
    gpu_gib: tuple[float, ...] = ()
    """The memory of each GPU."""
    free_gib: float | None = None
    """Memory that nothing else uses now; None: all of it."""

    @property
    def large_gpus_gib(self) -> tuple[float, ...]:
        """The memory of each GPU that is used: of several very unequal ones the large ones."""
        return tuple(gib for gib in self.gpu_gib if gib >= max(GPU_GIB, max(self.gpu_gib) / 2))


@dataclass(frozen=True, slots=True)
class ChosenConfiguration:
    """Name of a configuration, and the reason of the choice."""

    config: str
    reason: str


def choose_with(machine: Machine, roles: Collection[str]) -> ChosenConfiguration | None:
    """The configuration for a machine whose workers have these roles; None if no configuration has them."""
    has_gpus = bool(machine.large_gpus_gib)
    names = {
        frozenset({"mixed"}): "gpu_single" if has_gpus else "cpu_mixed",
        frozenset({"prefill", "decode"}): "gpu_disaggregated" if has_gpus else "cpu",
    }
    name = names.get(frozenset(roles))
    return None if name is None else ChosenConfiguration(name, f"workers that are {' and '.join(roles)}")


def choose(machine: Machine) -> ChosenConfiguration:
    """Choose the configuration for one machine that serves alone."""
    large_gpus = len(machine.large_gpus_gib)
    if large_gpus >= 2 and machine.num_cores >= SPLIT_CORES and machine.memory_gib >= GPU_MEMORY_GIB:
        return ChosenConfiguration("gpu_disaggregated", f"{large_gpus} GPUs, one for prefill and one for decode")
    if large_gpus:
        return ChosenConfiguration("gpu_single", "one GPU for prefill and decode")

    if machine.gpu_gib:
        gib = max(machine.gpu_gib)
        return ChosenConfiguration("cpu_mixed", f"a GPU of {gib:.0f} GiB, too small to be used: one worker on the CPU")

    if machine.num_cores < SPLIT_CORES:
        return ChosenConfiguration(
            "cpu_mixed", f"{_cores(machine.num_cores)} and no GPU: one worker prefills and decodes"
        )
    if machine.memory_gib < SPLIT_MEMORY_GIB:
        return ChosenConfiguration(
            "cpu_mixed", f"{machine.memory_gib:.0f} GiB of memory: one worker prefills and decodes"
        )

    return ChosenConfiguration(
        "cpu", f"{_cores(machine.num_cores)} and no GPU: a worker for prefill and one for decode"
    )


def _cores(number: int) -> str:
    return "one core" if number == 1 else f"{number} cores"
