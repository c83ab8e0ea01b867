"""What the manager does by itself, now and then. There is no Ray here: the workers' handles are objects of ours."""

import asyncio
from types import SimpleNamespace

from actors.calls import Background
from actors.kv_cache_manager import KVCacheManager
from engine.core.directory import Directory
from engine.core.placement import CostModel
from engine.core.types import AdmitRequest, BlockHash, Retention, Role, SegmentHeader

EXPIRED = SegmentHeader("m", (b"2",), 10, 0, retention=Retention(expires_at=1.0))


def test_those_who_wait_for_a_worker_that_stalls_are_told() -> None:
    async def wait_in_vain() -> tuple[BlockHash, ...]:
        manager = KVCacheManager.__new__(KVCacheManager)
        manager._directory = directory = Directory(CostModel(block_size=4, piggyback_tokens=0), 0)
        manager._background, manager._await_timeout_s = Background(), 0.01
        told: asyncio.Future[tuple[BlockHash, ...]] = asyncio.get_running_loop().create_future()

        async def blocks_lost(hashes: tuple[BlockHash, ...]) -> None:
            told.set_result(hashes)

        for request_id, worker_id in (("r", "a"), ("s", "b")):
            directory.register(worker_id, Role.MIXED, 1, 10, ())
            assert directory.admit(AdmitRequest(request_id, 0, (b"1", b"2"), 9))[0].prefill == worker_id
        handle = SimpleNamespace(blocks_lost=SimpleNamespace(remote=blocks_lost))
        manager._handles = {"b": handle}  # type: ignore[dict-item]
        watch = manager._background.start(manager._watch_senders())
        hashes = await asyncio.wait_for(told, 20)
        watch.cancel()
        return hashes

    assert asyncio.run(wait_in_vain()) == (b"1", b"2")


def test_of_what_was_found_on_disk_the_expired_goes_first() -> None:
    async def start() -> SegmentHeader:
        manager = KVCacheManager.__new__(KVCacheManager)
        manager._directory = Directory(CostModel(block_size=4, piggyback_tokens=0), 0, disk_budget_bytes=10)
        manager._background, manager._await_timeout_s = Background(), 30.0
        manager._watch, manager._ingresses = None, {}
        erased: asyncio.Future[SegmentHeader] = asyncio.get_running_loop().create_future()

        async def scan() -> list[SegmentHeader]:
            return [SegmentHeader("m", (b"1",), 10, 0), EXPIRED]

        async def erase(header: SegmentHeader) -> None:
            erased.set_result(header)

        manager._disk = SimpleNamespace(open=scan, erase=erase)  # type: ignore[assignment]
        await manager.start()
        return await asyncio.wait_for(erased, 20)

    assert asyncio.run(start()) == EXPIRED
