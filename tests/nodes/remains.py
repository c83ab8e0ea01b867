"""Removal of what a network consists of: processes, namespaces, cables and the bridge.

The removal is the work of a process of its own (`Remover`), which outlives the tests: it waits for the end of its
standard input, which comes when the tests close it, and also when their process dies, of SIGKILL too. Mounts are made
in the processes' own mount namespaces, and end with the processes.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ENDED_S = 20.0
REMOVED_S = 60.0
NAMESPACES = Path("/run/netns")
DEVICES = Path("/sys/class/net")


class Remover:
    """A process that removes everything of a network when it is told to, or when this process has died."""

    def __init__(self, network: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, network], stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )

    def remove(self) -> None:
        """Remove everything. Raises AssertionError with the reason if something is left."""
        _, errors = self._process.communicate(timeout=REMOVED_S)
        assert self._process.returncode == 0, errors.decode()


def run(*command: str) -> str:
    """The output of a command. Raises AssertionError if it fails."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr or done.stdout}"
    return done.stdout


def pids_in(namespace: str) -> list[int]:
    """The processes in a namespace; one that has ended and is not awaited yet does not count."""
    return [int(pid) for pid in run("ip", "netns", "pids", namespace).split()]


def remove_namespace(namespace: str) -> None:
    """End the processes of a namespace at once with SIGKILL, as a power cut does, and then the namespace."""
    deadline = time.monotonic() + ENDED_S
    while pids := pids_in(namespace):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert time.monotonic() < deadline, f"processes that do not end: {pids}"
        time.sleep(0.02)
    run("ip", "netns", "del", namespace)


def remove_device(name: str) -> None:
    """Remove a network device, and a cable's other end with it; it may be gone. The end of a namespace that has had
    connections would remove the cable only when these have timed out."""
    if (DEVICES / name).exists():
        subprocess.run(["ip", "link", "del", name], stdin=subprocess.DEVNULL, capture_output=True, check=False)


def remains(network: str) -> list[str]:
    """The namespaces and devices of a network that are there."""
    namespaces = NAMESPACES.iterdir() if NAMESPACES.exists() else ()
    found = [path.name for path in namespaces if path.name.startswith(f"{network}-")]
    return found + [path.name for path in DEVICES.iterdir() if path.name.startswith(network)]


def main(network: str) -> None:
    """Wait for the end of the standard input, and then remove a network."""
    sys.stdin.read()
    for name in [each for each in remains(network) if each.startswith(f"{network}-")]:
        remove_namespace(name)
    deadline = time.monotonic() + ENDED_S
    while left := remains(network):
        assert time.monotonic() < deadline, f"left of the network: {', '.join(left)}"
        for name in left:
            remove_device(name)


if __name__ == "__main__":
    main(sys.argv[1])
