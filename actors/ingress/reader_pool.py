"""Reads long requests in processes beside the ingress, the shortest first.

Reading a body of a few megabytes takes seconds and, for a while, gigabytes. A process of its own takes no turn of the
event loop and no time of the ingress's interpreter lock, and its memory is given back.
"""

import asyncio
import heapq
import itertools
import logging
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from actors.ingress import reader_process
from actors.ingress.reader_work import (
    Conversations,
    GrammarQuestion,
    NextTurn,
    Reading,
    ReadingFacts,
    Request,
    TokenRequest,
    Work,
)
from actors.ingress.reading import Reader
from engine.api.spec import GenerationSpec
from engine.core.errors import OverloadedError, RaydixError, ServiceError
from engine.model.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

READ_TIMEOUT_S = 60.0
"""Limit of reading one request, after which the request fails and its process is killed."""
START_TIMEOUT_S = 120.0
PAUSE_S = 5.0
"""Between two attempts to start a process."""
ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "262144",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}
"""Environment of a process: large pieces of memory go back to the system when freed, and transformers keeps quiet."""

NUM_PROCESSES = 1
MESSAGE_BYTES = 64
"""Bytes counted for each message besides its values."""
MAX_NEXT_TURNS = 2
"""Next turns read ahead in the processes at a time."""
MAX_VALID_GRAMMARS = 4096
SHORT_BYTES = 4096
"""Size up to which a request is read between others' tokens, in a few milliseconds; longer requests go to a process."""


def size_of(spec: GenerationSpec) -> int:
    """Approximate bytes of a request, counting only parts that take long to read."""
    values = [str(value) for message in spec.messages for value in message.values()]
    values += [spec.template.source or "", *map(str, spec.template.arguments.values())]
    values += map(str, () if spec.tools is None else spec.tools.definitions)
    return sum(map(len, spec.prompts)) + MESSAGE_BYTES * len(spec.messages) + sum(map(len, values))


def _parsed_size(request: Work) -> int:
    """Characters of the prompts of a parsed request, which are more than the body has where parts are joined."""
    return sum(map(len, request.prompts)) if isinstance(request, GenerationSpec) else 0


class RequestReader:
    """Reads short requests in this process, one in each turn of the event loop, and long ones in processes beside."""

    def __init__(self, facts: ReadingFacts, tokenizer: Tokenizer, max_waiting_bytes: int) -> None:
        self._facts = facts
        self._reader = Reader(facts, tokenizer)
        self._max_waiting_bytes = max_waiting_bytes
        self._turn = asyncio.Lock()
        """Held while a short request is read."""
        self._valid_grammars: dict[bytes, None] = {}
        """Digests of grammars found valid, oldest first."""
        self._num_next_turns = 0
        """Next turns being read in the processes now."""

    def start(self) -> None:
        """Start the processes beside; needs a running event loop."""
        self._readers = Readers(self._facts, NUM_PROCESSES, self._max_waiting_bytes)

    def limit(self, max_waiting_bytes: int) -> None:
        """Take another limit; above a lower one the largest requests that wait are refused."""
        self._readers.limit(max_waiting_bytes)

    async def close(self) -> None:
        """End the processes beside."""
        await self._readers.close()

    def check_model(self, name: str) -> None:
        """Raise ModelNotFoundError unless `name` is the model's name."""
        self._reader.check_model(name)

    async def read(self, request: Request, size: int) -> Reading:
        """The tokens of a request of about `size` bytes; errors as `Readers.read`."""
        reading: Reading = await self._answer(request, size)
        grammar, param = reading.spec.sampling.grammar, reading.spec.grammar_param
        if grammar is not None:
            await self._check(GrammarQuestion(grammar, param or "grammar"))
        return reading

    async def read_all(self, conversations: Conversations) -> list[Reading]:
        """The tokens of each conversation, read in a process beside; errors as `Readers.read`."""
        readings: list[Reading] = await self._readers.read(conversations, len(conversations.body))
        spec = readings[0].spec
        if spec.sampling.grammar is not None:  # the same one in all conversations
            await self._check(GrammarQuestion(spec.sampling.grammar, spec.grammar_param or "grammar"))
        return readings

    async def _check(self, question: GrammarQuestion) -> None:
        """Have a process check a grammar, unless the grammar is among the last valid ones."""
        digest = question.grammar.digest
        if digest not in self._valid_grammars:
            await self._readers.read(question, len(question.grammar.source))
            self._valid_grammars[digest] = None
            if len(self._valid_grammars) > MAX_VALID_GRAMMARS:
                del self._valid_grammars[next(iter(self._valid_grammars))]

    async def next_turn(self, turn: NextTurn, size: int) -> Sequence[int]:
        """Return the ids with which the next turn begins; none if they are uncertain, or if a long one would delay
        clients.

        Errors as `Readers.read`.
        """
        is_long = size > SHORT_BYTES
        if is_long and (self._readers.num_waiting or self._num_next_turns >= MAX_NEXT_TURNS):
            return ()
        self._num_next_turns += is_long
        try:
            token_ids: Sequence[int] = await self._answer(turn, size)
        finally:
            self._num_next_turns -= is_long
        return token_ids

    async def tokens(self, request: TokenRequest) -> bytes:
        """The response to a body of `/tokenize` or `/detokenize`; errors as `Readers.read`."""
        response: bytes = await self._answer(request, len(request.body))
        return response

    async def _answer(self, request: Work, size: int) -> Any:
        if size <= SHORT_BYTES:
            async with self._turn:
                await asyncio.sleep(0)
                request = self._reader.parse(request)
                size = max(size, _parsed_size(request))
                if size <= SHORT_BYTES and not self._reader.runs_program(request):
                    return self._reader.answer(request)
        # Long requests, short ones of long prompts, and a client's own program, which may run for long.
        return await self._readers.read(request, size)


@dataclass(order=True, slots=True)
class _Job:
    is_next_turn: bool
    """No client waits for a next turn: it is read after all requests, and refused before them."""
    size: int
    number: int
    request: Work = field(compare=False)
    reading: asyncio.Future[Any] = field(compare=False)

    def settle(self, outcome: Any) -> None:
        """Return or raise the outcome to the waiting caller, unless the client has left."""
        if self.reading.done():
            return
        if isinstance(outcome, RaydixError):
            self.reading.set_exception(outcome)
        else:
            self.reading.set_result(outcome)


class Readers:
    """Processes that read requests, as many at a time as there are processes."""

    def __init__(self, facts: ReadingFacts, num_processes: int, max_waiting_bytes: int) -> None:
        self._facts = facts
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting: list[_Job] = []
        """A heap: clients' requests by size, then next turns."""
        self._arrived = asyncio.Condition()
        self._numbers = itertools.count()
        self._processes = [asyncio.create_task(self._serve()) for _ in range(num_processes)]

    async def read(self, request: Work, size: int) -> Any:
        """Return the outcome of `Reader.answer`; `size` is the request's approximate bytes.

        Raises:
            RequestError: the request is not valid.
            OverloadedError: too many bytes wait to be read, and this request has the most.
            ServiceError: the reading failed.
        """
        reading = asyncio.get_running_loop().create_future()
        job = _Job(isinstance(request, NextTurn), size, next(self._numbers), request, reading)
        heapq.heappush(self._waiting, job)
        try:
            self._refuse_largest()
            async with self._arrived:
                self._arrived.notify()
            return await job.reading
        finally:
            if job in self._waiting:  # its client has left
                self._waiting.remove(job)
                heapq.heapify(self._waiting)

    @property
    def num_waiting(self) -> int:
        """Number of requests that no process reads yet."""
        return len(self._waiting)

    def limit(self, max_waiting_bytes: int) -> None:
        """Take another limit; above a lower one the largest requests that wait are refused."""
        self._max_waiting_bytes = max_waiting_bytes
        self._refuse_largest()

    async def close(self) -> None:
        """End the processes."""
        for task in self._processes:
            task.cancel()
        await asyncio.gather(*self._processes, return_exceptions=True)

    def _refuse_largest(self) -> None:
        while sum(job.size for job in self._waiting) > self._max_waiting_bytes:
            largest = max(self._waiting)
            self._waiting.remove(largest)
            heapq.heapify(self._waiting)
            largest.settle(
                OverloadedError(
                    f"Requests of more than {self._max_waiting_bytes} bytes together wait to be read; try again later"
                )
            )

    async def _serve(self) -> None:
        """Keep a process reading the waiting requests: start another after each end or failure."""
        while True:
            try:
                await self._serve_with_one()
            except Exception as error:
                logger.error("no process reads long requests (%s); the next one in %g s", _reason(error), PAUSE_S)
                await asyncio.sleep(PAUSE_S)

    async def _serve_with_one(self) -> None:
        """Start a process and have it read requests until its end."""
        process = await _Process.start(self._facts)
        try:
            if not await process.is_ready():
                raise ChildProcessError("the process did not start")
            await self._read_with(process)
        finally:
            await process.end()

    async def _read_with(self, process: "_Process") -> None:
        """Have this process read requests until its end."""
        while True:
            async with self._arrived:
                await self._arrived.wait_for(lambda: self._waiting)
                job = heapq.heappop(self._waiting)
            outcome: Any = ServiceError("The request could not be read.")
            try:
                outcome = await process.read(job.request)
            finally:
                job.settle(outcome)
            del job, outcome
            if not await process.is_ready():
                return


def _reason(error: Exception) -> str:
    """Message of a system error; of any other error the type alone, since its message may quote a request."""
    return str(error) if isinstance(error, OSError) else type(error).__name__


class _Process:
    """One process, and the socket to it."""

    def __init__(self, popen: "subprocess.Popen[bytes]", stream: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._popen = popen
        self._stream = stream
        self._writer = writer

    @classmethod
    async def start(cls, facts: ReadingFacts) -> "_Process":
        """A process that becomes ready after a few seconds."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                popen = await asyncio.to_thread(
                    subprocess.Popen,
                    [sys.executable, "-m", reader_process.__name__, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
            stream, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            raise

        writer.write(reader_process.encode_frame(facts))
        return cls(popen, stream, writer)

    async def is_ready(self) -> bool:
        """Wait until the process can read a request; False if the process has ended."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                return bool(await self._receive() == reader_process.READY)
        except (TimeoutError, OSError, EOFError) as error:
            logger.warning("a process that reads long requests has ended or says nothing (%s)", type(error).__name__)
            return False

    async def read(self, request: Work) -> Any:
        """Return the outcome of `Reader.answer`, or the RaydixError raised by it."""
        try:
            self._writer.write(reader_process.encode_frame(request))
            async with asyncio.timeout(READ_TIMEOUT_S):
                answer = await self._receive()
        except TimeoutError:
            self._popen.kill()
            return ServiceError(f"The request could not be read in {READ_TIMEOUT_S:g} s.")
        except (OSError, EOFError):
            return ServiceError("The process that was reading the request has ended.")
        return answer

    async def end(self) -> None:
        self._writer.close()
        self._popen.kill()
        await asyncio.to_thread(self._popen.wait)

    async def _receive(self) -> Any:
        (length,) = reader_process.LENGTH.unpack(await self._stream.readexactly(reader_process.LENGTH.size))
        return pickle.loads(await self._stream.readexactly(length))
