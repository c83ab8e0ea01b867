"""Machines made of one: network namespaces on a bridge, each with an address, a cable and shared memory of its own.

Needs root and iproute2. Processes of a machine see the files of this one, except `/dev/shm` and Ray's folder in `/tmp`.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Network
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.nodes.remains import Remover, pids_in, remove_device, remove_namespace, run
from tests.nodes.subnet import ABSENT, free_subnet, networks

TOOLS = ("ip", "tc", "unshare", "nsenter")
FIRST_NUMBER = 11
"""Last part of the first machine's address; the bridge has the first address of the subnet."""
BRIDGE_MAC = "02:00:00:00:00:01"
RAY_FOLDER = "/tmp/ray"
SHARED_MEMORY_MIB = 2048


def unused_subnet() -> IPv4Network | None:
    """A range of addresses that no network of this machine uses."""
    routes = run("ip", "-json", "-4", "route", "show", "table", "all")
    return free_subnet([*networks(routes, run("ip", "-json", "-4", "address"))])


def obstacle() -> str | None:
    """Reason why no network can be made here; None if one can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    return ABSENT if unused_subnet() is None else None


class Machine:
    """One network namespace with a cable to the bridge."""

    def __init__(self, network: "Network", number: int) -> None:
        self.address = str(network.subnet[number])
        self._network = network
        self._namespace = f"{network.name}-{number}"
        self._outer, self._inner = f"{network.name}o{number}", f"{network.name}i{number}"
        """The two ends of the cable, on the bridge and in the namespace."""
        self._processes: list[subprocess.Popen[bytes]] = []
        run("ip", "netns", "add", self._namespace)
        run("ip", "link", "add", self._outer, "type", "veth", "peer", "name", self._inner)
        run("ip", "link", "set", self._outer, "master", network.name, "up")
        run("ip", "link", "set", self._inner, "netns", self._namespace)
        self._inside("ip", "link", "set", "lo", "up")
        self._inside("ip", "address", "add", f"{self.address}/{network.subnet.prefixlen}", "dev", self._inner)
        self._inside("ip", "link", "set", self._inner, "up")

    def start(
        self, command: Sequence[str], *, log: Path, ray: Path, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a program that stays in the foreground, with its output in `log` and Ray's folder in `ray`."""
        mounts = (
            f"mkdir -p {RAY_FOLDER} && mount --bind {ray} {RAY_FOLDER}"
            f" && mount -t tmpfs -o size={SHARED_MEMORY_MIB}m tmpfs /dev/shm"
        )
        private = ("ip", "netns", "exec", self._namespace, "unshare", "--mount", "--propagation", "private")
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*private, "sh", "-c", f'{mounts} && exec "$@"', "sh", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environment),
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def enter(
        self, process: subprocess.Popen[bytes], command: Sequence[str], *, log: Path, environment: Mapping[str, str]
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
        return pids_in(self._namespace)

    def cut(self) -> None:
        """Pull the cable: nothing arrives, and nobody is told."""
        run("ip", "link", "set", self._outer, "nomaster")

    def mend(self) -> None:
        """Plug the cable in again."""
        run("ip", "link", "set", self._outer, "master", self._network.name)

    def limit(self, megabits_per_s: int) -> None:
        """Send and receive at most that much."""
        for inside, device in ((False, self._outer), (True, self._inner)):
            command = ["tc", "qdisc", "replace", "dev", device, "root", "tbf", "rate", f"{megabits_per_s}mbit"]
            command += ["burst", "256kb", "latency", "400ms"]
            (self._inside if inside else run)(*command)

    def unlimit(self) -> None:
        """End a limit."""
        run("tc", "qdisc", "del", "dev", self._outer, "root")
        self._inside("tc", "qdisc", "del", "dev", self._inner, "root")

    def remove(self) -> None:
        """End the processes with SIGKILL, and the namespace, and with it the cable."""
        remove_namespace(self._namespace)
        remove_device(self._outer)
        self.await_processes()

    def await_processes(self) -> None:
        """Collect the exit codes of processes that were ended."""
        while self._processes:
            self._processes.pop().wait()

    def _inside(self, *command: str) -> str:
        return run("ip", "netns", "exec", self._namespace, *command)


class Network:
    """A bridge with machines; everything is removed at its end, and when this process dies."""

    def __init__(self) -> None:
        subnet = unused_subnet()
        assert subnet is not None, ABSENT
        self.subnet = subnet
        self.name = f"rx{os.getpid() % 100_000}"
        self.machines: list[Machine] = []
        self._next = FIRST_NUMBER

    def __enter__(self) -> Self:
        self._remover = Remover(self.name)
        # An address of its own: otherwise the bridge has the lowest one of its cables, and is out of sight for half a
        # minute when that cable goes.
        run("ip", "link", "add", self.name, "address", BRIDGE_MAC, "type", "bridge")
        run("ip", "address", "add", f"{self.subnet[1]}/{self.subnet.prefixlen}", "dev", self.name)
        run("ip", "link", "set", self.name, "up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._remover.remove()
        finally:
            for machine in self.machines:
                machine.await_processes()

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
