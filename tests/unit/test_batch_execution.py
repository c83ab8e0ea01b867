"""Batches from their lines to their files, through cancellation, expiry, full disks and dying runners."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raydix.engine.api.batches import LineLimits
from raydix.engine.batches import execution as execution_module
from raydix.engine.batches import runner as runner_module
from raydix.engine.batches.execution import CHANGED, Execution
from raydix.engine.batches.journal import Journal
from raydix.engine.batches.runner import FixedSlots
from raydix.engine.core.batches.lines import MAX_ATTEMPTS
from raydix.engine.core.batches.records import Answered, Record, Status, Stopped
from tests.unit.batch_files import LIMITS, Server, Stores, line_of, lines_of, prompts_of
from tests.unit.waits import WAIT_S, until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "LOOK_S", 0.005)
    monkeypatch.setattr(execution_module, "OBSERVE_S", 0.0)
    monkeypatch.setattr(execution_module, "MEASURE_S", 0.0)


def execution(stores: Stores, batch: Any, server: Server, concurrency: int = 4) -> Execution:
    return Execution(
        batch,
        stores.batches,
        stores.files,
        limits=LineLimits(100, 10_000),
        answer=server.answer,
        slots=FixedSlots(concurrency),
        clock=stores.clock,
        timer=stores.timer,
    )


def complete(stores: Stores, batch: Any, server: Server, concurrency: int = 4) -> Any:
    """Run a batch to its end; returns the batch as its client sees it then."""

    async def work() -> None:
        async with asyncio.timeout(WAIT_S):
            await execution(stores, batch, server, concurrency).complete()

    asyncio.run(work())
    assert stores.batches.open_batches() == []
    return stores.batches.get("a", batch.record.id)


def test_answers_are_in_the_order_of_the_input(tmp_path: Path) -> None:
    stores, server = Stores(tmp_path), Server(fails={"b": 400})
    long = "x" * 300
    names = ["a", f"{long}1", "b", f"{long}2"]
    batch = stores.begin(lines_of(*names))
    ended = complete(stores, batch, server, concurrency=1)
    assert server.asked == ["a", f"{long}1", f"{long}2", "b"], "lines that share a beginning run in a row"
    assert ended.progress.status is Status.COMPLETED
    output, errors = (stores.content(name) for name in (batch.record.output_file_id, batch.record.error_file_id))
    assert [line["custom_id"] for line in output] == ["a", f"{long}1", f"{long}2"] and prompts_of(output)
    assert len({line["id"] for line in output + errors}) == 4
    [failed] = errors
    assert failed["response"] == {"status_code": 400, "request_id": "r-b", "body": {"text": "b"}}
    assert failed["error"] is None and failed["custom_id"] == "b"
    made = stores.files.get("a", batch.record.output_file_id)
    assert made.purpose == "batch_output" and made.filename == f"{batch.record.id}_output.jsonl"


def test_no_more_lines_run_at_a_time_than_there_is_room_for(tmp_path: Path) -> None:
    stores, server = Stores(tmp_path), Server()
    complete(stores, stores.begin(lines_of(*map(str, range(40)))), server, concurrency=3)
    assert server.most_running == 3 and len(server.asked) == 40


def test_a_line_without_room_is_tried_again(tmp_path: Path) -> None:
    stores = Stores(tmp_path)
    server = Server(has_no_room={"a": 3, "b": MAX_ATTEMPTS})
    batch = stores.begin(lines_of("a", "b", "c"))

    async def work() -> None:
        task = asyncio.ensure_future(execution(stores, batch, server).complete())
        while not task.done():
            stores.timer.now += 30
            await asyncio.sleep(0.005)
        task.result()

    asyncio.run(work())
    assert (server.asked.count("a"), server.asked.count("b"), server.asked.count("c")) == (4, MAX_ATTEMPTS, 1)
    [failed] = stores.content(batch.record.error_file_id)
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("b", 429)


def test_a_clock_that_is_set_back_changes_no_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the one before a line is tried again, nor the one between two looks for a cancellation."""
    monkeypatch.setattr(execution_module, "OBSERVE_S", 1.0)
    stores, server = Stores(tmp_path), Server(has_no_room={"a": 1}, hangs={"b"})
    batch = stores.begin(lines_of("a", "b"))

    async def work() -> None:
        task = asyncio.ensure_future(execution(stores, batch, server).complete())
        await until(lambda: sorted(server.asked) == ["a", "b"])
        stores.clock.now -= 3600
        await until(
            lambda: after_a_second(lambda: stores.batches.get("a", batch.record.id).progress.num_completed == 1)
        )
        stores.batches.cancel("a", batch.record.id)
        await until(lambda: after_a_second(task.done))
        task.result()

    def after_a_second(condition: Callable[[], bool]) -> bool:
        stores.timer.now += 1
        return condition()

    asyncio.run(work())
    assert sorted(server.asked) == ["a", "a", "b"]
    assert stores.batches.get("a", batch.record.id).progress.status is Status.CANCELLED


def test_lines_that_are_not_valid_fail_the_batch(tmp_path: Path) -> None:
    stores, server = Stores(tmp_path), Server()
    batch = stores.begin(lines_of("a") + b"{\n" + lines_of("a"))
    ended = complete(stores, batch, server)
    assert ended.progress.status is Status.FAILED and server.asked == []
    assert [(problem.line, problem.code) for problem in ended.progress.problems] == [
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
    ]
    assert [file.purpose for file in stores.files.all("a")] == ["batch"], "nothing ran, so there is no output"


def test_a_cancelled_batch_keeps_the_answers_that_it_has(tmp_path: Path) -> None:
    stores, server = Stores(tmp_path), Server(hangs={"b"})
    batch = stores.begin(lines_of("a", "b", "c"))

    async def work() -> None:
        task = asyncio.ensure_future(execution(stores, batch, server, 1).complete())
        await until(lambda: server.asked == ["a", "b"])
        stores.batches.cancel("a", batch.record.id)
        await asyncio.wait_for(task, WAIT_S)

    asyncio.run(work())
    assert server.num_running == 0, "the line that ran was ended"
    ended = stores.batches.get("a", batch.record.id)
    assert ended.progress.status is Status.CANCELLED
    assert prompts_of(stores.content(batch.record.output_file_id)) == ["a"]
    errors = stores.content(batch.record.error_file_id)
    assert [(line["custom_id"], line["response"], line["error"]["code"]) for line in errors] == [
        ("b", None, "batch_cancelled"),
        ("c", None, "batch_cancelled"),
    ]


def test_a_batch_that_is_cancelled_before_it_begins_runs_nothing(tmp_path: Path) -> None:
    stores, server = Stores(tmp_path), Server()
    batch = stores.begin(lines_of("a"))
    stores.batches.cancel("a", batch.record.id)
    progress = complete(stores, batch, server).progress
    assert (progress.status, progress.num_unanswered, server.asked) == (Status.CANCELLED, 1, [])
    assert len(stores.files.all("a")) == 2, "the input, and the line that did not run among the errors"


def test_a_batch_expires_with_the_answers_that_it_has(tmp_path: Path) -> None:
    stores, server = Stores(tmp_path), Server(hangs={"b"})
    batch = stores.begin(lines_of("a", "b"), completion_window="1h")

    async def work() -> None:
        task = asyncio.ensure_future(execution(stores, batch, server, 1).complete())
        await until(lambda: server.asked == ["a", "b"])
        stores.clock.now += 3600
        await asyncio.wait_for(task, WAIT_S)

    asyncio.run(work())
    assert stores.batches.get("a", batch.record.id).progress.status is Status.EXPIRED
    assert prompts_of(stores.content(batch.record.output_file_id)) == ["a"]
    assert [line["error"]["code"] for line in stores.content(batch.record.error_file_id)] == ["batch_expired"]


def test_a_batch_ends_where_its_output_would_not_fit(tmp_path: Path) -> None:
    stores, server = Stores(tmp_path, replace(LIMITS, tenant_bytes=3000)), Server(hangs={"b"})
    batch = stores.begin(line_of("a", suffix="x" * 1200) + line_of("b"))

    async def work() -> None:
        task = asyncio.ensure_future(execution(stores, batch, server, 1).complete())
        await until(lambda: server.asked == ["a", "b"])
        (batch.folder / "large").write_bytes(b"x" * 2000)
        await asyncio.wait_for(task, WAIT_S)

    asyncio.run(work())
    ended = stores.batches.get("a", batch.record.id).progress
    assert ended.status is Status.FAILED and [problem.code for problem in ended.problems] == ["storage_full"]
    assert prompts_of(stores.content(batch.record.output_file_id)) == ["a"]
    assert [line["error"]["code"] for line in stores.content(batch.record.error_file_id)] == ["batch_failed"]


def test_progress_is_seen_while_the_batch_runs(tmp_path: Path) -> None:
    stores, server = Stores(tmp_path), Server(hangs={"c"}, fails={"b": 400})
    batch = stores.begin(lines_of("a", "b", "c"))

    def seen() -> Any:
        progress = stores.batches.get("a", batch.record.id).progress
        return progress.status, progress.num_lines, progress.num_completed, progress.num_failed

    async def work() -> None:
        task = asyncio.ensure_future(execution(stores, batch, server, 1).complete())
        await until(lambda: seen() == (Status.IN_PROGRESS, 3, 1, 1))
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(work())
    assert server.num_running == 0


def test_another_runner_goes_on_and_no_answered_line_runs_again(tmp_path: Path) -> None:
    stores, server = Stores(tmp_path), Server(hangs={"c"})
    batch = stores.begin(lines_of("a", "b", "c", "d"))

    async def work() -> None:
        task = asyncio.ensure_future(execution(stores, batch, server, 2).complete())
        await until(lambda: stores.batches.get("a", batch.record.id).progress.num_completed == 3)
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(work())
    again = Server()
    complete(stores, batch, again)
    assert again.asked == ["c"]
    assert prompts_of(stores.content(batch.record.output_file_id)) == ["a", "b", "c", "d"]


def test_a_failing_journal_stops_the_run_and_nothing_is_said_to_be_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores, server = Stores(tmp_path), Server()
    batch = stores.begin(lines_of("a", "b"))
    append = Journal.append

    def full(self: Journal, records: Any) -> None:
        if any(isinstance(record, Answered) for record in records):
            raise OSError(errno.ENOSPC, "full")
        append(self, records)

    monkeypatch.setattr(Journal, "append", full)
    with pytest.raises(OSError, match="full"):
        complete(stores, batch, server)
    monkeypatch.setattr(Journal, "append", append)
    complete(stores, batch, server)
    assert prompts_of(stores.content(batch.record.output_file_id)) == ["a", "b"]


STEPS = [
    (Journal, "open"),
    (Journal, "append"),
    ("store", "show"),
    ("files", "put"),
    ("store", "retire"),
]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize(("owner", "name"), STEPS, ids=lambda value: str(value))
def test_a_batch_survives_the_end_of_its_runner_at_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, count: int, when: str
) -> None:
    """The runner ends before or after its n-th call of a step; the next one completes the batch."""
    stores, server = Stores(tmp_path), Server(fails={"b": 400})
    batch = stores.begin(lines_of("a", "b", "c"))
    owner = {"store": type(stores.batches), "files": type(stores.files)}.get(owner, owner)
    step, calls = getattr(owner, name), 0

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count and when == "before":
            raise OSError("killed")
        result = step(*args, **kwargs)
        if calls == count:
            raise OSError("killed")
        return result

    monkeypatch.setattr(owner, name, dying)
    try:
        complete(stores, batch, server, concurrency=1)
    except OSError as death:
        assert str(death) == "killed"
    monkeypatch.setattr(owner, name, step)
    for left in stores.batches.open_batches():
        complete(stores, left, server)

    assert stores.batches.get("a", batch.record.id).progress.status is Status.COMPLETED
    assert prompts_of(stores.content(batch.record.output_file_id)) == ["a", "c"]
    assert [line["custom_id"] for line in stores.content(batch.record.error_file_id)] == ["b"]
    assert len(stores.files.all("a")) == 3


def test_an_input_that_was_changed_by_hand_fails_the_batch(tmp_path: Path) -> None:
    stores, server = Stores(tmp_path), Server(hangs={"b"})
    batch = stores.begin(lines_of("a", "b"))

    async def work() -> None:
        task = asyncio.ensure_future(execution(stores, batch, server, 1).complete())
        await until(lambda: server.asked == ["a", "b"])
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(work())
    (batch.folder / "input").write_bytes(lines_of("a", "z"))
    ended = complete(stores, batch, Server())
    assert ended.progress.status is Status.FAILED and ended.progress.problems == (CHANGED,)
    assert prompts_of(stores.content(batch.record.output_file_id)) == ["a"]


RUNNER = """
import asyncio, os, sys
from pathlib import Path
from raydix.engine.api.batches import LineLimits
from raydix.engine.batches.execution import Execution
from raydix.engine.batches.runner import FixedSlots
from tests.unit.batch_files import Server, Stores

class ByLeave(Server):
    async def answer(self, url, body):
        print("asked", flush=True)
        await asyncio.to_thread(os.read, 0, 1)
        return await super().answer(url, body)

async def main():
    stores = Stores(Path(sys.argv[1]))
    stores.clock.now = 1_000_000.0
    for batch in stores.batches.open_batches():
        with stores.batches.taken(batch) as is_taken:
            assert is_taken
            await Execution(batch, stores.batches, stores.files, limits=LineLimits(), answer=ByLeave().answer,
                            slots=FixedSlots(4), clock=stores.clock).complete()
    print("done", flush=True)

asyncio.run(main())
"""


def test_killed_runners_leave_a_batch_that_the_next_completes(tmp_path: Path) -> None:
    """Real processes, killed after more and more lines, each of which waits for leave; the locks go with them."""
    stores = Stores(tmp_path)
    names = [str(number) for number in range(60)]
    batch = stores.begin(lines_of(*names))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    num_asked = 0
    for num_lines in (1, 7, 20, None):
        command = [sys.executable, "-c", RUNNER, str(tmp_path)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        ) as runner:
            assert runner.stdin is not None and runner.stdout is not None
            for line in runner.stdout:
                num_asked += line == "asked\n"
                if line == "done\n":
                    break
                num_lines = None if num_lines is None else num_lines - 1
                if num_lines == 0:
                    runner.send_signal(signal.SIGKILL)
                    break
                runner.stdin.write("\n")
                runner.stdin.flush()
    assert prompts_of(stores.content(batch.record.output_file_id)) == names
    assert stores.batches.open_batches() == []
    assert num_asked <= 60 + 3 * 4, "only lines that were running when their runner died ran again"


def records_of(batch: Any) -> list[Record]:
    records: list[Record] = []
    journal = Journal(batch.folder / "journal")
    journal.open(records.append)
    journal.close()
    return records


def test_a_stop_is_written_behind_the_answers_that_were_decided_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores, server = Stores(tmp_path), Server()
    batch = stores.begin(lines_of(*map(str, range(30))))
    monkeypatch.setattr(stores.batches, "retire", lambda batch: None)
    asyncio.run(execution(stores, batch, server, 30).complete())
    kinds = [type(record) for record in records_of(batch)]
    assert kinds.index(Stopped) == 31 and kinds.count(Answered) == 30
