"""One remote call for what many coroutines ask in the same turn of the event loop."""

import asyncio
from collections.abc import Callable
from typing import Any

from actors.calls import Background


class Batch:
    """Gathers calls made in the same turn of the event loop into one."""

    def __init__(self, send: Callable[[list[Any]], Any]) -> None:
        self._send = send
        self._waiting: list[tuple[Any, asyncio.Future[Any]]] = []
        self._background = Background()

    async def add(self, item: Any) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
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
