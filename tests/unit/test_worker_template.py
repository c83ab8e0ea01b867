"""Workers that are forked from a template. Template and workers are real processes; Ray's programs are stand-ins, which
say what they were started with."""

import importlib.util
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from raydix.cli import worker_start
from raydix.cli.worker_template import FIRST_WORKER, PARTS, WorkerTemplate
from tests.unit.waits import WAIT_S, until_outside

SAYING = """
import json, os, resource, signal, sys, time
report = {
    "program": os.path.basename(sys.argv[0]), "arguments": sys.argv[1:], "mark": os.environ.get("MARK"),
    "folder": os.getcwd(), "pid": os.getpid(), "group": os.getpgid(0), "parent": os.getppid(),
    "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    "waits_for_children": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
    "oom_score": open("/proc/self/oom_score_adj").read().strip(), "niceness": os.nice(0),
    "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "has_part": "colorsys" in sys.modules,
}
print(json.dumps(report), flush=True)
"""
WAITING = "time.sleep(600)\n"


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with stand-ins for Ray's programs."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in (worker_start.SETUP, worker_start.WORKER):
        (folder / name).write_text(SAYING)
    return folder


@pytest.fixture
def template(tmp_path: Path) -> Iterator[WorkerTemplate]:
    template = WorkerTemplate(tmp_path, parts=("colorsys",))
    yield template
    template.process.kill()
    template.communicate()


def start(template: WorkerTemplate, programs: Path, *arguments: str, raylet: int | None = None, **options: Any) -> Any:
    """Start a worker as the raylet does; returns what the worker says of itself."""
    environment = {**os.environ, **template.environment(programs), "MARK": "own"}
    environment["RAY_RAYLET_PID"] = str(raylet or os.getpid())
    read, write = os.pipe()
    subprocess.run(
        [sys.executable, "-IS", worker_start.__file__, *arguments, "--language=PYTHON"],
        env=environment,
        stdout=write,
        check=True,
        timeout=WAIT_S,
        **options,
    )
    os.close(write)
    with os.fdopen(read) as output:
        return json.loads(output.readline())


def test_a_worker_is_forked_as_the_raylet_would_have_started_it(
    template: WorkerTemplate, programs: Path, tmp_path: Path
) -> None:
    report = start(template, programs, "--worker-id=7", "--serialized-runtime-env-context={}", cwd=tmp_path)
    assert report["parent"] == template.process.pid
    assert (report["program"], report["arguments"]) == (worker_start.WORKER, ["--worker-id=7"])
    assert (report["mark"], report["folder"]) == ("own", str(tmp_path))
    assert report["group"] == report["pid"], "the raylet ends a worker's process group"
    assert report["waits_for_children"]
    assert report["oom_score"] == "1000", "the system ends workers before the raylet"


def test_a_worker_has_the_priority_and_the_limit_of_the_process_that_asks(
    template: WorkerTemplate, programs: Path
) -> None:
    niceness, (soft, hard) = os.nice(0), resource.getrlimit(resource.RLIMIT_NOFILE)

    def change() -> None:
        os.nice(1)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))

    report = start(template, programs, preexec_fn=change)
    assert (report["niceness"], report["open_files"]) == (niceness + 1, [soft - 1, hard])


def test_signals_blocked_by_the_raylet_are_blocked_in_a_worker(template: WorkerTemplate, programs: Path) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        report = start(template, programs)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert report["blocked"] == [signal.SIGINT]


def test_a_worker_has_what_the_template_imported(template: WorkerTemplate, programs: Path) -> None:
    until_outside(lambda: start(template, programs)["has_part"], "the template imports its parts between forks")


def test_parts_that_wait_are_imported_once_a_worker_runs(tmp_path: Path, programs: Path) -> None:
    template = WorkerTemplate(tmp_path, parts=(FIRST_WORKER, "colorsys"))
    try:
        assert not start(template, programs)["has_part"]
        until_outside(lambda: start(template, programs)["has_part"], "the rest is imported")
    finally:
        template.communicate()


def test_a_runtime_env_is_left_to_ray(template: WorkerTemplate, programs: Path) -> None:
    arguments = ('--serialized-runtime-env-context={"env_vars": {"A": "1"}}', "--worker-id=7")
    report = start(template, programs, *arguments)
    assert report["program"] == worker_start.SETUP
    assert report["arguments"] == [str(programs / worker_start.WORKER), *arguments, "--language=PYTHON"]


def test_ray_starts_the_workers_where_the_template_has_died(template: WorkerTemplate, programs: Path) -> None:
    template.process.kill()
    template.process.wait()
    assert start(template, programs, "--worker-id=7")["program"] == worker_start.SETUP


def test_ray_starts_the_workers_once_code_has_changed(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "code_of_workers.py"
    module.touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    template = WorkerTemplate(tmp_path, parts=(module.stem, "colorsys"))
    try:
        until_outside(lambda: start(template, programs).get("has_part", False), "everything is imported")
        os.utime(module, ns=(0, 0))
        assert start(template, programs)["program"] == worker_start.SETUP
    finally:
        template.communicate()


def test_a_worker_outlives_the_template_and_ends_with_the_raylet(template: WorkerTemplate, programs: Path) -> None:
    (programs / worker_start.WORKER).write_text(SAYING + WAITING)
    raylet = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    worker = psutil.Process(start(template, programs, raylet=raylet.pid)["pid"])
    template.process.communicate()
    assert template.process.returncode == 0, "it ends with the process that started it"
    assert worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE
    raylet.communicate(b"\n")
    until_outside(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, "the worker ends")


def test_the_system_forgets_a_killed_worker(template: WorkerTemplate, programs: Path) -> None:
    """The raylet asks the system whether a worker's process lives."""
    (programs / worker_start.WORKER).write_text(SAYING + WAITING)
    pid = start(template, programs)["pid"]
    os.kill(pid, signal.SIGKILL)
    until_outside(lambda: not psutil.pid_exists(pid), "the process is gone")


def test_the_parts_exist() -> None:
    modules = [part.partition(":")[0] for part in PARTS if part != FIRST_WORKER]
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


def test_workers_draw_different_ids(tmp_path: Path, programs: Path) -> None:
    """Ray's generator of ids is seeded at its first use: none before a fork."""
    saying = (
        'import json\nfrom ray import WorkerID\nprint(json.dumps({"id": WorkerID.from_random().hex()}), flush=True)'
    )
    (programs / worker_start.WORKER).write_text(saying)
    template = WorkerTemplate(tmp_path, parts=[part for part in PARTS if part != FIRST_WORKER])
    try:
        ids = [start(template, programs)["id"] for _ in range(3)]
        for _ in range(8):  # more of the parts are imported between two of these
            ids.append(start(template, programs)["id"])
        assert len(set(ids)) == len(ids)
    finally:
        template.communicate()


RAYLET = f"""
import os, subprocess, sys
command = [sys.executable, "-IS", {worker_start.__file__!r}, "--language=PYTHON"]
subprocess.run(command, env={{**os.environ, "{worker_start.RAYLET_PID}": str(os.getpid())}})
"""


def test_a_worker_that_is_to_begin_when_the_raylet_dies_does_not(tmp_path: Path, programs: Path) -> None:
    """Both the raylet and the template end with the server, the raylet first here."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "template"))
        listener.listen()
        variables = {worker_start.TEMPLATE: listener.getsockname(), worker_start.RAYS_PROGRAMS: str(programs)}
        command = [sys.executable, "-c", RAYLET]
        with subprocess.Popen(command, env=os.environ | variables, stdout=subprocess.PIPE, text=True) as raylet:
            assert raylet.stdout is not None
            connection, _ = listener.accept()  # a worker asks to be forked
            raylet.kill()
            raylet.wait()
            connection.close()
            assert raylet.stdout.read() == "", "no worker began before all had ended"
