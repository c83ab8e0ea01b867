"""Twelve agents on pools for four, through the data plane: an ingress, the manager and workers in one process."""

import asyncio
from collections.abc import Iterator

import pytest

from raydix.actors.ingress.dispatcher import Dispatcher
from raydix.actors.manager.kv_cache_manager import KVCacheManager
from raydix.actors.names import incarnation_name
from raydix.engine.core.ingress.generation import Generation
from raydix.engine.core.manager.turns import TurnLimits
from raydix.engine.core.types import CacheHints, Role, Salt, Sampling
from tests.unit.local_actors import make_dispatcher
from tests.unit.test_data_plane import Scene, expected
from tests.unit.waits import until

NUM_AGENTS = 12
NUM_TURNS = 3
NUM_TOKENS = 4
"""Of an answer."""
PROMPT = 56
"""Tokens of the first prompt: with the later turns 20 blocks, of pools of 40 on each of two workers."""


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    scene = Scene(monkeypatch)
    yield scene
    scene.stop()


class Agents:
    """Agents that each run some turns, one after the other."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.running: dict[str, Generation] = {}
        self.paused: set[int] = set()
        """Agents that were seen to wait for their turns."""
        self.num_done = 0

    async def run(self, agent: int) -> None:
        prompt = tuple(1 + (agent + 3 * number) % 50 for number in range(PROMPT))
        for turn in range(NUM_TURNS):
            generation = Generation(
                f"agent-{agent}-{turn}", prompt, Sampling(NUM_TOKENS), Salt(), CacheHints(), session=None
            )
            self.running[generation.request_id] = generation
            tokens: list[int] = []
            async for events in self._dispatcher.generate(generation):
                tokens += [event.token_id for event in events if event.token_id is not None]
            del self.running[generation.request_id]
            assert tokens == expected(prompt, NUM_TOKENS)
            prompt += (*tokens, 7, 7, 7, 7)
            self.num_done += 1

    async def watch(self) -> None:
        """Note who pauses, again and again."""
        while True:
            await asyncio.sleep(0.01)
            self.paused |= {int(name.split("-")[1]) for name, each in self.running.items() if each.paused is not None}


async def start_manager(scene: Scene) -> KVCacheManager:
    manager = await scene.local.start_manager()
    manager._directory.turns.limits = TurnLimits(quantum_s=0.4)
    return manager


@pytest.mark.parametrize("event", ["nothing", "a client leaves", "a worker dies", "the manager dies"])
def test_more_agents_than_fit_take_turns(scene: Scene, event: str) -> None:
    async def play() -> None:
        manager = await start_manager(scene)
        for name in ("v", "w"):
            scene.workers[name] = await scene.local.start_worker(Role.MIXED, name, num_blocks=40)
        await until(lambda: all(each.num_blocks == 40 for each in manager._directory.fleet.values()))
        await until(lambda: scene.num_registered(manager) == 2)
        dispatcher = make_dispatcher(scene.local)
        dispatcher.start()
        agents = Agents(dispatcher)
        watch = asyncio.create_task(agents.watch())
        tasks = [asyncio.create_task(agents.run(agent)) for agent in range(NUM_AGENTS)]
        await until(lambda: agents.paused)

        num_left = 0
        if event == "a client leaves":
            leaver = next(iter(agents.paused))
            await until(lambda: any(each.paused is not None for each in agents.running.values()))
            name = next(name for name, each in agents.running.items() if each.paused is not None)
            leaver = int(name.split("-")[1])
            tasks[leaver].cancel()
            del agents.running[name]
            await asyncio.wait([tasks[leaver]])
            num_left = 1
        elif event == "a worker dies":
            scene.local.kill(incarnation_name("v", 1))
        elif event == "the manager dies":
            scene.local.kill_manager()
            manager = await start_manager(scene)

        done = await asyncio.gather(*tasks, return_exceptions=True)
        watch.cancel()
        assert [each for each in done if each is not None and not isinstance(each, asyncio.CancelledError)] == []
        assert sum(isinstance(each, asyncio.CancelledError) for each in done) == num_left
        await until(lambda: manager._directory.num_reservations == 0)
        manager._directory.check_integrity()
        if event == "nothing":
            sessions = [*manager._directory.sessions]
            assert len(sessions) == NUM_AGENTS, "known by the blocks of their prompts"
            assert {session.num_requests for session in sessions} == {NUM_TURNS}
            assert sum(session.num_pauses for session in sessions) > 0

    scene.run(play())


def test_no_agent_waits_with_turns_off(scene: Scene) -> None:
    async def play() -> None:
        await scene.local.start_manager()
        scene.workers["w"] = await scene.local.start_worker(Role.MIXED, "w", num_blocks=80)
        dispatcher = make_dispatcher(scene.local)
        dispatcher.start()
        agents = Agents(dispatcher)
        watch = asyncio.create_task(agents.watch())
        await asyncio.gather(*(agents.run(agent) for agent in range(NUM_AGENTS)))
        watch.cancel()
        assert not agents.paused and agents.num_done == NUM_AGENTS * NUM_TURNS

    scene.run(play())


def test_agents_that_fit_never_wait(scene: Scene) -> None:
    async def play() -> None:
        manager = await start_manager(scene)
        # Four sessions of 20 blocks, and room to spare: a part of a pool is for no session.
        scene.workers["w"] = await scene.local.start_worker(Role.MIXED, "w", num_blocks=100)
        await until(lambda: scene.num_registered(manager) == 1)
        dispatcher = make_dispatcher(scene.local)
        dispatcher.start()
        agents = Agents(dispatcher)
        await asyncio.gather(*(agents.run(agent) for agent in range(4)))
        sessions = [*manager._directory.sessions]
        assert len(sessions) == 4 and sum(session.num_pauses for session in sessions) == 0
        assert agents.num_done == 4 * NUM_TURNS

    scene.run(play())
