"""One remote call for the items of many coroutines in the same turn of the event loop."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from raydix.actors.calls import Background

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class SharedCall(Generic[Item, Answer]):
    """Gathers the items of one turn of the event loop for one call of `send`, which answers each."""

    def __init__(self, send: Callable[[list[Item]], Awaitable[list[Answer]]]) -> None:
        self._send = send
        self._waiting: list[tuple[Item, asyncio.Future[Answer]]] = []
        self._background = Background()

    async def add(self, item: Item) -> Answer:
        """Return the answer to `item`. Raises the error of `send`."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        if not self._waiting:
            self._background.start(self._run())  # which begins in the next turn
        self._waiting.append((item, answer))
        return await answer

    async def _run(self) -> None:
        waiting, self._waiting = self._waiting, []
        try:
            results = await self._send([item for item, _ in waiting])
        except Exception as error:  # every caller gets it
            for _, answer in waiting:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (_, answer), result in zip(waiting, results, strict=True):
            if not answer.done():
                answer.set_result(result)
