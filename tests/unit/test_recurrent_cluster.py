"""Workers whose model has recurrent states, with the production actors around them: a manager, an ingress replica."""

import asyncio
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

import raydix.actors.manager.executor as executor_module
from raydix.actors.ingress.dispatcher import Dispatcher
from raydix.actors.manager.kv_cache_manager import KVCacheManager
from raydix.actors.names import incarnation_name
from raydix.engine.core.manager.block_index import BlockRecord
from raydix.engine.core.manager.matching import with_states
from raydix.engine.core.types import BlockHash, Role
from raydix.engine.core.worker.swaps import SwapPolicy
from tests.unit.local_actors import answer_of, make_dispatcher, make_recurrent_engine
from tests.unit.test_data_plane import NUM_TOKENS, Scene, expected
from tests.unit.waits import until

MIXED = {"m0": Role.MIXED, "m1": Role.MIXED}
SPLIT = {"p": Role.PREFILL, "d": Role.DECODE}
LONG = (*range(10, 70),)


def prompt_of(number: int) -> tuple[int, ...]:
    """Prompts that begin alike, with ends of many blocks."""
    return (*LONG[:32], *((number + token) % 97 for token in range(31)))


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    scene = Scene(monkeypatch)
    monkeypatch.setattr("raydix.engine.model.build.build_engine", make_recurrent_engine)
    return scene


async def start(
    scene: Scene, roles: Mapping[str, Role] = MIXED, disk: Path | None = None, epoch: int = 1
) -> tuple[KVCacheManager, Dispatcher]:
    manager = await scene.local.start_manager(disk)
    for worker_id, role in roles.items():
        scene.workers[worker_id] = await scene.local.start_worker(role, worker_id, epoch)
    await until(lambda: scene.num_registered(manager) == len(roles))
    dispatcher = make_dispatcher(scene.local, f"ingress {epoch}")
    dispatcher.start()
    return manager, dispatcher


async def ask(
    scene: Scene,
    manager: KVCacheManager,
    dispatcher: Dispatcher,
    name: str,
    prompt: tuple[int, ...],
    num_tokens: int = NUM_TOKENS,
) -> tuple[int, ...]:
    """Have one prompt answered, and the manager know what the workers have of it; returns it with the answer."""
    answer = await answer_of(dispatcher, name, prompt, num_tokens)
    assert answer == expected(prompt, num_tokens)
    directory = manager._directory
    await until(lambda: directory.num_reservations == 0)
    # The pools' last changes may come behind the last token.
    for worker_id in [*directory.fleet]:
        names = await scene.workers[worker_id]._thread.ask(lambda engine: engine.pool.hashes())
        await until(lambda: all(worker_id in _holders(manager, each) for each in names))  # noqa: B023
    return (*prompt, *answer)


def _holders(manager: KVCacheManager, name: BlockHash) -> Collection[str]:
    record = manager._directory.stock.blocks.get(name)
    return () if record is None else record.workers


def num_prefilled(scene: Scene) -> int:
    """Tokens of prompts that all workers have computed."""
    return sum(worker._measurements.num_prefill_tokens for worker in scene.workers.values())


@pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 31, 60])
def test_states_are_handed_over(scene: Scene, length: int) -> None:
    """The decode worker computes nothing of a prompt, whether the prompt ends with a block or within one."""

    async def play() -> None:
        manager, dispatcher = await start(scene, SPLIT)
        await ask(scene, manager, dispatcher, "r", LONG[:length])
        assert num_prefilled(scene) == length
        assert scene.workers["d"]._measurements.num_prefill_tokens == 0
        assert scene.workers["d"]._engine.scheduler.requests == {}

    scene.run(play())


def test_a_next_turn_goes_on_from_the_decode_worker_s_state(scene: Scene) -> None:
    """The prefill worker imports the blocks of the answer, and the state behind the last of them."""

    async def play() -> None:
        manager, dispatcher = await start(scene, SPLIT)
        said = await ask(scene, manager, dispatcher, "first", LONG[:31])
        await ask(scene, manager, dispatcher, "second", (*said, 5, 6, 7))
        [decision] = manager._directory.decisions.of("second")["second"]
        assert num_prefilled(scene) == 31 + 6
        assert decision.runs == (("local", 7), ("worker", 3), ("never_seen", 1))

    scene.run(play())


def test_a_prompt_is_a_hit_when_its_prefill_worker_is_gone(scene: Scene) -> None:
    """The object store has the blocks, and the snapshot behind the last one that a prompt can go on from."""

    async def play() -> None:
        manager, dispatcher = await start(scene, {"p0": Role.PREFILL, "p1": Role.PREFILL, "d": Role.DECODE})
        await ask(scene, manager, dispatcher, "first", LONG)
        [decision] = manager._directory.decisions.of("first")["first"]
        await until(lambda: len(manager._directory.stock.segments) > 0)
        scene.local.kill(f"{decision.prefill}:1")
        await until(lambda: scene.num_registered(manager) == 2)
        before = num_prefilled(scene)
        await ask(scene, manager, dispatcher, "second", LONG)
        [decision] = manager._directory.decisions.of("second")["second"]
        assert decision.runs[0] == ("store", 14) and num_prefilled(scene) - before == 60 - 56

    scene.run(play())


def test_a_worker_that_leaves_gives_its_states_away(scene: Scene) -> None:
    async def play() -> None:
        manager, dispatcher = await start(scene)
        await ask(scene, manager, dispatcher, "first", LONG)
        [decision] = manager._directory.decisions.of("first")["first"]
        [other] = {*MIXED} - {decision.prefill}
        leaver = decision.prefill
        while not await manager.worker_leaving(leaver):
            await asyncio.sleep(0)
        await ask(scene, manager, dispatcher, "second", LONG)
        [decision] = manager._directory.decisions.of("second")["second"]
        assert decision.prefill == other and decision.runs == (("store", 14), ("no_state", 1))
        assert scene.workers[other]._measurements.num_prefill_tokens == 4

    scene.run(play())


def test_preempted_requests_go_on_from_their_swapped_state(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SwapPolicy, "pays", lambda *_: True)

    async def play() -> None:
        manager = await scene.local.start_manager()
        worker = await scene.local.start_worker(Role.MIXED, "m", num_blocks=32, swap_bytes=1 << 20)
        scene.workers["m"] = worker
        await until(lambda: scene.num_registered(manager) == 1)
        dispatcher = make_dispatcher(scene.local)
        dispatcher.start()
        # All are there before the second step, so that the pool is too small for them whatever the machine's speed.
        scene.hold.after(worker, 0)
        prompts = {f"r{number}": (number, *LONG[:23]) for number in range(6)}
        answers = [asyncio.create_task(answer_of(dispatcher, *each, 40)) for each in prompts.items()]
        await until(lambda: len(worker._tokens.attempts.under_way) == len(prompts))
        scene.hold.end()
        assert await asyncio.gather(*answers) == [expected(prompt, 40) for prompt in prompts.values()]
        counts = worker._engine.preemptions
        assert counts.num_swapped > 0 and counts.swapped_in_bytes > 0

    scene.run(play())


@pytest.mark.parametrize("roles", [{"m0": Role.MIXED}, SPLIT], ids=["mixed", "split"])
def test_states_on_disk_survive_everybody(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, roles: Mapping[str, Role]
) -> None:
    """After a restart the prompt and the next turn are hits, as far as a state had been written."""
    monkeypatch.setattr(executor_module, "SAVE_S", 0.02)

    def is_saved(manager: KVCacheManager) -> bool:
        records = [record for _, record in manager._directory.stock.blocks.items()]
        return all(record.segment is not None and record.segment.file is not None for record in records)

    async def play() -> None:
        manager, dispatcher = await start(scene, roles, tmp_path)
        said = await ask(scene, manager, dispatcher, "first", LONG)
        await until(lambda: is_saved(manager))
        for worker_id in roles:
            scene.local.kill(f"{worker_id}:1")
        scene.local.kill_manager()
        scene.workers = {f"{worker_id} before": worker for worker_id, worker in scene.workers.items()}
        before = num_prefilled(scene)

        manager, dispatcher = await start(scene, roles, tmp_path, epoch=2)
        await ask(scene, manager, dispatcher, "again", LONG)
        assert num_prefilled(scene) - before == 60 - 56
        await ask(scene, manager, dispatcher, "next", (*said, 1, 2, 3))
        assert num_prefilled(scene) - before - 4 == len(said) + 3 - 68
        [decision] = manager._directory.decisions.of("again")["again"]
        assert decision.runs[0] == ("disk", 14)

    scene.run(play())


@pytest.mark.parametrize("victims", [["d0"], ["p0"], ["d0", "d1"], ["p0", "d1"]], ids=" ".join)
def test_answers_are_the_same_after_prefill_and_decode_workers_die(scene: Scene, victims: list[str]) -> None:
    async def play() -> None:
        manager, dispatcher = await scene.start()
        crowd = await scene.begin(dispatcher, victims)
        for worker_id in victims:
            scene.local.kill(f"{worker_id}:1")
        scene.hold.end()
        await crowd.check()
        assert scene.num_failovers >= len(victims)
        await until(lambda: manager._directory.num_reservations == 0)
        manager._directory.check_integrity()

    scene.run(play())


def test_states_are_looked_for_from_the_last_block_on() -> None:
    """A prompt of a hundred thousand tokens has thousands of blocks, of which the last few decide."""
    asked: list[int] = []
    workers = {7: {"a"}, 3: {"a", "b"}}

    def state_behind(number: int) -> BlockRecord | None:
        asked.append(number)
        return BlockRecord(workers=frozenset(workers[number])) if number in workers else None

    found = with_states({9000: {"a"}, 5: {"b"}, 0: {"c"}}, 8, state_behind)
    assert found == {7: {"a"}, 3: {"b"}, 0: {"c"}} and asked == [8, 7, 5, 4, 3]
    assert with_states({2: {"a", "b"}}, 8, state_behind) == {0: {"a", "b"}}


def test_the_third_prompt_of_one_beginning_goes_on_from_the_seconds_snapshot(scene: Scene) -> None:
    async def play() -> None:
        manager, dispatcher = await start(scene)
        computed, before = [], 0
        for name, number in enumerate((0, 1, 2, 0)):
            prompt = prompt_of(number)
            await ask(scene, manager, dispatcher, f"r{name}", prompt)
            computed.append(num_prefilled(scene) - before)
            before += computed[-1]
        assert computed == [63, 63, 31, 3]
        # The manager predicts what the workers find, and says why the second prompt was computed.
        sources = []
        for number in range(4):
            [decision] = manager._directory.decisions.of(f"r{number}")[f"r{number}"]
            sources.append([(str(source), count) for source, count in decision.runs])
        assert sources[1][0] == ("no_state", 8) and sources[2][0] == ("local", 8) and sources[3] == [("local", 15)]

    scene.run(play())


def test_a_worker_dies_in_the_middle_of_answers(scene: Scene) -> None:
    """The other one computes the prompts with what was answered, and goes on."""

    async def play() -> None:
        _, dispatcher = await start(scene)
        for worker in scene.workers.values():
            scene.hold.after(worker, 5)
        prompts = [(*LONG, number) for number in range(8)]
        answers = [
            asyncio.create_task(answer_of(dispatcher, f"r{number}", prompt, 40))
            for number, prompt in enumerate(prompts)
        ]

        def held() -> list[str]:
            return [worker_id for worker_id, worker in scene.workers.items() if scene.hold.is_held(worker)]

        await until(lambda: bool(held()))
        scene.local.kill(incarnation_name(held()[0], 1))
        scene.hold.end()
        assert await asyncio.gather(*answers) == [expected(prompt, 40) for prompt in prompts]

    scene.run(play())


def test_a_worker_counts_up_to_its_last_state() -> None:
    """States behind blocks that it lacks, or that others have, are of no use to it."""
    states = [None, {"a", "b", "c"}, None, {"b"}, {"c", "e"}]
    records = [None if workers is None else BlockRecord(workers=frozenset(workers)) for workers in states]
    holders = {5: {"a", "b"}, 2: {"c"}, 4: {"e"}, 0: {"d"}}

    def state_behind(num_blocks: int) -> BlockRecord | None:
        return records[num_blocks - 1]

    assert with_states(holders, 5, state_behind) == {4: {"b"}, 2: {"a", "c"}, 0: {"d", "e"}}
    assert with_states({5: {"a", "b"}}, 3, state_behind) == {2: {"a", "b"}}, "no request goes on behind its last token"
