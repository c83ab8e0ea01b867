"""The journal on disk: what was written stays, through SIGKILL, a full disk and cut files."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from raydix.engine.batches.journal import SYNC_S, Journal
from raydix.engine.core.batches.records import Answered, Opened, Record, Status, Stopped, encode

WRITER = """
import sys
from pathlib import Path
from raydix.engine.batches.journal import Journal
from raydix.engine.core.batches.records import Answered

journal = Journal(Path(sys.argv[1]))
number = 0

def follow(record):
    global number
    number = record.number + 1

journal.open(follow)
while True:
    journal.append([Answered(number, False, b"x" * 3000)])
    print(number, flush=True)
    number += 1
"""


def records_in(path: Path) -> list[Record]:
    records: list[Record] = []
    journal = Journal(path)
    journal.open(records.append)
    journal.close()
    return records


def test_records_are_read_again(tmp_path: Path) -> None:
    records: list[Record] = [Opened(1.0, 2, "d"), Answered(1, False, b"one"), Stopped(2.0, Status.CANCELLED)]
    journal = Journal(tmp_path / "journal")
    journal.open(lambda record: pytest.fail("there are none"))
    journal.append(records[:2])
    journal.append(records[2:])
    journal.append([])
    assert journal.output(1) == b"one" and journal.num_bytes == (tmp_path / "journal").stat().st_size
    journal.close()
    assert records_in(tmp_path / "journal") == records
    assert (tmp_path / "journal").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", ["cut", "changed", "garbage behind"])
def test_what_is_not_whole_is_cut_off_and_writing_goes_on(tmp_path: Path, damage: str) -> None:
    path, first, second = tmp_path / "journal", Answered(0, False, b"zero"), Answered(1, False, b"one")
    damaged = {
        "cut": encode(first) + encode(second)[:-3],
        "changed": encode(first) + encode(second).replace(b"one", b"two"),
        "garbage behind": encode(first) + b"\0" * 100,
    }
    path.write_bytes(damaged[damage])
    found: list[Record] = []
    journal = Journal(path)
    journal.open(found.append)
    assert found == [first]
    journal.append([second])
    assert journal.output(1) == b"one"
    journal.close()
    assert path.read_bytes() == encode(first) + encode(second)


def test_a_killed_writer_loses_nothing_that_it_has_written(tmp_path: Path) -> None:
    """Three processes, each killed in the middle of its writing, go on one after the other."""
    path, num_said = tmp_path / "journal", 0
    for _ in range(3):
        command = [sys.executable, "-c", WRITER, str(path)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as writer:
            assert writer.stdout is not None
            said = [int(writer.stdout.readline()) for _ in range(20)]
            writer.send_signal(signal.SIGKILL)
            said += [int(line) for line in writer.stdout.read().splitlines() if line]
        assert said == [*range(num_said, num_said + len(said))], "each goes on behind the last"
        numbers = [record.number for record in records_in(path) if isinstance(record, Answered)]
        assert numbers == [*range(len(numbers))] and len(numbers) >= said[-1] + 1
        num_said = len(numbers)


def test_a_full_disk_leaves_the_journal_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "journal")
    journal.open(lambda record: None)
    journal.append([Answered(0, False, b"zero")])
    write = os.pwrite

    def part_of(handle: int, content: memoryview, place: int) -> int:
        monkeypatch.setattr(os, "pwrite", full)
        return write(handle, content[:4], place)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwrite", part_of)
    with pytest.raises(OSError, match="full"):
        journal.append([Answered(1, False, b"one")])
    monkeypatch.setattr(os, "pwrite", write)
    journal.append([Answered(2, False, b"two")])
    journal.close()
    assert records_in(tmp_path / "journal") == [Answered(0, False, b"zero"), Answered(2, False, b"two")]


def test_changes_of_state_reach_the_disk_at_once_and_answers_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    now = 0.0
    journal = Journal(tmp_path / "journal", lambda: now)
    journal.open(lambda record: None)
    synced.clear()
    journal.append([Answered(0, False, b"zero")])
    assert not synced
    journal.append([Answered(1, False, b"one"), Stopped(1.0, Status.COMPLETED)])
    assert len(synced) == 1
    now = SYNC_S
    journal.append([Answered(2, False, b"two")])
    assert len(synced) == 2
    journal.close()


def test_an_answer_that_is_damaged_later_is_not_given_out(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.open(lambda record: None)
    journal.append([Answered(0, False, b"zero")])
    (tmp_path / "journal").write_bytes(encode(Answered(0, False, b"zero")).replace(b"zero", b"hero"))
    with pytest.raises(OSError, match="damaged"):
        journal.output(0)
    journal.close()
