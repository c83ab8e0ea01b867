"""`raydix serve`: a cluster of this machine alone, its messages on the screen, until a signal ends it all."""

import argparse
import contextlib
import errno
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from raydix.cli.cluster import STOP_TIMEOUT_S, STORE_RESERVE_GIB, ClusterDiedError, LocalCluster, who_may_use
from raydix.cli.descriptors import check_descriptors
from raydix.cli.flags import roles_of, values_of
from raydix.cli.log_lines import LogFollower, events_of
from raydix.cli.machine import this_machine
from raydix.cli.restart import is_orphaned
from raydix.cli.sizing import Sizes, described, size_up, sized
from raydix.cli.waiting import Waiting, age_s
from raydix.configs import Config, load_config
from raydix.configs.choose import ChosenConfiguration, Machine, choose, choose_with
from raydix.configs.load import is_shipped, merge, merged, of_values
from raydix.configs.schema import CacheSection
from raydix.configs.settings import engine_settings
from raydix.configs.tenants import TenantsFile
from raydix.engine.core.errors import StartupError
from raydix.engine.core.log_fields import about
from raydix.engine.core.settings import GIB
from raydix.engine.model.config import ModelConfig
from raydix.engine.model.preparing import prepare
from raydix.engine.model.sources import computes_nothing, has_chat_template, model_name, read_description, resolve_model

logger = logging.getLogger(__name__)

ONE_WORKER = "mixed"  # role of the only worker of a server in one process
POLL_S = 0.25  # interval between two checks of the cluster's life
CLUSTER_DIED = 1  # exit code
# Where Ray puts the object store on Linux. Docker gives a container 64 MiB of it unless told otherwise.
SHARED_MEMORY = Path("/dev/shm")
SLOW_STORE = "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE"  # Ray's own variable for an object store on the disk


@dataclass(frozen=True, slots=True)
class StartedServer:
    """A started server."""

    config: Config
    cluster: LocalCluster
    ray_thread: ThreadPoolExecutor
    console: Console
    stop: threading.Event
    events: frozenset[str] = frozenset()
    """Events of the log that the terminal shows beside warnings."""


def run(options: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM, or until Ray dies; returns the exit code.

    Raises:
        StartupError: configuration, model, or port cannot be used.
    """
    return run_with(options.config, overrides_of(options), _serve_until_stopped, options=options)


def run_with(
    configs: Sequence[str] | None,
    overrides: Mapping[str, Any],
    use: Callable[[StartedServer], None],
    *,
    stopped: int = 0,
    options: argparse.Namespace | None = None,
) -> int:
    """Start a cluster and the application, use them, and end them; returns the exit code, `stopped` where Ray has to be
    killed after a stop. `configs`: names or paths, each merged over those before it, and over the configuration that
    suits the machine unless the first is one of raydix's own. `options`: those of `raydix.cli.flags`.

    Raises:
        StartupError: configuration, model, or port cannot be used.
    """
    console = Console(stderr=True, highlight=False)
    config = prepared(configs or (), overrides, options or argparse.Namespace(), console)
    stop = threading.Event()
    cluster = LocalCluster(config)

    # Ray is called in a thread of its own: this one hears signals and deaths while Ray waits for what is dead. And the
    # thread lasts, for the kernel ends the processes of Ray with the thread that started them.
    ray_thread = ThreadPoolExecutor(1, "ray")

    try:
        events = frozenset() if options is None else events_of(options, is_terminal=console.is_terminal)
        _start_and_use(StartedServer(config, cluster, ray_thread, console=console, stop=stop, events=events), use)
    except ClusterDiedError as death:
        logger.error("%s", death, extra=about("cluster_died"))
        cluster.kill()
        if stop.is_set():
            console.print("stopping")
            _leave(stopped)
        console.print(f"raydix: {death}; the server has ended with it", soft_wrap=True)
        _leave(CLUSTER_DIED)
    finally:
        ray_thread.submit(cluster.stop).result()

    return 0


def prepared(
    configs: Sequence[str],
    overrides: Mapping[str, Any],
    options: argparse.Namespace,
    console: Console,
    *,
    has_store: bool = True,
) -> Config:
    """The configuration of a server that can start here: chosen, checked and sized, with its model at hand and its
    kernels built; says what was chosen. `has_store`: KV lies in Ray's object store, too.

    Raises:
        StartupError: configuration, model, or port cannot be used.
    """
    machine = this_machine()
    choice, config = chosen(configs, overrides, machine, options)
    TenantsFile().resolved(config)
    with Waiting(console, "starting") as status:
        _check_port(config.http.host, config.http.port)
        _check_disk(config.cache)
        if has_store:
            _check_memory(config)
            _check_shared_memory(config, console)
            if limited := check_descriptors():
                console.print(limited, style="yellow", soft_wrap=True)
        choice, config, description = fitted(choice, config, machine, status.update)
        if choice.reason:
            console.print(f"configuration {choice.config} for {choice.reason} (--config takes another)", soft_wrap=True)
        if description:
            console.print(description, soft_wrap=True)

        prepare([engine_settings(config, section) for section in config.workers.sections.values()], status.update)

    return config


def of_one_process(configs: Sequence[str], overrides: Mapping[str, Any]) -> Config:
    """The configuration of a server in one process, chosen and sized for this machine, without a word.

    Raises:
        StartupError: the configuration or the model cannot be used, or does not fit.
    """
    machine = this_machine()
    options = argparse.Namespace(role=None if merged(configs).get("workers") else ONE_WORKER)
    choice, config = chosen(configs, overrides, machine, options)
    _, config, _ = fitted(choice, config, machine, logger.info)
    return config


def fitted(
    choice: ChosenConfiguration, config: Config, machine: Machine, progress: Callable[[str], None]
) -> tuple[ChosenConfiguration, Config, str]:
    """The configuration with its model's sizes for a machine, and a line about these, empty where there are none.

    Raises:
        StartupError: the model cannot be found, or does not fit.
    """
    model = read_description(config.model.source, progress)
    if computes_nothing(config.model.source):
        return choice, config, ""  # made-up tokens need no memory
    choice, config, sizes = fitting(choice, config, model, machine)
    return choice, sized(config, sizes), described(config, sizes, model, machine)


def chosen(
    configs: Sequence[str], overrides: Mapping[str, Any], machine: Machine, options: argparse.Namespace
) -> tuple[ChosenConfiguration, Config]:
    """Choose and read the configuration. A file of one's own is laid over the one that suits the machine and has the
    file's roles of workers, so that a file with nothing but tenants changes nothing else.

    Raises:
        StartupError: the configuration is not valid.
    """
    is_whole = bool(configs) and is_shipped(configs[0])
    own = merged(configs)
    asked, configured = roles_of(options), tuple(own.get("workers") or ())
    if asked is not None and configured and set(asked) != set(configured):
        raise StartupError(
            f"--role {options.role} contradicts the workers of the configuration: {', '.join(configured)}"
        )

    roles = asked or configured
    choice = ChosenConfiguration(configs[0] if configs else "", "")
    base = None
    if not is_whole:
        found = choose_with(machine, roles) if roles else choose(machine)
        if found is not None:
            choice, base = found, found.config

    sections: dict[str, Any] = {role: {} for role in roles}  # of roles that no configuration of raydix's own has
    known = merged(configs if base is None else [base, *configs])
    known = merge({"workers": sections}, known) if sections else known
    flags = values_of(options, tuple(known["workers"]), has_tenants=bool(known.get("tenants")))
    extra = merge(merge({"workers": sections} if asked and not configured else {}, flags), overrides)
    if configs:
        return choice, load_config(configs[0], extra, configs[1:], base)
    if base is None:
        return ChosenConfiguration(f"of {' and '.join(roles)} workers", ""), of_values(extra)
    return choice, load_config(base, extra)


def fitting(
    choice: ChosenConfiguration, config: Config, model: ModelConfig, machine: Machine
) -> tuple[ChosenConfiguration, Config, Sizes]:
    """The configuration with its sizes: the chosen one, or with one worker in the place of two where two have no room
    for the weights twice, or for a whole context.

    Raises:
        StartupError: the model does not fit.
    """
    try:
        sizes = size_up(config, model, machine)
        refusal = None
    except StartupError as error:
        sizes, refusal = None, error
    is_whole = sizes is not None and sizes.max_model_len >= (config.model.max_model_len or model.max_position)
    if choice.config == "cpu" and choice.reason and not is_whole and config.workers == load_config("cpu").workers:
        alone = config.model_copy(update={"workers": load_config("cpu_mixed").workers})
        with contextlib.suppress(StartupError):
            other = size_up(alone, model, machine)
            reason = "a model that two workers have no room for: one has it all"
            if sizes is None or other.max_model_len > sizes.max_model_len:
                return (
                    ChosenConfiguration("cpu_mixed", reason),
                    alone,
                    other,
                )
    if sizes is None:
        assert refusal is not None
        raise refusal
    return choice, config, sizes


def _start_and_use(running: StartedServer, use: Callable[[StartedServer], None]) -> None:
    """Start the cluster and the application, and use them unless told to stop.

    Raises:
        ClusterDiedError: Ray has died, or does not react to a stop.
        StartupError: a part of the server cannot start.
    """
    cluster, console, stop = running.cluster, running.console, running.stop
    follower: LogFollower | None = None

    try:
        with Waiting(console, "starting Ray") as status:
            finish(running, running.ray_thread.submit(cluster.start))
            if not stop.is_set():
                follower = LogFollower(cluster.log_folder(), lambda line: show_line(console, line), running.events)
                follower.start()
                finish(running, running.ray_thread.submit(cluster.deploy, status.update, stop))

        if not stop.is_set():
            took_s = age_s()
            logger.info("ready after %.1f s", took_s, extra=about("ready", took_s=round(took_s, 3)))
            console.print(
                f"ready after {took_s:.1f} s: {url_of(running.config)}, Ray at {cluster.address()}\n"
                f"{who_may_use(running.config)}\n"
                f"logs: {cluster.log_folder()}/raydix-*.log\n",
                soft_wrap=True,
            )
            use(running)
    finally:
        if follower is not None:
            follower.stop()  # before the processes report each other's end

    console.print("stopping")


def _serve_until_stopped(running: StartedServer) -> None:
    """Print a request to try, and wait for a reason to end. Raises ClusterDiedError."""
    model = running.config.model
    folder = resolve_model(model.source, quantization=model.quantization)
    running.console.print(f"{example(running.config, folder)}\n", soft_wrap=True)
    while not running.stop.wait(POLL_S) and not is_orphaned():
        running.cluster.check()


def finish(running: StartedServer, work: Future[None]) -> None:
    """Wait for a call of Ray while the cluster lives; after a stop, only briefly. Raises the call's error."""
    cluster, stop = running.cluster, running.stop
    deadline = float("inf")
    is_done = False
    while not is_done:
        _stop_on_signals(stop)  # again and again, since Ray puts handlers of its own in while it starts
        is_done = bool(wait([work], POLL_S).done)
        cluster.check()
        if is_orphaned():
            stop.set()
        if stop.is_set():
            deadline = min(deadline, time.monotonic() + STOP_TIMEOUT_S)
        if not is_done and time.monotonic() > deadline:
            raise ClusterDiedError("Ray does not answer")

    _stop_on_signals(stop)
    try:
        work.result()
    except StartupError:
        if not stop.is_set():
            raise
    except Exception:
        cluster.check()  # what failed for want of Ray is told as Ray's death
        if not stop.is_set():
            raise


def show_line(console: Console, line: str) -> None:
    """Print a line of `raydix.cli.log_lines`, warnings in colour."""
    level = line.split(" ", 2)[1]
    style = {"ERROR": "red", "CRITICAL": "red", "WARNING": "yellow"}.get(level)
    console.print(line, style=style, markup=False, soft_wrap=True)


def _leave(code: int) -> None:
    """End this process without waiting for threads of Ray's that will never end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def example(config: Config, folder: Path) -> str:
    """A request to paste into a shell, for the model in `folder`: a chat where it has a template for one."""
    name = config.model.name or model_name(config.model.source)
    key = '-H "Authorization: Bearer $OPENAI_API_KEY" ' if config.tenants or config.tenants_file else ""
    is_chat = has_chat_template(folder)
    route = "chat/completions" if is_chat else "completions"
    prompt = (
        '"messages": [{"role": "user", "content": "What is the capital of France?"}]'
        if is_chat
        else '"prompt": "The capital of France is"'
    )
    request = (
        f"curl {url_of(config)}/v1/{route} {key}-H 'Content-Type: application/json' -d "
        f'\'{{"model": "{name}", {prompt}, "temperature": 0, "max_tokens": 100}}\''
    )
    return request if is_chat else f"the model has no chat template, and so completes texts alone:\n{request}"


def overrides_of(options: argparse.Namespace) -> dict[str, Any]:
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
    from raydix.engine.model.segment_files import SegmentFiles

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


def _check_shared_memory(config: Config, console: Console) -> None:
    """Refuse an object store that is larger than the shared memory: Ray would put it on the disk without a word.

    Raises:
        StartupError: the store does not fit, and the operator has not allowed Ray a slow one.
    """
    if not SHARED_MEMORY.is_dir():  # as on systems other than Linux
        return
    found = os.statvfs(SHARED_MEMORY)
    needed_gib, free_gib = config.stored_gib + STORE_RESERVE_GIB, found.f_bavail * found.f_frsize / GIB
    if needed_gib <= free_gib:
        return
    lack = (
        f"{SHARED_MEMORY} has {free_gib:,.2f} GiB free, and the object store needs {needed_gib:,.2f} GiB: give the "
        f"container --shm-size={math.ceil(needed_gib)}g, or lower cache.segment_gib and cache.swap_gib"
    )
    if os.environ.get(SLOW_STORE) != "1":
        raise StartupError(f"{lack} ({SLOW_STORE}=1 has Ray keep the store on the disk)")
    console.print(f"{lack}; Ray keeps the store on the disk", style="yellow", soft_wrap=True)


def _stop_on_signals(stop: threading.Event) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())


def url_of(config: Config) -> str:
    host = config.http.host
    return f"http://{f'[{host}]' if ':' in host else host}:{config.http.port}"
