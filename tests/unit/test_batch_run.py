"""A batch through its events: states, lines, and the journal from which a batch goes on."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from raydix.engine.core.batches.batch_run import BatchRun
from raydix.engine.core.batches.lines import FIRST_PAUSE_S, MAX_ATTEMPTS, MAX_PAUSE_S, LineAllowance, LineQueue
from raydix.engine.core.batches.records import (
    Answered,
    Opened,
    OutputEnded,
    Problem,
    Record,
    Status,
    Stopped,
    decode,
    encode,
)

RECORDS: list[Record] = [
    Opened(1.5, 3, "digest"),
    Answered(2, False, b'{"text": "a b"}'),
    Answered(0, True, "ä".encode()),
    Stopped(2.0, Status.FAILED, (Problem("code", "message", 4, "url"), Problem("empty", "message"))),
    Stopped(2.0, Status.COMPLETED),
    OutputEnded(3.25),
]


def status_of(run: BatchRun) -> Status:
    return run.progress.status


@pytest.mark.parametrize("record", RECORDS, ids=str)
def test_a_record_is_read_as_it_was_written(record: Record) -> None:
    assert decode(encode(record)) == record


@pytest.mark.parametrize("record", RECORDS, ids=str)
def test_a_line_that_is_not_whole_did_not_happen(record: Record) -> None:
    line = encode(record)
    assert [decode(line[:end]) for end in range(len(line))] == [None] * len(line)
    assert [decode(line[:at] + bytes([line[at] ^ 1]) + line[at + 1 :]) for at in range(len(line) - 1)] == [None] * (
        len(line) - 1
    )


def test_a_batch_that_is_answered() -> None:
    run = BatchRun(expires_at=100.0)
    assert status_of(run) is Status.VALIDATING and run.start(5, 0.0) == []
    assert run.opened([1, 0, 2], "d", 1.0) == [Opened(1.0, 3, "d")]
    assert status_of(run) is Status.IN_PROGRESS
    assert run.start(2, 2.0) == [1, 0]
    assert run.answered(0, b"x", 3.0, has_failed=True) == [Answered(0, True, b"x")]
    assert run.start(5, 3.0) == [2]
    run.answered(2, b"y", 4.0, has_failed=False)
    assert run.answered(1, b"z", 5.0, has_failed=False) == [Answered(1, False, b"z"), Stopped(5.0, Status.COMPLETED)]
    assert status_of(run) is Status.FINALIZING
    assert (run.is_answered(0), run.has_failed(0), run.has_failed(1)) == (True, True, False)
    assert run.ended(6.0) == [OutputEnded(6.0)] and run.ended(7.0) == []
    progress = run.progress
    assert (progress.status, progress.num_completed, progress.num_failed, progress.num_unanswered) == (
        Status.COMPLETED,
        2,
        1,
        0,
    )
    run.check_integrity()


def test_a_batch_that_is_not_valid() -> None:
    run = BatchRun()
    assert run.refused([Problem("code", "message", 1)], 1.0) == [
        Stopped(1.0, Status.FAILED, (Problem("code", "message", 1),))
    ]
    run.ended(2.0)
    assert status_of(run) is Status.FAILED and not run.progress.has_errors
    assert run.refused([], 3.0) == []


def test_a_batch_that_is_cancelled_takes_no_late_answers() -> None:
    run = BatchRun()
    run.opened([0, 1], "d", 0.0)
    run.start(2, 0.0)
    assert run.cancelled(1.0) == [Stopped(1.0, Status.CANCELLED)]
    assert status_of(run) is Status.CANCELLING
    assert run.answered(0, b"x", 2.0, has_failed=False) == [] and not run.try_again(1, 2.0) and run.cancelled(2.0) == []
    assert run.start(2, 2.0) == []
    run.ended(3.0)
    assert status_of(run) is Status.CANCELLED and run.progress.has_errors


@pytest.mark.parametrize("is_open", [False, True])
def test_a_batch_expires_at_any_state(is_open: bool) -> None:
    run = BatchRun(expires_at=10.0)
    if is_open:
        run.opened([0], "d", 1.0)
    assert run.tick(9.9) == []
    opened = [] if is_open else [Opened(10.0, 1, "d")]
    assert (run.tick(10.0) if is_open else run.opened([0], "d", 10.0)) == [*opened, Stopped(10.0, Status.EXPIRED)]
    assert run.progress.num_unanswered == 1, "its lines are among what did not run"
    assert run.opened([0], "d", 11.0) == [] and run.tick(12.0) == []


def test_a_batch_without_lines_is_complete() -> None:
    assert BatchRun().opened([], "d", 1.0) == [Opened(1.0, 0, "d"), Stopped(1.0, Status.COMPLETED)]


def test_a_batch_goes_on_from_its_journal() -> None:
    run = BatchRun()
    for record in (Opened(1.0, 3, "d"), Answered(1, False, b"x")):
        run.take_back(record)
    assert run.digest == "d"
    assert run.opened([2, 1, 0], "d", 5.0) == []
    assert run.start(9, 5.0) == [2, 0]


def test_a_line_is_tried_again_after_growing_pauses_and_then_fails() -> None:
    queue, now, pauses = LineQueue([7]), 0.0, []
    assert queue.take(1, now) == [7]
    while queue.try_again(7, now):
        queue.check_integrity()
        began = now
        while not queue.take(1, now):
            now += FIRST_PAUSE_S / 2
        pauses.append(now - began)
    assert len(pauses) == MAX_ATTEMPTS - 1 and pauses[0] == FIRST_PAUSE_S and pauses[-1] == MAX_PAUSE_S
    queue.answered(7)
    assert queue.is_empty


def test_lines_to_be_tried_again_run_first() -> None:
    queue = LineQueue([0, 1, 2])
    assert queue.take(1, 0.0) == [0]
    queue.try_again(0, 0.0)
    assert queue.take(1, 0.1) == [1]
    assert queue.take(5, FIRST_PAUSE_S) == [0, 2]


def test_batches_share_what_clients_leave() -> None:
    allowance = LineAllowance(8)
    allowance.join("a", "t")
    assert allowance.free("a", num_others=0) == 8
    assert allowance.free("a", num_others=5) == 3
    allowance.begin("a", 8)
    allowance.join("b", "t")
    assert allowance.free("b", num_others=0) == 0, "until lines of the other end"
    for _ in range(5):
        allowance.end("a")
    assert (allowance.free("a", 0), allowance.free("b", 0)) == (1, 4)
    allowance.begin("b", 4)
    assert allowance.free("b", 0) == 0
    for _ in range(4):
        allowance.end("b")
    allowance.leave("b")
    assert allowance.free("a", 0) == 5


def test_one_line_runs_however_many_clients_there_are() -> None:
    allowance = LineAllowance(4)
    allowance.join("a", "t")
    allowance.join("b", "t")
    assert allowance.free("a", num_others=100) == 1
    allowance.begin("a", 1)
    assert allowance.free("b", num_others=100) == 0


class BatchMachine(RuleBasedStateMachine):
    """A batch under random events; at any time it may die, and goes on from its journal."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.journal: list[Record] = []
        self.running: set[int] = set()
        self.order = [3, 1, 0, 2]
        self.run = BatchRun(expires_at=50.0)
        self.is_open = False

    def note(self, records: list[Record]) -> None:
        self.journal += records

    @rule(seconds=st.floats(0, 10))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.note(self.run.tick(self.now))

    @precondition(lambda self: not self.is_open)
    @rule()
    def open(self) -> None:
        self.note(self.run.opened(self.order, "d", self.now))
        self.is_open = True

    @rule(count=st.integers(0, 3))
    def start(self, count: int) -> None:
        started = self.run.start(count, self.now)
        assert len(started) <= count and not self.running.intersection(started)
        assert not any(self.run.is_answered(number) for number in started)
        self.running.update(started)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), has_failed=st.booleans())
    def answer(self, data: st.DataObject, has_failed: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.running)))
        self.running.remove(number)
        self.note(self.run.answered(number, b"x", self.now, has_failed=has_failed))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def find_no_room(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.running)))
        if self.run.try_again(number, self.now) or self.run.is_stopped:
            self.running.remove(number)

    @rule()
    def cancel(self) -> None:
        self.note(self.run.cancelled(self.now))

    @precondition(lambda self: self.run.is_stopped)
    @rule()
    def end(self) -> None:
        self.note(self.run.ended(self.now))

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """Only a part of the last record was written."""
        content = b"".join(map(encode, self.journal))
        lines = content[: len(content) - data.draw(st.integers(0, 5))].splitlines(keepends=True)
        self.journal = [record for line in lines if (record := decode(line)) is not None]
        self.run, self.running, self.is_open = BatchRun(expires_at=50.0), set(), False
        for record in self.journal:
            self.run.take_back(record)

    @invariant()
    def is_whole(self) -> None:
        self.run.check_integrity()
        again = BatchRun(expires_at=50.0)
        for record in self.journal:
            again.take_back(record)
        assert again.progress == self.run.progress
        answered = [record.number for record in self.journal if isinstance(record, Answered)]
        assert len(answered) == len(set(answered)), "each line is answered once"
        kinds = [type(record) for record in self.journal if not isinstance(record, Answered)]
        assert kinds in (
            [],
            [Opened],
            [Stopped],
            [Opened, Stopped],
            [Stopped, OutputEnded],
            [Opened, Stopped, OutputEnded],
        )


TestBatchMachine = BatchMachine.TestCase
