"""The object store's pages are taken without a change of what lies in it."""

import os
import tempfile
from pathlib import Path

from raydix.cli.ray_node import PIECE_BYTES, STORE, StorePages

SIZE = 5 * PIECE_BYTES + 5000
WRITTEN_AT = PIECE_BYTES + 123


def test_all_pages_are_taken_and_bytes_stay() -> None:
    folder, prefix = os.path.split(STORE)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=prefix) as file:
        Path(file.name).unlink()
        try:
            os.truncate(file.fileno(), SIZE)
            os.pwrite(file.fileno(), b"KV", WRITTEN_AT)
            pages = StorePages(os.getpid())
            pages.start()
            pages.join()
            found = os.fstat(file.fileno())
            assert found.st_size == SIZE and found.st_blocks * 512 >= SIZE
            assert os.pread(file.fileno(), 2, WRITTEN_AT) == b"KV"
        finally:
            Path(file.name).touch()  # which the end of the block removes


def test_a_raylet_that_has_ended_is_no_error() -> None:
    pages = StorePages(2**22 + 1)  # above every process id
    pages.start()
    pages.join()
