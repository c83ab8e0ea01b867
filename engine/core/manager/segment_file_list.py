"""The files of segments on disk, as the manager counts them."""

from collections import Counter
from collections.abc import Iterable

from raydix.engine.core.manager.disk_instructions import DiskInstruction, EraseFile
from raydix.engine.core.types import BlockHash, SegmentHeader


class SegmentFileList:
    """The files that are present or being written; segments of exactly the same blocks share a file."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Bytes of payloads."""
        self._num_sharing: Counter[tuple[BlockHash, ...]] = Counter()
        """Segments by file."""

    def add(self, file: SegmentHeader) -> None:
        self.num_bytes += file.num_bytes
        self._num_sharing[file.full_hashes] += 1

    def remove(self, file: SegmentHeader) -> None:
        self.num_bytes -= file.num_bytes
        self._num_sharing[file.full_hashes] -= 1
        if not self._num_sharing[file.full_hashes]:
            del self._num_sharing[file.full_hashes]

    def erase(self, file: SegmentHeader) -> list[DiskInstruction]:
        """Erase a segment's former file, unless another segment shares it."""
        return [] if file.full_hashes in self._num_sharing else [EraseFile(file)]

    def check_integrity(self, files: Iterable[SegmentHeader]) -> None:
        """Assert that the list has exactly these files."""
        listed = [*files]
        assert self.num_bytes == sum(file.num_bytes for file in listed)
        assert self._num_sharing == Counter(file.full_hashes for file in listed)
