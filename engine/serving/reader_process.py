"""Processes that read requests too long to be read between other requests' tokens; see `reader_pool`.

Parsing and rendering hold the interpreter's lock from beginning to end, so threads would not help. The *template*, the
process that is started, loads the tokenizer and the libraries once, and then reads nothing: the *readers* are forked
from it, which takes a few milliseconds and little memory. The template is driven through one socket, by a message for
each reader to be forked (`FORK`, with the socket to the reader) or waited for (`WAIT`); its readers end with it.

A reader is driven through its own socket: a frame is a length and a pickle. The reader reports when it is ready, and
answers one request after the other. It ends when the socket is closed, or when its memory has grown too much. The
system ends it, whatever it does, when a request has used `READ_S` of processor time; the pool then forks another one.
"""

import contextlib
import ctypes
import gc
import os
import pickle
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

import psutil

if TYPE_CHECKING:
    from raydix.engine.serving.reading import Reader

# Messages to the template. The reply to the first is the reader's process id; behind the second stands such an id, and
# the reply is the status with which that reader has ended.
FORK, WAIT = b"F", b"W"
ID = struct.Struct("!q")  # process id, or status as of `os.wait`
FACTS_BYTES = 128 << 10  # most of the facts' pickle, which is one message
READ_S = 3.0  # processor time that one request may use
KILLED_BY = signal.SIGPROF  # signal by which the system ends a reader whose request has used this time

LENGTH = struct.Struct("!Q")  # length of the pickle that follows, in bytes
READY = "ready"
NICENESS = 5  # priority below the processes that pass tokens on, and equal to those that compute tokens
FULL = "full"  # answer in place of `READY` of a reader that ends because its memory has grown too much
SWEPT_BYTES = 256 << 10  # bytes of requests after which the memory of reading them is given back
KEPT_BYTES = 48 << 20  # growth of memory since the start after which the process ends


def encode_frame(value: object) -> bytes:
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)) + data


def give_memory_back() -> None:
    """Return freed memory to the system, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Sweeper:
    """Collects garbage and looks at this process's memory after every `SWEPT_BYTES` of requests."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._at_start = self._process.memory_info().rss
        self._num_unswept_bytes = 0

    def keeps_too_much(self, num_bytes: int) -> bool:
        """Note that a request of `num_bytes` has been read; True if the process is to end."""
        self._num_unswept_bytes += num_bytes
        if self._num_unswept_bytes < SWEPT_BYTES:
            return False
        self._num_unswept_bytes = 0
        gc.collect()
        give_memory_back()
        return self._process.memory_info().rss > self._at_start + KEPT_BYTES


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Have the system end this process when it has used so much processor time in the block, also in C code."""
    signal.signal(KILLED_BY, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    """Be the template of readers, driven by the socket whose number is the first argument, until it is closed."""
    import raydix.engine.serving.grammar_check  # noqa: F401  (loaded once for all readers)
    from raydix.engine.model.tokenizer import Tokenizer, forgo_torch
    from raydix.engine.serving.confinement import confined
    from raydix.engine.serving.reader_work import ReadingFacts
    from raydix.engine.serving.reading import Reader

    forgo_torch()
    os.nice(NICENESS)
    gc.disable()  # a body of a million lists would be gone through again and again while they are made

    with socket.socket(fileno=int(sys.argv[1])) as control:
        facts = pickle.loads(control.recv(FACTS_BYTES))
        assert isinstance(facts, ReadingFacts)
        reader = Reader(facts, Tokenizer(facts.folder), confined)
        gc.collect()
        gc.freeze()  # objects that readers share with the template are not to be written to by collections
        readers = set[int]()
        try:
            control.sendall(READY.encode())
            _be_template(control, reader, readers)
        except OSError:
            pass  # the pool has left
        finally:
            for pid in readers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _be_template(control: socket.socket, reader: "Reader", readers: set[int]) -> None:
    """Fork readers and wait for them as the socket's messages say, until the socket is closed. `readers`: the ids of
    those that have not been waited for."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1 + ID.size, 1)
        if not message:
            return
        if message[:1] == WAIT:
            (pid,) = ID.unpack(message[1:])
            _, status = os.waitpid(pid, 0)
            readers.discard(pid)
            control.sendall(ID.pack(status))
            continue

        [descriptor] = descriptors
        pid = os.fork()
        if not pid:
            control.close()
            _read_and_exit(descriptor, reader)
        os.close(descriptor)
        readers.add(pid)
        control.sendall(ID.pack(pid))


def _read_and_exit(descriptor: int, reader: "Reader") -> None:
    """Be a reader until its socket is closed; then end, without the template's clearing up."""
    status = 1
    try:
        with socket.socket(fileno=descriptor) as connection:
            _serve(connection, reader)
        status = 0
    except OSError:
        pass  # the pool has left
    finally:
        os._exit(status)


def _serve(connection: socket.socket, reader: "Reader") -> None:
    """Answer the requests of a socket until it is closed, or the memory has grown too much."""
    sweeper = Sweeper()
    with connection.makefile("rb") as requests:
        connection.sendall(encode_frame(READY))
        while (data := _received(requests)) is not None:
            num_bytes = len(data)
            with limited(READ_S):
                frame = _answer(data, reader)
            connection.sendall(frame)
            del data, frame
            if sweeper.keeps_too_much(num_bytes):
                connection.sendall(encode_frame(FULL))
                return
            connection.sendall(encode_frame(READY))


def _answer(data: bytes, reader: "Reader") -> bytes:
    """Return the frame with the answer to the request of this pickle, or with the error that it ends with."""
    from raydix.engine.core.errors import RaydixError, ServiceError

    try:
        return encode_frame(reader.answer(pickle.loads(data)))
    except RaydixError as error:
        return encode_frame(error)
    except Exception as error:  # its message may quote a prompt
        return encode_frame(ServiceError(f"The request could not be read ({type(error).__name__})."))


def _received(stream: BinaryIO) -> bytes | None:
    """Return the next pickle; None at the end."""
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(header)
    data = stream.read(length)
    return data if len(data) == length else None


if __name__ == "__main__":
    main()
