"""The journal of a batch: an append-only file of records (`raydix.engine.core.batches.records`), answers included.

A record is the kernel's when `append` returns, so SIGKILL loses nothing. Changes of state are on the disk then;
answers about a second later, so a crash of the machine costs the answers of the last second; their lines run again.
"""

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from raydix.engine.batches.disk import sync_folder
from raydix.engine.core.batches.records import Answered, Record, decode, encode

SYNC_S = 1.0  # pause between two syncs of answers


class Journal:
    """The journal in one file, with one writing process and one call at a time."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._clock = clock
        self._handle: int | None = None
        self._places: dict[int, tuple[int, int]] = {}  # place and length of the record of each answered line
        self._size = 0
        self._synced_at = clock()

    @property
    def num_bytes(self) -> int:
        return self._size

    def open(self, follow: Callable[[Record], None]) -> None:
        """Open the file, or a new one, for `append`; `follow` is called with each record found. A torn end
        is cut off. Raises OSError."""
        self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with self.path.open("rb") as file:
            for line in file:
                record = decode(line)
                if record is None:
                    break
                self._note(record, len(line))
                follow(record)
        os.ftruncate(self._handle, self._size)
        self._sync(self._handle)
        sync_folder(self.path.parent)

    def append(self, records: Iterable[Record]) -> None:
        """Write records. Raises OSError; then no record is added."""
        assert self._handle is not None, "the journal is open"
        lines = [(record, encode(record)) for record in records]
        try:
            _write(self._handle, b"".join(line for _, line in lines), self._size)
            is_due = self._clock() >= self._synced_at + SYNC_S
            if is_due or not all(isinstance(record, Answered) for record, _ in lines):
                self._sync(self._handle)
        except OSError:
            # Half a record would hide everything that is appended behind it.
            os.ftruncate(self._handle, self._size)
            raise
        for record, line in lines:
            self._note(record, len(line))

    def output(self, number: int) -> bytes:
        """The output line of an answered line. Raises OSError."""
        assert self._handle is not None, "the journal is open"
        place, length = self._places[number]
        record = decode(os.pread(self._handle, length, place))
        if not isinstance(record, Answered):
            raise OSError(f"{self.path} is damaged")
        return record.output

    def close(self) -> None:
        """Leave the file to others."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    def _sync(self, handle: int) -> None:
        os.fsync(handle)
        self._synced_at = self._clock()

    def _note(self, record: Record, length: int) -> None:
        if isinstance(record, Answered):
            self._places[record.number] = self._size, length
        self._size += length


def _write(handle: int, content: bytes, place: int) -> None:
    rest = memoryview(content)
    while rest:
        # A disk that is nearly full takes a part; the next call then raises.
        num_written = os.pwrite(handle, rest, place)
        rest, place = rest[num_written:], place + num_written
