"""A batch from one file to another, for any program with a way to get answers: no server's folder, no window of time.

    out.jsonl             the answers, in the input's order, once all lines are answered
    out.errors.jsonl      the lines that failed, if there are any
    out.jsonl.journal     all events so far; there while lines are left to do

Another call with the same files goes on after an interruption.
"""

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from raydix.engine.batches.disk import replaced
from raydix.engine.batches.journal import Journal
from raydix.engine.batches.lines import Input, read_input
from raydix.engine.batches.output import answers, errors
from raydix.engine.batches.runner import Answer, BatchRunner, FixedSlots
from raydix.engine.core.batches.batch_run import BatchRun, Progress
from raydix.engine.core.batches.records import Problem, Record
from raydix.engine.core.errors import RequestError

SHOWN_PROBLEMS = 10


@dataclass(frozen=True, slots=True)
class BatchFiles:
    """The files of a batch: two are given, two more are named after the output."""

    source: Path
    output: Path

    @property
    def errors(self) -> Path:
        """`out.errors.jsonl` beside `out.jsonl`."""
        return self.output.with_suffix(f".errors{self.output.suffix}")

    @property
    def journal(self) -> Path:
        """`out.jsonl.journal` beside `out.jsonl`."""
        return self.output.with_name(f"{self.output.name}.journal")


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """The end of a batch."""

    num_lines: int
    num_completed: int
    num_failed: int


def look_at(files: BatchFiles) -> Input | BatchSummary:
    """The lines of a valid input, or the summary of a batch ended before. Errors as `run_batch`."""
    lines = read_input(files.source, None, rest=None)
    if isinstance(lines, list):
        raise _refusal(files.source, lines)
    # While there is a journal lines are left to do, whatever an output says.
    if files.journal.exists() or not files.output.exists():
        return lines
    return _finished(files, lines)


async def run_batch(
    files: BatchFiles, answer: Answer, *, concurrency: int, on_progress: Callable[[Progress], None] | None = None
) -> BatchSummary:
    """Run all lines of a file without an answer yet. `on_progress` is called several times a second.

    After a cancellation the next call goes on.

    Raises:
        RequestError: the input is not valid, naming lines; another process runs the batch; or the output exists
            and is of another input.
        OSError: a file cannot be read or written.
    """
    lines = await asyncio.to_thread(look_at, files)
    if isinstance(lines, BatchSummary):
        return lines

    run, journal = BatchRun(), Journal(files.journal)
    with _alone(files.journal):
        await asyncio.to_thread(journal.open, run.take_back)
        try:
            if run.digest not in (None, lines.digest):
                raise RequestError(f"{files.journal} is of another input than {files.source}; remove it to begin anew.")
            await _run_lines(run, lines, journal, answer, concurrency, on_progress)
            await asyncio.to_thread(_write_outputs, files, run, journal, lines)
        finally:
            journal.close()
        # Last of all: up to here another call would go on from it.
        files.journal.unlink()
    return BatchSummary(run.progress.num_lines, run.progress.num_completed, run.progress.num_failed)


async def _run_lines(
    run: BatchRun,
    lines: Input,
    journal: Journal,
    answer: Answer,
    concurrency: int,
    on_progress: Callable[[Progress], None] | None,
) -> None:
    async def look() -> Sequence[Record]:
        if on_progress is not None:
            on_progress(replace(run.progress))
        return ()

    if not run.is_stopped:
        await asyncio.to_thread(journal.append, run.opened(lines.order, lines.digest, time.time()))
    slots = FixedSlots(concurrency)
    await BatchRunner(lines.digest, run, lines=lines, journal=journal, answer=answer, slots=slots, look=look).work()


def _write_outputs(files: BatchFiles, run: BatchRun, journal: Journal, lines: Input) -> None:
    if run.progress.has_errors:
        with replaced(files.errors) as file:
            file.writelines(errors(run, journal, lines.digest, lines))
    else:
        files.errors.unlink(missing_ok=True)
    # The output comes last: that it exists says that the batch is complete.
    with replaced(files.output) as file:
        file.writelines(answers(run, journal))


def _finished(files: BatchFiles, lines: Input) -> BatchSummary:
    """The summary of a batch ended before. Raises RequestError if the output is of another one."""
    completed = _custom_ids(files.output)
    failed = _custom_ids(files.errors) if files.errors.exists() else []
    if sorted([*completed, *failed]) != sorted(lines.custom_ids):
        raise RequestError(f"{files.output} is there already, and has not the lines of {files.source}.")
    return BatchSummary(len(lines.custom_ids), len(completed), len(failed))


def _custom_ids(path: Path) -> list[str]:
    with path.open("rb") as file, contextlib.suppress(ValueError, TypeError, KeyError):
        return [str(orjson.loads(line)["custom_id"]) for line in file]
    return []


def _refusal(path: Path, problems: Sequence[Problem]) -> RequestError:
    shown = [f"line {p.line}: {p.message}" if p.line else p.message for p in problems[:SHOWN_PROBLEMS]]
    more = [f"{len(problems) - SHOWN_PROBLEMS} more"] if len(problems) > SHOWN_PROBLEMS else []
    return RequestError(f"{path} is not valid: {' '.join([*shown, *more])}")


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep other processes from a journal. Raises RequestError where another process is writing."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    is_free = False
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_free = bool(os.fstat(handle).st_nlink)  # not erased by its writer, who has just ended
        if not is_free:
            raise RequestError(f"{path} is written by another process.")
        yield
    finally:
        os.close(handle)
