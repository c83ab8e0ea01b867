"""The output of a stopped batch: the answers in the input's order, and the errors in another file."""

from collections.abc import Iterator
from hashlib import blake2b

from raydix.engine.api.batches import unanswered_line
from raydix.engine.batches.journal import Journal
from raydix.engine.batches.lines import Input
from raydix.engine.core.batches.batch_run import BatchRun
from raydix.engine.core.batches.records import Status


def line_id(batch_id: str, number: int) -> str:
    """Id of a line in output and error file; the same in every run."""
    return f"batch_req_{blake2b(f'{batch_id} {number}'.encode(), digest_size=16).hexdigest()}"


def answers(run: BatchRun, journal: Journal) -> Iterator[bytes]:
    """The lines of the output file."""
    for number in range(run.progress.num_lines):
        if run.is_answered(number) and not run.has_failed(number):
            yield journal.output(number) + b"\n"


def errors(run: BatchRun, journal: Journal, batch_id: str, lines: Input) -> Iterator[bytes]:
    """The lines of the error file: failed ones, and ones not run."""
    assert run.progress.outcome is not None, "a batch that has stopped"
    for number in range(run.progress.num_lines):
        if run.has_failed(number):
            yield journal.output(number) + b"\n"
        elif not run.is_answered(number) and number < len(lines.custom_ids):
            yield _unanswered(run.progress.outcome, batch_id, lines, number)


def _unanswered(outcome: Status, batch_id: str, lines: Input, number: int) -> bytes:
    return unanswered_line(line_id(batch_id, number), lines.custom_ids[number], outcome) + b"\n"
