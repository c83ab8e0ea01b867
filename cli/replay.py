"""`raydix replay`: sends the requests of a recording again, and compares the answers with those of then.

The answers come from the model in this process, behind the same HTTP application as in a server, or from a running
server. Requests are sent at the times at which they came, and clients that left leave again. A request that names an
earlier answer, as a chat that goes on from a stored response does, waits for that answer now, and names its new id.

Exit codes: 0, all answers that can be compared are the same as then; 1, some are not; 2, nothing could begin.
"""

import argparse
import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp
import orjson
from rich.console import Console

from raydix.cli.chat import api_key
from raydix.cli.waiting import Waiting
from raydix.engine.api.answer_digest import LEFT, Digest, digest_of, name_in
from raydix.engine.api.reconnecting import BEGINNING, HEADER
from raydix.engine.core.errors import StartupError

ID = re.compile(r"[\w.:-]{8,}", re.ASCII)  # any word of a body that may be the id of an answer
# Statuses that depend on the other requests of the moment, and so are not compared.
LOADED = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
DIFFERENT = 1

Send: TypeAlias = Callable[[str, Mapping[str, str], bytes], Awaitable[tuple[int, bytes]]]
"""Sends a path, headers and a body; returns the status and the body of the answer."""


@dataclass(frozen=True, slots=True)
class ComparedAnswer:
    """The answer to a request: then, as the recording has it, or now."""

    status: int = 0
    """0 without an answer."""
    at: float = 0.0
    """End of the answer, in seconds since the beginning of the recording."""
    name: str | None = None
    """Name of the request in the server's log."""
    id: str | None = None
    seed: int | None = None
    """Seed for a body without one."""
    parts: Digest | None = None
    why: str = "the recording has no answer"
    """Reason why there are no parts."""


@dataclass(slots=True)
class RecordedRequest:
    """A recorded request."""

    number: int
    at: float
    """Seconds since the beginning of the recording."""
    path: str
    headers: dict[str, str]
    body: str
    then: ComparedAnswer = field(default_factory=ComparedAnswer)

    @property
    def left_after_s(self) -> float | None:
        """Time until the client left; None if it stayed."""
        return self.then.at - self.at if self.then.why == LEFT else None

    def reason_to_skip(self) -> str | None:
        """Reason why the answer is not compared; None if it is."""
        if self.then.status in LOADED:
            return f"status {self.then.status}"
        if self.headers.get(HEADER.lower(), BEGINNING) not in ("", BEGINNING):
            return "goes on with a stream"
        return self.then.why if self.then.parts is None else None


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The content of a recording."""

    began: str
    model: dict[str, Any]
    asked: tuple[RecordedRequest, ...]


def run(options: argparse.Namespace) -> int:
    """Send a recording again; returns the exit code.

    Raises:
        StartupError: the recording cannot be read, or there is no server.
    """
    if options.speed <= 0:
        raise StartupError("--speed must be above 0")
    recorded = read(Path(options.recording))
    console = Console(stderr=True, highlight=False)
    return asyncio.run(_replay(recorded, options, console))


def read(path: Path) -> RecordedRun:
    """The content of a file. A last line that is not whole, because the server died or the file was full, is left out.

    Raises:
        StartupError: the file is no recording.
    """
    try:
        first, *lines = map(orjson.loads, path.read_bytes().split(b"\n")[:-1])
        asked = {each["request"]: _asked(each) for each in lines if "request" in each}
        for each in lines:
            if "answer" in each:
                facts = {name: each[name] for name in ComparedAnswer.__slots__ if name in each}
                asked[each["answer"]].then = ComparedAnswer(**facts)
        return RecordedRun(first["began"], first["model"], tuple(asked.values()))
    except OSError as error:
        raise StartupError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise StartupError(f"{path} is no recording of requests: logging.recording makes them") from None


def _asked(line: Mapping[str, Any]) -> RecordedRequest:
    return RecordedRequest(
        number=line["request"], at=line["at"], path=line["path"], headers=line["headers"], body=line["body"]
    )


async def _replay(recorded: RecordedRun, options: argparse.Namespace, console: Console) -> int:
    async with _server(recorded, options, console) as send:
        answers = await send_again(recorded, send, options.speed)
    return report(recorded, answers, console)


async def send_again(recorded: RecordedRun, send: Send, speed: float = 1.0) -> list[ComparedAnswer]:
    """Send all requests, `speed` times as fast as they came; returns the answers in the order of the requests."""
    now, tasks = asyncio.get_running_loop().time, list[asyncio.Task[ComparedAnswer]]()
    began_at, named = now(), dict[str, tuple[float, asyncio.Task[ComparedAnswer]]]()
    async with asyncio.TaskGroup() as group:
        for asked in recorded.asked:
            await asyncio.sleep(began_at + asked.at / speed - now())
            # An id that was not known yet when this request came is no id of an answer in it.
            words = set(ID.findall(asked.body)) if named else set()
            earlier = {word: named[word][1] for word in words if word in named and named[word][0] <= asked.at}
            task = group.create_task(_send_one(asked, send, earlier, speed))
            tasks.append(task)
            if asked.then.id is not None:
                named[asked.then.id] = asked.then.at, task
    return [task.result() for task in tasks]


async def _send_one(
    asked: RecordedRequest, send: Send, earlier: Mapping[str, "asyncio.Task[ComparedAnswer]"], speed: float
) -> ComparedAnswer:
    body, headers = asked.body, dict(asked.headers)
    for word, task in earlier.items():
        body = body.replace(word, (await task).id or word)
    if asked.then.seed is not None:
        body = orjson.dumps({**orjson.loads(body), "seed": asked.then.seed}).decode()
    # The name of then, so that the log and `explain` of the replay tell of the same requests.
    if asked.then.name is not None:
        headers["x-request-id"] = asked.then.name

    left_after_s = asked.left_after_s
    try:
        async with asyncio.timeout(None if left_after_s is None else left_after_s / speed):
            status, answer = await send(asked.path, headers, body.encode())
    except TimeoutError:
        return ComparedAnswer(why=LEFT)
    return ComparedAnswer(status, id=name_in(answer), parts=digest_of(answer))


def report(recorded: RecordedRun, answers: list[ComparedAnswer], console: Console) -> int:
    """Say whether the answers are the same as then, and show the first that is not; returns the exit code."""
    different, skipped = [], dict[str, int]()
    for asked, now in zip(recorded.asked, answers, strict=True):
        reason = asked.reason_to_skip()
        if reason is not None:
            skipped[reason] = skipped.get(reason, 0) + 1
        elif differences := _differences(asked.then, now):
            different.append((asked, differences))

    num_compared = len(answers) - sum(skipped.values())
    console.print(
        f"{len(answers)} requests of {recorded.began}: {num_compared - len(different)} answers the same as then"
    )
    for reason, count in skipped.items():
        console.print(f"{count} not compared: {reason}")
    if not different:
        return 0
    asked, differences = different[0]
    console.print(f"{len(different)} different; the first: request {asked.number}, {asked.path}, at {asked.at:.3f} s")
    for name, then, now_part in differences:
        console.print(f"  {name}: then {then!r}, now {now_part!r}", markup=False, soft_wrap=True)
    return DIFFERENT


def _differences(then: ComparedAnswer, now: ComparedAnswer) -> list[tuple[str, object, object]]:
    """Parts that differ, each then and now."""
    if then.status != now.status:
        return [("status", then.status, now.status)]
    if then.status >= HTTPStatus.INTERNAL_SERVER_ERROR:  # the body names a record of that server's log
        return []
    were, are = then.parts or {}, now.parts or {}
    return [(name, were.get(name), are.get(name)) for name in {**were, **are} if were.get(name) != are.get(name)]


@asynccontextmanager
async def _server(recorded: RecordedRun, options: argparse.Namespace, console: Console) -> AsyncGenerator[Send]:
    """The way to a running server, or to one in this process."""
    if options.url is not None:
        async with _http(options.url, api_key(options.api_key_env)) as send:
            yield send
        return

    from raydix.actors.one_process import OneProcess
    from raydix.cli.cluster import free_port
    from raydix.cli.local import listening
    from raydix.cli.serve import of_one_process, url_of

    model = recorded.model if options.model is None else {**recorded.model, "source": options.model}
    own = {"http": {"host": "127.0.0.1", "port": free_port()}, "batches": {"gib": 0}, "logging": {"recording": None}}
    nobody: dict[str, Any] = {"tenants": [], "tenants_file": None}  # a recording has no keys
    config = of_one_process(options.config or (), {"model": model, **own, **nobody})
    server = OneProcess(config)
    try:
        with Waiting(console, "loading the model"):
            await server.start()
        async with listening(server.application(), config), _http(url_of(config), None) as send:
            yield send
    finally:
        await server.stop()


@asynccontextmanager
async def _http(url: str, key: str | None) -> AsyncGenerator[Send]:
    """The way to a server. Raises StartupError if there is none."""
    url = url.rstrip("/")
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)  # as many at a time as then
    authorization = {} if key is None else {"authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=authorization) as session:
        try:
            await (await session.get(f"{url}/health")).read()
        except (aiohttp.ClientError, ValueError) as error:
            raise StartupError(f"there is no server at {url}: {error}") from None

        async def send(path: str, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
            try:
                async with session.post(url + path, headers=headers, data=body) as response:
                    return response.status, await response.read()
            except aiohttp.ClientPayloadError:  # a stream that breaks off is a failure of the server
                return HTTPStatus.INTERNAL_SERVER_ERROR, b""
            except aiohttp.ClientError:
                return 0, b""

        yield send
