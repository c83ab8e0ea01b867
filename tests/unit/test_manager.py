"""What the manager does by itself, now and then. There is no Ray here: the workers' handles are objects of ours."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raydix.actors.manager.ingress_watch as ingress_watch
import raydix.actors.manager.load_watch as load_watch
import raydix.actors.manager.worker_watch as worker_watch
from raydix.actors.local import LocalReference, LocalRuntime
from raydix.actors.manager.kv_cache_manager import KVCacheManager
from raydix.actors.messages import Imported, ImportReport, Registration, WorkerState
from raydix.engine.core.answers.continuations import BegunAnswer
from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.manager.elastic import PoolLimits, Wanted
from raydix.engine.core.manager.placement import CostModel
from raydix.engine.core.objectives import Late, Objectives, WhenLate
from raydix.engine.core.types import (
    Admission,
    AdmitRequest,
    BlockHash,
    Ended,
    FirstToken,
    Retention,
    Role,
    SegmentHeader,
)
from raydix.engine.model.segment_files import SegmentFiles
from raydix.engine.model.segments import checksum
from tests.unit.builders import FINGERPRINT
from tests.unit.local_actors import MortalHandle
from tests.unit.waits import WAIT_S, until

PAYLOAD = np.arange(10, dtype=np.uint8)


class SilentWorker:
    """A worker that notes what the manager tells it, and does nothing."""

    def __init__(self) -> None:
        self.lost: list[BlockHash] = []
        self.imported: list[SegmentHeader] = []
        self.answer = Imported.TAKEN

    async def export_stream(self) -> AsyncIterator[object]:
        await asyncio.Event().wait()
        yield None

    async def blocks_lost(self, hashes: tuple[BlockHash, ...]) -> None:
        self.lost += hashes

    async def import_segment(
        self, header: SegmentHeader, payload: list[object], patience_s: float | None
    ) -> ImportReport:
        self.imported.append(header)
        return ImportReport(self.answer, 0.25)


def make_manager(
    disk: Path | None = None, await_timeout_s: float = 30.0, answer_budget_bytes: int = 0
) -> KVCacheManager:
    return KVCacheManager(
        CostModel(block_size=4, piggyback_tokens=0),
        segment_budget_bytes=0,
        transcript_budget_bytes=1 << 20,
        await_timeout_s=await_timeout_s,
        disk_budget_bytes=0 if disk is None else 10,
        disk_path=None if disk is None else str(disk),
        response_budget_bytes=1 << 20,
        response_ttl_s=60.0,
        answer_budget_bytes=answer_budget_bytes,
        runtime=LocalRuntime(),
    )


async def register(
    manager: KVCacheManager,
    worker_id: str,
    epoch: int = 1,
    fingerprint: str = FINGERPRINT,
    role: Role = Role.MIXED,
) -> Any:
    """Register a worker that does nothing; returns the worker, or the reason why the manager refuses it."""
    worker = SilentWorker()
    registration = Registration(worker_id, epoch, role, 10, 64, "cpu", fingerprint, ())
    refusal = await manager.register(registration, [MortalHandle(worker)])  # type: ignore[list-item]
    return refusal or worker


def request(request_id: str, attempt: int = 0) -> AdmitRequest:
    return AdmitRequest(request_id, attempt, (b"1", b"2"), 9, ingress_id="i")


def test_those_who_wait_for_a_worker_that_stalls_are_told() -> None:
    async def play() -> None:
        manager = make_manager(await_timeout_s=0.05)
        await manager.start()
        workers = {"a": await register(manager, "a")}
        [first] = await manager.admit([request("r")])
        workers["b"] = await register(manager, "b")
        [second] = await manager.admit([request("s")])
        assert isinstance(first, Admission) and isinstance(second, Admission)
        assert (first.prefill, second.prefill) == ("a", "b")
        await until(lambda: workers["b"].lost == [b"1", b"2"])

    asyncio.run(play())


def test_elastic_workers_are_divided_as_the_load_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts beyond what one worker prefills in time; two divisions stand a while apart."""
    monkeypatch.setattr(load_watch, "DIVIDE_S", 0.01)

    async def play() -> None:
        manager = make_manager()
        objectives = Objectives(ttft_s=1.0, tpot_s=0.01)
        await manager.reconfigure(0, WorkerCosts(), (), objectives, "INFO", PoolLimits(5, 60.0))
        await manager.start()
        assert await manager.wanted_workers() is None
        assert not (await manager.workers()).starts_on_demand
        for name in ("a", "b", "c"):
            await register(manager, name, role=Role.ELASTIC)
        for number in range(6):
            await manager.admit([replace(request(f"r{number}"), hashes=(), num_tokens=800)])
        workers = manager._directory.fleet
        await until(lambda: {worker.duty for worker in workers.values()} == {Role.PREFILL, Role.DECODE})
        assert await manager.wanted_workers() == Wanted(3, may_shrink=False), (
            "not fewer than there are, while they queue"
        )
        [metric] = [each for each in await manager.metrics() if each.name == "raydix_elastic_workers"]
        assert sum(value for value in metric.values.values() if isinstance(value, float | int)) == 3
        [metric] = [each for each in await manager.metrics() if each.name == "raydix_elastic_workers_wanted"]
        assert list(metric.values.values()) == [3]

        for name in ("a", "b", "c"):
            manager._workers._forget(name)
        await until(lambda: manager._directory.fleet.plan is None)
        assert await manager.wanted_workers() is None, "without workers there is nothing to tell"
        await manager.reconfigure(0, WorkerCosts(), (), objectives, "INFO", PoolLimits(5, 60.0, 0))
        assert (await manager.workers()).starts_on_demand

    asyncio.run(play())


def test_of_what_was_found_on_disk_the_expired_goes_first(tmp_path: Path) -> None:
    async def play() -> None:
        files = SegmentFiles(str(tmp_path))
        files.open()
        for block_hash, retention in ((b"1" * 16, Retention()), (b"2" * 16, Retention(expires_at=1.0))):
            files.write(SegmentHeader("m", (block_hash,), 10, checksum(PAYLOAD), retention=retention), PAYLOAD)
        files.close()

        await make_manager(tmp_path).start()
        await until(lambda: len(files.scan()) == 1)
        assert files.scan()[0].hashes == (b"1" * 16,)

    asyncio.run(play())


def test_a_late_word_of_an_old_attempt_does_not_end_the_new_one() -> None:
    async def play() -> None:
        manager = make_manager()
        await register(manager, "a")
        await manager.admit([request("r", attempt=1)])
        await manager.settle("i", [FirstToken("r", 0, 0.5)], [Ended("r", 0)])
        assert (await manager.statistics())["num_reservations"] == 1
        await manager.settle("i", [FirstToken("r", 1, 0.5)], [Ended("r", 1)])
        assert (await manager.statistics())["num_reservations"] == 0

    asyncio.run(play())


def test_requests_of_a_silent_ingress_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress_watch, "INGRESS_SILENCE_S", 0.1)

    async def play() -> None:
        manager = make_manager()
        await manager.start()
        await register(manager, "a")
        await manager.admit([request("r")])
        await until(lambda: not manager._directory.num_reservations)

    asyncio.run(play())


def test_requests_that_an_ingress_does_not_name_twice_are_released() -> None:
    async def play() -> None:
        manager = make_manager()
        await register(manager, "a")
        await manager.admit([request("r"), AdmitRequest("s", 0, (b"3",), 5, ingress_id="i")])
        for active in (["r"], ["r"]):
            membership = await manager.workers("i", active)
            assert [worker.worker_id for worker in membership.workers] == ["a"]
        assert (await manager.statistics())["num_reservations"] == 1

    asyncio.run(play())


def test_a_request_without_a_worker_is_not_placed() -> None:
    async def play() -> None:
        manager = make_manager()
        assert await manager.admit([request("r")]) == [None]
        assert (await manager.statistics())["num_reservations"] == 0

    asyncio.run(play())


def test_a_request_that_would_be_late_is_refused_if_it_asks_for_that() -> None:
    async def play() -> None:
        manager = make_manager()
        await register(manager, "w")
        strict, wait = Objectives(ttft_s=1e-6, when_late=WhenLate.REFUSE), Objectives(ttft_s=1e-6)
        asked = [replace(request(f"r{number}"), objectives=each) for number, each in enumerate((strict, wait))]
        late, placed = await manager.admit(asked)
        assert isinstance(late, Late) and late.predicted_s > late.objective_s == 1e-6
        assert isinstance(placed, Admission)
        assert (await manager.statistics())["num_reservations"] == 1

        in_time = replace(request("s"), objectives=Objectives(ttft_s=1e6, when_late=WhenLate.REFUSE))
        under_way = replace(request("t", attempt=1), objectives=strict)
        assert all(isinstance(each, Admission) for each in await manager.admit([in_time, under_way]))

    asyncio.run(play())


def test_a_request_is_refused_only_if_every_worker_would_be_late() -> None:
    async def play() -> None:
        manager = make_manager()
        await register(manager, "a")
        await register(manager, "b")
        objectives = Objectives(ttft_s=1.0, when_late=WhenLate.REFUSE)
        for busy, answer in (("long1", Admission), ("long2", Late)):
            [taken] = await manager.admit([AdmitRequest(busy, 0, (), 50_000)])
            [found] = await manager.admit([AdmitRequest(f"after {busy}", 0, (), 5, objectives=objectives)])
            assert isinstance(taken, Admission) and isinstance(found, answer)
            assert isinstance(found, Late) or found.prefill != taken.prefill

    asyncio.run(play())


def test_a_worker_without_heartbeats_is_forgotten_until_it_registers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_watch, "WORKER_SILENCE_S", 0.1)

    async def play() -> None:
        manager = make_manager()
        await manager.start()
        await register(manager, "a")
        await register(manager, "b")
        state = WorkerState(costs=None, num_free_blocks=9, num_empty_blocks=9, num_steps=0, token_budget=64)
        async with asyncio.timeout(WAIT_S):
            while len(manager._directory.fleet) == 2:
                assert await manager.heartbeat("b", 1, state)
                await asyncio.sleep(0.01)
        requests = [AdmitRequest(f"r{number}", 0, (), 5, session=f"{number}") for number in range(8)]
        assert {
            admission.prefill for admission in await manager.admit(requests) if isinstance(admission, Admission)
        } == {"b"}
        assert not await manager.heartbeat("b", 2, state), "another incarnation has to register"
        assert not await manager.heartbeat("a", 1, state)
        assert isinstance(await register(manager, "a"), SilentWorker)
        assert await manager.heartbeat("a", 1, state)

        await until(lambda: len(manager._workers._signs.quiet(time.monotonic(), 0.3)) == len(manager._directory.fleet))
        assert len((await manager.workers()).workers) > 0, "the last one stays"

    asyncio.run(play())


def test_a_worker_that_an_ingress_doubts_too_is_forgotten_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_watch, "DOUBTED_SILENCE_S", 0.05)

    async def play() -> None:
        manager = make_manager()
        state = WorkerState(costs=None, num_free_blocks=9, num_empty_blocks=9, num_steps=0, token_budget=64)
        for worker_id in ("a", "b", "c"):
            await register(manager, worker_id)
        await until(lambda: len(manager._workers._signs.quiet(time.monotonic(), 0.05)) == 3)
        for worker_id in ("b", "c"):
            assert await manager.heartbeat(worker_id, 1, state)
        doubting = AdmitRequest("r", 0, (), 5, ingress_id="i", avoided=("a", "b"))
        [admission] = await manager.admit([request("s")])
        assert set(manager._directory.fleet) == {"a", "b", "c"}, "nobody doubts them"
        [admission] = await manager.admit([doubting])
        assert isinstance(admission, Admission) and admission.prefill == "c"
        assert set(manager._directory.fleet) == {"b", "c"}, "the manager hears of b"

    asyncio.run(play())


def test_older_incarnations_and_other_models_are_refused() -> None:
    async def play() -> None:
        manager = make_manager()
        await register(manager, "a", epoch=2)
        assert await register(manager, "a", epoch=1) == "a newer incarnation is registered"
        assert "fingerprint other" in await register(manager, "b", fingerprint="other")
        assert (await manager.statistics())["num_workers"] == 1

    asyncio.run(play())


@pytest.mark.parametrize("answer", list(Imported))
def test_a_segment_that_cannot_be_taken_is_not_offered_again(answer: Imported) -> None:
    async def play() -> None:
        manager = KVCacheManager(CostModel(4, piggyback_tokens=0), 100, 100, 30.0, runtime=LocalRuntime())
        await register(manager, "a")
        worker = await register(manager, "b")
        worker.answer = answer
        header = SegmentHeader("m", (b"1",), 10, 0)
        manager._executor.carry_out(manager._directory.segment_exported("a", 1, header, LocalReference(PAYLOAD), 0.0))
        [admission] = await manager.admit([AdmitRequest("r", 0, (b"1",), 6, avoided=("a",))])
        assert isinstance(admission, Admission) and admission.prefill == "b"
        await until(lambda: worker.imported == [header] and not manager._executor._deliveries._tasks)
        assert (len(manager._directory.stock.segments) == 1) is (answer is Imported.TAKEN)
        manager._directory.check_integrity()

    asyncio.run(play())


def test_transcripts_are_kept_until_the_cache_is_reset() -> None:
    async def play() -> None:
        from array import array

        manager = make_manager()
        assert await manager.of_answers("remember", [(b"n", array("i", [1, 2]), "t")]) == [True]
        assert await manager.of_answers("recall", [b"n", b"m"]) == [array("i", [1, 2]), None]
        assert await manager.reset_cache() == {"store_blocks": 0, "pool_blocks": 0}
        assert await manager.of_answers("recall", [b"n"]) == [None]
        assert (await manager.events_since(None)).events is not None

    asyncio.run(play())


def test_answers_ride_on_admissions_until_the_cache_is_reset() -> None:
    async def play() -> None:
        manager = make_manager(answer_budget_bytes=10_000)
        await register(manager, "w")
        asked = replace(request("a"), answer_name=b"n")

        async def continuations(of: AdmitRequest) -> tuple[bytes, ...]:
            [admission] = await manager.admit([of])
            assert isinstance(admission, Admission)
            return admission.continuations

        assert await continuations(asked) == ()
        ended = [Ended("a", answer=BegunAnswer(b"n", b"12345678")), Ended("b")]
        await manager.settle("i", [], ended)
        assert await continuations(asked) == (b"12345678",)
        assert await continuations(replace(asked, answer_name=b"m")) == () == await continuations(request("c"))
        assert (await manager.statistics())["num_answers"] == 1
        manager._workers._forget("w")
        await manager.reset_cache()
        assert (await manager.statistics())["answer_bytes"] == 0
        await register(manager, "w", epoch=2)
        assert await continuations(asked) == ()

        manager = make_manager()
        await register(manager, "w")
        await manager.settle("i", [], ended)
        assert await continuations(asked) == () and (await manager.statistics())["num_answers"] == 0

    asyncio.run(play())


def test_stored_responses_outlive_a_manager_with_a_disk(tmp_path: Path) -> None:
    async def play(folder: Path | None, *, keeps: bool) -> list[bytes]:
        manager = make_manager(folder)
        await manager.start()
        if keeps:
            assert await manager.of_answers("keep_response", b"a", None, b"data")
        if keeps and folder is not None:
            await until(lambda: [*(folder / "responses").glob("*.response")])
        found: list[bytes] = await manager.of_answers("find_response", b"a", False)
        if manager._disk is not None:
            manager._disk._files.close()
        return found

    for folder, expected in ((None, []), (tmp_path, [b"data"])):
        assert asyncio.run(play(folder, keeps=True)) == [b"data"]
        assert asyncio.run(play(folder, keeps=False)) == expected
