"""Load of the machine by processes other than the engines: a figure taken under such load does not count."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

QUIET = 0.2
"""Limit of the cores used by others in a turn that counts."""
SAMPLE_S = 2.0


@dataclass
class Watch:
    """Cores used by others during the watch."""

    cores: float = 0.0


@contextmanager
def watching(own_cpu_s: Callable[[], float]) -> Iterator[Watch]:
    """Watches for as long as the block runs; `own_cpu_s` is the CPU time used by this benchmark's processes."""
    watch = Watch()
    started, before = time.perf_counter(), _busy_s() - own_cpu_s()
    yield watch
    watch.cores = max(0.0, _busy_s() - own_cpu_s() - before) / (time.perf_counter() - started)


def wait_until_quiet(own_cpu_s: Callable[[], float], patience_s: float) -> None:
    """Return when others leave the cores alone, or when `patience_s` is over."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        with watching(own_cpu_s) as watch:
            time.sleep(SAMPLE_S)
        if watch.cores <= QUIET:
            return


def _busy_s() -> float:
    """CPU time used by all processes, and taken from this machine by its host."""
    times = psutil.cpu_times()
    busy = times.user + times.nice + times.system + times.irq + times.softirq + times.steal
    return float(busy)
