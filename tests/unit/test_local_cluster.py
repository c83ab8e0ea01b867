"""What `raydix serve` knows of the processes that it starts. They are real ones."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from ray import _raylet
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._raylet import NodeID

from raydix.cli.cluster import IRREPLACEABLE, ClusterDiedError, LocalCluster, logs_since
from raydix.cli.ray_node import AGENT_PORTS, SPARED, with_agent_ports, without_spare_processes
from raydix.configs import load_config


def test_only_while_a_cluster_starts_ray_starts_no_spare_processes() -> None:
    before = [getattr(Node, name) for name in SPARED]  # under these names Ray has them
    with without_spare_processes():
        assert not {getattr(Node, name) for name in SPARED} & set(before)
    assert [getattr(Node, name) for name in SPARED] == before


def test_a_raylet_knows_the_ports_of_its_agents(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where its start has been changed before. It finds the one written down that it waits for in any case."""
    seen: list[int] = []
    library: Any = _raylet
    node_id = NodeID.from_random().hex()

    def changed_start(node: Any) -> None:
        seen.extend(getattr(node._ray_params, name) for name in AGENT_PORTS)
        waited_for = library.DASHBOARD_AGENT_LISTEN_PORT_NAME
        seen.append(library.wait_for_persisted_port(str(tmp_path), node_id, waited_for, timeout_ms=0))

    monkeypatch.setattr(Node, "start_raylet", changed_start)
    node: Any = SimpleNamespace(_ray_params=RayParams(), _session_dir=str(tmp_path), _node_id=node_id)
    with with_agent_ports(iter((1, 2, 3, 4)).__next__):
        getattr(Node, "start_raylet")(node)  # noqa: B009
    assert seen == [1, 2, 3, 4, 3]
    assert getattr(Node, "start_raylet") is changed_start  # noqa: B009


@pytest.fixture
def starting_raylet(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that becomes `raylet` once there is a file `go`, as each one does between fork and exec."""
    program = tmp_path / "raylet"
    shutil.copy("/bin/sleep", program)
    process = subprocess.Popen(
        ["sh", "-c", "while [ ! -e go ]; do sleep 0.05; done; exec ./raylet 60"], cwd=tmp_path, start_new_session=True
    )
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("forks", [True, False])
def test_ray_that_cannot_start_is_told_in_one_line_with_its_reason_and_logs(tmp_path: Path, forks: bool) -> None:
    folder = tmp_path / ("x" * 100)  # too long for the names of Ray's sockets
    folder.mkdir()
    program = """
from raydix.cli.cluster import LocalCluster
from raydix.configs import load_config
from raydix.engine.core.errors import StartupError

cluster = LocalCluster(load_config("cpu_mixed"))
try:
    cluster.start()
except StartupError as error:
    print(error)
cluster.stop()
"""
    environment = os.environ | {"TMPDIR": str(folder), "RAYDIX_FORK_WORKERS": str(int(forks))}
    told = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    [line] = told.stdout.splitlines()
    assert line.startswith("Ray cannot start: ")
    if forks:
        assert "AF_UNIX path too long" in line
    else:
        assert "cannot exceed 107 bytes" in line
        assert line.endswith("/logs") and Path(line.rpartition(" ")[2]).is_dir()


def test_the_logs_of_a_failed_start_are_its_own_and_no_other_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    began = time.time()

    def session(after_s: float, pid: int) -> Path:
        """Logs of a session, as Ray names them, that began so long after the start."""
        at = datetime.fromtimestamp(began + after_s).strftime("%Y-%m-%d_%H-%M-%S_%f")
        logs = tmp_path / "ray" / f"session_{at}_{pid}" / "logs"
        logs.mkdir(parents=True)
        return logs

    session(-0.5, os.getpid())  # of an earlier process of this number, or of this process
    session(0.5, os.getpid() + 1)  # of another server that starts at the same time
    session(0.5, int(f"1{os.getpid()}"))
    assert logs_since(began) == ""

    own = session(0.25, os.getpid())
    assert logs_since(began) == f"; its logs are in {own}"

    session(0.75, os.getpid())  # of another container that has a process of this number and the same folder
    assert logs_since(began) == ""


def test_the_death_of_a_process_is_seen_that_was_listed_before_its_exec(
    starting_raylet: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "raylet" in IRREPLACEABLE
    monkeypatch.setattr("raydix.cli.cluster.IRREPLACEABLE", ("raylet",))
    cluster = LocalCluster(load_config("cpu_mixed"))
    cluster.check()  # lists the shell

    (tmp_path / "go").touch()
    deadline = time.monotonic() + 30
    while psutil.Process(starting_raylet.pid).name() != "raylet" and time.monotonic() < deadline:
        time.sleep(0.01)
    cluster.check()  # lists what the shell has become

    starting_raylet.kill()
    starting_raylet.wait()
    with pytest.raises(ClusterDiedError, match=rf"Ray's raylet \(process {starting_raylet.pid}\) has died"):
        cluster.check()


def test_a_child_of_the_raylet_is_not_taken_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that the raylet forks has its name until it begins another program, and may end soon."""
    monkeypatch.setattr("raydix.cli.cluster.IRREPLACEABLE", ("raylet",))
    shutil.copy("/bin/sleep", tmp_path / "raylet")
    parent = subprocess.Popen(
        ["sh", "-c", "./raylet 60 & echo $!; wait; read line"],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    try:
        deadline = time.monotonic() + 30
        while child.name() != "raylet" and time.monotonic() < deadline:
            time.sleep(0.01)
        cluster = LocalCluster(load_config("cpu_mixed"))
        cluster.check()
        child.kill()
        psutil.wait_procs([child], timeout=30)
        cluster.check()
    finally:
        parent.communicate(b"\n")
