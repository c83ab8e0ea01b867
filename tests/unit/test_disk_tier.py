"""Files that do not come from the disk. No file is read here, and nothing put into an object store."""

import asyncio
import resource
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import raydix.actors.manager.disk_tier
from raydix.actors.local import LocalRuntime
from raydix.actors.manager.disk_tier import DiskTier
from raydix.engine.core.manager.block_index import Segment
from raydix.engine.core.types import SegmentHeader
from raydix.engine.model.segments import checksum

HEADER = SegmentHeader("model", (b"1", b"2"), 64, 0)


def test_who_waits_for_a_file_hears_in_time_that_it_does_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raydix.actors.manager.disk_tier, "READ_TIMEOUT_S", 0.01)
    disk, is_over = DiskTier(str(tmp_path), LocalRuntime()), threading.Event()

    def hang(header: SegmentHeader) -> None:
        is_over.wait()
        raise OSError

    async def read() -> object:
        try:
            return await disk.read(HEADER)
        finally:
            is_over.set()

    monkeypatch.setattr(disk, "_files", SimpleNamespace(read=hang))
    assert asyncio.run(read()) is None


def test_a_full_disk_is_warned_of_once_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A limit of the size of files stands in for a full disk."""
    runtime, payload = LocalRuntime(), np.zeros(64, np.uint8)

    async def work() -> None:
        disk = DiskTier(str(tmp_path), runtime)
        await disk.open()
        header = SegmentHeader("model", (b"1", b"2"), payload.nbytes, checksum(payload))

        async def write() -> SegmentHeader | None:
            return await disk.write(Segment(1, header, runtime.put(payload)))

        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))
        try:
            for _ in range(3):
                assert await write() is None
            disk._warns_at = 0.0  # a minute later
            assert await write() is None
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert await write() is not None
        await disk.close()

    asyncio.run(work())
    first, second = [record.getMessage() for record in caplog.records]
    assert first.startswith("1 segments not written") and second.startswith("3 segments not written")
