"""Exported KV on the disk of the manager's node: carries out what the directory decides.

Files are written one after the other and erased in their turn, so that a file that is written again is not erased by an
older decision. Reading waits for nobody.
"""

import asyncio
import logging
import time
from typing import Any

import ray
from ray.exceptions import RayError

from engine.core.block_index import Segment
from engine.core.errors import StartupError
from engine.core.segment_store import DamagedFileError
from engine.core.types import SegmentHeader

logger = logging.getLogger(__name__)

READ_TIMEOUT_S = 20.0
"""Who waits for a file hears after so long that it cannot be had now."""
TAKE_OVER_S = 5.0
"""How long a folder may be kept by a manager that has died and whose process is still ending."""


class DiskTier:
    """Moves segments between the object store and files, in threads."""

    def __init__(self, folder: str | None) -> None:
        from engine.model.segment_files import SegmentFiles  # with numpy, which a manager without a disk can spare

        self._files = SegmentFiles(folder)
        self._writing = asyncio.Lock()

    async def open(self) -> list[SegmentHeader]:
        """Take the folder; what is there, the least recently used first.

        Raises:
            StartupError: another server has the folder, and not only a manager that is ending.
            OSError: it cannot be read.
        """
        deadline = time.monotonic() + TAKE_OVER_S
        while True:
            try:
                self._files.open()
                return await asyncio.to_thread(self._files.scan)
            except StartupError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(TAKE_OVER_S / 20)

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
        """A reference to a file's payload in the object store; None if it cannot be had now.

        Raises:
            DamagedFileError: nor later.
        """
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                return await asyncio.to_thread(lambda: ray.put(self._files.read(header)))
        except DamagedFileError:
            raise
        except Exception as error:  # whatever it was, whoever waits for the file must hear of it
            logger.warning("segment of %d blocks not read: %r", len(header.hashes), error)
            return None

    async def erase(self, header: SegmentHeader) -> None:
        """Remove a file, if it is there."""
        async with self._writing:
            try:
                await asyncio.to_thread(self._files.erase, header)
            except OSError as error:
                logger.warning("segment of %d blocks not erased: %s", len(header.hashes), error)
