"""`raydix deploy`: deploys a configuration on a Ray cluster that runs, or changes the application that runs there.

The changes are printed first, each with the effect, and then the deployments whose replicas restart. Keys under
`http.*` that `raydix serve` reads when the server starts stay unchanged.
"""

import argparse
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from raydix.cli.cluster import LOCAL_NAMES, SERVE_SWITCHES, wait_until_running, who_may_use
from raydix.configs import Config, load_config
from raydix.configs.changes import KEYS, Change, changes
from raydix.configs.load import merge
from raydix.configs.schema import HttpSection
from raydix.configs.section import Effect
from raydix.configs.sections import INGRESS
from raydix.configs.tenants import TenantsFile
from raydix.engine.core.errors import StartupError
from raydix.engine.core.settings import GIB

CONNECT_TIMEOUT_S = 5.0
PROGRESS_S = 15.0  # interval between two lines about a deployment that takes long
SERVER_KEYS = tuple(key.removeprefix("http.") for key, effect in KEYS.items() if effect is Effect.SERVER)


@dataclass(frozen=True, slots=True)
class RunningApplication:
    """An application that runs."""

    versions: Mapping[str, str]
    """Versions of the application's deployments, by name."""
    config: Config | None
    """None: the application is of another version of raydix, or no raydix."""
    http: HttpSection | None = None
    """The server's own keys, as far as this version reads them; None: there is no server of raydix."""
    has_tenants: bool = False


NOTHING_RUNS = RunningApplication({}, None)


@dataclass(frozen=True, slots=True)
class DeploymentPlan:
    """The difference that a deployment makes."""

    changes: tuple[Change, ...]
    started: tuple[str, ...]
    restarted: tuple[str, ...]
    ended: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """The plan for an operator."""
        keys, values = [change.key for change in self.changes], [f"{c.was} -> {c.becomes}" for c in self.changes]
        for change, value in zip(self.changes, values, strict=True):
            yield f"{change.key:<{_width(keys)}}  {value:<{_width(values)}}  {change.effect}"
        for what, names in (("starts", self.started), ("ends", self.ended)):
            if names:
                yield f"{what}: {', '.join(names)}"
        yield f"restarts: {', '.join(self.restarted) or 'nothing'}"


def run(options: argparse.Namespace) -> int:
    """Deploy, and wait until all replicas are as they should be; returns the exit code.

    Raises:
        StartupError: the configuration is not valid, there is no cluster, or a replica does not start.
    """
    overrides = {} if options.model is None else {"model": {"source": options.model}}
    name, *files = options.config
    config = load_config(name, overrides, files)
    _connect(options.address)
    deploy(config, options.name, is_dry_run=options.dry_run, is_open=options.without_tenants)
    return 0


def deploy(config: Config, name: str, *, is_dry_run: bool = False, is_open: bool = False) -> None:
    """Deploy on the cluster that this process is connected to, and wait until all replicas are as they should be.
    `is_dry_run`: only print what would change. `is_open`: a server with tenants may become one without.

    Raises:
        StartupError: a replica could not start.
    """
    from raydix.serve_app import versions

    # What runs is read from Serve, not from a file: somebody else may have deployed since.
    running = running_application(name)
    served = with_sizes(as_served(config, running.http), running.config)
    wanted = versions(served)
    plan = planned(running, served, wanted)
    told = [*plan.lines(), *ignored(config, running.http), who_may_use(served)]
    # Printed before anything is checked or done, so that an operator sees the plan also where it is refused.
    print("\n".join(told), flush=True)
    _check(served, running.config)
    _check_tenants(served, running, is_open=is_open)
    is_unchanged = running.versions == wanted and not plan.changes
    # An application with failed replicas is deployed again even without a change: that starts them anew.
    if is_dry_run or (is_unchanged and _is_running(name)):
        return

    began = time.monotonic()
    _deploy(served, name, is_new=not running.versions)
    print(f"deployed after {time.monotonic() - began:.1f} s")


def planned(running: RunningApplication, config: Config, wanted: Mapping[str, str]) -> DeploymentPlan:
    """The plan to get from what runs to a configuration, whose deployments have the `wanted` versions."""
    known = running.versions
    return DeploymentPlan(
        () if running.config is None else tuple(changes(running.config, config)),
        started=tuple(name for name in wanted if name not in known),
        restarted=tuple(name for name in wanted if name in known and known[name] != wanted[name]),
        ended=tuple(name for name in known if name not in wanted),
    )


def as_served(config: Config, running: HttpSection | None) -> Config:
    """The configuration with the address and limits of the server that runs, which a deployment cannot change. A
    server that answers to the name localhost alone, as `raydix serve` does by itself, goes on so."""
    if running is None:
        return config
    kept: dict[str, Any] = {name: getattr(running, name) for name in SERVER_KEYS if name in running.model_fields_set}
    if config.http.allowed_hosts is None and running.allowed_hosts == LOCAL_NAMES:
        kept["allowed_hosts"] = LOCAL_NAMES
    return config.model_copy(update={"http": config.http.model_copy(update=kept)})


# Keys that `raydix serve` sizes from its machine where they have no value.
SIZES: Mapping[str, tuple[str, ...]] = {"model": ("max_model_len",), "cache": ("pool_gib", "num_blocks")}


def with_sizes(config: Config, running: Config | None) -> Config:
    """The configuration with the sizes that run in the place of its own absent ones, as long as it changes nothing that
    the sizes were made of: the rest of the model and of the cache, and the workers."""
    # Sizes were made for that model and those workers; for others they could be too large to start with.
    if running is None or _without_sizes(config) != _without_sizes(running):
        return config
    for name, keys in SIZES.items():
        section, sizes = getattr(config, name), getattr(running, name)
        if all(getattr(section, key) is None for key in keys):
            kept = section.model_copy(update={key: getattr(sizes, key) for key in keys})
            config = config.model_copy(update={name: kept})
    return config


def _without_sizes(config: Config) -> tuple[object, ...]:
    parts = (getattr(config, name).model_copy(update=dict.fromkeys(keys)) for name, keys in SIZES.items())
    return (*parts, config.workers)


def ignored(config: Config, running: HttpSection | None) -> Iterator[str]:
    """Lines about keys that the file has and this server cannot change."""
    for name in SERVER_KEYS:
        if running is not None and name in config.http.model_fields_set & running.model_fields_set:
            was, becomes = getattr(running, name), getattr(config.http, name)
            if was != becomes:
                yield f"http.{name} stays {was}: {becomes} {Effect.SERVER}"


def running_application(name: str) -> RunningApplication:
    """What runs under this name on the cluster that this process is connected to."""
    import ray
    from ray.serve import context

    client: Any = context._get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return NOTHING_RUNS
    infos = ray.get(client._controller.list_deployments_internal.remote())  # the public status has no user_config
    found = {key.name: info for key, (info, _) in infos.items() if key.app_name == name}
    versions = {deployment: info.version for deployment, info in found.items()}
    if INGRESS not in found:
        return described(versions, None)
    ingress = found[INGRESS]
    return described(versions, whole(ingress.deployment_config.user_config, ingress.replica_config.init_kwargs))


def whole(user_config: object, arguments: Mapping[str, Any]) -> object:
    """The configuration in the ingress's `user_config`, which an application from a Serve config file lays over the
    base that its replicas were made with."""
    base = arguments.get("base")
    if base is None or not isinstance(user_config, Mapping):
        return user_config
    return merge(base, user_config)


def described(versions: Mapping[str, str], user_config: object) -> RunningApplication:
    """The application with the ingress's `user_config`, which another version of raydix may have written."""
    if not isinstance(user_config, Mapping):
        return RunningApplication(versions, None)
    try:
        config = Config.model_validate(user_config)
    except ValidationError:
        config = None
    has_tenants = bool(user_config.get("tenants") or user_config.get("tenants_file"))
    return RunningApplication(versions, config, _http_of(user_config.get("http")), has_tenants)


def _http_of(section: object) -> HttpSection | None:
    """The keys of the section `http` that this version of raydix reads; the others count as not set."""
    if not isinstance(section, Mapping):
        return None
    known: dict[str, Any] = {}
    for name, value in section.items():
        with contextlib.suppress(ValidationError):
            # Each key by itself: one that a newer version wrote does not hide the others.
            HttpSection.model_validate({name: value})
            known[name] = value
    return HttpSection.model_validate(known)


def _connect(address: str) -> None:
    """Connect to a cluster that runs, with the switches with which `raydix serve` deploys."""
    for name, value in SERVE_SWITCHES.items():
        os.environ.setdefault(name, value)
    _require_listener(address)  # before Ray is imported, which takes longer than the question
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        hint = "" if "RAY_AUTH_MODE" in os.environ else " (a cluster of raydix serve wants RAY_AUTH_MODE=token)"
        raise StartupError(f"there is no Ray cluster at {address}: {' '.join(str(error).split())}{hint}") from None
    logging.getLogger("ray.serve").setLevel(logging.ERROR)


def _require_listener(address: str) -> None:
    """Raise StartupError if nothing listens at `host:port`; Ray would wait for minutes. Other forms are left to Ray."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise StartupError(f"there is no Ray cluster at {address}: {error}") from None


def _check_tenants(config: Config, running: RunningApplication, *, is_open: bool) -> None:
    """Refuse to open a server to everybody by a file that only lacks the tenants."""
    if running.has_tenants and not (config.tenants or config.tenants_file) and not is_open:
        raise StartupError(
            "the running application has tenants, and the configuration has none: every client would be an "
            "administrator; --without-tenants deploys it all the same"
        )


def _is_running(name: str) -> bool:
    """True if the application has no replica that failed or is still to start."""
    from ray import serve

    application = serve.status().applications.get(name)
    return application is not None and application.status == "RUNNING"


def _check(config: Config, running: Config | None) -> None:
    """Refuse a configuration with which no replica could start."""
    if config.tenants_file is not None and not Path(config.tenants_file).expanduser().exists():
        print(
            f"tenants_file {config.tenants_file} is not on this machine: every node of a replica needs it", flush=True
        )
    else:
        TenantsFile().resolved(config)
    import ray

    from raydix.actors.ingress.build import identity_of

    # Looking at a model may fetch its files; an unchanged one was looked at when it was deployed.
    if running is None or running.model != config.model:
        identity_of(config)
    cluster: Any = ray
    resources = [node["Resources"] for node in cluster.nodes() if node["Alive"]]
    require_stores(config, [each.get("object_store_memory", 0.0) / GIB for each in resources if each.get("CPU")])
    for lack in lacking(config, resources):
        print(f"{lack}: workers start when there is such a node", flush=True)


def require_stores(config: Config, stores_gib: Sequence[float]) -> None:
    """Raise StartupError unless the object stores of the nodes with CPUs, in GiB, have room for the exported KV: each
    one, or, where it is the only one, with the swapped KV of all workers."""
    if not stores_gib:
        return  # Nodes for workers come when workers are to start.
    cache, has_gib = config.cache, min(stores_gib)
    is_alone = len(stores_gib) == 1
    # Of several nodes nobody knows yet which workers share one: at least each must have room for one worker.
    needed_gib = config.stored_gib if is_alone else cache.segment_gib + cache.swap_gib
    if needed_gib > has_gib:
        swaps = "each worker's" if is_alone else "one worker's"
        raise StartupError(
            f"cache.segment_gib and {swaps} cache.swap_gib come to {needed_gib:,.1f} GiB; the object store of a node "
            f"of the cluster has {has_gib:,.1f} GiB"
        )


def lacking(config: Config, nodes: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """A line for each worker pool with workers too large for every node. `nodes`: the resources of each."""
    for pool, section in config.workers.sections.items():
        needs = {"CPU": section.num_cpus, "GPU": section.num_gpus, **section.resources}
        if not any(all(node.get(kind, 0.0) >= amount for kind, amount in needs.items()) for node in nodes):
            wanted = ", ".join(f"{kind} {amount:g}" for kind, amount in needs.items() if amount)
            yield f"workers.{pool}: no node has {wanted}"


def _deploy(config: Config, name: str, *, is_new: bool) -> None:
    from ray import serve

    from raydix.serve_app import compose

    if is_new:
        serve.start(http_options={"host": config.http.host, "port": config.http.port})
    serve._run(compose(config), name=name, _blocking=False)
    wait_until_running(name, _Progress(), threading.Event())


class _Progress:
    """Progress of a deployment, printed every `PROGRESS_S`."""

    def __init__(self) -> None:
        self._next_at = time.monotonic() + PROGRESS_S

    def __call__(self, progress: str) -> None:
        if time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + PROGRESS_S
            print(progress, flush=True)


def _width(texts: Iterable[str]) -> int:
    return max(map(len, texts), default=0)
