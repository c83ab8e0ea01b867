"""Exported KV on the disk of the manager's node: carries out the directory's decisions.

Writes and erasures run one after the other, so that an older decision does not erase a file that has been written
again. Reading waits for neither.
"""

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from raydix.actors.runtime import Runtime
from raydix.engine.core.errors import StartupError
from raydix.engine.core.manager.block_index import Segment
from raydix.engine.core.manager.instructions import DamagedFileError
from raydix.engine.core.types import SegmentHeader

logger = logging.getLogger(__name__)

READ_TIMEOUT_S = 20.0  # limit of reading a file, after which the reader is told that the file is out of reach now
# Least time between two warnings of segments that were not written: a full disk refuses one after the other.
WARN_S = 60.0
TAKE_OVER_S = 5.0  # seconds for which a manager that has died, and whose process is still ending, may keep a folder


class DiskTier:
    """Moves segments between the object store and files, in threads."""

    def __init__(self, folder: str | None, runtime: Runtime) -> None:
        # With numpy, which a manager without a disk can spare.
        from raydix.engine.model.segment_files import SegmentFiles

        self._files = SegmentFiles(folder)
        self._runtime = runtime
        self._writing = asyncio.Lock()
        self._is_open = False
        self._num_unwritten = 0  # segments that could not be written since the last warning of them
        self._warns_at = 0.0  # time from which on the next one is warned of

    @property
    def folder(self) -> Path:
        return self._files.folder

    async def open(self) -> list[SegmentHeader]:
        """Take the folder; returns the headers of its files, the least recently used first.

        Raises:
            StartupError: another server has the folder, and not only a manager that is ending.
            OSError: the folder cannot be read.
        """
        deadline = time.monotonic() + TAKE_OVER_S
        while True:
            try:
                self._files.open()
                self._is_open = True
                return await asyncio.to_thread(self._files.scan)
            except StartupError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(TAKE_OVER_S / 20)

    async def close(self) -> None:
        """Give the folder up after the write or erasure under way: from then on nothing is written, read or erased,
        until `open`."""
        async with self._writing:
            self._is_open = False
            self._files.close()

    async def write(self, segment: Segment) -> SegmentHeader | None:
        """Copy a segment into a file; returns the file's header, or None after a failure."""
        ref: Any = segment.ref
        async with self._writing:
            if not self._is_open:
                return None
            try:
                return await asyncio.to_thread(self._files.write, segment.header, await ref)
            except (RayError, OSError, ValueError) as error:
                self._warn(segment, error)
                return None

    def _warn(self, segment: Segment, error: Exception) -> None:
        self._num_unwritten += 1
        if (now := time.monotonic()) < self._warns_at:
            return
        num_blocks = len(segment.header.hashes)
        logger.warning("%d segments not written, the last of %d blocks: %s", self._num_unwritten, num_blocks, error)
        self._num_unwritten, self._warns_at = 0, now + WARN_S

    async def read(self, header: SegmentHeader) -> Any | None:
        """Put a file's payload into the object store; returns a reference, or None if the file is out of reach now.

        Raises:
            DamagedFileError: the file is damaged, and lost for good.
        """
        if not self._is_open:
            return None
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                return await asyncio.to_thread(lambda: self._runtime.put(self._files.read(header)))
        except DamagedFileError:
            raise
        except Exception as error:  # of any kind: the worker that waits for the file must hear of it
            logger.warning("segment of %d blocks not read: %r", len(header.hashes), error)
            return None

    async def erase(self, header: SegmentHeader) -> None:
        """Remove a file, if it exists."""
        async with self._writing:
            if not self._is_open:
                return
            try:
                await asyncio.to_thread(self._files.erase, header)
            except OSError as error:
                logger.warning("segment of %d blocks not erased: %s", len(header.hashes), error)
