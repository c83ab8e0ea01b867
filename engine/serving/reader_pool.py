"""Reads long requests in processes beside the ingress: several at a time, in turns of tenants, the shortest first.

Reading a body of a few megabytes takes seconds and, for a while, gigabytes. A process of its own takes no turn of the
event loop and no time of the ingress's interpreter lock, and its memory is given back.

| a request | is |
|---|---|
| that uses `READ_S` of processor time | refused, and its process ends; the same request is not tried again |
| that crashes its process | the same |
| whose process ends otherwise (SIGKILL, no memory) | read once more, since reading changes nothing; then it fails |
| above `LONG_BYTES` | never in all processes at a time: one is left for the others |
"""

import asyncio
import contextlib
import itertools
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, NamedTuple, Self

from raydix.engine.api.spec import GenerationSpec
from raydix.engine.core.errors import OverloadedError, RaydixError, RequestError, ServiceError
from raydix.engine.core.types import Grammar
from raydix.engine.model.host import num_cores
from raydix.engine.model.tokenizer import Tokenizer
from raydix.engine.serving import confinement, reader_process
from raydix.engine.serving.reader_process import READ_S
from raydix.engine.serving.reader_work import (
    Conversations,
    GrammarQuestion,
    NextTurn,
    Reading,
    ReadingFacts,
    Request,
    TokenRequest,
    Work,
)
from raydix.engine.serving.reading import Reader, template_error

logger = logging.getLogger(__name__)

# Limit of reading one request, after which the request fails and its process is killed: on a machine so busy that the
# request gets no processor time, or a process that stands still.
READ_TIMEOUT_S = 60.0
START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 5.0
PAUSE_S = 5.0  # between two attempts to start a process
# Environment of a process: large pieces of memory go back to the system when freed, and transformers keeps quiet.
ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "262144",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}

# Signals by which a request itself ends its process, such as by an overflow of the stack.
CRASHES = frozenset((signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT))
MAX_DEFAULT_PROCESSES = 4  # most processes where the configuration names no number
LONG_BYTES = 16 << 10  # size above which a request leaves one process to the others
MAX_SPENT = 4096  # requests remembered that have ended their processes
SPENT_DIGEST_BYTES = 16
MESSAGE_BYTES = 64  # bytes counted for each message besides its values
MAX_NEXT_TURNS = 2  # next turns read ahead in the processes at a time
MAX_VALID_GRAMMARS = 4096
MAX_VALID_CHARS = 16 << 20  # characters of all valid grammars that are remembered
# Size up to which a request is read between others' tokens, in a few milliseconds; longer requests go to a process.
SHORT_BYTES = 4096


def default_processes(cores: int) -> int:
    """Number of processes where the configuration names none: one for every two cores, and at least two."""
    return min(max(2, cores // 2), MAX_DEFAULT_PROCESSES)


def size_of(spec: GenerationSpec) -> int:
    """Approximate bytes of a request, counting only parts that take long to read."""
    # Templates may print a whole list of parts, so its text is what counts, not the number of parts.
    values = [str(value) for message in spec.messages for value in message.values()]
    values += [spec.template.source or "", *map(str, spec.template.arguments.values())]
    values += map(str, () if spec.tools is None else spec.tools.definitions)
    earlier = 0 if spec.turn is None else len(spec.turn.earlier)
    return earlier + sum(map(len, spec.prompts)) + MESSAGE_BYTES * len(spec.messages) + sum(map(len, values))


def _parsed_size(request: Work) -> int:
    """Characters of the prompts of a parsed request, which are more than the body has where parts are joined."""
    return sum(map(len, request.prompts)) if isinstance(request, GenerationSpec) else 0


class RequestReader:
    """Reads short requests in this process, one in each turn of the event loop, and long ones in processes beside."""

    def __init__(
        self, facts: ReadingFacts, tokenizer: Tokenizer, max_waiting_bytes: int, num_processes: int | None = None
    ) -> None:
        """`num_processes`: processes beside; None for as many as suit the machine."""
        self._facts = facts
        self._reader = Reader(facts, tokenizer)
        self._max_waiting_bytes = max_waiting_bytes
        self._num_processes = num_processes or default_processes(num_cores())
        self._turn = asyncio.Lock()  # held while a short request is read
        # Grammars in canonical form, by the digests of what clients wrote, oldest first.
        self._valid_grammars: dict[bytes, Grammar] = {}
        self._num_valid_chars = 0
        self._num_next_turns = 0  # next turns being read in the processes now

    def start(self) -> None:
        """Start the first process beside; needs a running event loop."""
        self._readers = Readers(self._facts, self._num_processes, self._max_waiting_bytes)

    def limit(self, max_waiting_bytes: int, num_processes: int | None = None) -> None:
        """Take other limits; above a lower one the largest requests that wait are refused, and processes end behind the
        requests that they read."""
        self._readers.limit(max_waiting_bytes, num_processes or default_processes(num_cores()))

    @property
    def load(self) -> "ReaderLoad":
        """The requests before the processes beside, now."""
        return self._readers.load

    async def close(self) -> None:
        """End the processes beside."""
        await self._readers.close()

    async def read(self, request: Request, size: int, tenant: str = "") -> Reading:
        """The tokens of a request of about `size` bytes, its grammar in canonical form; errors as `Readers.read`."""
        reading: Reading = await self._answer(request, size, tenant)
        return await self._checked(reading, tenant)

    async def read_all(self, conversations: Conversations, tenant: str = "") -> list[Reading]:
        """The tokens of each conversation, read in a process beside; errors as `Readers.read`."""
        readings: list[Reading] = await self._readers.read(conversations, len(conversations.body), tenant)
        return [await self._checked(reading, tenant) for reading in readings]  # all have the same grammar

    async def _checked(self, reading: Reading, tenant: str) -> Reading:
        """Return a reading whose grammar a process has checked and brought into canonical form, unless the grammar is
        among the last valid ones. Raises as `Readers.read`."""
        sampling = reading.spec.sampling
        if (written := sampling.grammar) is None:
            return reading
        # By what the client wrote: finding the canonical form is the work that is to be saved.
        digest = replace(written, frame="").digest
        known = self._valid_grammars.get(digest)
        if known is None:
            question = GrammarQuestion(replace(written, frame=""), reading.spec.grammar_param or "grammar")
            known = await self._readers.read(question, len(written.source), tenant)
            self._keep(digest, known)
        # What may stand before the answer is the request's own: the grammar is checked without it.
        sampling = replace(sampling, grammar=replace(known, lead=written.lead, frame=written.frame))
        return replace(reading, spec=replace(reading.spec, sampling=sampling))

    def _keep(self, digest: bytes, known: Grammar) -> None:
        """Remember a valid grammar, and forget the oldest ones above the limits."""
        if digest in self._valid_grammars:  # checked for two requests at the same time
            return
        self._valid_grammars[digest] = known
        self._num_valid_chars += len(known.source)
        # Two limits: a few grammars may be megabytes, and thousands of small ones cost more than their text.
        while len(self._valid_grammars) > MAX_VALID_GRAMMARS or self._num_valid_chars > MAX_VALID_CHARS:
            oldest = self._valid_grammars.pop(next(iter(self._valid_grammars)))
            self._num_valid_chars -= len(oldest.source)

    async def next_turn(self, turn: NextTurn, size: int) -> Sequence[int]:
        """Return the ids with which the next turn begins; none if they are uncertain, or if a long one would delay
        clients.

        Errors as `Readers.read`.
        """
        is_long = size > SHORT_BYTES
        # Nobody waits for a next turn; a client's body behind it would.
        if is_long and (self._readers.num_waiting or self._num_next_turns >= MAX_NEXT_TURNS):
            return ()
        self._num_next_turns += is_long
        try:
            token_ids: Sequence[int] = await self._answer(turn, size)
        finally:
            self._num_next_turns -= is_long
        return token_ids

    async def tokens(self, request: TokenRequest, tenant: str = "") -> bytes:
        """The response to a body of `/tokenize` or `/detokenize`; errors as `Readers.read`."""
        response: bytes = await self._answer(request, len(request.body), tenant)
        return response

    async def _answer(self, request: Work, size: int, tenant: str = "") -> Any:
        if size <= SHORT_BYTES:
            async with self._turn:
                await asyncio.sleep(0)
                request = self._reader.parse(request)
                size = max(size, _parsed_size(request))
                # A template of the client's is a program, and a short one may loop for ever: it is never run in this
                # process.
                if size <= SHORT_BYTES and not self._reader.runs_program(request):
                    return self._reader.answer(request)
        # Long requests, short ones of long prompts, and a client's own program, which may run for long.
        return await self._readers.read(request, size, tenant)


class ReaderLoad(NamedTuple):
    """Requests before the processes that read them."""

    num_waiting: int
    num_reading: int
    waiting_bytes: int


class _Lost(Exception):
    """A process has ended, and not because of its request."""


@dataclass(slots=True, eq=False)
class _Job:
    is_next_turn: bool
    """No client waits for a next turn: it is read after all requests, and refused before them."""
    size: int
    tenant: str
    number: int
    request: Work
    reading: asyncio.Future[Any] = field(repr=False)
    is_second_try: bool = False
    """True once a process has ended while it was reading the request."""

    def settle(self, outcome: Any) -> None:
        """Return or raise the outcome to the waiting caller, unless the client has left."""
        if self.reading.done():
            return
        if isinstance(outcome, RaydixError):
            self.reading.set_exception(outcome)
        else:
            self.reading.set_result(outcome)


class Readers:
    """Processes that read requests, as many at a time as there are processes. The first is started at once, another one
    whenever a request finds none free, up to the limit; they are kept."""

    def __init__(self, facts: ReadingFacts, num_processes: int, max_waiting_bytes: int) -> None:
        self._template = _Template(facts)
        self._max_processes = num_processes
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting: list[_Job] = []
        self._running: list[_Job] = []  # requests that a process reads
        # Set, and cleared at once, when `_choice` may have changed: wakes the processes that wait for a request.
        self._changed = asyncio.Event()
        self._numbers = itertools.count()
        # Errors of requests that have ended their processes, by digest, oldest first.
        self._spent: dict[bytes, RequestError] = {}
        self._processes: set[asyncio.Task[None]] = set()
        self._add_process()

    async def read(self, request: Work, size: int, tenant: str = "") -> Any:
        """Return the outcome of `Reader.answer`; `size` is the request's approximate bytes.

        Raises:
            RequestError: the request is not valid, or takes too long.
            OverloadedError: too many bytes wait to be read, and this request has the most.
            ServiceError: the reading failed.
        """
        # Digests are only made while there is something to find: hashing megabytes for each request would cost more
        # than it saves.
        if self._spent and (error := self._spent.get(_digest(request))) is not None:
            raise error
        reading = asyncio.get_running_loop().create_future()
        job = _Job(isinstance(request, NextTurn), size, tenant, next(self._numbers), request, reading)
        self._waiting.append(job)
        try:
            self._refuse_largest()
            self._add_if_short()
            self._tell()
            return await job.reading
        finally:
            if job in self._waiting:  # its client has left
                self._waiting.remove(job)

    @property
    def num_waiting(self) -> int:
        """Number of requests that no process reads yet."""
        return len(self._waiting)

    @property
    def load(self) -> ReaderLoad:
        """The requests of now."""
        return ReaderLoad(len(self._waiting), len(self._running), sum(job.size for job in self._waiting))

    def limit(self, max_waiting_bytes: int, num_processes: int) -> None:
        """Take other limits; above a lower one the largest requests that wait are refused."""
        self._max_waiting_bytes = max_waiting_bytes
        self._max_processes = num_processes
        self._refuse_largest()
        self._add_if_short()
        self._tell()

    async def close(self) -> None:
        """End the processes."""
        for task in self._processes:
            task.cancel()
        await asyncio.gather(*self._processes, return_exceptions=True)
        await self._template.close()

    def _refuse_largest(self) -> None:
        """Refuse requests while there are too many bytes: of the tenant that has the most, the largest."""
        while sum(job.size for job in self._waiting) > self._max_waiting_bytes:
            sizes = Counter[tuple[bool, str]]()
            for job in self._waiting:
                # Next turns are sums of their own, and are refused first: no client waits for them.
                sizes[job.is_next_turn, job.tenant] += job.size
            owner = max(sizes, key=lambda each: (each[0], sizes[each]))
            of_owner = (job for job in self._waiting if (job.is_next_turn, job.tenant) == owner)
            # Of equal ones the latest, so that a request that has waited is not refused for one that has just come.
            largest = max(of_owner, key=lambda job: (job.size, job.number))
            self._waiting.remove(largest)
            largest.settle(
                OverloadedError(
                    f"Requests of more than {self._max_waiting_bytes} bytes together wait to be read; try again later"
                )
            )

    def _choice(self) -> _Job | None:
        """Return the request to be read next: clients' own before next turns, of the tenant that has the fewest read
        now, the shortest. The last free process is for requests that are not long."""
        num_free = self._max_processes - len(self._running)
        # With one process nothing can be kept free, and long requests have to be read, too.
        takes_long = num_free > 1 or self._max_processes == 1
        num_running = Counter(job.tenant for job in self._running)
        return min(
            (job for job in self._waiting if takes_long or job.size <= LONG_BYTES),
            # Shortest first within a tenant's turn: the mean wait is the least so.
            key=lambda job: (job.is_next_turn, num_running[job.tenant], job.size, job.number),
            default=None,
        )

    def _tell(self) -> None:
        self._changed.set()
        self._changed.clear()

    def _add_if_short(self) -> None:
        """Start a process if more requests wait than processes are free, those that are being started among them."""
        num_free = len(self._processes) - len(self._running)
        if len(self._waiting) > num_free and len(self._processes) < self._max_processes:
            self._add_process()

    def _add_process(self) -> None:
        task = asyncio.create_task(self._serve())
        self._processes.add(task)
        task.add_done_callback(self._left)

    def _left(self, task: asyncio.Task[None]) -> None:
        """Forget a process. Under a lowered limit more processes may leave at a time than have to: where requests wait,
        another one is started."""
        self._processes.discard(task)
        if not task.cancelled():
            self._add_if_short()

    async def _serve(self) -> None:
        """Keep a process reading the waiting requests: start another after each end or failure."""
        while len(self._processes) <= self._max_processes:
            try:
                await self._serve_with_one()
            except Exception as error:
                logger.error("no process reads long requests (%s); the next one in %g s", _reason(error), PAUSE_S)
                await asyncio.sleep(PAUSE_S)

    async def _serve_with_one(self) -> None:
        """Start a process and have it read requests until its end."""
        process = await _Process.start(self._template)
        try:
            if not await process.is_ready():
                raise ChildProcessError("the process did not start")
            await self._read_with(process)
        finally:
            await process.end()

    async def _read_with(self, process: "_Process") -> None:
        """Have this process read requests until its end, or until there are too many processes."""
        while len(self._processes) <= self._max_processes:
            job = await self._next_job()
            try:
                if process.has_ended:
                    self._waiting.append(job)  # not tried yet
                    return
                await self._read_one(job, process)
            finally:
                self._running.remove(job)
                self._tell()
            del job
            if not await process.is_ready():
                return

    async def _next_job(self) -> _Job:
        """Wait for a request for a free process, and take it."""
        while (job := self._choice()) is None:
            await self._changed.wait()
        self._waiting.remove(job)
        self._running.append(job)
        return job

    async def _read_one(self, job: _Job, process: "_Process") -> None:
        """Have a process read a request. A request whose process ends for another reason waits once more."""
        outcome: Any = ServiceError("The request could not be read.")
        try:
            outcome = await process.read(job.request)
        except _Lost:
            outcome = ServiceError("The process that was reading the request has ended.")
            if not job.is_second_try and not job.reading.done():
                job.is_second_try = True
                self._waiting.append(job)
                return
        except RequestError as error:  # not of the reader: the request has ended the process
            outcome = error
            self._spent[_digest(job.request)] = error
            if len(self._spent) > MAX_SPENT:
                del self._spent[next(iter(self._spent))]
        finally:
            if job not in self._waiting:
                job.settle(outcome)


def _digest(request: Work) -> bytes:
    return blake2b(pickle.dumps(request, pickle.HIGHEST_PROTOCOL), digest_size=SPENT_DIGEST_BYTES).digest()


def _reason(error: Exception) -> str:
    """Message of a system error; of any other error the type alone, since its message may quote a request."""
    return str(error) if isinstance(error, OSError) else type(error).__name__


class _Forked(NamedTuple):
    """A reader, which only the template that forked it can wait for."""

    pid: int
    control: socket.socket
    """Socket to the template."""


class _Template:
    """The process from which readers are forked, started when the first one is needed and again after its end, and the
    socket to it."""

    def __init__(self, facts: ReadingFacts) -> None:
        self._facts = facts
        self._turn = asyncio.Lock()  # held from a message to its reply
        self._popen: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    async def fork(self, connection: socket.socket) -> "_Forked":
        """Fork a reader that serves a socket. Raises OSError."""
        async with self._turn:
            control = self._control or await self._start()
            try:
                socket.send_fds(control, [reader_process.FORK], [connection.fileno()])
                return _Forked(await self._reply(control), control)
            except BaseException:
                await self._drop()
                raise

    async def wait(self, reader: "_Forked") -> int | None:
        """Wait for a reader that has ended or has been killed; returns its status as of `os.wait`, or None if its
        template has ended and the status is not known."""
        async with self._turn:
            if self._control is not reader.control:
                return None
            try:
                reader.control.send(reader_process.WAIT + reader_process.ID.pack(reader.pid))
                return await self._reply(reader.control)
            except BaseException as error:
                await self._drop()
                if isinstance(error, OSError):
                    return None
                raise

    async def close(self) -> None:
        """End the template, which ends its readers."""
        await self._drop()

    async def _reply(self, control: socket.socket) -> int:
        async with asyncio.timeout(START_TIMEOUT_S):
            reply = await asyncio.get_running_loop().sock_recv(control, reader_process.ID.size)
        if len(reply) < reader_process.ID.size:
            raise ChildProcessError("the template has ended")
        (value,) = reader_process.ID.unpack(reply)
        return int(value)

    async def _start(self) -> socket.socket:
        """Start the template, which is ready after a second or more."""
        await self._drop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = ours
        try:
            ours.setblocking(False)
            with theirs:
                making = asyncio.create_task(
                    asyncio.to_thread(
                        subprocess.Popen,
                        [sys.executable, "-m", reader_process.__name__, str(theirs.fileno())],
                        pass_fds=[theirs.fileno()],
                        stdin=subprocess.DEVNULL,
                        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    )
                )
                try:
                    self._popen = await asyncio.shield(making)
                except asyncio.CancelledError:
                    self._popen = await making  # the process begins all the same, and is to be waited for
                    raise
            ours.send(pickle.dumps(self._facts, pickle.HIGHEST_PROTOCOL))
            async with asyncio.timeout(START_TIMEOUT_S):
                if not await asyncio.get_running_loop().sock_recv(ours, len(reader_process.READY)):
                    raise ChildProcessError("the template of readers did not start")
        except BaseException:
            await self._drop()
            raise
        return ours

    async def _drop(self) -> None:
        """Close the socket and wait for the process, which ends with it. Kills one that stands still."""
        control, popen, self._control, self._popen = self._control, self._popen, None, None
        if control is not None:
            control.close()
        if popen is not None:
            try:
                await asyncio.to_thread(popen.wait, END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                popen.kill()
                await asyncio.to_thread(popen.wait)


class _Process:
    """A reader, and the socket to it."""

    def __init__(
        self, template: _Template, forked: _Forked, stream: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._template = template
        self._forked = forked
        # Names the process even when the template has ended and the id is another's.
        self._descriptor = os.pidfd_open(forked.pid)
        self._is_waited_for = False
        self._stream = stream
        self._writer = writer

    @classmethod
    async def start(cls, template: _Template) -> Self:
        """Fork a reader, which is ready after a few milliseconds. Raises OSError."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                forked = await template.fork(theirs)
            stream, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        return cls(template, forked, stream, writer)

    @property
    def has_ended(self) -> bool:
        """True if the reader's end of the socket is closed."""
        return self._stream.at_eof()

    async def is_ready(self) -> bool:
        """Wait until the process can read a request; False if the process has ended."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                return bool(await self._receive() == reader_process.READY)
        except (TimeoutError, OSError, EOFError) as error:
            logger.warning("a process that reads long requests has ended or says nothing (%s)", type(error).__name__)
            return False

    async def read(self, request: Work) -> Any:
        """Return the outcome of `Reader.answer`, or the RaydixError raised by it.

        Raises:
            RequestError: the request has ended the process: by its processor time, or by a crash.
            _Lost: the process has ended for another reason.
        """
        frame = reader_process.encode_frame(request)
        try:
            self._writer.write(frame)
            async with asyncio.timeout(READ_TIMEOUT_S):
                answer = await self._receive()
        except TimeoutError:
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
            return ServiceError(f"The request could not be read in {READ_TIMEOUT_S:g} s.")
        except (OSError, EOFError):
            # A killed template's readers go on until their sockets are closed: this socket's end is the reader's own.
            killed_by = await self._killed_by()
            logger.warning("a process that reads long requests has ended (signal %s)", killed_by)
            # The limit of processor time ends a process with a signal of its own, so that it can be told from a crash.
            if killed_by == reader_process.KILLED_BY:
                raise _too_slow(request) from None
            if killed_by == confinement.KILLED_BY:
                raise template_error() from None
            if killed_by in CRASHES:
                raise _crashing(request) from None
            raise _Lost from None
        return answer

    async def end(self) -> None:
        """Kill the process if it runs, and wait for it."""
        self._writer.close()
        try:
            if not self._is_waited_for:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
                await self._template.wait(self._forked)
        finally:
            os.close(self._descriptor)

    async def _killed_by(self) -> int | None:
        """The signal that has ended the process; None if there was none, or it is not known."""
        self._is_waited_for = True
        status = await self._template.wait(self._forked)
        return os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None

    async def _receive(self) -> Any:
        (length,) = reader_process.LENGTH.unpack(await self._stream.readexactly(reader_process.LENGTH.size))
        return pickle.loads(await self._stream.readexactly(length))


def _crashing(request: Work) -> RequestError:
    """The error of a request whose reading crashes."""
    param = request.param if isinstance(request, GrammarQuestion) else None
    name = "The request" if param is None else f"'{param}'"
    return RequestError(f"{name} ends the process that reads it: it may be nested too deeply.", param=param)


def _too_slow(request: Work) -> RequestError:
    """The error of a request that has used up its processor time."""
    if isinstance(request, GrammarQuestion):
        return RequestError(
            f"'{request.param}' takes more than {READ_S:g} s of processor time to check.", param=request.param
        )
    return RequestError(f"The request takes more than {READ_S:g} s of processor time to read.")
