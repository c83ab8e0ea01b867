"""Resets of pools: each ends with its own place in the worker's export stream."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import raydix.actors.manager.pool_resets as pool_resets
from raydix.actors.manager.pool_resets import PoolResets
from raydix.actors.rpc import WorkerClient
from tests.unit.local_actors import MortalHandle
from tests.unit.waits import until


class ForgetfulWorker:
    """A worker that notes the numbers of its resets."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    async def reset_cache(self, number: int) -> int:
        self.numbers.append(number)
        return 7


def play(story: Callable[[PoolResets, ForgetfulWorker, MortalHandle], Awaitable[None]]) -> None:
    async def run() -> None:
        worker = ForgetfulWorker()
        await story(PoolResets(), worker, MortalHandle(worker))

    asyncio.run(run())


def start(resets: PoolResets, handle: Any) -> asyncio.Task[int]:
    return asyncio.create_task(resets.reset({"w": WorkerClient(handle)}))


async def until_asked(worker: ForgetfulWorker, num_resets: int) -> None:
    await until(lambda: len(worker.numbers) >= num_resets)


async def let_go_on() -> None:
    """Let every task go on until all wait for something that the test has not done; an answer takes a few turns."""
    for _ in range(50):
        await asyncio.sleep(0)


def test_a_reset_is_not_answered_by_the_end_of_an_earlier_one() -> None:
    async def story(resets: PoolResets, worker: ForgetfulWorker, handle: MortalHandle) -> None:
        first, second = start(resets, handle), start(resets, handle)
        await until_asked(worker, 2)
        resets.exports_over("w", worker.numbers[0])
        assert await first == 7
        await let_go_on()
        assert not second.done(), "what the worker exported before the second reset may still come"
        resets.exports_over("w", worker.numbers[1])
        assert await second == 7

    play(story)


def test_a_reset_that_was_given_up_answers_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(resets: PoolResets, worker: ForgetfulWorker, handle: MortalHandle) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(pool_resets, "UNDER_WAY_S", 0.01)
            assert await start(resets, handle) == 7
        later = start(resets, handle)
        await until_asked(worker, 2)
        resets.exports_over("w", worker.numbers[0])
        await let_go_on()
        assert not later.done()
        resets.exports_over("w", worker.numbers[1])
        assert await later == 7

    play(story)


def test_the_end_of_a_stream_ends_all_resets_of_its_worker() -> None:
    async def story(resets: PoolResets, worker: ForgetfulWorker, handle: MortalHandle) -> None:
        both = [start(resets, handle), start(resets, handle)]
        await until_asked(worker, 2)
        resets.stream_over("another")
        await let_go_on()
        assert not any(reset.done() for reset in both)
        resets.stream_over("w")
        assert await asyncio.gather(*both) == [7, 7]
        resets.exports_over("w", worker.numbers[0])

    play(story)


def test_a_worker_that_is_gone_has_nothing_to_forget() -> None:
    async def story(resets: PoolResets, worker: ForgetfulWorker, handle: MortalHandle) -> None:
        handle.die()
        assert await start(resets, handle) == 0

    play(story)
