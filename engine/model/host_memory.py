"""Memory of this machine, or of the container around this process: a limit counts as the machine's memory."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CGROUP = Path("/sys/fs/cgroup")
OWN_GROUP = Path("/proc/self/cgroup")
MEMORY = Path("/proc/meminfo")


class HostMemory(NamedTuple):
    """Memory of the host in bytes."""

    total: float
    free: float
    """What nothing else uses now."""


def host_memory(cgroup: Path = CGROUP, own_group: Path = OWN_GROUP) -> HostMemory:
    """Memory that this process may use."""
    total, free = _whole()
    for limit, used in _limits(cgroup, own_group):
        total, free = min(total, limit), min(free, max(0.0, limit - used))
    return HostMemory(total, min(total, free))


def _whole() -> tuple[float, float]:
    """All of the machine's memory, and what of it nothing else uses."""
    try:
        lines = dict(line.split(":", 1) for line in MEMORY.read_text().splitlines())
        total, available = (1024.0 * float(lines[name].split()[0]) for name in ("MemTotal", "MemAvailable"))  # from KiB
        return total, available
    except (OSError, ValueError, KeyError):
        page = os.sysconf("SC_PAGE_SIZE")
        total = float(page * os.sysconf("SC_PHYS_PAGES"))
        return total, total


def _limits(cgroup: Path, own_group: Path) -> Iterator[tuple[float, float]]:
    """Limits of memory and what is used of each, in bytes: of this process's control group and of those around it, in
    version 2 and in version 1. In a container the group is mounted as the root."""
    for folder, limit, usage, inactive in _groups(cgroup, own_group):
        bytes_limit = _number(folder / limit, float("inf"))
        # Files that nobody uses are dropped when memory is asked for.
        used = _number(folder / usage, 0.0) - _statistic(folder / "memory.stat", inactive)
        yield bytes_limit, max(0.0, used)


def _groups(cgroup: Path, own_group: Path) -> Iterator[tuple[Path, str, str, str]]:
    try:
        lines = [line.split(":", 2) for line in own_group.read_text().splitlines()]
    except OSError:
        lines = []
    second = {"/", *(path for number, _, path in lines if number == "0")}
    first = {"/", *(path for _, kinds, path in lines if "memory" in kinds.split(","))}
    for root, paths, names in (
        (cgroup, second, ("memory.max", "memory.current", "inactive_file")),
        (cgroup / "memory", first, ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
    ):
        folders = {root}
        for path in paths:
            own = root / path.lstrip("/")
            folders |= {own, *(parent for parent in own.parents if root in parent.parents)}
        for folder in folders:
            yield folder, *names


def _statistic(path: Path, name: str) -> float:
    """A line of a control group's statistics; 0 where there is none."""
    try:
        values = dict(line.split(maxsplit=1) for line in path.read_text().splitlines())
        return float(values[name])
    except (OSError, ValueError, KeyError):
        return 0.0


def _number(path: Path, missing: float) -> float:
    """A number of the control group; `max` is infinite."""
    try:
        return float(path.read_text().strip().replace("max", "inf"))
    except (OSError, ValueError):
        return missing
