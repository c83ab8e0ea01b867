"""The last words of a worker's process: for which requests it computed when it died or fell silent.

Each thread that computes for requests notes their ids in a file that is mapped into memory: a store of some bytes,
which needs no system call, and which stays when the process dies. A second file tells of an end that the process met by
what it computed: there Python's `faulthandler` names the thread that got a fatal signal, a worker says that its device
is broken, and a host that it kills a worker which hangs. Who reads finds the requests that are *named*:

| the process | named are the requests of |
|---|---|
| died of SIGSEGV, SIGABRT, SIGBUS, SIGFPE or SIGILL | the thread that got it; all threads if it was none of Python's |
| ended because its device is broken, or was killed by its host because its engine hangs | all threads |
| lives, and answers nothing | the threads that run now; none while the event loop itself runs |
| ended in any other way, such as by SIGKILL, or is stopped | none: an operator, the kernel or the node did it |

A process killed for its memory got SIGKILL: the kernel chooses the largest process, so nobody is named.
"""

import contextlib
import ctypes
import faulthandler
import logging
import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from raydix.actors.processes import is_running, is_there, own_process
from raydix.engine.core.types import ProcessName

logger = logging.getLogger(__name__)

_PROCESS = struct.Struct("<QQ")  # id and start of the process, at the beginning of the file
# A thread: its id in Python and in the kernel, and the number of ids and of their bytes that follow.
_SLOT = struct.Struct("<QQII")
_SLOT_BYTES = 1 << 15
_NUM_SLOTS = 4
_MAX_AGE_S = 24 * 3600.0  # age of the files of a dead process that the next worker of the node erases
_SIGNAL_STACK_BYTES = 1 << 16
_CURRENT = "Current thread 0x"
_ENDED = "raydix: "  # beginning of an end that raydix itself wrote down


def words_folder() -> Path:
    """The folder of the last words of this user's workers on this node."""
    return Path(tempfile.gettempdir()) / f"raydix-{os.getuid()}" / "last-words"


class LastWords:
    """The last words of this process, under the name of its incarnation."""

    def __init__(self, folder: Path, name: str) -> None:
        """Begin, called in the thread of the event loop; from now on a fatal signal is written down. Raises OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _erase_old(folder)
        size = _PROCESS.size + _NUM_SLOTS * _SLOT_BYTES
        with (folder / name).open("w+b") as file:
            file.truncate(size)
            self._memory = mmap.mmap(file.fileno(), size)
        own = own_process("")
        _PROCESS.pack_into(self._memory, 0, own.pid, own.started)
        self._end = _end_file(folder, name).open("w")
        faulthandler.enable(self._end, all_threads=True)
        self._slots: dict[int, int] = {}  # the place in the file of each thread, by Python's id
        self._stacks: list[ctypes.Array[ctypes.c_char]] = []
        self._lock = threading.Lock()
        self.note(())  # the first place is the event loop's

    def note(self, request_ids: Sequence[str]) -> None:
        """Note the requests that the calling thread computes for. Ids beyond the room are counted and not named."""
        ident = threading.get_ident()
        at = self._slots.get(ident)
        if at is None:
            at = self._begin_slot(ident)
        text = "\n".join(request_ids).encode()[: _SLOT_BYTES - _SLOT.size]
        native = threading.get_native_id()
        # Whoever reads between the stores finds no request rather than a wrong one.
        _SLOT.pack_into(self._memory, at, ident, native, 0, 0)
        if request_ids:
            self._memory[at + _SLOT.size : at + _SLOT.size + len(text)] = text
            _SLOT.pack_into(self._memory, at, ident, native, len(request_ids), len(text))

    def end(self, reason: str) -> None:
        """Write down that this process ends by what it computes."""
        self._end.write(f"{_ENDED}{reason}\n")
        self._end.flush()

    def _begin_slot(self, ident: int) -> int:
        """A place for another thread: the last one is shared by all that come later."""
        with self._lock:
            at = _PROCESS.size + min(len(self._slots), _NUM_SLOTS - 1) * _SLOT_BYTES
            self._slots[ident] = at
            self._stacks.append(_take_signal_stack())
        return at


class _Stack(ctypes.Structure):
    """The kernel's `stack_t`."""

    _fields_ = (("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


def _take_signal_stack() -> "ctypes.Array[ctypes.c_char]":
    """Give the calling thread a stack for its signals, without which a stack that has overflowed dies unheard; returns
    the memory, which must stay as long as the thread."""
    memory = ctypes.create_string_buffer(_SIGNAL_STACK_BYTES)
    with contextlib.suppress(OSError, AttributeError):  # of another C library: the words are fewer
        ctypes.CDLL(None).sigaltstack(ctypes.byref(_Stack(ctypes.addressof(memory), 0, len(memory))), None)
    return memory


def begin_words(name: str) -> LastWords | None:
    """Begin the last words of this process; None, and a line in the log, where they cannot be written."""
    try:
        return LastWords(words_folder(), name)
    except OSError as error:
        logger.warning("no last words are written (%s)", error)
        return None


def condemn(name: str, folder: Path | None = None) -> None:
    """Write down, before a process of this node is killed because it hangs, that it did; a stopped one does not."""
    folder = words_folder() if folder is None else folder
    words = _read(folder, name)
    if words is not None and is_there(words.process):
        with contextlib.suppress(OSError), _end_file(folder, name).open("a") as file:
            file.write(f"{_ENDED}it hangs\n")


def named_requests(name: str, *, is_dead: bool, folder: Path | None = None) -> tuple[str, ...]:
    """The requests that the last words of a process of this node name, see the table above; none without words.
    `is_dead`: as others know it; its threads may look alive for a moment longer."""
    folder = words_folder() if folder is None else folder
    words = _read(folder, name)
    if words is None:
        return ()
    try:
        end = _end_file(folder, name).read_text(errors="replace")
    except OSError:
        end = ""
    if end:
        return words.of_end(end)
    return () if is_dead else words.of_silence()


@dataclass(frozen=True, slots=True)
class _Thread:
    """A thread's words."""

    ident: int
    native_id: int
    requests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Words:
    """The content of a file."""

    process: ProcessName
    threads: tuple[_Thread, ...]

    def of_end(self, end: str) -> tuple[str, ...]:
        """The requests of a process that wrote its end down."""
        _, found, rest = end.partition(_CURRENT)
        chosen = self.threads
        if found and not end.startswith(_ENDED):
            current = int(rest.partition(" ")[0], 16)
            chosen = tuple(thread for thread in self.threads if thread.ident == current)
        return _requests(chosen)

    def of_silence(self) -> tuple[str, ...]:
        """The requests of a process that answers nothing, if it lives and computes."""
        loop, *others = self.threads
        if not is_there(self.process) or is_running(self.process.pid, loop.native_id):
            return ()
        return _requests([each for each in others if is_running(self.process.pid, each.native_id)])


def _requests(threads: Sequence[_Thread]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(request for thread in threads for request in thread.requests))


def _end_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.end"


def _read(folder: Path, name: str) -> _Words | None:
    """The words in a file; None if there are none."""
    try:
        data = (folder / name).read_bytes()
        pid, started = _PROCESS.unpack_from(data)
        threads = []
        for at in range(_PROCESS.size, len(data), _SLOT_BYTES):
            ident, native_id, count, size = _SLOT.unpack_from(data, at)
            text = data[at + _SLOT.size : at + _SLOT.size + size].decode(errors="replace")
            names = text.split("\n") if count else []
            if len(names) < count:  # so many that they were cut: at least one more was computed for
                names = [*names[:-1], ""]
            threads.append(_Thread(ident, native_id, tuple(names)))
    except (OSError, struct.error):
        return None
    return _Words(ProcessName("", pid, started), tuple(threads))


def _erase_old(folder: Path) -> None:
    """Erase the words of processes that died long ago."""
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime < _MAX_AGE_S:
                continue
            words = _read(folder, path.name.removesuffix(".end"))
            if words is None or not is_there(words.process):
                path.unlink()
