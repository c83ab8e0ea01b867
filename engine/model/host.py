"""Memory and cores of this machine, or of the container around this process: a limit counts as the machine's."""

import os
from collections.abc import Iterator, Sequence
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


def num_cores(cgroup: Path = CGROUP, own_group: Path = OWN_GROUP) -> int:
    """Cores that this process may use: those that it may run on, or fewer where its control group has a quota of their
    time. More threads than the quota would all stand still once it is spent, in the middle of a step."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *(int(quota) for quota in _quotas(cgroup, own_group))]))


def _quotas(cgroup: Path, own_group: Path) -> Iterator[float]:
    """Seconds of processor time in a second, of this process's control group and of those around it, where limited."""
    for folder in _folders(cgroup, own_group, ""):
        yield from _ratio(_words(folder / "cpu.max"))
    for folder in _folders(cgroup / "cpu", own_group, "cpu"):
        yield from _ratio(_words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us"))


def _ratio(words: Sequence[str]) -> Iterator[float]:
    """Quota and period; without a limit the quota is `max` or, in version 1, negative."""
    try:
        quota, period = map(float, words)
    except ValueError:  # none, or not two numbers
        return
    if quota > 0 and period > 0:
        yield quota / period


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _limits(cgroup: Path, own_group: Path) -> Iterator[tuple[float, float]]:
    """Limits of memory and what is used of each, in bytes: of this process's control group and of those around it, in
    version 2 and in version 1. In a container the group is mounted as the root."""
    for folder, limit, usage, inactive in _groups(cgroup, own_group):
        bytes_limit = _number(folder / limit, float("inf"))
        # Files that nobody uses are dropped when memory is asked for.
        used = _number(folder / usage, 0.0) - _statistic(folder / "memory.stat", inactive)
        yield bytes_limit, max(0.0, used)


def _groups(cgroup: Path, own_group: Path) -> Iterator[tuple[Path, str, str, str]]:
    for folder in _folders(cgroup, own_group, ""):
        yield folder, "memory.max", "memory.current", "inactive_file"
    for folder in _folders(cgroup / "memory", own_group, "memory"):
        yield folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"


def _folders(root: Path, own_group: Path, kind: str) -> set[Path]:
    """Folders of this process's control group and of those around it, up to `root`. `kind`: a controller of version 1,
    each of which has groups of its own; empty for version 2."""
    try:
        lines = [line.split(":", 2) for line in own_group.read_text().splitlines()]
    except OSError:
        lines = []
    folders = {root}
    for _, kinds, path in lines:
        if kind in kinds.split(","):
            own = root / path.lstrip("/")
            folders |= {own, *(parent for parent in own.parents if root in parent.parents)}
    return folders


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
