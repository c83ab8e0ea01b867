"""One remote call for what many coroutines ask in the same turn of the event loop."""

import asyncio
from collections.abc import Callable
from typing import Any


class Batch:
    """Gathers calls made in the same turn of the event loop into one."""

    def __init__(self, send: Callable[[list[Any]], Any]) -> None:
        self._send = send
        self._waiting: list[tuple[Any, asyncio.Future[Any]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def add(self, item: Any) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append((item, answer))
        return await answer

    def _flush(self) -> None:
        task = asyncio.ensure_future(self._run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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
