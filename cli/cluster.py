"""A Ray cluster of this machine alone, with Serve and the application on it, and ports and files of its own."""

import asyncio
import contextlib
import logging
import os
import random
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from raydix.cli import haproxy
from raydix.cli.descriptors import connections
from raydix.cli.ray_node import (
    StorePages,
    log_errors_of_rays_threads,
    secure_token,
    with_agent_ports,
    without_spare_processes,
)
from raydix.cli.worker_template import WorkerTemplate, forks_workers
from raydix.configs import Config
from raydix.configs.schema import HttpSection
from raydix.engine.core.errors import StartupError
from raydix.engine.core.settings import GIB

APP_NAME = "raydix"
LOCAL_NAMES = ("localhost",)  # host names of a server on a loopback address, unless the configuration names others
STORE_RESERVE_GIB = 0.5  # object store beyond the exported KV: segments in flight, and Ray's own objects
MAX_NAMED = 10  # tenants that a line on the screen names
READY_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 10.0
# Ports for a server's own parts: above Ray's workers', below Linux's and others' outgoing connections.
FIRST_OWN_PORT, LAST_OWN_PORT = 20_000, 32_767
OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Interval between two lists of the cluster's processes: children of a dead raylet have another parent and are not found
# then.
CENSUS_S = 5.0
# Processes of Ray without which the cluster cannot live: nothing starts them again.
IRREPLACEABLE = ("gcs_server", "raylet")

SERVE_SWITCHES = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "600",
    "RAY_worker_niceness": "0",
    "RAY_object_manager_pull_timeout_ms": "1000",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_task_events_report_interval_ms": "0",
    "MALLOC_ARENA_MAX": "4",
    "RAY_agent_register_timeout_ms": "180000",
    "RAY_gcs_server_port_wait_time_s": "180",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
    "RAY_event_stats": "0",
    "RAY_raylet_check_gc_period_milliseconds": "1000",
    "RAY_kill_idle_workers_interval_ms": "1000",
    "RAY_local_fs_monitor_interval_ms": "1000",
    "RAY_io_context_monitor_probe_interval_ms": "10000",
    "RAY_report_worker_backlog_interval_ms": "5000",
}
"""Settings of every Ray process: Serve's fast path (both switches or neither), with handles that work outside an event
loop; three failed checks of HAProxy, after which Serve replaces it, one second apart instead of ten; ten minutes
instead of two for streams whose ingress replica is being replaced; workers that do not stand behind every other process
of the machine; and a second instead of ten until a fetch from a node that does not answer is tried at another node that
has the object.

Memory that would grow for hours: the GCS keeps a record of each of the last 100,000 calls of actors for a dashboard,
which this cluster does not have; and glibc gives threads up to eight heaps per core, each of which keeps what its
threads once used.

A start on a machine that is busy with other work: the raylet dies when its agent has not registered in time (30 s
by default; see also `raydix.cli.ray_node`), Ray gives its GCS up that has not written its port down (30 s by
default), and Serve gives HAProxy up when HAProxy is not ready in time (5 s by default).

Processor time of a server at rest: Serve's controller compares what runs with what shall run four times a second
instead of ten, which a host is replaced 0.15 s later for; Serve's own counters, which nobody reads faster than Ray
reports them, go out each second; Ray keeps no times of its event loops' handlers; and the raylet looks less often for
objects to collect, idle workers, a full disk, standing event loops and tasks that wait for a worker, none of which a
request needs."""

# Ports that Serve opens besides its front end; free ones, so that two servers fit on one machine. The fallback answers
# while no ingress replica is known to be healthy.
SERVE_PORTS = (
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
)
# Ports at which HAProxy finds the ingress replicas. All of Serve's instances begin at the same port and share ports, so
# without ranges of their own two servers would get each other's requests.
REPLICA_PORTS = ("RAY_SERVE_DIRECT_INGRESS_{}_HTTP_PORT", "RAY_SERVE_DIRECT_INGRESS_{}_GRPC_PORT")
NUM_REPLICA_PORTS = 200
# Folder of HAProxy's state and command socket: one of its own for each server, for the same reason.
HAPROXY_FILES = {
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "admin.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "server-state",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "metrics.sock",
}
# A program that waits for the end of the process which started it, then ends HAProxy and removes its folder. Ray's
# processes notice the end by themselves; HAProxy would go on and keep the port.
REAPER = """
import contextlib, psutil, shutil, sys
folder = sys.argv[1]
sys.stdin.read()
for process in psutil.process_iter(["cmdline"]):
    if any(argument.startswith(folder + "/") for argument in process.info["cmdline"] or ()):
        with contextlib.suppress(psutil.Error):
            process.kill()
shutil.rmtree(folder, ignore_errors=True)
"""


class ClusterDiedError(Exception):
    """Death of a part of Ray that nothing replaces."""


class LocalCluster:
    """A local Ray cluster with Serve, owned by this process. Made before Ray is imported, which reads the switches."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._reaper: subprocess.Popen[bytes] | None = None
        self._template: WorkerTemplate | None = None
        self._store_pages: StorePages | None = None
        # Processes of the cluster found by any census that have not ended.
        self._processes: dict[int, psutil.Process] = {}
        self._irreplaceable: dict[str, psutil.Process] = {}
        self._listed_at = -CENSUS_S
        for name, value in SERVE_SWITCHES.items():
            os.environ.setdefault(name, value)

    def start(self) -> None:
        """Start Ray; returns when Ray runs. The thread that calls this must outlive the cluster.

        Raises:
            StartupError: Ray cannot start.
        """
        began = time.time()
        secure_token(Path.home())
        folder = tempfile.mkdtemp(prefix="raydix-")
        self._reaper = subprocess.Popen(
            [sys.executable, "-c", REAPER, folder], stdin=subprocess.PIPE, start_new_session=True
        )
        os.environ.update(own_places(Path(folder)) | front(Path(folder), self._config.http))
        try:
            self._start_ray(Path(folder))
        except Exception as error:  # of any kind: Ray has none of its own for this
            reason = " ".join(str(error).split()) or type(error).__name__
            raise StartupError(f"Ray cannot start: {reason}{logs_since(began)}") from error

        from raydix.actors.logs import log_to_ray

        log_to_ray("serve", self._config.logging)

    def _start_ray(self, folder: Path) -> None:
        """Start Ray's processes. `folder`: for the cluster's own files."""
        starting_workers: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if forks_workers():
            self._template = WorkerTemplate(folder)  # imports while this process does, and while Ray starts
            starting_workers = self._template.starts_workers()
        import ray

        log_errors_of_rays_threads()
        with without_spare_processes(), starting_workers, with_agent_ports(free_port):
            ray.init(
                address="local",
                include_dashboard=False,
                object_store_memory=int((self._config.stored_gib + STORE_RESERVE_GIB) * GIB),
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=True,
            )

    def log_folder(self) -> Path:
        """Folder of the logs of the cluster's processes."""
        from raydix.actors.logs import log_folder

        folder = log_folder()
        assert folder is not None, "Ray runs"
        return folder

    def check(self) -> None:
        """Raise ClusterDiedError if a process of Ray's has died that nothing replaces."""
        now = time.monotonic()
        if len(self._irreplaceable) < len(IRREPLACEABLE) or now - self._listed_at > CENSUS_S:
            self._listed_at = now
            self._take_census()
        for name, process in self._irreplaceable.items():
            if not _is_alive(process):
                raise ClusterDiedError(f"Ray's {name} (process {process.pid}) has died")

    def _take_census(self) -> None:
        for process in psutil.Process().children(recursive=True):
            if self._reaper is not None and process.pid == self._reaper.pid:
                continue
            with contextlib.suppress(psutil.Error):
                known = self._processes.setdefault(process.pid, process)
                name = known.name()  # another one than before, if the process has begun a program since
                # A process that the raylet has just forked has the raylet's name until it begins its own program.
                if name in IRREPLACEABLE and known.ppid() == os.getpid():
                    self._irreplaceable[name] = known
        self._processes = {pid: process for pid, process in self._processes.items() if process.is_running()}

    def kill(self) -> None:
        """End every process of a cluster that cannot end itself any more."""
        self._take_census()
        for process in self._processes.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(self._processes.values(), timeout=STOP_TIMEOUT_S)
        self._end_helpers()

    def _end_helpers(self) -> None:
        """End what belongs to this cluster and is not Ray's."""
        if self._store_pages is not None:
            self._store_pages.stop()
            self._store_pages = None
        for helper in (self._template, self._reaper):
            if helper is not None:
                helper.communicate()
        self._template = self._reaper = None

    def address(self) -> str:
        """Address for `ray.init` of another program; `auto` finds the right cluster only if there is no other."""
        import ray

        return str(ray.get_runtime_context().gcs_address)

    def manager(self) -> Any:
        """Ray's handle of the application's present KV cache manager. Raises LookupError if there is none."""
        from raydix.actors.rpc import find_manager

        manager = asyncio.run(find_manager(APP_NAME))
        if manager is None:
            raise LookupError("there is no KV cache manager")
        return manager.handle

    def deploy(self, progress: Callable[[str], None], stop: threading.Event) -> None:
        """Start Serve and the application; returns when it is ready, or when told to stop.

        Raises:
            StartupError: a part of the application cannot start.
        """
        from ray import serve

        from raydix.serve_app import compose

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(http_options={"host": self._config.http.host, "port": self._config.http.port})
        serve._run(compose(named_local(self._config)), name=APP_NAME, _blocking=False)
        wait_until_running(APP_NAME, progress, stop)
        if (raylet := self._irreplaceable.get("raylet")) is not None and not stop.is_set():
            self._store_pages = StorePages(raylet.pid)
            self._store_pages.start()

    def stop(self) -> None:
        """End every process of the cluster. Ray leaves one behind: HAProxy survives the actor that started it."""
        import ray

        if self._reaper is not None or ray.is_initialized():  # a start that failed leaves processes behind, too
            own = None if self._reaper is None else self._reaper.pid
            processes = [child for child in psutil.Process().children(recursive=True) if child.pid != own]
            if ray.is_initialized():
                _kill_at_once()
                ray.shutdown()
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(processes, timeout=STOP_TIMEOUT_S)
        self._end_helpers()


def who_may_use(config: Config) -> str:
    """A line for an operator about the clients of the server: never a key, nor the hash of one."""
    if config.tenants_file is not None:
        return f"open to the tenants in {config.tenants_file}, by key"
    if not config.tenants:
        host, port = config.http.host, config.http.port
        return f"open, without a key, to anybody who reaches {f'[{host}]' if ':' in host else host}:{port}"
    names = [tenant.name for tenant in config.tenants if tenant.key_hashes]
    if not names:
        return "open to nobody over HTTP: no tenant has a key"
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"open to tenant{'s' * (len(names) > 1)} {', '.join(names[:MAX_NAMED])}{more}, by key"


def wait_until_running(app_name: str, progress: Callable[[str], None], stop: threading.Event) -> None:
    """Wait until every replica of an application is ready, or until told to stop.

    Raises:
        StartupError: a part of the application cannot start.
    """
    from ray import serve

    deadline = time.monotonic() + READY_TIMEOUT_S
    while not stop.wait(0.2):
        application = serve.status().applications.get(app_name)
        if application is None:
            continue
        if application.status == "RUNNING":
            return
        if application.status in ("DEPLOY_FAILED", "UNHEALTHY") or time.monotonic() > deadline:
            raise StartupError(_reason(application))
        ready = [name for name, part in application.deployments.items() if part.status == "HEALTHY"]
        progress(f"starting the actors, {len(ready)} of {len(application.deployments)} parts ready")


def logs_since(began: float) -> str:
    """Words that tell where Ray's logs are of a start of this process that failed; none where Ray did not get as far as
    to log."""
    from ray._common import utils

    # Ray tells its folder only while it runs. The name of one has the local time of its beginning, and the id of the
    # process that starts Ray. In containers that share the folder, several processes may have that id.
    place = Path(utils.get_default_ray_temp_dir())  # type: ignore[no-untyped-call]
    earliest = datetime.fromtimestamp(began).strftime("session_%Y-%m-%d_%H-%M-%S_%f")
    found = [path for path in place.glob(f"session_*_{os.getpid()}/logs") if path.parent.name > earliest]
    return f"; its logs are in {found[0]}" if len(found) == 1 else ""


def own_places(folder: Path) -> dict[str, str]:
    """Ports and files for one server alone. Set anew for each: another server may have started this process."""
    places = {name: str(folder / file) for name, file in HAPROXY_FILES.items()}
    places |= {name: str(free_port()) for name in SERVE_PORTS}
    for name in REPLICA_PORTS:
        first = free_port()
        places |= {name.format("MIN"): str(first), name.format("MAX"): str(first + NUM_REPLICA_PORTS)}
    return places


def front(folder: Path, http: HttpSection) -> dict[str, str]:
    """Has Serve start HAProxy through `raydix.cli.haproxy`, with the configured limits."""
    program = folder / "haproxy"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P {shlex.quote(haproxy.__file__)} "$@"\n')
    program.chmod(0o700)
    return {
        haproxy.TOTAL_CONNECTIONS: str(connections().total),
        haproxy.BINARY: str(program),
        haproxy.HEADER_TIMEOUT: str(http.header_timeout_s),
        haproxy.CONNECTIONS: str(http.connections_per_address),
    }


def named_local(config: Config) -> Config:
    """Allow the name localhost on a loopback address, unless the configuration names hosts."""
    if config.http.allowed_hosts is not None or not haproxy.LOOPBACK.match(config.http.host):
        return config
    http = config.http.model_copy(update={"allowed_hosts": LOCAL_NAMES})
    return config.model_copy(update={"http": http})


def free_port() -> int:
    """Find a free port below the range that the kernel gives to outgoing connections: a port of the range may be taken
    again before a server binds it."""
    first_outgoing = int(OUTGOING_PORTS.read_text().split()[0]) if OUTGOING_PORTS.exists() else LAST_OWN_PORT
    while True:
        port = random.randrange(FIRST_OWN_PORT, max(first_outgoing, FIRST_OWN_PORT + 1000) - NUM_REPLICA_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def _kill_at_once() -> None:
    """Have Ray kill the processes of its node when it shuts down. It would ask one after the other to end and wait up
    to a second for each, and nothing of this cluster outlives them."""
    from ray._private import worker

    node: Any = worker._global_node
    if node is not None:
        kill = node.kill_all_processes
        node.kill_all_processes = lambda **_: kill(check_alive=False)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _reason(application: Any) -> str:
    """Last lines of the reason why a deployment failed."""
    messages = [part.message for part in application.deployments.values() if part.status != "HEALTHY" and part.message]
    lines = [line.strip() for line in " ".join(messages or [application.message]).splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return f"the application did not start: {(errors or lines or ['no reason given'])[-1]}"
