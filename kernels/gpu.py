"""What kernels need to know of the GPU that they run on."""

import functools
import sys

import torch


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of `device`, one where it is no GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether `device` is of the Hopper generation (compute capability 9.0), whose matrix instructions take 64 rows and
    give an element the same bits whatever the shape of its tile."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have on `device`; without bound where it is no GPU."""
    if device.type != "cuda":
        return sys.maxsize
    properties = torch.cuda.get_device_properties(device)
    size: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return size
