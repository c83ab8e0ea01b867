"""Machines made of one: network namespaces on a bridge, each with an address, a cable and shared memory of its own.

Needs root and iproute2. Processes of a machine see the files of this one, except `/dev/shm` and Ray's folder in `/tmp`.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

SUBNET = "10.77.0"
PREFIX_LENGTH = 24
HOST_NUMBER = 1
"""Last part of the address of this machine on the bridge."""
FIRST_NUMBER = 11
RAY_FOLDER = "/tmp/ray"
SHARED_MEMORY_MIB = 2048
ENDED_S = 20.0


def missing_tools() -> str | None:
    """Reason why no network can be made here; None if one can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    return f"not installed: {', '.join(absent)}" if absent else None


class Machine:
    """One network namespace with a cable to the bridge."""

    def __init__(self, network: "Network", number: int) -> None:
        self.address = f"{SUBNET}.{number}"
        self._network = network
        self._namespace = f"{network.name}-{number}"
        self._outer, self._inner = f"{network.name}o{number}", f"{network.name}i{number}"
        """The two ends of the cable, on the bridge and in the namespace."""
        self._processes: list[subprocess.Popen[bytes]] = []
        _run("ip", "netns", "add", self._namespace)
        _run("ip", "link", "add", self._outer, "type", "veth", "peer", "name", self._inner)
        _run("ip", "link", "set", self._outer, "master", network.name, "up")
        _run("ip", "link", "set", self._inner, "netns", self._namespace)
        self._inside("ip", "link", "set", "lo", "up")
        self._inside("ip", "address", "add", f"{self.address}/{PREFIX_LENGTH}", "dev", self._inner)
        self._inside("ip", "link", "set", self._inner, "up")

    def start(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a program that stays in the foreground, with its output in `log`."""
        mounts = (
            f"mkdir -p {RAY_FOLDER} && mount -t tmpfs tmpfs {RAY_FOLDER}"
            f" && mount -t tmpfs -o size={SHARED_MEMORY_MIB}m tmpfs /dev/shm"
        )
        return self._spawn(["sh", "-c", f'{mounts} && exec "$@"', "sh", *command], log, environment)

    def _spawn(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self._namespace, "unshare", "--mount", "--propagation", "private", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environment),
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def enter(
        self, process: subprocess.Popen[bytes], command: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> int:
        """Run a program beside `process`, with the same mounts; returns the exit status."""
        with log.open("ab") as output:
            done = subprocess.run(
                ["nsenter", f"--target={process.pid}", "--net", "--mount", f"--wd={Path.cwd()}", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environment),
                check=False,
            )
        return done.returncode

    def pids(self) -> list[int]:
        """The processes in the namespace."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self._namespace).split()]

    def kill(self) -> None:
        """End every process at once with SIGKILL, as a power cut does."""
        deadline = time.monotonic() + ENDED_S
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in self._processes:
                process.poll()
            assert time.monotonic() < deadline, f"processes that do not end: {pids}"
            time.sleep(0.05)
        self._processes.clear()

    def cut(self) -> None:
        """Pull the cable: nothing arrives, and nobody is told."""
        _run("ip", "link", "set", self._outer, "nomaster")

    def mend(self) -> None:
        """Plug the cable in again."""
        _run("ip", "link", "set", self._outer, "master", self._network.name)

    def limit(self, megabits_per_s: int) -> None:
        """Send and receive at most that much."""
        for inside, device in ((False, self._outer), (True, self._inner)):
            command = ["tc", "qdisc", "replace", "dev", device, "root", "tbf", "rate", f"{megabits_per_s}mbit"]
            command += ["burst", "256kb", "latency", "400ms"]
            (self._inside if inside else _run)(*command)

    def unlimit(self) -> None:
        """End a limit."""
        _run("tc", "qdisc", "del", "dev", self._outer, "root")
        self._inside("tc", "qdisc", "del", "dev", self._inner, "root")

    def remove(self) -> None:
        """End the processes and the namespace, and with it the cable."""
        self.kill()
        _run("ip", "netns", "del", self._namespace)

    def _inside(self, *command: str) -> str:
        return _run("ip", "netns", "exec", self._namespace, *command)


class Network:
    """A bridge with machines; removes everything at its end."""

    def __init__(self) -> None:
        self.name = f"rx{os.getpid() % 100_000}"
        self.machines: list[Machine] = []
        self._next = FIRST_NUMBER

    def __enter__(self) -> Self:
        _run("ip", "link", "add", self.name, "type", "bridge")
        _run("ip", "address", "add", f"{SUBNET}.{HOST_NUMBER}/{PREFIX_LENGTH}", "dev", self.name)
        _run("ip", "link", "set", self.name, "up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for machine in self.machines:
            machine.remove()
        _run("ip", "link", "del", self.name)

    def add(self) -> Machine:
        """One more machine, with an address that no other had."""
        machine = Machine(self, self._next)
        self._next += 1
        self.machines.append(machine)
        return machine

    def remove(self, machine: Machine) -> None:
        """Take a machine away."""
        self.machines.remove(machine)
        machine.remove()


def _run(*command: str) -> str:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr or done.stdout}"
    return done.stdout
