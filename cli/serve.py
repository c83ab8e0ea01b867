"""`raydix serve`: a Ray cluster of this machine alone, Serve on it, the application, until a signal ends it all."""

import argparse
import contextlib
import errno
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from configs import Config, load_config
from configs.schema import CacheSection
from configs.settings import engine_settings
from engine.core.errors import StartupError
from engine.core.settings import GIB

APP_NAME = "raydix"
STORE_RESERVE_GIB = 0.5
"""Object store beyond the exported KV: segments in flight, and what Ray itself puts there."""
READY_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 10.0
MAX_PORT = 65535

SERVE_SWITCHES = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1",
    "RAY_preallocate_plasma_memory": "1",
    "RAY_worker_niceness": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""For every Ray process: Serve's fast path (both switches or neither), though with handles that work outside an event
loop; an object store without page faults; and workers that do not stand behind every other process of the machine."""

SERVE_PORTS = (
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
)
"""What Serve opens besides its front end; free ones, so that two servers fit on one machine. The fallback answers while
no ingress replica is known to be healthy."""
REPLICA_PORTS = ("RAY_SERVE_DIRECT_INGRESS_{}_HTTP_PORT", "RAY_SERVE_DIRECT_INGRESS_{}_GRPC_PORT")
"""Where HAProxy finds the ingress replicas. Serve begins at the same port for everybody and shares ports, so without
ranges of their own two servers would get each other's requests."""
NUM_REPLICA_PORTS = 200
HAPROXY_FILES = {
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "admin.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "server-state",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "metrics.sock",
}
"""Which servers HAProxy knows and how it is told of others: in a folder of its own, for the same reason."""
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
"""A program that waits for the end of the process which started it, then ends HAProxy and removes its folder. Ray's
processes notice that end by themselves; HAProxy would go on and keep the port."""


def run(options: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code.

    Raises:
        StartupError: configuration, model, or port cannot be used.
    """
    from engine.model.build import prepare  # torch comes with it

    config = load_config(options.config, _overrides(options))
    console = Console(stderr=True, highlight=False)
    stop = threading.Event()
    cluster = LocalCluster(config)
    with console.status("starting") as status:
        _check_port(config.http.host, config.http.port)
        _check_disk(config.cache)
        _check_memory(config)
        prepare([engine_settings(config, section) for section in config.workers.sections.values()], status.update)
        started = time.monotonic()
        try:
            status.update("starting Ray")
            _stop_on_signals(stop)
            cluster.start()
            _stop_on_signals(stop)  # again, since Ray has put its own handlers in
            if not stop.is_set():
                cluster.deploy(status.update, stop)
        except BaseException:
            cluster.stop()
            raise
    try:
        if not stop.is_set():
            console.print(
                f"ready after {time.monotonic() - started:.1f} s: {_url(config)}, Ray at {cluster.address()}\n\n"
                f"{example(config)}\n",
                soft_wrap=True,
            )
        stop.wait()
        console.print("stopping")
    finally:
        cluster.stop()
    return 0


def example(config: Config) -> str:
    """A request to paste into a shell."""
    from engine.model.sources import model_name

    name = config.model.name or model_name(config.model.source)
    key = '-H "Authorization: Bearer $OPENAI_API_KEY" ' if config.tenants else ""
    return (
        f"curl {_url(config)}/v1/chat/completions {key}-H 'Content-Type: application/json' -d "
        f'\'{{"model": "{name}", "messages": [{{"role": "user", "content": "What is the capital of France?"}}], '
        '"temperature": 0, "max_tokens": 100}\''
    )


class LocalCluster:
    """A local Ray cluster with Serve, owned by this process. Made before Ray is imported, which reads the switches."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._reaper: subprocess.Popen[bytes] | None = None
        for name, value in SERVE_SWITCHES.items():
            os.environ.setdefault(name, value)

    def start(self) -> None:
        folder = tempfile.mkdtemp(prefix="raydix-")
        self._reaper = subprocess.Popen(
            [sys.executable, "-c", REAPER, folder], stdin=subprocess.PIPE, start_new_session=True
        )
        os.environ.update(own_places(Path(folder)))
        import ray

        ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=int((self._config.stored_gib + STORE_RESERVE_GIB) * GIB),
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=True,
        )

    def address(self) -> str:
        """What `ray.init` of another program takes; `auto` finds the right cluster only where there is no other."""
        import ray

        return str(ray.get_runtime_context().gcs_address)

    def deploy(self, progress: Callable[[str], None], stop: threading.Event) -> None:
        """Start Serve and the application; returns when it is ready, or when told to stop.

        Raises:
            StartupError: a part of it cannot start.
        """
        from ray import serve

        from serve_app import compose

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(http_options={"host": self._config.http.host, "port": self._config.http.port})
        serve._run(compose(self._config), name=APP_NAME, _blocking=False)
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not stop.wait(0.2):
            application = serve.status().applications.get(APP_NAME)
            if application is None:
                continue
            if application.status == "RUNNING":
                return
            if application.status in ("DEPLOY_FAILED", "UNHEALTHY") or time.monotonic() > deadline:
                raise StartupError(_reason(application))
            ready = [name for name, part in application.deployments.items() if part.status == "HEALTHY"]
            progress(f"starting the actors, {len(ready)} of {len(application.deployments)} parts ready")

    def stop(self) -> None:
        """End every process of the cluster. Ray leaves one behind: HAProxy survives the actor that started it."""
        import ray

        reaper, self._reaper = self._reaper, None
        if ray.is_initialized():
            own = None if reaper is None else reaper.pid
            processes = [child for child in psutil.Process().children(recursive=True) if child.pid != own]
            ray.shutdown()
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(processes, timeout=STOP_TIMEOUT_S)
        if reaper is not None:
            reaper.communicate()


def own_places(folder: Path) -> dict[str, str]:
    """Ports and files for one server alone. Set anew for each: another server may have started this process."""
    places = {name: str(folder / file) for name, file in HAPROXY_FILES.items()}
    places |= {name: str(free_port()) for name in SERVE_PORTS}
    for name in REPLICA_PORTS:
        first = min(free_port(), MAX_PORT - NUM_REPLICA_PORTS)
        places |= {name.format("MIN"): str(first), name.format("MAX"): str(first + NUM_REPLICA_PORTS)}
    return places


def _overrides(options: argparse.Namespace) -> dict[str, Any]:
    chosen = {
        "model": {"source": options.model},
        "http": {"host": options.host, "port": options.port},
    }
    sections = {
        section: {key: value for key, value in values.items() if value is not None}
        for section, values in chosen.items()
    }
    return {section: values for section, values in sections.items() if values}


def _check_port(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be bound: {error.strerror}"
            raise StartupError(f"{host}:{port} {reason}; choose another with --port or --host") from None


def _check_disk(cache: CacheSection) -> None:
    from engine.model.segment_files import SegmentFiles

    if cache.disk_gib:
        files = SegmentFiles(cache.disk_path)
        files.open()
        files.close()  # the manager's from now on


def _check_memory(config: Config) -> None:
    needed_gib, memory_gib = config.stored_gib + STORE_RESERVE_GIB, psutil.virtual_memory().total / GIB
    if needed_gib > memory_gib:
        raise StartupError(
            f"cache.segment_gib and each worker's cache.swap_gib come to an object store of {needed_gib:,.1f} GiB; "
            f"this machine has {memory_gib:,.1f} GiB of memory"
        )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _stop_on_signals(stop: threading.Event) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())


def _reason(application: Any) -> str:
    """The last lines that say why a deployment failed."""
    messages = [part.message for part in application.deployments.values() if part.status != "HEALTHY" and part.message]
    lines = [line.strip() for line in " ".join(messages or [application.message]).splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return f"the application did not start: {(errors or lines or ['no reason given'])[-1]}"


def _url(config: Config) -> str:
    host = config.http.host
    return f"http://{f'[{host}]' if ':' in host else host}:{config.http.port}"
