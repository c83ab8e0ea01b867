"""One Ray and one Serve for all tests of a session, and what an operator sees of the application on it.

A module asks for the configuration that it needs. The application is replaced where another configuration runs, or
where a test has deployed something over it; Ray, Serve and HAProxy stay.
"""

import contextlib
import gc
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import yaml
from pydantic import ValidationError

from raydix.actors.logs import log_folder
from raydix.cli.cluster import APP_NAME, LocalCluster, free_port, named_local, wait_until_running
from raydix.cli.deploy import deploy
from raydix.configs import Config
from raydix.engine.core.errors import StartupError
from tests.integration.conftest import WAIT_S, Server, eventually
from tests.integration.thin_model import write_thin_model

PARTS = re.compile(r"ray::(ServeReplica:\w+:\w+|KVCacheManager|PrefillWorker|DecodeWorker|MixedWorker)")
STORE_GIB = 1.5
"""Object store of the cluster: enough for each configuration of the tests, which have a limit of their own in it."""
METRICS_MS = 4000
"""Interval at which Ray gathers metrics, by default ten seconds: tests wait for some of them."""
CONTROL_LOOP_S = 0.1
"""Interval at which Serve's controller takes the next step of a deployment: shorter than a server's own, since tests
deploy again and again."""
DRAIN_S = 1.0
"""Least time for which Serve keeps an ingress replica that is replaced, by default 30 s, for load balancers that ask
now and then which replicas there are. HAProxy is told at once."""
PACE_S = 0.2
"""Least time of a step while the gate of `paced` is closed, unless a test says another: a hundred tokens last many
times as long as what is done to their stream, on a machine with other work, too."""


class Cluster:
    """A local Ray cluster with Serve, and on it the application that a module asked for last."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self._model = write_thin_model(folder)
        store: dict[str, Any] = {"segment_gib": STORE_GIB, "swap_gib": 0}
        config = {"cache": store, "workers": {"mixed": {}}, "http": {"port": self.port}}
        self._local = LocalCluster(Config.model_validate(config))
        self._deployed: Config | None = None
        """None: nothing, or a test has deployed something else since."""
        self._logged: dict[Path, int] = {}
        """Bytes in each log file before the present application was deployed."""

    def start(self) -> None:
        from ray import serve

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_metrics_report_interval_ms", str(METRICS_MS))
            patch.setenv("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", str(CONTROL_LOOP_S))
            patch.setenv("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", str(DRAIN_S))
            self._local.start()
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(http_options={"host": "127.0.0.1", "port": self.port})

    def stop(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # Ray drops its processes without waiting for their end
            self._local.stop()
            gc.collect()

    def with_model(self, sections: Mapping[str, Any]) -> dict[str, Any]:
        """The sections with the thin model (`thin_model`), unless they name a model."""
        return {**sections, "model": {"source": str(self._model), **sections.get("model", {})}}

    def serve(self, sections: Mapping[str, Any]) -> "Live":
        """The application with this configuration, deployed unless it is what runs."""
        http = {**sections.get("http", {}), "port": self.port}
        config = named_local(Config.model_validate({**self.with_model(sections), "http": http}))
        live = Live(self, Server("127.0.0.1", self.port), self.folder / "deployed.yaml")
        if config != self._deployed:
            self._deploy(config)
            open_to_all = not (config.tenants or config.tenants_file)
            route = "/v1/cache" if open_to_all else "/health"
            eventually(lambda: live.server.request("GET", route)[0] == 200, "the application answers")
            self._deployed = config
        return live

    def forget(self) -> None:
        """Have the next call of `serve` deploy whatever it asks for: a test changes the application."""
        self._deployed = None

    def remove(self) -> None:
        """Delete the application. Its processes get SIGKILL, so nothing is handed over or written down at the end."""
        from ray import serve

        def status() -> str | None:
            application = serve.status().applications.get(APP_NAME)
            return None if application is None else application.status.value

        self._deployed = None
        if status() is not None:
            serve.delete(APP_NAME, _blocking=False)
            eventually(lambda: status() in (None, "DELETING"), "Serve replaces no process any more")
            found = parts()
            hosts = [pid for pid, part in found.items() if part.startswith("ServeReplica")]
            for pid in [*hosts, *(found.keys() - hosts)]:  # a host that lives longer would start another child
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        eventually(lambda: status() is None, "the application is deleted")
        eventually(lambda: not parts(), "its processes have ended")

    def address(self) -> str:
        return self._local.address()

    def log_lines(self) -> list[str]:
        """Lines that the processes have logged since the present application was deployed."""
        return [line for path in log_files() for line in self._text_of(path).splitlines()]

    def logs(self) -> dict[str, str]:
        """The same as text by file, of the files in which something was logged."""
        texts = {path.name: self._text_of(path) for path in log_files()}
        return {name: text for name, text in texts.items() if text}

    def _text_of(self, path: Path) -> str:
        return path.read_bytes()[self._logged.get(path, 0) :].decode()

    def _deploy(self, config: Config) -> None:
        from ray import serve

        from raydix.serve_app import compose

        self.remove()
        self._logged = {path: path.stat().st_size for path in log_files()}
        began = time.monotonic()
        serve._run(compose(config), name=APP_NAME, _blocking=False)
        wait_until_running(APP_NAME, lambda _: None, threading.Event())
        print(f"deployed in {time.monotonic() - began:.1f} s")


def log_files() -> list[Path]:
    """The files that the cluster's processes log to."""
    folder = log_folder()
    assert folder is not None, "Ray runs"
    return sorted(folder.glob("raydix-*.log*"))


def processes() -> list[psutil.Process]:
    """The processes of the cluster, all of them started by this one."""
    return psutil.Process().children(recursive=True)


def parts() -> dict[int, str]:
    """The replicas and actors of the application by process id, the manager's standby among them."""
    found = {}
    for process in processes():
        with contextlib.suppress(psutil.Error):
            if match := PARTS.match(" ".join(process.cmdline())):
                found[process.pid] = match.group(1)
    return found


@dataclass(frozen=True)
class Deployed:
    """The outcome of a deployment, as the command would end."""

    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Live:
    """The application that runs, as clients and operators see it, and the file of what is deployed over it."""

    cluster: Cluster
    server: Server
    file: Path

    def deploy(self, config: dict[str, Any], *, is_dry_run: bool = False) -> "Deployed":
        """What `raydix deploy` does with another configuration, on this process's connection to the cluster: a command
        of its own imports Ray first."""
        self.cluster.forget()
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said):
                deploy(Config.model_validate(self.cluster.with_model(config)), APP_NAME, is_dry_run=is_dry_run)
        except (StartupError, ValidationError) as error:
            return Deployed(2, said.getvalue(), str(error))
        return Deployed(0, said.getvalue(), "")

    def deploy_by_command(self, config: dict[str, Any]) -> "subprocess.CompletedProcess[str]":
        """`raydix deploy` of another configuration, as a command."""
        self.cluster.forget()
        self.file.write_text(yaml.safe_dump(self.cluster.with_model(config)))
        own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        raydix, address = Path(sys.executable).with_name("raydix"), self.cluster.address()
        return subprocess.run(
            [raydix, "deploy", "--config", str(self.file), "--address", address],
            env={**own, "RAY_AUTH_MODE": "token"},
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )

    def events(self, name: str) -> list[dict[str, Any]]:
        """Lines of an event in the logs of all processes."""
        return [entry for line in self.cluster.log_lines() if (entry := json.loads(line)).get("event") == name]

    def parts(self) -> dict[int, str]:
        """The replicas and actors by process id, but for the manager's standby."""
        standbys = self.standbys()
        return {pid: part for pid, part in parts().items() if pid not in standbys}

    def standbys(self) -> set[int]:
        started = {event["pid"] for event in self.events("started")}
        return {pid for pid, part in parts().items() if part == "KVCacheManager"} - started

    def with_key(self, key: str) -> Server:
        return replace(self.server, api_key=key)

    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = json.loads(self.server.request("GET", "/server_info")[2])["raydix_config"]
        return settings

    def num_workers(self) -> int:
        """Registered workers; 0 while no manager answers."""
        status, _, data = self.server.request("GET", "/v1/cache")
        return len(json.loads(data)["workers"]) if status == 200 else 0


@dataclass(frozen=True)
class Pace:
    """Least time of a step, in seconds."""

    step_s: float
    prompt_token_s: float = 0.0
    decode_s: float = 0.0
    """For each request that gets a next token."""


@contextlib.contextmanager
def paced(server: Server, gate: Path, pace: float | Pace = PACE_S) -> Iterator[None]:
    """Meanwhile each step of the present workers takes at least so long, on a machine of any speed.

    So an answer of some hundred tokens outlasts whatever is done within, and its rest comes at once afterwards, or
    when somebody removes the file `gate`. The workers stay alive to everybody who watches them, which they would not
    behind a gate that stops them. Where a `Pace` is slower than the machine, all workers measure its costs.
    """
    least = pace if isinstance(pace, Pace) else Pace(pace)

    def close(worker: Any) -> None:  # runs in the worker's process
        runner = worker._engine.runner
        compute = runner.run

        def run(output: Any) -> Any:
            began = time.monotonic()
            num_decodes = sum(chunk.start >= chunk.request.assignment.num_prompt_tokens for chunk in output.chunks)
            num_prompt_tokens = sum(chunk.num_tokens for chunk in output.chunks) - num_decodes
            step_s = least.step_s + num_prompt_tokens * least.prompt_token_s + num_decodes * least.decode_s
            done = compute(output)
            while (left_s := began + step_s - time.monotonic()) > 0 and gate.exists():
                time.sleep(min(left_s, 0.01))
            return done

        runner.run = run

    def unhook(worker: Any) -> None:
        del worker._engine.runner.run

    workers = server.incarnations()
    gate.touch()
    try:
        ray.get([worker.__ray_call__.remote(close) for worker in workers], timeout=WAIT_S)
        yield
    finally:
        gate.unlink(missing_ok=True)
        for worker in workers:
            with contextlib.suppress(ray.exceptions.RayError):  # one that has left meanwhile
                ray.get(worker.__ray_call__.remote(unhook), timeout=WAIT_S)
