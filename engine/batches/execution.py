"""Completes one stored batch, from the point where an earlier runner ended: checks and runs the lines, makes the files,
puts the batch among the ended. Every step may be the last of the process, and is safe to repeat."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from raydix.engine.api.batches import FileRecord, LineLimits
from raydix.engine.batches.batch_store import INPUT, JOURNAL, BatchStore, StoredBatch
from raydix.engine.batches.file_store import FileStore
from raydix.engine.batches.journal import Journal
from raydix.engine.batches.lines import Input, read_beside
from raydix.engine.batches.output import answers, errors
from raydix.engine.batches.runner import Answer, BatchRunner, Slots
from raydix.engine.core.batches.batch_run import BatchRun, Progress
from raydix.engine.core.batches.records import Problem, Record

OBSERVE_S = 1.0  # pause between two looks at the disk: for a cancellation, and to show the progress
MEASURE_S = 60.0  # pause between two sums of the tenant's bytes on the disk
FULL = Problem("storage_full", "The tenant's or the server's room for files is used up.")
CHANGED = Problem("input_changed", "The input file is not what it was when the batch began.")


class Execution:
    """One batch. The caller holds the lock."""

    def __init__(
        self,
        batch: StoredBatch,
        store: BatchStore,
        files: FileStore,
        *,
        limits: LineLimits,
        answer: Answer,
        slots: Slots,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` gives the times that clients see; `timer` measures pauses, also while the clock is set."""
        self._batch = batch
        self._store = store
        self._files = files
        self._limits = limits
        self._answer = answer
        self._slots = slots
        self._clock = clock
        self._timer = timer
        self._run = BatchRun(batch.record.expires_at)
        self._journal = Journal(batch.folder / JOURNAL)
        self._observed_at = self._measured_at = timer()

    @property
    def progress(self) -> Progress:
        """How far the batch is."""
        return self._run.progress

    async def complete(self) -> None:
        """Return when the batch has ended. May be cancelled. Raises OSError."""
        # Where it has, the last runner only did not come to the retiring any more.
        if self._batch.progress.ended_at is None:
            await asyncio.to_thread(self._journal.open, self._run.take_back)
            try:
                if not self._run.is_ended:
                    await self._go_on()
            finally:
                self._journal.close()
            await asyncio.to_thread(self._store.show, self._batch, self._run.progress)
        await asyncio.to_thread(self._store.retire, self._batch)

    async def _go_on(self) -> None:
        lines = Input(self._batch.folder / INPUT)
        # A batch that failed before its lines were known has none to name in its files.
        if not self._run.is_stopped or self._run.progress.num_lines:
            lines = await self._read_lines() or lines
        if not self._run.is_stopped:
            await asyncio.to_thread(self._store.show, self._batch, replace(self._run.progress))
            await self._runner(lines).work()
        await asyncio.to_thread(self._make_files, lines)
        await asyncio.to_thread(self._journal.append, self._run.ended(self._clock()))

    async def _read_lines(self) -> Input | None:
        """The lines of the input; None for invalid lines, with which the batch has failed."""
        path, endpoint = self._batch.folder / INPUT, self._batch.record.endpoint
        lines = await read_beside(path, endpoint, self._limits)
        now = self._clock()
        if isinstance(lines, list):
            await self._note(self._run.refused(lines, now))
            return None
        # The journal has answers by number: to another file they would be answers of other lines.
        if self._run.digest not in (None, lines.digest):
            await self._note(self._run.refused([CHANGED], now))
            return None
        if not self._run.is_stopped:
            is_cancelled = await asyncio.to_thread(self._store.is_cancelled, self._batch)
            # The lines come first, so that each of them is among what did not run.
            records = self._run.opened(lines.order, lines.digest, now)
            await self._note([*records, *(self._run.cancelled(now) if is_cancelled else [])])
        return lines

    async def _note(self, records: Sequence[Record]) -> None:
        await asyncio.to_thread(self._journal.append, records)

    def _runner(self, lines: Input) -> BatchRunner:
        return BatchRunner(
            self._batch.record.id,
            self._run,
            lines=lines,
            journal=self._journal,
            answer=self._answer,
            slots=self._slots,
            look=self._look,
            clock=self._clock,
            timer=self._timer,
        )

    async def _look(self) -> Sequence[Record]:
        """Show the progress, and learn of a cancellation and of a full disk."""
        now = self._timer()
        if now < self._observed_at + OBSERVE_S:
            return []
        self._observed_at = now
        is_cancelled = await asyncio.to_thread(self._observe, replace(self._run.progress))
        if is_cancelled:
            return self._run.cancelled(self._clock())
        if now < self._measured_at + MEASURE_S:
            return []
        self._measured_at = now
        is_full = await asyncio.to_thread(self._is_full)
        return self._run.refused([FULL], self._clock()) if is_full else []

    def _observe(self, progress: Progress) -> bool:
        self._store.show(self._batch, progress)
        return self._store.is_cancelled(self._batch)

    def _is_full(self) -> bool:
        """True if the room left would not hold the output."""
        num_left, _ = self._files.room(self._batch.record.tenant)
        return num_left < self._journal.num_bytes

    def _make_files(self, lines: Input) -> None:
        # The ids were chosen with the batch, so a file that an earlier runner has made is found and kept.
        record, progress = self._batch.record, self._run.progress
        if progress.num_completed:
            self._make_file(record.output_file_id, "output", answers(self._run, self._journal))
        if progress.has_errors:
            self._make_file(record.error_file_id, "error", errors(self._run, self._journal, record.id, lines))

    def _make_file(self, file_id: str, kind: str, content: Iterable[bytes]) -> None:
        batch, now = self._batch.record, self._clock()
        file = FileRecord(
            id=file_id,
            filename=f"{batch.id}_{kind}.jsonl",
            purpose="batch_output",
            num_bytes=0,
            created_at=now,
            expires_at=now + self._files.life_s(batch.output_life_s),
        )
        self._files.put(batch.tenant, file, content)
