"""A Ray cluster of several nodes with raydix on it, deployed with the commands of docs/guides/ray.md."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import yaml

from cli.ray_token import secure_token
from tests.integration.conftest import Server, eventually
from tests.nodes.network import Machine, Network

GCS_PORT = 6379
HTTP_PORT = 8000
STORE_BYTES = 700 << 20
FRONT = "front"
"""Label of the node of ingress and manager; each other node is labelled with the role of its worker."""
STARTED_S = 60
READY_S = 240


BIN = Path(sys.executable).parent


@dataclass
class Node:
    """A machine that runs Ray."""

    machine: Machine
    label: str
    raylet: "subprocess.Popen[bytes]"


@dataclass
class Deployment:
    """Nodes and what is deployed on them, as an operator sees it."""

    network: Network
    folder: Path
    """Folder of the logs of every command."""
    nodes: dict[str, Node] = field(default_factory=dict)
    """Nodes by label."""

    @cached_property
    def environment(self) -> Mapping[str, str]:
        """Environment of every process: no variable of another cluster."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        paths = os.pathsep.join([str(BIN), own.get("PATH", "")])
        return {
            **own,
            "PATH": paths,
            "PYTHONPATH": str(Path.cwd()),
            "RAY_AUTH_MODE": "token",
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    @property
    def head(self) -> Node:
        return self.nodes[FRONT]

    @property
    def server(self) -> Server:
        """The HTTP front end, as a client of this machine reaches it."""
        return Server(self.head.machine.address, HTTP_PORT)

    def add_node(self, label: str) -> Node:
        """Start Ray on one more machine; the first one is the head."""
        machine = self.network.add()
        command = [str(BIN / "ray"), "start", "--block", f"--node-ip-address={machine.address}", "--num-cpus=4"]
        command += [f"--object-store-memory={STORE_BYTES}", "--disable-usage-stats", f"--labels=raydix={label}"]
        if self.nodes:
            command += [f"--address={self.head.machine.address}:{GCS_PORT}"]
        else:
            secure_token(Path.home())
            command += ["--head", f"--port={GCS_PORT}", "--include-dashboard=false"]
        log = self.folder / f"{machine.address}.log"
        node = Node(machine, label, machine.start(command, log, self.environment))
        eventually(lambda: b"Ray runtime started" in log.read_bytes(), f"Ray runs on {machine.address}", STARTED_S)
        self.nodes[label] = node
        return node

    def deploy(self, config: Mapping[str, Any]) -> None:
        """Deploy the application, or change it; returns when it answers."""
        file = self.folder / "raydix.yaml"
        file.write_text(yaml.safe_dump(dict(config)))
        address = f"--address={self.head.machine.address}:{GCS_PORT}"
        host = f"--http-host={self.head.machine.address}"
        self._on_head("serve", "start", address, host, f"--http-port={HTTP_PORT}", "--proxy-location=HeadOnly")
        arguments = ("serve_app:build", f"config={file}", "--name=raydix", "--non-blocking")
        self._on_head("serve", "run", address, *arguments)
        eventually(lambda: self.server.request("GET", "/health", timeout=5)[0] == 200, "healthy", READY_S)

    def workers(self) -> dict[str, dict[str, Any]]:
        """The registered workers, by role."""
        status, _, data = self.server.request("GET", "/v1/cache", timeout=5)
        assert status == 200, data
        return {worker["role"]: worker for worker in json.loads(data)["workers"]}

    def worker_pid(self, label: str) -> int:
        """The process of the worker on a node labelled with the role."""
        for pid in self.nodes[label].machine.pids():
            with contextlib.suppress(psutil.Error):
                if " ".join(psutil.Process(pid).cmdline()).startswith(f"ray::{label.capitalize()}Worker"):
                    return pid
        raise LookupError(f"no worker on the node {label}")

    def kill_node(self, label: str) -> None:
        """End every process of a node with SIGKILL, and take the machine away."""
        node = self.nodes.pop(label)
        self.network.remove(node.machine)

    def _on_head(self, program: str, *arguments: str) -> None:
        log = self.folder / f"{program}.log"
        status = self.head.machine.enter(self.head.raylet, [str(BIN / program), *arguments], log, self.environment)
        assert status == 0, log.read_text()[-4000:]


def wait_for_roles(deployment: Deployment, *roles: str, timeout_s: float = READY_S) -> float:
    """Seconds until exactly these roles have a registered worker."""
    started = time.monotonic()
    eventually(lambda: set(deployment.workers()) == set(roles), f"workers: {', '.join(roles)}", timeout_s)
    return time.monotonic() - started
