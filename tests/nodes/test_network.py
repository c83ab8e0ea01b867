"""The machines that the other tests of this folder are made of, without Ray: links, and that nothing is left."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.conftest import eventually
from tests.nodes.network import Machine, Network, obstacle
from tests.nodes.remains import remains

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(120)]

SERVE = "import socket, sys; s = socket.create_server(('', 7000)); [s.accept()[0].sendfile(open(sys.argv[1], 'rb'))" + (
    " for _ in iter(int, 1)]"
)
SLEEPS = """
import os, sys
from pathlib import Path
from tests.nodes.network import Network
with Network() as network:
    folder = Path(sys.argv[1])
    command = ["sh", "-c", "touch /dev/shm/mine; sleep 1000"]
    network.add().start(command, log=folder / "log", ray=folder, environment=os.environ)
    print(network.name, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def network() -> Iterator[Network]:
    if (reason := obstacle()) is not None:
        pytest.skip(reason)
    with Network() as made:
        yield made
    assert not remains(made.name)


def fetched(address: str, timeout_s: float) -> tuple[int, float]:
    """The bytes that a machine sends, and how many seconds they took."""
    import socket

    began, count = time.monotonic(), 0
    with socket.create_connection((address, 7000), timeout_s) as connection:
        while data := connection.recv(1 << 16):
            count += len(data)
    return count, time.monotonic() - began


def is_alive(pid: int) -> bool:
    """True for a process that has not ended; one that nobody has awaited yet has."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def serving(machine: Machine, folder: Path, size: int) -> None:
    """Have a machine send a file of so many bytes to each that connects."""
    content = folder / "content"
    content.write_bytes(bytes(size))
    ray = folder / "ray"
    ray.mkdir()
    machine.start([sys.executable, "-c", SERVE, str(content)], log=folder / "log", ray=ray, environment=os.environ)
    eventually(lambda: fetched(machine.address, 1.0)[0] == size, "the machine is reached")


def test_a_cut_link_carries_nothing_and_a_mended_one_does(network: Network, tmp_path: Path) -> None:
    machine = network.add()
    serving(machine, tmp_path, 1000)
    machine.cut()
    with pytest.raises(TimeoutError):
        fetched(machine.address, 1.0)
    machine.mend()
    assert fetched(machine.address, 10.0)[0] == 1000


def test_a_limited_link_is_as_slow_as_the_limit(network: Network, tmp_path: Path) -> None:
    machine, size = network.add(), 8 << 20
    serving(machine, tmp_path, size)
    machine.limit(50)
    expected_s = size * 8 / 50e6
    limited_s = fetched(machine.address, 10.0)[1]
    assert 0.8 * expected_s < limited_s < 2 * expected_s
    machine.unlimit()
    assert fetched(machine.address, 10.0)[1] < limited_s / 2


def test_a_removed_machine_leaves_no_process(network: Network, tmp_path: Path) -> None:
    machine = network.add()
    serving(machine, tmp_path, 1)
    pids = machine.pids()
    network.remove(machine)
    assert pids and not any(map(is_alive, pids))
    assert remains(network.name) == [network.name]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
def test_an_interrupted_run_leaves_nothing(how: signal.Signals, tmp_path: Path) -> None:
    if (reason := obstacle()) is not None:
        pytest.skip(reason)
    tests = subprocess.Popen(
        [sys.executable, "-c", SLEEPS, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert tests.stdin is not None and tests.stdout is not None
    name = tests.stdout.readline().strip()
    assert remains(name)
    pids = eventually(lambda: subprocess.getoutput(f"ip netns pids {name}-11").split(), "its process")
    tests.send_signal(how)
    tests.wait()
    eventually(lambda: not remains(name), "everything is removed")
    eventually(lambda: not any(is_alive(int(pid)) for pid in pids), "its process has ended")
    assert name not in Path("/proc/mounts").read_text()
    tests.stdin.close()
    tests.stdout.close()
