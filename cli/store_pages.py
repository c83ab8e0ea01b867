"""Memory of Ray's object store, taken from the system while the server already serves.

The first touch of a page of shared memory takes some microseconds: a segment of KV would be written several times more
slowly than later. Ray can take all pages at once (`RAY_preallocate_plasma_memory`), but its raylet answers nobody
meanwhile, for 2.5 s with 1.75 GiB. Here a thread of the lowest priority takes them once the server is ready. What
already lies in the store stays as it is.
"""

import contextlib
import os
import threading
from pathlib import Path

STORE = "/dev/shm/plasma"
"""Beginning of the name of the store's file, which Ray removes once it is open."""
PIECE_BYTES = 1 << 20
"""Taken by one call of the system, which ends some milliseconds later also where other processes leave little time."""
LOWEST = 19
"""Niceness of the thread: requests go first."""


class StorePages:
    """Takes the pages of the object store of a raylet, in a thread, from `start` to `stop`."""

    def __init__(self, raylet: int) -> None:
        """`raylet`: its process."""
        self._raylet = raylet
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._take, name="pages of the object store", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Take no more pages. The thread lets go of the store soon, which nobody waits for on a busy machine."""
        self._over.set()

    def join(self) -> None:
        """Wait until all pages are taken."""
        self._thread.join()

    def _take(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)  # of this thread alone, on Linux
        # Where the raylet has ended, or the system has no more memory, pages are taken when they are touched.
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{self._raylet}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    if str(link.readlink()).startswith(STORE):
                        self._take_of(link)

    def _take_of(self, path: Path) -> None:
        with path.open("r+b", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            for begin in range(0, size, PIECE_BYTES):
                if self._over.is_set():
                    return
                os.posix_fallocate(file.fileno(), begin, min(PIECE_BYTES, size - begin))
