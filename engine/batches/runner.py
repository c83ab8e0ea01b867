"""Runs the lines of one batch: asks for answers, writes answers into the journal, tries lines without room again."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeAlias

from raydix.engine.api.batches import LineAnswer, output_line
from raydix.engine.batches.journal import Journal
from raydix.engine.batches.lines import Input
from raydix.engine.batches.output import line_id
from raydix.engine.core.batches.batch_run import BatchRun
from raydix.engine.core.batches.records import Record

Answer: TypeAlias = Callable[[str, bytes], Awaitable[LineAnswer]]
"""Gives the response to a body at a route; never raises."""
LOOK_S = 0.25  # pause between two looks for room and for reasons to stop
SUCCESS = 200


class Slots(Protocol):
    """Limit of the running lines."""

    def free(self) -> int:
        """Number of lines with room to begin now."""
        ...

    def begin(self) -> None: ...

    def end(self) -> None: ...


class FixedSlots:
    """Slots whose number never changes."""

    def __init__(self, limit: int) -> None:
        self._num_free = limit

    def free(self) -> int:
        """Number of lines with room to begin now."""
        return self._num_free

    def begin(self) -> None:
        """Count a line that begins."""
        self._num_free -= 1

    def end(self) -> None:
        """Count a line less."""
        self._num_free += 1


class BatchRunner:
    """Runs the lines of one batch until the batch is stopped."""

    def __init__(
        self,
        batch_id: str,
        run: BatchRun,
        *,
        lines: Input,
        journal: Journal,
        answer: Answer,
        slots: Slots,
        look: Callable[[], Awaitable[Sequence[Record]]],
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        """`look` is called every `LOOK_S`: on an event from outside, such as a cancellation, `look` returns the
        records of the run. `clock` gives the times of records; `timer` measures the pauses before lines are tried
        again, also while the clock is set."""
        self._batch_id = batch_id
        self._run = run
        self._lines = lines
        self._journal = journal
        self._answer = answer
        self._slots = slots
        self._look = look
        self._clock = clock
        self._timer = timer
        self._writing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def work(self) -> None:
        """Returns when the batch is stopped, and the journal says so. Cancelling ends running lines.

        Raises:
            OSError: the journal cannot be written, or the input not be read.
        """
        try:
            while not self._run.is_stopped:
                self._start_lines()
                await self._wait()
                await self._write([*await self._look(), *self._run.tick(self._clock())])
            await self._all_written()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start_lines(self) -> None:
        for number in self._run.start(self._slots.free(), self._timer()):
            self._slots.begin()
            self._tasks.add(asyncio.create_task(self._run_line(number)))

    async def _wait(self) -> None:
        """Wait until a line has ended, at most `LOOK_S`; raises the line's error."""
        if not self._tasks:
            await asyncio.sleep(LOOK_S)
            return
        done, self._tasks = await asyncio.wait(self._tasks, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        for error in [task.exception() for task in done]:  # each is asked, the first is raised
            if error is not None:
                raise error

    async def _run_line(self, number: int) -> None:
        """Answer a line, in a slot taken before. Written answers alone free the slot: few wait for a slow disk."""
        try:
            await self._answer_line(number)
        finally:
            self._slots.end()

    async def _answer_line(self, number: int) -> None:
        line = await asyncio.to_thread(self._lines.line, number)
        answer = await self._answer(line.url, line.body)
        if answer.may_retry and self._run.try_again(number, self._timer()):
            return
        output = output_line(line_id(self._batch_id, number), line.custom_id, answer)
        await self._write(self._run.answered(number, output, self._clock(), has_failed=answer.status != SUCCESS))

    async def _write(self, records: Sequence[Record]) -> None:
        """Write records, after all records decided before."""
        if not records:
            return
        async with self._writing:
            writing = asyncio.ensure_future(asyncio.to_thread(self._journal.append, records))
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:  # the thread writes on, and the journal is its own meanwhile
                await asyncio.wait({writing})
                raise

    async def _all_written(self) -> None:
        """Wait until all records decided so far are written. Raises OSError."""
        async with self._writing:
            pass
        for task in self._tasks:
            if task.done():
                task.result()
