"""Composition: from a configuration to the Serve application.

`serve run raydix.serve_app:app` serves the default configuration; `raydix.serve_app:build` takes arguments, as in
`configs/serve.yaml`: `config` (the name or path of a YAML file), `files` (more of them, each merged over those
before it; they are read where the application is built, on any node) and `overrides` (merged over all).

Each deployment gets its part of the configuration (`raydix.configs.sections`): arguments, which its version is made of,
and a
`user_config`, which Serve hands to `reconfigure`. Where Serve is told versions, as by `raydix serve` and `raydix
deploy`, a deployment of the same version is not restarted.

`serve deploy` and KubeRay give one version to all deployments, made of the application's `args`, so a change of these
restarts everything. Keys that change in place therefore belong into the `user_config` of each deployment in the Serve
config file, which is laid over what `args` say (`raydix.configs.sections.live_part`), and numbers of replicas into
`num_replicas`: Serve applies both without building the application again.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application

from raydix.actors.scaling import scaled
from raydix.configs import Config, load_config
from raydix.configs.pools import WorkerSection
from raydix.configs.schema import CacheSection
from raydix.configs.sections import CHECK_TIMEOUT_S, INGRESS, MANAGER, MANAGER_CPUS, DeploymentPart, base_for, parts
from raydix.configs.tenants import TenantsFile

# Classes of the deployments, which Serve imports in the replicas: whoever deploys needs neither, and seconds less.
INGRESS_CLASS, HOST_CLASS = "raydix.actors.ingress.app.Ingress", "raydix.actors.host.ActorHost"
# CPUs of a host, which only starts and watches its child; the child holds the worker's own reservation.
HOST_CPUS = 0.01
NUM_BUNDLES = 2  # bundles of a host's placement group: the host's own and its child's
# Serve's own limit, set out of the way: the ingress has a limit of its own, and answers 429.
MAX_ONGOING_REQUESTS = 100_000
# Time for which an ingress replica that is replaced goes on with its streams, as long as HAProxy keeps their
# connections (`raydix.cli.cluster.SERVE_SWITCHES`); then they are cut, and clients may send again.
STREAM_S = 600
# Parts of the project that run in replicas and their children.
CODE = ("actors", "configs", "engine", "kernels", "serve_app.py")
SOURCES = {".py", ".cpp", ".h"}


def build(args: Mapping[str, Any] | None = None) -> Application:
    """The application that a configuration describes: hosts for the manager and each worker pool, and the ingress.

    Raises:
        StartupError: the configuration is not valid.
    """
    args = args or {}
    config = load_config(args.get("config", "cpu"), args.get("overrides"), args.get("files", ()))
    TenantsFile().resolved(config)  # Invalid tenants are refused before anything that runs is replaced.
    return compose(config, is_base=True)


def compose(config: Config, *, is_base: bool = False) -> Application:
    """The application of a loaded configuration.

    Args:
        is_base: the deployments' `user_config` is empty, to be replaced by a Serve config file's, and counts on top of
            the configuration; otherwise it is all that changes in place.
    """
    found = parts(config)
    if is_base:
        found = {name: replace(part, live={}) for name, part in found.items()}

    def bind(deployment: Any, *arguments: object) -> Any:
        base = base_for(deployment.name, config) if is_base else None
        return _with(deployment, found[deployment.name]).bind(*arguments, base=base)

    hosts = [_manager_host(config.cache)]
    hosts += [_worker_host(role, section) for role, section in config.workers.sections.items()]
    bound = [bind(host, host.name, found[host.name].arguments) for host in hosts]

    ingress = _deployment(INGRESS_CLASS).options(
        name=INGRESS,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        ray_actor_options=_actor_options(config.ingress.num_cpus, config.ingress.label_selector),
        logging_config={"enable_access_log": False},
        health_check_period_s=2,
        graceful_shutdown_timeout_s=STREAM_S,
    )
    application: Application = bind(ingress, found[INGRESS].arguments, *bound)
    return application


def versions(config: Config) -> dict[str, str]:
    """The version of each deployment: replicas of another version are restarted."""
    return {name: part.version(code_digest()) for name, part in parts(config).items()}


@cache
def code_digest() -> str:
    """A name for the code of this installation."""
    digest = hashlib.sha256(version("raydix").encode())
    root = Path(__file__).parent
    for part in CODE:
        files = [root / part] if part.endswith(".py") else sorted((root / part).rglob("*"))
        for file in files:
            if file.suffix in SOURCES:
                digest.update(str(file.relative_to(root)).encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()


def _with(deployment: Any, part: DeploymentPart) -> Any:
    """The deployment with its number of replicas, its values that change in place, and its version. Serve makes a
    version up where it is told none, and then restarts everything; there is no public way to tell one."""
    least, most = part.replicas
    numbers = {"autoscaling_config": scaled(least, most)} if part.follows_load else {"num_replicas": least}
    live = deployment.options(user_config=part.live, **numbers)
    return live.options(version=part.version(code_digest()), _internal=True)


def _manager_host(section: CacheSection) -> Any:
    host = _host(MANAGER, [{"CPU": HOST_CPUS}, {"CPU": MANAGER_CPUS}])
    surging = host.options(max_surge_percent=100)  # A manager hands over to its successor while both live.
    return _on_labelled(surging, section.label_selector)


def _worker_host(role: str, section: WorkerSection) -> Any:
    worker = {"CPU": section.num_cpus, **section.resources}
    if section.num_gpus:
        worker["GPU"] = section.num_gpus
    return _on_labelled(_host(role, [{"CPU": HOST_CPUS}, worker]), section.label_selector)


def _on_labelled(host: Any, label_selector: dict[str, str]) -> Any:
    """The host, with its child, on nodes with these labels."""
    if not label_selector:
        return host
    return host.options(placement_group_bundle_label_selector=[label_selector] * NUM_BUNDLES)


def _host(name: str, bundles: list[dict[str, float]]) -> Any:
    return _deployment(HOST_CLASS).options(
        name=name,
        placement_group_bundles=bundles,
        placement_group_strategy="STRICT_PACK",
        ray_actor_options={"num_cpus": HOST_CPUS},
        logging_config={"enable_access_log": False},
        health_check_period_s=2,
        health_check_timeout_s=2 * CHECK_TIMEOUT_S,
        graceful_shutdown_timeout_s=60,
        max_constructor_retry_count=3,
    )


def _deployment(path: str) -> Any:
    """A deployment of the class of this name. `serve.deployment` takes classes alone, its result takes names, too."""
    deployment: Any = serve.deployment(type("ByPath", (), {}))
    return deployment.options(func_or_class=path)


def _actor_options(num_cpus: float, label_selector: dict[str, str]) -> dict[str, Any]:
    options: dict[str, Any] = {"num_cpus": num_cpus}
    if label_selector:
        options["label_selector"] = label_selector
    return options


app = build()
