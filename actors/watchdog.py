"""A thread that notices when one piece of work keeps a process's event loop, or the interpreter's lock, for itself.

The thread wakes at intervals. If it wakes late, it waited for a processor (the machine is busy), or for the lock, which
another thread of this process held. The kernel counts how long a thread waited for a processor, so the rest of the
lateness is the lock; and what was held counts only as far as some thread of the process computed meanwhile, by its own
clock of processor time. A turn of the event loop is measured by the same clock of the loop's thread, from one mark that
the watchdog sends through the loop to its arrival. So neither a busy machine nor a stopped process is reported.

A turn is logged while it lasts, with the work that the loop is at, and counted when it is over, with its whole time.

A watch costs some 20 wakes a second. While the process computes next to nothing a wake reads two clocks and no more,
and marks go through the loop only while its thread computes.
"""

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from raydix.engine.core.log_fields import about

logger = logging.getLogger(__name__)

INTERVAL_S = 0.05
LONG_S = 0.05  # processor time of a turn of the event loop, and of a hold of the lock, above which it is reported
QUIET_S = 1.0  # shortest time between two lines in the log
# Processor time of the loop's thread in an interval from which on turns are measured. Also that of the process up to
# which the threads' clocks are not read again: a hold that follows seems longer by less than this.
BUSY_S = 0.01


@dataclass(frozen=True, slots=True)
class Hold:
    """One piece of work that lasted too long, in seconds of processor time of its thread."""

    of: Literal["loop", "lock"]
    seconds: float
    thread: int


def lock_hold(late_s: float, waited_s: float, used_s: Mapping[int, float]) -> Hold | None:
    """The hold of the interpreter's lock for which a thread woke `late_s` late, after waiting `waited_s` for a
    processor; `used_s` is the processor time of each other thread since the last wake."""
    if not used_s:
        return None
    thread = max(used_s, key=lambda ident: used_s[ident])
    held_s = min(late_s - waited_s, used_s[thread])
    return Hold("lock", held_s, thread) if held_s > LONG_S else None


@dataclass(slots=True)
class _Mark:
    """A mark on its way through the event loop."""

    used_s: float
    """Processor time of the loop's thread when the mark was sent."""
    arrived_s: float | None = None
    """Processor time of the loop's thread when the mark arrived."""
    is_logged: bool = False

    def arrive(self) -> None:
        """Called in the loop."""
        self.arrived_s = time.thread_time()


class Watchdog:
    """Watches the process of an event loop, from `start` to `stop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_hold: Callable[[Hold], None]) -> None:
        """Called in the thread of the loop. `on_hold` is called in the watchdog's thread with each turn and hold that
        was too long, when it is over."""
        self._loop = loop
        self._on_hold = on_hold
        self._loop_thread = threading.get_ident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._mark: _Mark | None = None
        self._logged_at = -QUIET_S
        self._num_unlogged = 0

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching, and wait for the thread."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        with _Delays() as delays:
            used, read_at = _processor_times(), time.process_time()
            waited = delays.waited_s()
            while not self._over.is_set() and not self._loop.is_closed():
                due = time.monotonic() + INTERVAL_S
                time.sleep(INTERVAL_S)
                late_s = time.monotonic() - due
                waited, before = delays.waited_s(), waited
                if time.process_time() - read_at < BUSY_S and self._mark is None:
                    continue

                now, read_at = _processor_times(), time.process_time()
                spent = {ident: time_s - used[ident] for ident, time_s in now.items() if ident in used}
                spent.pop(threading.get_ident(), None)
                if late_s > LONG_S and (hold := lock_hold(late_s, waited - before, spent)) is not None:
                    self._log(hold)
                    self._on_hold(hold)
                self._look_at_turn(now.get(self._loop_thread, 0.0), spent.get(self._loop_thread, 0.0))
                used = now

    def _look_at_turn(self, used_s: float, spent_s: float) -> None:
        """Log and count a turn of the event loop that is too long, each once. Sends the next mark."""
        mark = self._mark
        if mark is not None and mark.arrived_s is None:
            if not mark.is_logged and used_s - mark.used_s > LONG_S:
                mark.is_logged = True
                self._log(Hold("loop", used_s - mark.used_s, self._loop_thread))
            return

        if mark is not None and mark.arrived_s is not None and mark.arrived_s - mark.used_s > LONG_S:
            turn = Hold("loop", mark.arrived_s - mark.used_s, self._loop_thread)
            if not mark.is_logged:  # over before it was seen: what the thread is at now is other work
                self._log(turn, is_over=True)
            self._on_hold(turn)

        self._mark = None
        if spent_s > BUSY_S:
            self._mark = _Mark(used_s)
            try:
                self._loop.call_soon_threadsafe(self._mark.arrive)
            except RuntimeError:  # the loop has closed
                self._mark = None

    def _log(self, hold: Hold, *, is_over: bool = False) -> None:
        """Log a hold with the work that its thread is at, if it is at it still, unless a line was written just now."""
        now = time.monotonic()
        if now < self._logged_at + QUIET_S:
            self._num_unlogged += 1
            return
        frame = None if is_over else sys._current_frames().get(hold.thread)
        place = None if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        is_of_loop = hold.thread == self._loop_thread and not is_over
        task = asyncio.current_task(self._loop) if is_of_loop else None
        request = None if task is None else request_of(task)
        # The operator's terminal shows warnings: one names a request that harms others. Imports at the start do not.
        logger.log(
            logging.INFO if request is None else logging.WARNING,
            "the %s was held for %.0f ms of processor time",
            "event loop" if hold.of == "loop" else "interpreter's lock",
            1000 * hold.seconds,
            extra=about(
                "held",
                of=hold.of,
                held_s=round(hold.seconds, 4),
                request=request,
                thread=names.get(hold.thread),
                place=place,
                unlogged=self._num_unlogged,
            ),
        )
        self._logged_at, self._num_unlogged = now, 0


_PREFIX = "request "


def work_for(request_id: str) -> None:
    """Note the request that the current task works for, for the watchdog."""
    task = asyncio.current_task()
    if task is not None:
        task.set_name(_PREFIX + request_id)


def request_of(task: "asyncio.Task[object]") -> str | None:
    """The request that a task works for, if that is known."""
    name = task.get_name()
    return name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else None


def _processor_times() -> dict[int, float]:
    """Processor time of each of Python's threads, in seconds."""
    times = {}
    for thread in threading.enumerate():
        if thread.ident is not None:
            try:
                times[thread.ident] = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            except OSError:  # the thread has just ended
                continue
    return times


class _Delays:
    """The kernel's count of the time for which the current thread was ready and waited for a processor."""

    def __init__(self) -> None:
        try:
            self._file: int | None = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        except OSError:
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            os.close(self._file)

    def waited_s(self) -> float:
        """Seconds since the thread began; 0 where the kernel does not tell."""
        if self._file is None:
            return 0.0
        try:
            return int(os.pread(self._file, 128, 0).split()[1]) / 1e9  # running, waiting, number of slices; ns
        except (OSError, IndexError, ValueError):
            return 0.0
