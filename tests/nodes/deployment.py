"""A Ray cluster of several nodes with raydix on it, deployed with the commands of docs/guides/ray.md."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import yaml

from raydix.cli.cluster import SERVE_SWITCHES
from raydix.cli.ray_node import secure_token
from tests.integration.cluster import PARTS
from tests.integration.conftest import Server, eventually
from tests.nodes.network import Machine, Network

GCS_PORT = 6379
HTTP_PORT = 8000
STORE_BYTES = 500 << 20
FRONT = "front"
"""Name of the node of ingress and manager; the nodes of workers are labelled with the worker's role."""
DRAINED_S = 120
"""Notice that a node gets before it is to be empty."""
BIN = Path(sys.executable).parent


@dataclass
class Node:
    """A machine that runs Ray."""

    machine: Machine
    raylet: "subprocess.Popen[bytes]"
    ray: Path
    """Ray's folder; its logs stay when the machine is gone."""

    def processes(self) -> Iterator[tuple[psutil.Process, list[str]]]:
        """The processes of the machine with their command lines."""
        for pid in self.machine.pids():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                yield process, process.cmdline()

    @property
    def node_id(self) -> str:
        """Ray's id of the node."""
        words = [word for _, line in self.processes() for word in line if word.startswith("--node_id=")]
        return words[0].removeprefix("--node_id=")

    def worker_pids(self) -> list[int]:
        """The processes of raydix's workers."""
        titles = ("ray::PrefillWorker", "ray::DecodeWorker", "ray::MixedWorker")
        return [process.pid for process, line in self.processes() if " ".join(line).startswith(titles)]

    def part_pids(self) -> dict[int, str]:
        """The replicas and actors of raydix by process."""
        parts = {process.pid: PARTS.match(" ".join(line)) for process, line in self.processes()}
        return {pid: part.group(1) for pid, part in parts.items() if part is not None}

    def events(self, name: str) -> int:
        """Number of lines of an event in raydix's logs."""
        lines = [
            line for path in self.ray.glob("session_2*/logs/raydix-*.log*") for line in path.read_text().splitlines()
        ]
        return sum(json.loads(line).get("event") == name for line in lines)


@dataclass
class Deployment:
    """Nodes and what is deployed on them, as an operator sees it."""

    network: Network
    folder: Path
    """Folder of the logs of every command."""
    nodes: dict[str, Node] = field(default_factory=dict)
    """Nodes by name."""

    @cached_property
    def environment(self) -> Mapping[str, str]:
        """Environment of every process: the switches of `raydix serve`, and no variable of another cluster."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        paths = os.pathsep.join([str(BIN), own.get("PATH", "")])
        return {
            **own,
            "PATH": paths,
            "PYTHONPATH": str(Path.cwd()),
            "RAY_AUTH_MODE": "token",
            **SERVE_SWITCHES,
            "RAY_preallocate_plasma_memory": "0",  # four stores share this machine's memory
        }

    @property
    def head(self) -> Node:
        return self.nodes[FRONT]

    @property
    def server(self) -> Server:
        """The HTTP front end, as a client of this machine reaches it."""
        return Server(self.head.machine.address, HTTP_PORT)

    @property
    def gcs(self) -> str:
        return f"--address={self.head.machine.address}:{GCS_PORT}"

    def add_node(self, label: str, name: str | None = None) -> Node:
        """Start Ray on one more machine, named as its label if nothing else is said; the first one is the head."""
        machine = self.network.add()
        command = [str(BIN / "ray"), "start", "--block", f"--node-ip-address={machine.address}", "--num-cpus=2"]
        command += [f"--object-store-memory={STORE_BYTES}", "--disable-usage-stats", f"--labels=raydix={label}"]
        if self.nodes:
            command += [self.gcs]
        else:
            secure_token(Path.home())
            command += ["--head", f"--port={GCS_PORT}", "--include-dashboard=false"]
        log, ray = self.folder / f"{machine.address}.log", self.folder / f"{machine.address}-ray"
        ray.mkdir()
        raylet = machine.start(command, log=log, ray=ray, environment=self.environment)
        eventually(lambda: b"Ray runtime started" in log.read_bytes(), f"Ray runs on {machine.address}")
        node = self.nodes[name or label] = Node(machine, raylet, ray)
        return node

    def deploy(self, config: Mapping[str, Any]) -> None:
        """Deploy the application, or change it; returns when it answers. Serve listens on each node that has a
        replica, so on all addresses."""
        file = self.folder / "raydix.yaml"
        file.write_text(yaml.safe_dump({**config, "http": {"host": "0.0.0.0", "port": HTTP_PORT}}))
        self._on_head("raydix", "deploy", "--config", str(file), self.gcs)
        eventually(lambda: self.server.request("GET", "/health", timeout=5)[0] == 200, "healthy")

    def parts(self) -> dict[str, dict[int, str]]:
        """The replicas and actors by node and process, but for the manager's standby, which comes later than these."""
        found = {name: node.part_pids() for name, node in self.nodes.items()}
        managers = sorted(pid for pid, part in found[FRONT].items() if part == "KVCacheManager")
        for standby in managers[1:]:
            del found[FRONT][standby]
        return found

    def workers(self) -> list[dict[str, Any]]:
        """The registered workers."""
        status, _, data = self.server.request("GET", "/v1/cache", timeout=5)
        assert status == 200, data
        workers: list[dict[str, Any]] = json.loads(data)["workers"]
        return workers

    def kill_node(self, name: str) -> None:
        """End every process of a node with SIGKILL, and take the machine away."""
        node = self.nodes.pop(name)
        self.network.remove(node.machine)

    def drain_node(self, name: str) -> None:
        """Tell Ray that a node is going to be taken away."""
        arguments = ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=test"]
        arguments += [f"--node-id={self.nodes[name].node_id}", f"--deadline-remaining-seconds={DRAINED_S}"]
        self._on_head("ray", "drain-node", self.gcs, *arguments)

    def _on_head(self, program: str, *arguments: str) -> None:
        log = self.folder / f"{program}.log"
        command = [str(BIN / program), *arguments]
        status = self.head.machine.enter(self.head.raylet, command, log=log, environment=self.environment)
        assert status == 0, log.read_text()[-4000:]


def wait_for_roles(deployment: Deployment, *roles: str) -> float:
    """Seconds until exactly these workers are registered, one of each role named."""
    started = time.monotonic()

    def are_there() -> bool:
        return sorted(worker["role"] for worker in deployment.workers()) == sorted(roles)

    eventually(are_there, f"workers: {', '.join(roles)}")
    return time.monotonic() - started
