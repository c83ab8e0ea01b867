"""What the manager does by itself, now and then. There is no Ray here: the workers' handles are objects of ours."""

import asyncio
from types import SimpleNamespace

from actors.calls import Background
from actors.kv_cache_manager import KVCacheManager
from engine.core.directory import Directory
from engine.core.placement import CostModel
from engine.core.types import AdmitRequest, BlockHash, Role


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
