"""Resources of this machine, or of the container around this process."""

from pathlib import Path

from raydix.configs.choose import Machine
from raydix.engine.core.settings import GIB
from raydix.engine.model.host import CGROUP, OWN_GROUP, host_memory, num_cores

# Files that CUDA's driver needs, on Linux and in Linux below Windows: without any there is no GPU for torch to see.
GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


def this_machine(cgroup: Path = CGROUP, own_group: Path = OWN_GROUP) -> Machine:
    """Cores, memory and GPUs that this process may use."""
    memory = host_memory(cgroup, own_group)
    return Machine(
        num_cores=num_cores(cgroup, own_group),
        memory_gib=memory.total / GIB,
        gpu_gib=_gpu_gib() if any(device.exists() for device in GPU_DEVICES) else (),
        free_gib=memory.free / GIB,
    )


def _gpu_gib() -> tuple[float, ...]:
    """The memory of each GPU that torch sees."""
    import torch  # which takes seconds, and only tells of GPUs

    gpus = range(torch.cuda.device_count())
    return tuple(torch.cuda.get_device_properties(gpu).total_memory / GIB for gpu in gpus)
