"""`raydix deploy`: the plan that an operator reads, and refusals. There is no cluster here."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raydix.cli import deploy
from raydix.cli.cluster import LOCAL_NAMES, free_port
from raydix.cli.deploy import (
    NOTHING_RUNS,
    RunningApplication,
    as_served,
    described,
    ignored,
    lacking,
    planned,
    require_stores,
)
from raydix.cli.main import main
from raydix.configs import Config, load_config
from raydix.configs.sections import INGRESS, MANAGER, parts
from raydix.engine.core.errors import StartupError
from raydix.engine.core.tenants import key_hash

REPOSITORY = Path(__file__).resolve().parents[2]

BASE: dict[str, Any] = {"workers": {"prefill": {}, "decode": {}}}
BOB: dict[str, Any] = {"name": "bob", "key_hashes": [key_hash("rdx-bob")]}


def config_of(**sections: Any) -> Config:
    return Config.model_validate({**BASE, **sections})


def versions_of(config: Config, code: str = "code") -> dict[str, str]:
    return {name: part.version(code) for name, part in parts(config).items()}


def running(config: Config) -> RunningApplication:
    return served_as(config)


def served_as(config: Config) -> RunningApplication:
    """The application as Serve's controller tells of it."""
    return described(versions_of(config), config.model_dump(mode="json"))


def plan_lines(old: RunningApplication, new: Config, code: str = "code") -> list[str]:
    return [*planned(old, new, versions_of(new, code)).lines()]


def test_changes_in_place_restart_nothing() -> None:
    new = config_of(ingress={"max_queued_requests": 100}, tenants=[BOB])
    assert plan_lines(running(config_of()), new) == [
        "ingress.max_queued_requests  512 -> 100        applies in place",
        "tenants.bob                  unknown -> known  applies in place",
        "restarts: nothing",
    ]


def test_a_restart_is_told_before_it_happens() -> None:
    new = config_of(model={"pooling": "last"}, workers={"prefill": {}, "decode": {"replicas": 2, "num_threads": 1}})
    assert plan_lines(running(config_of()), new) == [
        "model.pooling               mean -> last  restarts the ingress",
        "workers.decode.replicas     1 -> 2        adds or removes replicas; the others go on",
        "workers.decode.num_threads  0 -> 1        restarts the workers of the role",
        "restarts: decode, ingress",
    ]


def test_deployments_start_and_end() -> None:
    lines = plan_lines(running(config_of()), config_of(workers={"mixed": {}}))
    assert lines[-3:] == ["starts: mixed", "ends: prefill, decode", "restarts: ingress"]
    assert plan_lines(NOTHING_RUNS, config_of()) == [
        f"starts: {MANAGER}, prefill, decode, {INGRESS}",
        "restarts: nothing",
    ]


def test_other_code_restarts_everything() -> None:
    assert plan_lines(running(config_of()), config_of(), code="new") == [
        f"restarts: {MANAGER}, prefill, decode, {INGRESS}"
    ]


def test_the_server_itself_stays_as_it_is() -> None:
    """`raydix deploy` does not move a server to another port, nor let names in that `raydix serve` keeps out."""
    old = config_of(http={"port": 9000, "allowed_hosts": LOCAL_NAMES})
    plain, moved = config_of(), config_of(http={"port": 9100, "header_timeout_s": 5})
    http = served_as(old).http
    for new in (plain, moved):
        assert as_served(new, http) == old
    assert [*ignored(plain, http)] == []
    assert [*ignored(moved, http)] == ["http.port stays 9000: 9100 at the next start of raydix serve"]
    named = config_of(http={"allowed_hosts": ["raydix.example"]})
    assert as_served(named, http).http.allowed_hosts == ("raydix.example",)
    assert as_served(plain, None) == plain
    open_to_all = config_of(http={"port": 9000})
    assert as_served(plain, served_as(open_to_all).http).http.allowed_hosts is None


def test_a_server_of_another_version_stays_as_it_is_too() -> None:
    """A key that one of the versions does not know, or an unknown form of a value, leaves the others as they are."""
    raw = config_of(http={"port": 9000, "allowed_hosts": LOCAL_NAMES}, tenants=[BOB]).model_dump(mode="json")
    other = raw | {"http": raw["http"] | {"wire": 1, "header_timeout_s": "soon"}, "model": {"sauce": 1}}
    known = described({}, other)
    assert known.config is None and known.has_tenants
    served = as_served(config_of(http={"header_timeout_s": 7}), known.http)
    assert (served.http.port, served.http.allowed_hosts, served.http.header_timeout_s) == (9000, LOCAL_NAMES, 7)
    assert [*ignored(config_of(http={"header_timeout_s": 7}), known.http)] == []
    for no_raydix in (None, {}, {"http": 3}):
        assert described({"a": "1"}, no_raydix) == RunningApplication({"a": "1"}, None)


def test_files_are_merged_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main_file, tenants, more = (tmp_path / name for name in ("main.yaml", "tenants.yaml", "more.yaml"))
    main_file.write_text("workers: {mixed: {token_budget: 128}}")
    tenants.write_text(f"tenants: [{{name: bob, key_hashes: [{BOB['key_hashes'][0]}]}}]")
    more.write_text("workers: {mixed: {token_budget: 256}}")
    loaded: list[Config] = []

    def connect(address: str) -> None:
        raise StartupError("no cluster here")

    def load(*arguments: Any) -> Config:
        loaded.append(load_config(*arguments))
        return loaded[-1]

    monkeypatch.setattr(deploy, "_connect", connect)
    monkeypatch.setattr(deploy, "load_config", load)
    files = [argument for file in (main_file, tenants, more) for argument in ("--config", str(file))]
    assert main(["deploy", *files, "--model", "named"]) == 2
    [config] = loaded
    assert config.workers.mixed is not None and config.workers.mixed.token_budget == 256
    assert [tenant.name for tenant in config.tenants] == ["bob"]
    assert config.model.source == "named"


def test_bad_configurations_are_refused_before_anything_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("workers: {mixed: {token_budgt: 3}}")
    assert main(["deploy", "--config", str(file)]) == 2
    assert "unknown key 'workers.mixed.token_budgt', did you mean 'token_budget'?" in capsys.readouterr().err
    file.write_text("workers: {mixed: {token_budget: 16}}")
    assert main(["deploy", "--config", str(file)]) == 2
    assert "token_budget (16) must be at least max_requests (64)" in capsys.readouterr().err
    assert main(["deploy", "--config", "nowhere.yaml"]) == 2
    assert "no such file" in capsys.readouterr().err


def test_the_cluster_is_asked_for_before_ray_is_imported(tmp_path: Path) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("import os\nos._exit(99)\n")
    address = f"127.0.0.1:{free_port()}"
    done = subprocess.run(
        [sys.executable, "-m", "raydix.cli.main", "deploy", "--config", "cpu", "--address", address],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith(f"raydix: there is no Ray cluster at {address}: ")


def test_a_configuration_has_to_be_named() -> None:
    with pytest.raises(SystemExit):
        main(["deploy"])


@pytest.mark.parametrize("stores", [(), (2.0,), (1.25, 1.25), (9.0, 1.25)], ids=str)
def test_stores_with_room(stores: tuple[float, ...]) -> None:
    """On one node the segments and the swapped KV of four workers; on each of several those of one."""
    config = config_of(
        cache={"segment_gib": 1.0, "swap_gib": 0.25}, workers={"prefill": {"replicas": 2}, "decode": {"replicas": 2}}
    )
    require_stores(config, stores)


@pytest.mark.parametrize("stores", [(1.9,), (9.0, 1.2)], ids=str)
def test_the_smallest_store_counts(stores: tuple[float, ...]) -> None:
    config = config_of(
        cache={"segment_gib": 1.0, "swap_gib": 0.25}, workers={"prefill": {"replicas": 2}, "decode": {"replicas": 2}}
    )
    with pytest.raises(StartupError, match=f"a node of the cluster has {stores[-1]:,.1f} GiB"):
        require_stores(config, stores)


@pytest.mark.parametrize(
    ("nodes", "lines"),
    [
        ([{"CPU": 4.0, "GPU": 1.0}], []),
        ([{"CPU": 4.0}, {"GPU": 2.0}], ["workers.decode: no node has CPU 2, GPU 1"]),
        ([{"CPU": 1.0, "GPU": 1.0}], ["workers.decode: no node has CPU 2, GPU 1"]),
        ([], ["workers.prefill: no node has CPU 0.1", "workers.decode: no node has CPU 2, GPU 1"]),
    ],
)
def test_workers_too_large_for_every_node_are_named(nodes: list[dict[str, float]], lines: list[str]) -> None:
    """One node must have all that a worker needs."""
    config = config_of(workers={"prefill": {}, "decode": {"num_cpus": 2, "num_gpus": 1}})
    assert [*lacking(config, nodes)] == lines


def test_sizes_of_a_running_server_stay_unless_what_they_were_made_of_changes() -> None:
    running = load_config("cpu_mixed", {"model": {"max_model_len": 5000}, "cache": {"pool_gib": 2.5}})
    kept = deploy.with_sizes(load_config("cpu_mixed"), running)
    assert kept == running, "nothing restarts"
    assert deploy.with_sizes(load_config("cpu_mixed", {"cache": {"pool_gib": 1}}), running).cache.pool_gib == 1
    for change in ({"model": {"dtype": "float32"}}, {"workers": {"mixed": {"token_budget": 100}}}):
        changed = load_config("cpu_mixed", change)
        assert deploy.with_sizes(changed, running) == changed
    assert deploy.with_sizes(load_config("cpu_mixed"), None).cache.pool_gib is None
