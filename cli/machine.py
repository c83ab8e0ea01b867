"""Resources of this machine, or of the container around this process."""

import os
from pathlib import Path

from raydix.configs.choose import Machine
from raydix.engine.core.settings import GIB
from raydix.engine.model.host_memory import CGROUP, OWN_GROUP, host_memory

# Files that CUDA's driver needs, on Linux and in Linux below Windows: without any there is no GPU for torch to see.
GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


def this_machine(cgroup: Path = CGROUP, own_group: Path = OWN_GROUP) -> Machine:
    """Cores, memory and GPUs that this process may use."""
    memory = host_memory(cgroup, own_group)
    return Machine(
        num_cores=num_cores(cgroup),
        memory_gib=memory.total / GIB,
        gpu_gib=_gpu_gib() if any(device.exists() for device in GPU_DEVICES) else (),
        free_gib=memory.free / GIB,
    )


def _gpu_gib() -> tuple[float, ...]:
    """The memory of each GPU that torch sees."""
    import torch  # which takes seconds, and only tells of GPUs

    gpus = range(torch.cuda.device_count())
    return tuple(torch.cuda.get_device_properties(gpu).total_memory / GIB for gpu in gpus)


def num_cores(cgroup: Path) -> int:
    """Cores that this process may run on; fewer in a container with a quota of their time."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, period = _number(cgroup / "cpu.max"), _number(cgroup / "cpu.max", 1)
    return allowed if quota == float("inf") else max(1, min(allowed, int(quota / period)))


def _number(path: Path, index: int = 0) -> float:
    """A limit of the control group; infinite where there is none."""
    try:
        return float(path.read_text().split()[index].replace("max", "inf"))
    except (OSError, ValueError, IndexError):
        return float("inf")
