"""The timeline of a start: which process is which, and all processes of a mark, their children's children too."""

import os
import subprocess
import sys
import time

import pytest

from benchmarks.start import MARK, Seen, Watch, by_name, name_of


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["ray::ServeReplica:raydix:ingress"], "ray::ServeReplica:raydix:ingress"),
        (["ray::Worker.start()"], "ray::Worker.start"),
        (["/x/raylet/raylet", "--a"], "raylet"),
        (["/usr/bin/python3.11", "-u", "/x/dashboard/agent.py", "--b"], "agent.py"),
        (["python", "-m", "raydix.cli.main", "serve"], "python -m raydix.cli.main"),
        (["python", "-c", "import x"], "python -c"),
        ([], "kthread"),
    ],
)
def test_names(command: list[str], name: str) -> None:
    assert name_of(command, "kthread") == name


def test_rows_are_sums_and_the_busiest_stand_first() -> None:
    rows = by_name([Seen("a", 1.0, 0.5, 10), Seen("b", 0.0, 0.7, 1), Seen("a", 0.5, 0.5, 20)])
    assert [row["name"] for row in rows] == ["a", "b"]
    assert rows[0] == {"name": "a", "processes": 2, "began_s": 0.5, "cpu_s": 1.0, "unique_mib": 30, "idle_share": 0.0}


def test_a_watch_sees_the_marked_processes_alone() -> None:
    """A child that left its parent, as HAProxy does, counts; a process beside it does not."""
    child = "import sys; print(flush=True); sys.stdin.read()"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}, 'orphan'], stdin=0)"
    read, write = os.pipe()
    own = {**os.environ, MARK: "this"}
    first = subprocess.Popen([sys.executable, "-c", parent], env=own, stdin=read, stdout=subprocess.PIPE)
    other = subprocess.Popen([sys.executable, "-c", child], env={**os.environ, MARK: "other"}, stdin=read)
    try:
        assert first.stdout is not None and first.stdout.readline() == b"\n", "the orphan runs"
        first.wait()
        watch = Watch("this", first.pid, time.time())
        watch.look(memory=True)
        [orphan] = watch.seen.values()
        assert orphan.name.endswith(" -c") and orphan.cpu_s >= 0 and orphan.unique_mib > 0
    finally:
        os.close(write)
        os.close(read)
        other.wait()
        first.communicate()
