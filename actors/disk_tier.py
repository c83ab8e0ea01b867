"""Exported KV on the disk of the manager's node: carries out what the directory decides.

Files are written one after the other and erased in their turn, so that a file that is written again is not erased by an
older decision. Reading waits for nobody.
"""

import asyncio
import logging
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from engine.core.block_index import Segment
from engine.core.types import SegmentHeader

logger = logging.getLogger(__name__)


class DiskTier:
    """Moves segments between the object store and files, in threads."""

    def __init__(self, folder: str | None) -> None:
        from engine.model.segment_files import SegmentFiles  # with numpy, which a manager without a disk can spare

        self._files: SegmentFiles = SegmentFiles(None if folder is None else Path(folder).expanduser())
        self._writing = asyncio.Lock()

    async def scan(self) -> list[SegmentHeader]:
        """What is there, the least recently used first. Raises OSError if the folder cannot be used."""
        return await asyncio.to_thread(self._files.scan)

    async def write(self, segment: Segment) -> SegmentHeader | None:
        """Copy a segment into a file; the file's header, or None if that is not possible."""
        ref: Any = segment.ref
        async with self._writing:
            try:
                return await asyncio.to_thread(self._files.write, segment.header, await ref)
            except (RayError, OSError, ValueError) as error:
                logger.warning("segment of %d blocks not written: %s", len(segment.header.hashes), error)
                return None

    async def read(self, header: SegmentHeader) -> Any | None:
        """A reference to a file's payload in the object store; None if it cannot be had."""
        try:
            return await asyncio.to_thread(lambda: ray.put(self._files.read(header)))
        except (RayError, OSError, ValueError) as error:
            logger.warning("segment of %d blocks not read: %s", len(header.hashes), error)
            return None

    async def erase(self, header: SegmentHeader) -> None:
        """Remove a file, if it is there."""
        async with self._writing:
            try:
                await asyncio.to_thread(self._files.erase, header)
            except OSError as error:
                logger.warning("segment of %d blocks not erased: %s", len(header.hashes), error)
