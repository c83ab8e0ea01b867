"""The production actors together: requests go from a dispatcher through manager and workers, while actors die."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import raydix.actors.ingress.dispatcher as dispatcher_module
import raydix.actors.manager.executor as executor_module
import raydix.actors.manager.ingress_watch as ingress_watch
import raydix.actors.worker.segment_import as segment_import_module
import raydix.actors.worker.token_streams as token_streams_module
import raydix.engine.core.manager.fleet as fleet_module
from raydix.actors.calls import answer
from raydix.actors.ingress.dispatcher import Dispatcher
from raydix.actors.manager.kv_cache_manager import KVCacheManager
from raydix.actors.rpc import ManagerClient, WorkerClient
from raydix.actors.worker.export_stream import ExportStream
from raydix.actors.worker.worker import Worker
from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.errors import StopsWorkersError
from raydix.engine.core.hashing import BlockChain
from raydix.engine.core.manager.elastic import PoolLimits
from raydix.engine.core.manager.turns import TurnLimits
from raydix.engine.core.objectives import Objectives
from raydix.engine.core.settings import DraftLimits, SchedulerLimits
from raydix.engine.core.tenants import Tenant
from raydix.engine.core.types import Role, Salt, Sampling
from raydix.engine.core.worker.drafts.drafter import Drafter
from raydix.engine.core.worker.drafts.texts import Past
from raydix.engine.core.worker.step import RunnerOutput, SchedulerOutput
from raydix.engine.model.engine import Engine, StepResult
from tests.unit.builders import ROOT, FakeModel, expected_answer
from tests.unit.local_actors import MAX_MODEL_LEN, LocalWorkers, answer_of, make_dispatcher
from tests.unit.processes import running
from tests.unit.waits import WAIT_S, until

NUM_TOKENS = 12


def prompt_of(number: int) -> tuple[int, ...]:
    """Prompts that begin alike."""
    return (*range(21), number, number + 1)


def expected(prompt: tuple[int, ...], num_tokens: int = NUM_TOKENS) -> list[int]:
    chain = BlockChain(ROOT, Salt(), 4)
    return expected_answer(chain, prompt, Sampling(num_tokens), MAX_MODEL_LEN)[0]


def abouts(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Fields of the records in the log."""
    return [record.about for record in caplog.records if hasattr(record, "about")]


class Hold:
    """Stops the steps of chosen engines, so that what happens to a worker happens in the middle of its requests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._num_left: dict[Engine, int] = {}
        """Token events that each chosen engine may still come to."""
        self._held = set[Engine]()
        self._is_over = threading.Event()
        step = Engine.step

        def step_or_wait(engine: Engine, now: float) -> StepResult | None:
            if self._num_left.get(engine, 1) <= 0 and engine.scheduler.requests:
                self._held.add(engine)
                self._is_over.wait()
            result = step(engine, now)
            if result is not None and engine in self._num_left:
                self._num_left[engine] -= len(result.events)
            return result

        monkeypatch.setattr(Engine, "step", step_or_wait)

    def after(self, worker: Worker, num_tokens: int) -> None:
        """Stop a worker once it has a request and has computed so many tokens, or somewhat more."""
        self._num_left[worker._engine] = num_tokens

    def is_held(self, worker: Worker) -> bool:
        """True once a chosen worker stands still with a request."""
        return worker._engine in self._held

    def wait(self) -> None:
        """Stand still as a chosen engine does; called in its thread."""
        self._is_over.wait()

    def end(self) -> None:
        self._num_left.clear()
        self._is_over.set()


class Crowd:
    """Requests under way, six of each beginning."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._expected: list[list[int]] = []
        self._answers: list[asyncio.Task[list[int]]] = []

    def begin(self, dispatcher: Dispatcher) -> None:
        beginning = len(self._answers)
        for number in range(6):
            prompt = (beginning, *prompt_of(number))
            self._expected.append(expected(prompt, self._num_tokens))
            answer = answer_of(dispatcher, f"crowd{beginning + number}", prompt, self._num_tokens)
            self._answers.append(asyncio.create_task(answer))

    @property
    def is_over(self) -> bool:
        return all(answer.done() for answer in self._answers)

    def leave(self) -> None:
        for begun in self._answers:
            begun.cancel()

    async def check(self) -> None:
        """Wait for the answers, and compare."""
        assert await asyncio.gather(*self._answers) == self._expected


class Scene:
    """A cluster with a manager, two prefill and two decode workers, and one ingress replica."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dispatcher_module, "PING_S", 0.02)
        self.local = LocalWorkers(monkeypatch)
        self.workers: dict[str, Worker] = {}
        self.hold = Hold(monkeypatch)
        self.num_failovers = 0

    def _count_failover(self) -> None:
        self.num_failovers += 1

    async def start(self, worker_silent_s: float = 30.0) -> tuple[KVCacheManager, Dispatcher]:
        manager = await self.local.start_manager()
        for worker_id, role in (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE)):
            self.workers[worker_id] = await self.local.start_worker(role, worker_id)
        await until(lambda: self.num_registered(manager) == 4)
        dispatcher = make_dispatcher(self.local, worker_silent_s=worker_silent_s, on_failover=self._count_failover)
        dispatcher.start()
        return manager, dispatcher

    async def begin(self, dispatcher: Dispatcher, victims: Sequence[str], num_tokens: int = 60) -> "Crowd":
        """Begin requests; returns when each of the victims stands still in the middle of one, which could not go on
        without it: a decode worker behind the request's first token, a prefill worker before it."""

        def is_amid(worker_id: str) -> bool:
            return self.hold.is_held(self.workers[worker_id]) and any(
                entry.generation.dies_with(worker_id) and entry.generation.is_answered == worker_id.startswith("d")
                for entry in dispatcher._dispatch.entries.values()
            )

        crowd = Crowd(num_tokens)
        for kind in "dp":
            chosen = [worker_id for worker_id in victims if worker_id.startswith(kind)]
            for worker_id in chosen:
                self.hold.after(self.workers[worker_id], 1 if kind == "d" else 0)
            if chosen:
                crowd.begin(dispatcher)
                if kind == "p":
                    # Prompts with one beginning follow the first one; those with another go to the other worker.
                    crowd.begin(dispatcher)
                await until(lambda: all(map(is_amid, chosen)))  # noqa: B023
        return crowd

    @staticmethod
    def num_registered(manager: KVCacheManager) -> int:
        return len(manager._directory.fleet)

    def stop(self) -> None:
        """End the workers' threads; a second time does nothing."""
        self.hold.end()
        for worker in self.workers.values():
            worker._thread.stop()

    def run(self, play: Coroutine[Any, Any, None]) -> None:
        """Run a test's coroutine; afterwards every worker's thread ends, before the event loop that it tells of its
        steps."""

        async def whole() -> None:
            try:
                await asyncio.wait_for(play, 2 * WAIT_S)
            finally:
                await asyncio.to_thread(self.stop)

        asyncio.run(whole())
        for worker in self.workers.values():
            worker._engine.scheduler.check_integrity()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_prompts_that_begin_alike_are_computed_once(scene: Scene) -> None:
    async def play() -> None:
        manager, dispatcher = await scene.start()
        assert await answer_of(dispatcher, "first", prompt_of(1), NUM_TOKENS) == expected(prompt_of(1))
        before = sum([worker._measurements.num_prefill_tokens for worker in scene.workers.values()])
        assert await answer_of(dispatcher, "second", prompt_of(2), NUM_TOKENS) == expected(prompt_of(2))
        await until(lambda: manager._directory.num_reservations == 0)
        after = sum([worker._measurements.num_prefill_tokens for worker in scene.workers.values()])
        assert after - before <= len(prompt_of(2)) - 20, "five whole blocks are shared"

        [explained] = await manager.explain("second", None)
        assert explained["id"] == "second"
        assert [miss.num_cached >= 20 for miss in await manager.misses("", 3600.0)] == [True, False]
        # The answer to a delivery may come behind the tokens that it made possible.
        await until(lambda: any(target.startswith("d") for _, target, _ in manager._directory.stock.moves.latest()))
        report = await manager.cache_report("default", is_admin=True)
        assert len(report["workers"]) == 4  # type: ignore[arg-type]
        moved: Any = report["moved"]
        assert {(each["source"][0], each["target"][0]) for each in moved} >= {("p", "d")}, "of each hand-over"
        assert all(each["blocks"] > 0 and each["bytes"] > 0 for each in moved)
        statistics = await manager.statistics()
        assert statistics["num_workers"] == 4 and statistics["num_reservations"] == 0
        for worker in scene.workers.values():
            assert (await worker.statistics())["num_running"] == 0
        assert (await manager.reset_cache())["pool_blocks"] > 0

    scene.run(play())


def test_a_reset_takes_what_is_still_on_its_way_to_the_store(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    read, is_reset = ExportStream.read, asyncio.Event()

    async def read_late(stream: ExportStream) -> AsyncIterator[Any]:
        async for item in read(stream):
            await is_reset.wait()
            yield item

    monkeypatch.setattr(ExportStream, "read", read_late)

    async def play() -> None:
        manager, dispatcher = await scene.start()
        assert await answer_of(dispatcher, "r", prompt_of(1), 1) == expected(prompt_of(1), 1)
        await until(lambda: manager._directory.num_reservations == 0)
        resets = asyncio.create_task(manager.reset_cache())
        await until(lambda: all(not worker._engine.pool.num_cached for worker in scene.workers.values()))
        is_reset.set()
        await resets
        await until(lambda: len(manager._directory.stock.blocks) == 0)
        for worker in scene.workers.values():
            assert (await worker.statistics())["num_cached_blocks"] == 0

    scene.run(play())


def test_a_reset_forgets_what_workers_have_answered(scene: Scene) -> None:
    async def play() -> None:
        manager, dispatcher = await scene.start()
        pasts = list[Past]()
        for worker in scene.workers.values():
            worker._engine.drafter = drafter = Drafter(DraftLimits())
            pasts.append(drafter.past)
        await answer_of(dispatcher, "r", prompt_of(1), NUM_TOKENS)
        await until(lambda: sum(past.num_tokens for past in pasts) > 0)
        await manager.reset_cache()
        assert sum(past.num_tokens for past in pasts) == 0

    scene.run(play())


@pytest.mark.parametrize("victims", [["d0"], ["p0"], ["d0", "d1"], ["p0", "p1"], ["p0", "d1"]], ids=" ".join)
def test_answers_are_the_same_after_workers_die(scene: Scene, victims: list[str]) -> None:
    async def play() -> None:
        manager, dispatcher = await scene.start()
        crowd = await scene.begin(dispatcher, victims)
        for worker_id in victims:
            scene.local.kill(f"{worker_id}:1")
        scene.hold.end()
        await crowd.check()
        assert scene.num_failovers >= len(victims)
        await until(lambda: scene.num_registered(manager) == 4 - len(victims))
        await until(lambda: manager._directory.num_reservations == 0)
        manager._directory.check_integrity()

    scene.run(play())


class Poison:
    """A request under which workers end, in the middle of a step of theirs that computes for it."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, scene: Scene, request_id: str, end: Callable[[str], None]
    ) -> None:
        """`end` is called in the event loop with a worker's id. The worker computes no further."""
        self.victims: list[str] = []
        self.max_victims = 4
        run = FakeModel.run

        def run_or_end(model: FakeModel, output: SchedulerOutput) -> RunnerOutput:
            [worker_id] = [name for name, each in scene.workers.items() if each._engine.runner is model]
            is_named = request_id in {chunk.request.request_id for chunk in output.chunks}
            if is_named and len(self.victims) < self.max_victims:
                self.victims.append(worker_id)
                scene.workers[worker_id]._thread.in_event_loop(end, worker_id)
                scene.hold.wait()
            return run(model, output)

        monkeypatch.setattr(FakeModel, "run", run_or_end)


@pytest.mark.parametrize("is_dead", [True, False], ids=["dies", "answers nothing"])
@pytest.mark.parametrize("is_in_crowd", [False, True], ids=["alone", "in a crowd"])
def test_a_request_that_stops_two_workers_gets_no_third(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, *, is_in_crowd: bool, is_dead: bool
) -> None:
    poison = Poison(monkeypatch, scene, "poison", lambda name: scene.local.stop_by_itself(f"{name}:1", is_dead=is_dead))

    async def play() -> None:
        _, dispatcher = await scene.start(worker_silent_s=30.0 if is_dead else 2.0)
        prompts = [prompt_of(number) for number in range(6 if is_in_crowd else 0)]
        crowd = [
            asyncio.create_task(answer_of(dispatcher, f"r{number}", prompt, 40))
            for number, prompt in enumerate(prompts)
        ]
        with pytest.raises(StopsWorkersError, match="2 workers died or stood still"):
            await answer_of(dispatcher, "poison", (9, *prompt_of(9)), 12)
        assert await asyncio.gather(*crowd) == [expected(prompt, 40) for prompt in prompts], "bystanders go on"
        assert len(poison.victims) == 2, "not carried to a third"

    scene.run(play())


def test_a_request_on_workers_that_others_kill_is_never_refused(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    poison = Poison(monkeypatch, scene, "r", lambda name: scene.local.kill(f"{name}:1"))
    poison.max_victims = 3

    async def play() -> None:
        _, dispatcher = await scene.start()
        assert await answer_of(dispatcher, "r", prompt_of(1), 60) == expected(prompt_of(1), 60)
        assert len(poison.victims) == scene.num_failovers == 3

    scene.run(play())


@pytest.mark.parametrize("leaving", [["d0"], ["p0"], ["p0", "d0"], ["d0", "d1"]], ids=" ".join)
def test_requests_move_from_workers_that_leave(
    scene: Scene, leaving: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_prompts_dear(worker: Worker) -> None:
        """Two milliseconds for each prompt token: where computing costs next to nothing, nothing is imported."""
        compute = worker._engine.runner.run

        def run(output: SchedulerOutput) -> RunnerOutput:
            prompts = [each for each in output.chunks if each.start < each.request.assignment.num_prompt_tokens]
            time.sleep(0.002 * sum(chunk.num_tokens for chunk in prompts))
            return compute(output)

        monkeypatch.setattr(worker._engine.runner, "run", run)

    async def play() -> None:
        manager, dispatcher = await scene.start()
        for worker in scene.workers.values():
            make_prompts_dear(worker)
        crowd = await scene.begin(dispatcher, leaving, 100)
        for worker_id in leaving:
            assert not await manager.worker_leaving(worker_id)
        await until(
            lambda: all(
                any(about["event"] == "moved" and worker_id in about["left"] for about in abouts(caplog))
                for worker_id in leaving
            )
        )
        scene.hold.end()
        async with asyncio.timeout(WAIT_S):
            while not all([await manager.worker_leaving(worker_id) for worker_id in leaving]):
                await asyncio.sleep(0.005)
        for worker_id in leaving:  # as their hosts end them
            scene.local.kill(f"{worker_id}:1")
        await crowd.check()
        assert not scene.num_failovers
        assert not [record for record in caplog.records if "goes on elsewhere" in record.message], "nothing failed over"

        # What the workers held is found in the store.
        await until(lambda: scene.num_registered(manager) == 4 - len(leaving))
        await until(lambda: manager._directory.num_reservations == 0)
        before = sum([worker._measurements.num_prefill_tokens for worker in scene.workers.values()])
        prompt = (0, *prompt_of(1))
        assert await answer_of(dispatcher, "again", prompt, NUM_TOKENS) == expected(prompt)
        after = sum([worker._measurements.num_prefill_tokens for worker in scene.workers.values()])
        assert after - before <= len(prompt) - 20, "five whole blocks are hit"
        await until(lambda: manager._directory.num_reservations == 0)
        manager._directory.check_integrity()

    with caplog.at_level("INFO"):
        scene.run(play())


def test_answers_are_the_same_after_the_manager_dies(scene: Scene) -> None:
    async def play() -> None:
        _, dispatcher = await scene.start()
        crowd = await scene.begin(dispatcher, ["d0"])
        scene.local.kill_manager()
        scene.hold.end()
        orphan = asyncio.create_task(answer_of(dispatcher, "orphan", prompt_of(7), NUM_TOKENS))
        await crowd.check()
        assert await orphan == expected(prompt_of(7))

        successor = await scene.local.start_manager()
        await until(lambda: scene.num_registered(successor) == 4)
        assert await answer_of(dispatcher, "later", prompt_of(8), NUM_TOKENS) == expected(prompt_of(8))
        successor._directory.check_integrity()

    scene.run(play())


def test_a_restarted_worker_takes_requests_again(scene: Scene) -> None:
    async def play() -> None:
        manager, dispatcher = await scene.start()
        for worker_id in ("d0", "d1"):
            scene.local.kill(f"{worker_id}:1")
        await until(lambda: scene.num_registered(manager) == 2)
        await manager.worker_starting("d0")
        assert (await manager.workers()).num_starting == 1
        scene.workers["d0 again"] = await scene.local.start_worker(Role.DECODE, "d0", epoch=2)
        await until(lambda: scene.num_registered(manager) == 3)
        assert (await manager.workers()).num_starting == 0
        assert await answer_of(dispatcher, "r", prompt_of(1), NUM_TOKENS) == expected(prompt_of(1))
        decoded = await scene.workers["d0 again"].statistics()
        assert decoded["num_cached_blocks"] > 0, "it has decoded"

    scene.run(play())


def test_answers_are_the_same_when_a_worker_cannot_be_reached(scene: Scene) -> None:
    async def play() -> None:
        manager, dispatcher = await scene.start(worker_silent_s=1.0)
        crowd = await scene.begin(dispatcher, ["d0"])
        scene.local.handles["d0:1"].cut_off()
        scene.hold.end()
        await crowd.check()
        assert scene.num_failovers >= 1

        scene.local.handles["d0:1"].reconnect()
        for number in range(6, 12):
            assert await answer_of(dispatcher, f"r{number}", prompt_of(number), 3) == expected(prompt_of(number), 3)
        await until(lambda: manager._directory.num_reservations == 0)
        statistics = await scene.workers["d0"].statistics()
        assert statistics["num_running"] == statistics["num_waiting"] == 0

    scene.run(play())


@pytest.mark.parametrize("node", [["d0"], ["p0"], ["p0", "d0"]], ids=" ".join)
def test_answers_are_the_same_when_a_node_vanishes(scene: Scene, node: list[str]) -> None:
    """Nobody hears of an end: the workers there neither answer nor fail."""

    async def play() -> None:
        manager, dispatcher = await scene.start(worker_silent_s=0.3)
        crowd = await scene.begin(dispatcher, node)
        for worker_id in node:
            scene.local.handles[f"{worker_id}:1"].vanish()
        scene.hold.end()
        await crowd.check()
        assert scene.num_failovers >= len(node)
        await until(lambda: scene.num_registered(manager) == 4 - len(node))
        for number in range(6, 9):
            assert await answer_of(dispatcher, f"r{number}", prompt_of(number), 3) == expected(prompt_of(number), 3)
        await until(lambda: manager._directory.num_reservations == 0)
        assert not any(handle.is_dead for handle in scene.local.handles.values())
        manager._directory.check_integrity()

    scene.run(play())


def test_a_worker_that_is_only_slow_keeps_its_requests(scene: Scene) -> None:
    """A real process that holds its interpreter lock stands for the worker's: it answers nothing. Once the process is
    stopped, the worker is silent at once."""

    async def play() -> None:
        with running() as process:
            manager, dispatcher = await scene.start(worker_silent_s=1.0)
            manager._workers._processes["d0"] = process.name("local")
            crowd = await scene.begin(dispatcher, ["d0"])
            await until(lambda: any(worker.process == process.name("local") for worker in dispatcher.workers))
            scene.local.handles["d0:1"].vanish()
            scene.hold.end()
            # Three times as long as a silent worker would keep its requests.
            quiet = dispatcher._dispatch.view.quiet
            await until(lambda: "d0" in [worker.worker_id for worker in quiet(time.monotonic(), 3.0)])
            assert not scene.num_failovers and not crowd.is_over
            assert scene.num_registered(manager) == 4, "the manager waits for its heartbeats, too"

            process.stop()
            await crowd.check()
            assert scene.num_failovers
            await until(lambda: scene.num_registered(manager) == 3)

    scene.run(play())


def test_an_ingress_that_is_only_slow_keeps_its_requests(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, for the process of an ingress replica, whose pings stay out."""
    monkeypatch.setattr(token_streams_module, "INGRESS_SILENCE_S", 0.4)
    monkeypatch.setattr(ingress_watch, "INGRESS_SILENCE_S", 0.4)

    async def play() -> None:
        with running() as process:
            manager, dispatcher = await scene.start()
            dispatcher._process = process.name("local")
            crowd = await scene.begin(dispatcher, ["d0"])
            worker = scene.workers["d0"]
            await until(lambda: worker._tokens.processes.get("ingress") == dispatcher._process)
            await until(lambda: manager._ingresses._replicas["ingress"].process == dispatcher._process)
            monkeypatch.setattr(dispatcher._dispatch, "keep_alive", lambda now, late_s: [])
            # Five times as long as a silent replica would keep its requests.
            for signs in (worker._tokens._signs, manager._ingresses._signs):
                await until(lambda: "ingress" in signs.quiet(time.monotonic(), 2.0))  # noqa: B023
            assert worker._tokens.attempts.under_way and manager._ingresses._replicas["ingress"].requests

            process.stop()
            await until(lambda: not worker._tokens.attempts.under_way)
            await until(lambda: "ingress" not in manager._ingresses._replicas)
            scene.hold.end()
            crowd.leave()

    scene.run(play())


def test_requests_are_placed_at_once_when_the_managers_node_vanishes(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher_module, "ADMIT_TIMEOUT_S", 0.1)
    monkeypatch.setattr(dispatcher_module, "MEMBERSHIP_TIMEOUT_S", 0.1)

    async def play() -> None:
        _, dispatcher = await scene.start(worker_silent_s=0.3)
        assert await answer_of(dispatcher, "r", prompt_of(1), NUM_TOKENS) == expected(prompt_of(1))
        for name in (str(scene.local.manager_name), "d0:1"):
            scene.local.handles[name].vanish()
        prompts = {f"r{number}": prompt_of(number) for number in range(6)}
        answers = [asyncio.create_task(answer_of(dispatcher, *each, 60)) for each in prompts.items()]
        assert await asyncio.gather(*answers) == [expected(prompt, 60) for prompt in prompts.values()]
        assert {worker.worker_id for worker in dispatcher.workers} >= {"p0", "p1", "d1"}, "they are known still"
        monkeypatch.setattr(dispatcher_module, "ADMIT_TIMEOUT_S", 3600.0)
        assert await answer_of(dispatcher, "later", prompt_of(7), NUM_TOKENS) == expected(prompt_of(7)), "not asked"

    scene.run(play())


def test_a_link_that_comes_back_soon_replaces_nobody(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        manager, dispatcher = await scene.start()
        crowd = await scene.begin(dispatcher, ["d0"])
        scene.local.handles["d0:1"].cut_off()
        scene.hold.end()
        entries = dispatcher._dispatch.entries
        await until(lambda: all(entry.generation.dies_with("d0") for entry in entries.values()))
        assert entries and not crowd.is_over, "some wait for the link"
        scene.local.handles["d0:1"].reconnect()
        await crowd.check()
        assert not scene.num_failovers
        assert {worker.epoch for worker in manager._directory.fleet.values()} == {1}
        assert scene.num_registered(manager) == 4
        assert not [record for record in caplog.records if "goes on elsewhere" in record.message]

    with caplog.at_level("INFO"):
        scene.run(play())


def test_imports_teach_the_manager_what_links_take(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker registers from a node of its own."""
    numbers = count()
    monkeypatch.setattr(scene.local, "own_node", lambda: f"node {next(numbers)}")

    async def play() -> None:
        manager, dispatcher = await scene.start()
        assert len(manager._directory.fleet.nodes) == 4
        for number in range(4):
            name = f"r{number}"
            assert await answer_of(dispatcher, name, prompt_of(number), NUM_TOKENS) == expected(prompt_of(number))
        await until(lambda: len(manager._directory.fleet.links))
        assert all(source != target for source, target in manager._directory.fleet.links.known())
        await until(lambda: manager._directory.num_reservations == 0)
        explained: Any = await manager.explain("r0", None)
        [attempt] = explained[0]["attempts"]
        assert attempt["prefill_worker"] != attempt["decode_worker"]
        assert attempt["predicted_handover_s"] > 0 and attempt["actual_handover_s"] >= 0
        report: Any = await manager.cache_report("default", is_admin=True)
        assert len(report["links"]) == len(manager._directory.fleet.links)
        assert report["object_store"]["bytes"] == sum(report["object_store"]["nodes"].values())
        manager._directory.check_integrity()

    scene.run(play())


def test_requests_compute_what_another_node_is_late_with(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker registers from a node of its own; nothing that one has exported comes until the answer is over."""
    numbers = count()
    monkeypatch.setattr(scene.local, "own_node", lambda: f"node {next(numbers)}")
    monkeypatch.setattr(fleet_module, "PATIENCE_S", 0.05)

    async def play() -> None:
        is_over, fetched = asyncio.Event(), []

        async def fetch(call: Awaitable[object], timeout_s: float) -> object:
            await is_over.wait()
            fetched.append(content := await answer(call, timeout_s))
            return content

        monkeypatch.setattr(segment_import_module, "answer", fetch)
        manager, dispatcher = await scene.start()
        async with asyncio.timeout(WAIT_S):  # less than `AWAIT_TIMEOUT_S`, after which anybody would compute
            assert await answer_of(dispatcher, "late", prompt_of(1), NUM_TOKENS) == expected(prompt_of(1))
        assert not fetched
        is_over.set()
        await until(lambda: fetched and len(manager._directory.fleet.links))
        assert await answer_of(dispatcher, "again", prompt_of(1), NUM_TOKENS) == expected(prompt_of(1))
        await until(lambda: manager._directory.num_reservations == 0)
        manager._directory.check_integrity()

    scene.run(play())


def test_preempted_requests_go_on_from_swapped_kv(scene: Scene) -> None:
    async def play() -> None:
        manager = await scene.local.start_manager()
        worker = await scene.local.start_worker(Role.MIXED, "m", num_blocks=32, swap_bytes=1 << 20)
        scene.workers["m"] = worker
        await until(lambda: scene.num_registered(manager) == 1)
        dispatcher = make_dispatcher(scene.local)
        prompts = {f"r{number}": (number, *prompt_of(number)) for number in range(6)}
        answers = [asyncio.create_task(answer_of(dispatcher, *each, 40)) for each in prompts.items()]
        assert await asyncio.gather(*answers) == [expected(prompt, 40) for prompt in prompts.values()]
        assert sum((await worker.statistics())["preemptions"].values()) > 0

    scene.run(play())


def num_bytes_in_files(folder: Path) -> int:
    """Sum the payloads of the whole segment files; unfinished ones have another suffix."""
    return sum(json.loads(file.read_bytes().splitlines()[0])["num_bytes"] for file in folder.glob("*.kv"))


def test_kv_on_disk_survives_everybody(scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "SAVE_S", 0.02)

    async def play() -> None:
        for epoch in (1, 2):
            manager = await scene.local.start_manager(tmp_path)
            worker = scene.workers[f"m{epoch}"] = await scene.local.start_worker(Role.MIXED, "m", epoch)
            await until(lambda: scene.num_registered(manager) == 1)  # noqa: B023
            dispatcher = make_dispatcher(scene.local, f"ingress {epoch}")
            before = manager._directory.stock.segments.disk_bytes
            prompt = tuple(range(90))
            assert await answer_of(dispatcher, "r", prompt, 3) == expected(prompt, 3)
            if epoch == 1:
                await until(lambda: num_bytes_in_files(tmp_path) >= 22 * 32)
                scene.local.kill("m:1")
                scene.local.kill_manager()
            else:
                assert before >= 22 * 32, "the files were found"
                assert worker._measurements.num_prefill_tokens <= 90 - 80

    scene.run(play())


def test_a_client_that_leaves_frees_what_its_request_holds(scene: Scene) -> None:
    async def play() -> None:
        manager, dispatcher = await scene.start()
        answer = asyncio.create_task(answer_of(dispatcher, "r", prompt_of(1), 90))
        await until(lambda: manager._directory.num_reservations == 1)
        answer.cancel()
        await until(lambda: manager._directory.num_reservations == 0)
        for worker in scene.workers.values():
            async with asyncio.timeout(WAIT_S):
                while (statistics := await worker.statistics())["num_running"] + statistics["num_waiting"]:
                    await asyncio.sleep(0.002)
            assert statistics["num_available_blocks"] == statistics["num_blocks"]

    scene.run(play())


def test_limits_change_under_a_stream(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same tokens, same actors; the manager learns of the other budget."""
    shares = (Tenant("alice", cache_min=0.5),)
    step, leave, is_open = Engine.step, threading.Semaphore(0), threading.Event()

    def step_by_leave(engine: Engine, now: float) -> StepResult | None:
        if engine.scheduler.requests and not is_open.is_set():
            leave.acquire()
        return step(engine, now)

    async def stepping(condition: Callable[[], Any]) -> None:
        """Give leave for a few steps at a time until the condition holds."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                leave.release()
                await asyncio.sleep(0.002)

    async def play() -> None:
        manager, dispatcher = await scene.start()
        assert await answer_of(dispatcher, "before", prompt_of(0), NUM_TOKENS) == expected(prompt_of(0))
        monkeypatch.setattr(Engine, "step", step_by_leave)
        running = asyncio.ensure_future(answer_of(dispatcher, "r", prompt_of(1), 60))
        await stepping(lambda: any(worker._engine.scheduler.running for worker in scene.workers.values()))
        for worker_id in scene.workers:
            handle: Any = scene.local.handles[f"{worker_id}:1"]
            changing = asyncio.ensure_future(WorkerClient(handle).reconfigure(SchedulerLimits(8, 4), shares, "DEBUG"))
            await stepping(changing.done)
            await changing
        manager_handle: Any = scene.local.handles[str(scene.local.manager_name)]
        objectives = Objectives(ttft_s=2.0, tpot_s=0.05)
        await ManagerClient(manager_handle).reconfigure(
            7, WorkerCosts(import_byte_s=1e-6), shares, objectives, "INFO", PoolLimits(3, 9.0), TurnLimits(60.0)
        )
        assert not running.done(), "the stream goes on meanwhile"
        is_open.set()
        leave.release(len(scene.workers))
        assert await running == expected(prompt_of(1), 60)
        assert await answer_of(dispatcher, "after", prompt_of(1), NUM_TOKENS) == expected(prompt_of(1))

        assert manager._directory.costs.piggyback_tokens == 7
        assert manager._directory.objectives == objectives
        assert manager._directory.turns.limits == TurnLimits(60.0)
        await until(lambda: {worker.token_budget for worker in manager._directory.fleet.values()} == {8})
        for worker in scene.workers.values():
            assert worker._engine.scheduler.limits == SchedulerLimits(8, 4)
        await until(lambda: manager._directory.num_reservations == 0)

    scene.run(play())
