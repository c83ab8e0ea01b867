"""States of a batch: events in, records out.

Each method takes an event and returns records of the outcome, for the caller to write into the journal. The state is a
function of the records, so the journal is enough to go on after a runner's death: `take_back` tells a new run of each
record, then `opened` of the lines.

    validating -- opened --> in_progress -- last answer --> finalizing -- ended --> completed
        |                        |-- cancel --> cancelling -- ended --> cancelled
        |                        '-- tick after expires_at --> finalizing -- ended --> expired
        '-- refused --> failed

A validating batch can be cancelled and can expire, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from raydix.engine.core.batches.lines import LineQueue
from raydix.engine.core.batches.records import Answered, Opened, OutputEnded, Problem, Record, Status, Stopped


@dataclass(slots=True)
class Progress:
    """State of a batch for the outside."""

    status: Status = Status.VALIDATING
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    opened_at: float | None = None
    stopped_at: float | None = None
    ended_at: float | None = None
    outcome: Status | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def num_unanswered(self) -> int:
        """Lines without an answer."""
        return self.num_lines - self.num_completed - self.num_failed

    @property
    def has_errors(self) -> bool:
        """True if a stopped batch has an error file: for failed lines and lines not run."""
        return self.num_failed + self.num_unanswered > 0


class BatchRun:
    """The state of one batch with all lines."""

    def __init__(self, expires_at: float | None = None) -> None:
        self.progress = Progress()
        self.digest: str | None = None
        """Digest of the input file, after the check of all lines."""
        self._expires_at = expires_at
        self._queue: LineQueue | None = None  # none until the lines have been read
        self._has_failed: dict[int, bool] = {}  # outcome by answered line: True for an error in place of an answer

    @property
    def is_stopped(self) -> bool:
        """True if no line will run any more."""
        return self.progress.outcome is not None

    @property
    def is_ended(self) -> bool:
        """True if nothing is left to do."""
        return self.progress.ended_at is not None

    def is_answered(self, number: int) -> bool:
        """True if a line has an answer, or an error in place of one."""
        return number in self._has_failed

    def has_failed(self, number: int) -> bool:
        """True if a line has an error in place of an answer."""
        return self._has_failed.get(number, False)

    # Events

    def take_back(self, record: Record) -> None:
        """Follow a record of the journal of an earlier run."""
        assert self._queue is None, "the past comes before the lines"
        self._apply(record)

    def opened(self, order: Sequence[int], digest: str, now: float) -> list[Record]:
        """The lines were read and are valid; `order` is the order of running."""
        if self.is_stopped:
            return []
        records: list[Record] = []
        if self.digest is None:
            records.append(self._apply(Opened(now, len(order), digest)))
        self._queue = LineQueue(order, self._has_failed)
        # The journal may have every answer already, and the time may be over since the last run.
        return [*records, *self._completed(now), *self._expired(now)]

    def refused(self, problems: Sequence[Problem], now: float) -> list[Record]:
        """The batch cannot be run, or no further."""
        return [] if self.is_stopped else [self._apply(Stopped(now, Status.FAILED, tuple(problems)))]

    def start(self, count: int, now: float) -> list[int]:
        """Take at most `count` lines, to run now; `now` is a time of `try_again`'s."""
        return [] if self.is_stopped or self._queue is None else self._queue.take(count, now)

    def answered(self, number: int, output: bytes, now: float, *, has_failed: bool) -> list[Record]:
        """A running line has an answer, too late after a stop."""
        if self.is_stopped:
            return []
        assert self._queue is not None
        self._queue.answered(number)
        return [self._apply(Answered(number, has_failed, output)), *self._completed(now)]

    def try_again(self, number: int, now: float) -> bool:
        """A running line found no room, or no worker. False: the failure is the answer. `now`: of a clock that is
        never set, other than the times of records."""
        return self._queue is not None and not self.is_stopped and self._queue.try_again(number, now)

    def cancelled(self, now: float) -> list[Record]:
        """The client does not want the remainder."""
        return [] if self.is_stopped else [self._apply(Stopped(now, Status.CANCELLED))]

    def tick(self, now: float) -> list[Record]:
        """Time has passed."""
        return self._expired(now)

    def ended(self, now: float) -> list[Record]:
        """The output is in place."""
        assert self.is_stopped
        return [] if self.is_ended else [self._apply(OutputEnded(now))]

    def check_integrity(self) -> None:
        """Assert: the counts agree with the lines."""
        assert self.progress.num_completed + self.progress.num_failed == len(self._has_failed)
        assert not self.is_ended or self.is_stopped
        if self._queue is not None:
            self._queue.check_integrity()

    def _completed(self, now: float) -> list[Record]:
        if self.is_stopped or self._queue is None or not self._queue.is_empty:
            return []
        return [self._apply(Stopped(now, Status.COMPLETED))]

    def _expired(self, now: float) -> list[Record]:
        if self.is_stopped or self._expires_at is None or now < self._expires_at:
            return []
        return [self._apply(Stopped(now, Status.EXPIRED))]

    def _apply(self, record: Record) -> Record:
        progress = self.progress
        match record:
            case Opened(at, num_lines, digest):
                progress.status, progress.opened_at, progress.num_lines = Status.IN_PROGRESS, at, num_lines
                self.digest = digest
            case Answered(number, has_failed):
                self._has_failed[number] = has_failed
                progress.num_failed += has_failed
                progress.num_completed += not has_failed
            case Stopped(at, outcome, problems):
                progress.stopped_at, progress.outcome, progress.problems = at, outcome, problems
                is_cancelled = outcome is Status.CANCELLED
                progress.status = Status.CANCELLING if is_cancelled else Status.FINALIZING
            case OutputEnded(at):
                assert progress.outcome is not None
                progress.ended_at, progress.status = at, progress.outcome
        return record
