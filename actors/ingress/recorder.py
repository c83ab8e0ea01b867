"""Recording of the requests of one ingress replica, where the configuration asks for one. A recording contains prompts.

A recording is a file of JSON lines, which `raydix replay` sends again:

* The first line has the warning that the file contains prompts (`recording`), `version`, `began` and `model`, the
  configuration's section.
* A request has a number (`request`), `at` in seconds since the beginning, `path`, the `headers` that count, and the
  `body` as it was read.
* An answer has the number of its request (`answer`), `at`, `status`, the request's `name`, its own `id`, the `seed` of
  a body that had none, and `parts` (`raydix.engine.api.answer_digest`), or the reason `why` there is nothing to
  compare.

A request's line is written before the request is served, in one write, so SIGKILL loses no request that explains the
failure. When the file is full, the recording ends. Neither an API key nor a tenant's name is in the file.
"""

import asyncio
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raydix.actors.ingress.http import CLIENT_CLOSED_REQUEST
from raydix.configs.schema import Config
from raydix.engine.api.answer_digest import LEFT, digest_of, name_in
from raydix.engine.api.parameters import TPOT_HEADER, TTFT_HEADER
from raydix.engine.api.reconnecting import HEADER
from raydix.engine.core.log_fields import about
from raydix.engine.serving.job import Job

logger = logging.getLogger(__name__)

WARNING = "contains prompts"
# Headers that an answer or its place depends on.
KEPT_HEADERS = ("content-type", "x-session-id", "x-request-id", TTFT_HEADER, TPOT_HEADER, HEADER.lower())
MOST_ANSWER_BYTES = 16 << 20  # a longer answer has no digest: the parts of an answer are held until its end


class RequestRecorder:
    """A new file for the requests of a replica. Lines are written in threads, as clients choose their size."""

    def __init__(self, folder: Path, most_bytes: int, config: Config) -> None:
        """Raises OSError if the file cannot be made."""
        began = datetime.now(UTC)
        self._path = folder / f"requests-{began:%Y%m%dT%H%M%S}-{os.getpid()}.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        # Nobody else may read prompts, nor may a link that lies there be written through.
        self._file: int | None = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._num_left = most_bytes
        self._began_at = time.monotonic()
        self._numbers = itertools.count()
        self._writing = threading.Lock()  # held while a line is written, so that lines do not mix
        model = config.model.model_dump(mode="json")
        self._write({"recording": WARNING, "version": version("raydix"), "began": began.isoformat(), "model": model})

    def request(self, path: str, headers: Headers, body: bytes) -> int:
        """Note a request; returns its number."""
        number = next(self._numbers)
        kept = {name: headers[name] for name in KEPT_HEADERS if name in headers}
        text = body.decode(errors="replace")  # what is not UTF-8 is refused, then as now
        self._write({"request": number, "at": self._now(), "path": path, "headers": kept, "body": text})
        return number

    def answer(self, number: int, **facts: object) -> None:
        self._write({"answer": number, "at": self._now(), **facts})

    def _now(self) -> float:
        return round(time.monotonic() - self._began_at, 6)

    def _write(self, line: dict[str, object]) -> None:
        """Append a line, or end the recording."""
        data = orjson.dumps(line) + b"\n"
        with self._writing:
            if self._file is None:
                return
            # Counted before the write: the file never has more than its limit, and a line is whole or not there.
            self._num_left -= len(data)
            if self._num_left < 0:
                self._end("the file is full")
                return
            try:
                if os.write(self._file, data) != len(data):
                    self._end("the disk is full")
            except OSError as error:  # recording must not stop the server
                self._end(str(error))

    def _end(self, reason: str) -> None:
        assert self._file is not None
        os.close(self._file)
        self._file = None
        logger.warning("%s ends here: %s", self._path, reason, extra=about("recording_ended", reason=reason))


def recorder_of(config: Config) -> RequestRecorder | None:
    """The recorder that a configuration asks for; None without one, or with a warning if the file cannot be made."""
    settings = config.logging
    if settings.recording is None:
        return None
    try:
        recorder = RequestRecorder(Path(settings.recording), settings.recording_mib << 20, config)
    except OSError as error:
        logger.warning("nothing is recorded: %s", error, extra=about("recording_ended", reason=str(error)))
        return None
    return recorder


class Recording:
    """Has requests for answers of the model, and the answers, noted by a recorder, if there is one."""

    def __init__(self, app: ASGIApp, recorder: Callable[[], RequestRecorder | None]) -> None:
        """`recorder` is known only once the replica has its configuration."""
        self._app = app
        self._recorder = recorder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        recorder = self._recorder() if scope["type"] == "http" and scope["method"] == "POST" else None
        if recorder is None:
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(recorder, scope, receive, send)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except Exception:
            exchange.has_failed = True  # outside of here it becomes a 500, or ends a stream
            raise
        finally:
            await exchange.end()


class _Exchange:
    """One request with its answer, between the server and the application."""

    def __init__(self, recorder: RequestRecorder, scope: Scope, receive: Receive, send: Send) -> None:
        self._recorder = recorder
        self._scope = scope
        self._receive = receive
        self._send = send
        self._body: list[bytes] = []
        self._number: int | None = None  # the request's number, once its body is whole
        self._status = 0
        self._answer: list[bytes] = []
        self._num_bytes = 0
        self._is_whole = False  # the end of the answer was sent
        self.has_failed = False
        """The application raised an unforeseen error."""

    async def receive(self) -> Message:
        """Pass a message to the application; the body's last part is noted first."""
        message = await self._receive()
        route = self._scope.get("route")  # only a route's handler reads a body, so the route is known by then
        if route is None or not route.declared.is_answer:
            return message
        if message["type"] == "http.request" and self._number is None:
            self._body.append(message.get("body", b""))
            if not message.get("more_body", False):
                whole, self._body = b"".join(self._body), []
                headers = Headers(scope=self._scope)
                self._number = await asyncio.to_thread(self._recorder.request, route.path, headers, whole)
        return message

    async def send(self, message: Message) -> None:
        """Pass a message to the server."""
        await self._send(message)
        if self._number is None:
            return
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif message["type"] == "http.response.body":
            part = message.get("body", b"")
            self._num_bytes += len(part)
            if self._num_bytes <= MOST_ANSWER_BYTES:
                self._answer.append(part)
            self._is_whole = not message.get("more_body", False)

    async def end(self) -> None:
        """Note the answer of a request that was noted."""
        if self._number is None:
            return
        jobs: Sequence[Job] = self._scope.get("state", {}).get("jobs", ())
        name = jobs[0].request_id if jobs else None
        seed = seed_of(jobs)
        facts: dict[str, object] = {"status": self._status, "name": name, "seed": seed.value}
        if self.has_failed:
            facts |= {"status": HTTPStatus.INTERNAL_SERVER_ERROR, "parts": {}}
        elif not self._is_whole or self._status == CLIENT_CLOSED_REQUEST:
            facts["why"] = LEFT
        elif not seed.is_enough:
            facts["why"] = "several prompts draw tokens, and the body has no seed"
        elif self._num_bytes > MOST_ANSWER_BYTES:
            facts["why"] = "the answer is too long"
        else:
            facts |= await asyncio.to_thread(_parts, b"".join(self._answer))
        await asyncio.to_thread(self._recorder.answer, self._number, **facts)


def _parts(answer: bytes) -> dict[str, Any]:
    return {"id": name_in(answer), "parts": digest_of(answer)}


@dataclass(frozen=True, slots=True)
class Seed:
    """The field `seed` for a body without one, with which the request is answered the same way again."""

    value: int | None
    """None where the body needs no other seed."""
    is_enough: bool = True
    """False where no one seed gives the same answers."""


def seed_of(jobs: Sequence[Job]) -> Seed:
    """The seed of a request that these jobs are of."""
    drawn = [job for job in jobs if job.spec.seed is None and not job.spec.has_inputs and _draws(job)]
    if not drawn:
        return Seed(None)
    # The server draws a seed for each job, from which each choice has its own; a seed in the body counts per prompt.
    job = drawn[0]
    is_enough = len(jobs) == 1 and job.spec.num_choices == job.spec.num_samples
    return Seed(job.answers[0].generation.sampling.seed if is_enough else None, is_enough)


def _draws(job: Job) -> bool:
    return any(answer.generation.sampling.temperature > 0 for answer in job.answers)
