"""Files and functions that requests run through, in a server of one process: `python -m tests.trips [--files]`.

Each request is sent once before it is counted, so that nothing is loaded or compiled for the first time. Calls of all
threads count, except functions that also run while nobody asks (heartbeats, reports, looks at the load), and except
code that runs as a module is imported. *Data plane*: the actors of manager and worker with their rooms in
`engine/core`, the engine's thread and the kernels; *ingress*: all the rest.
"""

import argparse
import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import aiohttp

from raydix.actors.one_process import OneProcess
from raydix.cli.cluster import free_port
from raydix.cli.local import listening
from raydix.cli.serve import of_one_process, url_of

ROOT = str(Path(__file__).parents[1] / "raydix") + "/"
DATA_PLANE = (
    *("actors/manager/", "actors/worker/", "engine/core/manager/", "engine/core/worker/"),
    *("engine/core/eviction/", "engine/core/memory/", "kernels/"),
)
LOOK_S = 0.01
QUIET_S = 5.0
"""Time without a request, longer than between two reports of any actor."""
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Name three rivers of Europe, and say for each where it ends."}],
    "max_tokens": 24,
    "temperature": 0,
}
NEXT_TURN = {
    **CHAT,
    "messages": [
        *CHAT["messages"],
        {"role": "assistant", "content": "The Danube, the Rhine and the Volga."},
        {"role": "user", "content": "And which of them is the longest one?"},
    ],
}
CALL = {
    **CHAT,
    "max_tokens": 64,
    "tool_choice": "required",
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "find_river",
                "parameters": {
                    "type": "object",
                    "properties": {"order": {"enum": ["length", "age"]}},
                    "required": ["order"],
                    "additionalProperties": False,
                },
            },
        }
    ],
}
Call: TypeAlias = tuple[str, str, bool]
"""File below the package, qualified name, and whether it ran on the data plane."""
Trip: TypeAlias = Callable[[aiohttp.ClientSession], Awaitable[None]]


class CallRecorder:
    """Notes calls of functions of the package, in threads that begin after it was installed, while it is told to."""

    def __init__(self) -> None:
        self.calls: set[Call] = set()
        self.is_on = False

    def install(self) -> None:
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if not self.is_on or event != "call":
            return
        code = frame.f_code
        if code.co_filename.startswith(ROOT) and code.co_name != "<module>":
            file = code.co_filename.removeprefix(ROOT)
            is_engine = threading.current_thread() is not threading.main_thread() and file.startswith("engine/model/")
            self.calls.add((file, code.co_qualname, is_engine or file.startswith(DATA_PLANE)))

    async def of(self, trip: Trip, session: aiohttp.ClientSession) -> set[Call]:
        """The calls of a trip, which is made once before."""
        await trip(session)
        self.calls = set()
        self.is_on = True
        try:
            await trip(session)
        finally:
            self.is_on = False
        return self.calls

    async def until_called(self, name: str) -> None:
        """Wait until a function of this qualified name runs, if calls are noted."""
        while self.is_on and name not in {qualified for _, qualified, _ in self.calls}:
            await asyncio.sleep(LOOK_S)


async def rest(session: aiohttp.ClientSession) -> None:
    """No request."""
    await asyncio.sleep(QUIET_S)


async def ask(session: aiohttp.ClientSession, body: Mapping[str, Any]) -> None:
    """One answer, whole or streamed. Raises ClientResponseError unless its status is 200."""
    async with session.post("/v1/chat/completions", json=body, raise_for_status=True) as response:
        await response.read()


def leaving(recorder: CallRecorder) -> Trip:
    """A client that goes after the first piece of a long answer, followed until the engine has dropped its request."""

    async def trip(session: aiohttp.ClientSession) -> None:
        body = {**CHAT, "max_tokens": 1000, "ignore_eos": True, "stream": True}
        async with session.post("/v1/chat/completions", json=body, raise_for_status=True) as response:
            await response.content.readline()
            response.close()
        await recorder.until_called("Engine.abort")

    return trip


async def measure(recorder: CallRecorder) -> dict[str, set[Call]]:
    """The calls of each trip."""
    port = free_port()
    settings = {"model": {"max_model_len": 2048}, "cache": {"num_blocks": 400}, "batches": {"gib": 0}}
    config = of_one_process((), {**settings, "http": {"host": "127.0.0.1", "port": port}})
    trips: dict[str, Trip] = {
        "a chat": lambda session: ask(session, CHAT),
        "a chat, streamed": lambda session: ask(session, {**CHAT, "stream": True}),
        "its next turn, from the cache": lambda session: ask(session, NEXT_TURN),
        "a tool call": lambda session: ask(session, CALL),
        "a client that leaves": leaving(recorder),
    }
    server = OneProcess(config)
    try:
        await server.start()
        async with listening(server.application(), config), aiohttp.ClientSession(url_of(config)) as session:
            at_rest = await recorder.of(rest, session)
            return {name: await recorder.of(trip, session) - at_rest for name, trip in trips.items()}
    finally:
        await server.stop()


def row(name: str, calls: set[Call]) -> str:
    """A line of the table: files and functions at the ingress, on the data plane, and in all."""
    sides = [[call for call in calls if call[2] is side] for side in (False, True)]
    cells = [f"{len({file for file, *_ in each})}, {len(each)}" for each in (*sides, list(calls))]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.trips", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--files", action="store_true", help="list the files of each trip, too")
    options = parser.parse_args()
    recorder = CallRecorder()
    recorder.install()
    found = asyncio.run(measure(recorder))
    print("| files, functions | ingress | data plane | in all |\n|---|---|---|---|")
    for name, calls in found.items():
        print(row(name, calls))
    if options.files:
        for name, calls in found.items():
            print(f"\n{name}:", *sorted({file for file, *_ in calls}), sep="\n  ")


if __name__ == "__main__":
    main()
