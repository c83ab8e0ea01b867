"""Files that do not come from the disk. No file is read here, and nothing put into an object store."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

import actors.manager.disk_tier
from actors.local import LocalRuntime
from actors.manager.disk_tier import DiskTier
from engine.core.types import SegmentHeader

HEADER = SegmentHeader("model", (b"1", b"2"), 64, 0)


def test_who_waits_for_a_file_hears_in_time_that_it_does_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors.manager.disk_tier, "READ_TIMEOUT_S", 0.01)
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
