"""What a worker's export stream says of segments whose bytes arrive later, or never."""

import asyncio
import logging

import numpy as np
import pytest

from raydix.actors.local import LocalRuntime
from raydix.actors.messages import ExportItem
from raydix.engine.core.types import Handover, Role, SegmentHeader
from raydix.engine.model.exchange import ExportedSegment
from raydix.engine.model.segments import checksum
from tests.unit.local_actors import make_engine, make_worker

PAYLOAD = np.arange(64, dtype=np.uint8)
HEADER = SegmentHeader("model", (b"1", b"2"), PAYLOAD.nbytes, 0, Handover("r", 0, 5, None))


@pytest.fixture(autouse=True)
def fake_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydix.engine.model.build.build_engine", make_engine)


def exported(count: int, *segments: ExportedSegment) -> list[object]:
    """The first `count` items that the stream yields, which are all."""

    async def read() -> list[object]:
        worker = make_worker(Role.DECODE, "d", LocalRuntime())
        for segment in segments:
            worker._exports.put(segment)
        stream = worker.export_stream()
        items = [await anext(stream) for _ in range(count)]
        assert worker._exports.is_empty
        return items

    return asyncio.run(read())


def test_a_segment_is_sent_when_it_has_arrived() -> None:
    complete = SegmentHeader("model", (b"3", b"4"), PAYLOAD.nbytes, checksum(PAYLOAD), None)
    late = ExportedSegment(HEADER, np.empty(0, np.uint8), lambda: PAYLOAD)
    first, first_payload, second, second_payload = exported(4, late, ExportedSegment(complete, PAYLOAD))
    assert isinstance(first, ExportItem) and first.header is not None
    assert first.header.checksum == checksum(PAYLOAD) and first.header.handover == HEADER.handover
    assert first_payload is PAYLOAD is second_payload
    assert isinstance(second, ExportItem) and second.header == complete


def test_blocks_that_never_arrive_are_not_sent_and_the_handover_is(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> np.ndarray:
        raise RuntimeError("the device is gone")

    with caplog.at_level(logging.ERROR):
        [item] = exported(1, ExportedSegment(HEADER, np.empty(0, np.uint8), fail))
    assert isinstance(item, ExportItem) and item.header is not None
    assert item.unsent == HEADER.names
    assert (item.header.hashes, item.header.num_bytes, item.header.handover) == ((), 0, HEADER.handover)
    assert "2 blocks not exported" in caplog.text
