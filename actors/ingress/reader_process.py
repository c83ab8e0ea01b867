"""A process that reads requests too long to be read between other requests' tokens; see `reader_pool`.

Parsing and rendering hold the interpreter's lock from beginning to end, so threads would not help. The process is
driven through one socket: a frame is a length and a pickle. The process reports when it is ready, and answers one
request after the other. It ends when the socket is closed, when its memory has grown too much, or when the check of a
grammar does not end: the pool then starts another one.
"""

import ctypes
import gc
import os
import pickle
import socket
import struct
import sys
from typing import Any, BinaryIO

import psutil

LENGTH = struct.Struct("!Q")
"""Length of the pickle that follows, in bytes."""
READY = "ready"
NICENESS = 5
"""Priority below the processes that pass tokens on, and equal to those that compute tokens."""
FULL = "full"
"""Answer in place of `READY` of a process that ends because its memory has grown too much, or because it still checks
a grammar whose request has been refused."""
SWEPT_BYTES = 256 << 10
"""Bytes of requests after which the memory of reading them is given back."""
KEPT_BYTES = 48 << 20
"""Growth of memory since the start after which the process ends."""


def encode_frame(value: object) -> bytes:
    """Encode `value` as a frame."""
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


def main() -> None:
    """Answer the requests of the socket whose number is the first argument, until the socket is closed."""
    from actors.ingress.confinement import confined
    from actors.ingress.reader_work import ReadingFacts
    from actors.ingress.reading import Reader
    from engine.core.errors import RaydixError, ServiceError
    from engine.model.tokenizer import Tokenizer, forgo_torch

    forgo_torch()
    os.nice(NICENESS)
    gc.disable()  # a body of a million lists would be gone through again and again while they are made

    with socket.socket(fileno=int(sys.argv[1])) as connection, connection.makefile("rb") as requests:
        facts, _ = _receive(requests)
        assert isinstance(facts, ReadingFacts)
        reader = Reader(facts, Tokenizer(facts.folder), confined)
        sweeper = Sweeper()
        connection.sendall(encode_frame(READY))
        while True:
            request, num_bytes = _receive(requests)
            if request is None:
                return

            try:
                frame = encode_frame(reader.answer(request))
            except RaydixError as error:
                frame = encode_frame(error)
            except Exception as error:  # its message may quote a prompt
                frame = encode_frame(ServiceError(f"The request could not be read ({type(error).__name__})."))

            connection.sendall(frame)
            del request, frame
            if sweeper.keeps_too_much(num_bytes) or reader.is_stuck:
                connection.sendall(encode_frame(FULL))
                return

            connection.sendall(encode_frame(READY))


def _receive(stream: BinaryIO) -> tuple[Any, int]:
    """The next value and the size of its pickle, in bytes; None at the end."""
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None, 0
    (length,) = LENGTH.unpack(header)
    data = stream.read(length)
    return (pickle.loads(data) if len(data) == length else None), length


if __name__ == "__main__":
    main()
