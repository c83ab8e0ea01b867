"""Limits of time and memory for a client's program, in the main thread of a process of its own.

Python looks at signals between its instructions only, and one instruction can run for long in C: `==` of lists nested
28 deep takes 14 s. So there is a second limit, which the system enforces by ending the process.
"""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import psutil

MAX_S = 2.0
KILLED_AFTER_S = 2.2  # processor time after which the system ends the process, with `KILLED_BY`
KILLED_BY = signal.SIGVTALRM
AGAIN_S = 0.1  # pause between interruptions, in case one is caught
MAX_BYTES = 512 << 20  # growth of the address space


@contextmanager
def confined() -> Iterator[None]:
    """Interrupt the block with TimeoutError after `MAX_S`, and refuse memory beyond `MAX_BYTES` (MemoryError). A block
    that cannot be interrupted ends with its process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    room = psutil.Process().memory_info().vms + MAX_BYTES
    handler = signal.signal(signal.SIGALRM, _interrupt)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (room if soft == resource.RLIM_INFINITY else min(room, soft), hard))
        signal.signal(KILLED_BY, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_VIRTUAL, KILLED_AFTER_S)
        signal.setitimer(signal.ITIMER_REAL, MAX_S, AGAIN_S)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"longer than {MAX_S:g} s")
