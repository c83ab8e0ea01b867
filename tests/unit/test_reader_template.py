"""The start of the process that readers are forked from."""

import asyncio
import subprocess
import threading
from typing import Any

import pytest

from raydix.engine.serving.reader_pool import _Template


def test_a_template_that_is_dropped_while_it_begins_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[subprocess.Popen[bytes]] = []
    is_starting, may_start = threading.Event(), threading.Event()
    popen = subprocess.Popen

    def start(*arguments: Any, **options: Any) -> Any:
        is_starting.set()
        assert may_start.wait(300)
        begun.append(popen(*arguments, **options))
        return begun[0]

    async def drop_while_it_begins() -> None:
        starting = asyncio.create_task(_Template({"no": "facts"})._start())  # type: ignore[arg-type]
        await asyncio.to_thread(is_starting.wait)
        starting.cancel()
        await asyncio.sleep(0)
        may_start.set()
        with pytest.raises(asyncio.CancelledError):
            await starting

    monkeypatch.setattr("raydix.engine.serving.reader_pool.subprocess.Popen", start)
    asyncio.run(drop_while_it_begins())
    assert begun[0].returncode is not None
