"""The files in `k8s/` say what KubeRay and Ray understand, and what they say fits together.

`manifests.py` has the checks. *Mutations*: a manifest with one thing broken must fail the check that is there for it.
The chart that the files are made of has `test_chart.py`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pydantic
import pytest
import yaml

from raydix.engine.core.errors import StartupError
from tests.skips import NO_KUBERAY_SCHEMA
from tests.unit.manifests import (
    CHECKS,
    K8S,
    OBJECT_CHECKS,
    OUR_SCHEMA,
    ROLE,
    SCHEMAS,
    Json,
    check_every_replica_has_its_group,
    check_haproxy_everywhere,
    check_head_takes_no_work,
    check_kuberays_schema,
    check_leaving_takes_no_longer_than_allowed,
    check_memory_is_reserved,
    check_object,
    check_pods_are_alike,
    check_root_file_systems_are_read_only,
    check_serve_schema,
    check_the_config_fits_the_pods,
    check_the_nodes_disk_is_reserved,
    fields,
    load,
    load_all,
    rayservice_in,
    schema_in,
    serve_config,
)

FILES = sorted(K8S.glob("*.yaml"))


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def objects(request: pytest.FixtureRequest) -> list[Json]:
    path: Path = request.param
    return load_all(path.read_text())


@pytest.fixture
def manifest() -> Json:
    return rayservice_in(load_all((K8S / "gpu_disaggregated.yaml").read_text()))


def test_there_is_a_manifest_for_each_way_to_run() -> None:
    assert [path.stem for path in FILES] == ["cpu", "gpu_disaggregated", "gpu_single"]
    assert not list(K8S.glob("*.yml"))


@pytest.mark.skipif(not os.environ.get("RAYDIX_CRD_SCHEMAS"), reason=NO_KUBERAY_SCHEMA)
def test_kuberays_own_schema_is_among_the_checks() -> None:
    assert check_kuberays_schema in CHECKS


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.name)
def test_a_schema_knows_the_fields_of_ours(path: Path) -> None:
    assert set(fields(schema_in(OUR_SCHEMA))) <= set(fields(schema_in(path)))


@pytest.mark.parametrize("check", CHECKS)
def test_rayservice(check: Callable[[Json], None], objects: list[Json]) -> None:
    check(rayservice_in(objects))


@pytest.mark.parametrize("check", OBJECT_CHECKS)
def test_objects(check: Callable[[list[Json]], None], objects: list[Json]) -> None:
    check(objects)


def test_application(objects: list[Json]) -> None:
    (app,) = serve_config(rayservice_in(objects))["applications"]
    assert app["import_path"] == "raydix.serve_app:build"
    assert (app["name"], app["route_prefix"]) == ("raydix", "/")


# Mutations


def _at(value: Any, path: str) -> Any:
    for step in path.split("/"):
        value = value[int(step)] if isinstance(value, list) else value[step]
    return value


def break_at(manifest: Json, path: str, change: Json) -> None:
    """Change keys of the object at `path`; those with None are taken away."""
    target = _at(manifest, path)
    target.update(change)
    for key in [key for key, value in change.items() if value is None]:
        del target[key]


PREFILL = "spec/rayClusterConfig/workerGroupSpecs/1"
PREFILL_POD = f"{PREFILL}/template/spec"
PREFILL_CONTAINER = f"{PREFILL_POD}/containers/0"
HEAD_CONTAINER = "spec/rayClusterConfig/headGroupSpec/template/spec/containers/0"


@pytest.mark.parametrize("check", SCHEMAS.values())
@pytest.mark.parametrize(
    ("path", "change"),
    [
        (PREFILL, {"minReplica": 1}),
        (PREFILL_POD, {"terminationGracePeriodSecond": 9}),
        (f"{PREFILL_CONTAINER}/readinessProbe", {"periodSecond": 5}),
        (f"{PREFILL_CONTAINER}/resources/limits", {"memory": "64GB"}),
        (f"{PREFILL_CONTAINER}/resources/limits", {"cpu": 1.5}),
        (PREFILL_CONTAINER, {"name": None}),
        (f"{PREFILL}/rayStartParams", {"num-cpus": 0}),
        ("spec/rayClusterConfig/autoscalerOptions", {"version": "v3"}),
        ("metadata", {"label": {}}),
        ("spec", {"serveConfig": ""}),
        ("spec/rayClusterConfig/headGroupSpec", {"template": None}),
        (f"{PREFILL_CONTAINER}/env/0", {"valeu": "1"}),
        (f"{PREFILL_CONTAINER}/ports/0", {"containerPort": "8000"}),
        (f"{PREFILL_CONTAINER}/volumeMounts/0", {"mountPath": None}),
        (f"{PREFILL_CONTAINER}/lifecycle/preStop/exec", {"command": "sleep 1"}),
        (f"{PREFILL_POD}/volumes/0/emptyDir", {"sizeLimit": "24GB"}),
        (f"{PREFILL_POD}/topologySpreadConstraints/0", {"topologyKeys": "zone"}),
        ("spec/rayClusterConfig/authOptions", {"mode": "tokens"}),
        ("spec/upgradeStrategy", {"clusterUpgradeOption": {}}),
    ],
)
def test_a_manifest_of_another_form_fails(
    check: Callable[[Json], None], path: str, change: Json, manifest: Json
) -> None:
    break_at(manifest, path, change)
    with pytest.raises((AssertionError, jsonschema.ValidationError)):
        check(manifest)


@pytest.mark.parametrize(
    ("check", "path", "change"),
    [
        (check_head_takes_no_work, "spec/rayClusterConfig/headGroupSpec/rayStartParams", {"num-cpus": "2"}),
        (check_haproxy_everywhere, f"{PREFILL_CONTAINER}/env/1", {"value": "0"}),
        (check_haproxy_everywhere, "spec/rayClusterConfig/headGroupSpec/template/spec/containers/0", {"env": []}),
        (check_every_replica_has_its_group, f"{PREFILL}/labels", {ROLE: "decode"}),
        (check_every_replica_has_its_group, f"{PREFILL_CONTAINER}/resources/limits", {"cpu": "1"}),
        (check_leaving_takes_no_longer_than_allowed, PREFILL_POD, {"terminationGracePeriodSeconds": 30}),
        (check_leaving_takes_no_longer_than_allowed, "spec", {"rayClusterDeletionDelaySeconds": 60}),
        (check_memory_is_reserved, f"{PREFILL}/rayStartParams", {"object-store-memory": "42949672960"}),
        (check_memory_is_reserved, f"{PREFILL_CONTAINER}/resources/requests", {"memory": "32Gi"}),
        (check_the_nodes_disk_is_reserved, f"{PREFILL_CONTAINER}/resources/limits", {"ephemeral-storage": "5Gi"}),
        (check_pods_are_alike, PREFILL_CONTAINER, {"startupProbe": None}),
        (check_pods_are_alike, "spec/rayClusterConfig/authOptions", {"mode": "disabled"}),
        (
            check_root_file_systems_are_read_only,
            f"{PREFILL_CONTAINER}/securityContext",
            {"readOnlyRootFilesystem": False},
        ),
        (check_root_file_systems_are_read_only, f"{PREFILL_CONTAINER}/volumeMounts/1", {"mountPath": "/var/tmp"}),
        (
            check_leaving_takes_no_longer_than_allowed,
            f"{HEAD_CONTAINER}/lifecycle/preStop/exec",
            {"command": ["sleep", "9"]},
        ),
        (check_pods_are_alike, "spec/rayClusterConfig", {"rayVersion": "2.9.0"}),
    ],
)
def test_a_broken_manifest_fails(check: Callable[[Json], None], path: str, change: Json, manifest: Json) -> None:
    break_at(manifest, path, change)
    with pytest.raises(AssertionError):
        check(manifest)


@pytest.mark.parametrize(
    ("check", "path", "change"),
    [
        (check_serve_schema, "http_options", {"prot": 9000}),
        (check_serve_schema, "applications/0", {"route_prefx": "/"}),
        (check_serve_schema, "applications/0/runtime_env", {"env_var": {}}),
        (check_serve_schema, "applications/0/args", {"overide": {}}),
        (check_serve_schema, "applications/0/deployments/1", {"num_replica": 2}),
        (check_serve_schema, "applications/0/deployments/1", {"num_replicas": 0}),
        (check_serve_schema, "applications/0/deployments/1", {"placement_group_bundle_label_selector": [{}, {}]}),
        (check_serve_schema, "applications/0/deployments/3/autoscaling_config", {"max_replica": 2}),
        (check_serve_schema, "applications/0/deployments/3/ray_actor_options", {"label_selectors": {}}),
        (check_every_replica_has_its_group, "applications/0/deployments/0", {"name": "manager"}),
        (check_every_replica_has_its_group, "applications/0/deployments/1", {"num_replicas": 9}),
        (check_every_replica_has_its_group, "applications/0/deployments/2/placement_group_bundles/0", {"GPU": 2}),
        (check_the_config_fits_the_pods, "applications/0/deployments/2/placement_group_bundles/0", {"CPU": 0.5}),
        (check_the_config_fits_the_pods, "applications/0/args/overrides", {"modle": {}}),
        (check_the_config_fits_the_pods, "applications/0/args/overrides", {"cache": {"segment_gib": 20}}),
        (check_the_config_fits_the_pods, "applications/0/args/overrides", {"cache": {"swap_gib": 25}}),
        (check_root_file_systems_are_read_only, "applications/0/args/overrides/batches", {"folder": "/data"}),
    ],
)
def test_a_broken_serve_config_fails(check: Callable[[Json], None], path: str, change: Json, manifest: Json) -> None:
    config = serve_config(manifest)
    _at(config, path).update(change)
    manifest["spec"]["serveConfigV2"] = yaml.safe_dump(config)
    with pytest.raises((AssertionError, pydantic.ValidationError, StartupError)):
        check(manifest)


def test_a_key_given_twice_fails() -> None:
    with pytest.raises(AssertionError, match="duplicate key"):
        load("spec: {a: 1, a: 2}")


@pytest.mark.parametrize(
    ("kind", "path", "change"),
    [
        ("NetworkPolicy", "spec/ingress/0", {"form": []}),
        ("Service", "spec/ports/0", {"targetport": "serve"}),
        ("PodDisruptionBudget", "spec", {"minAvailables": 1}),
        ("PodMonitor", "metadata", {"name": None}),
    ],
)
def test_an_object_of_another_form_fails(kind: str, path: str, change: Json) -> None:
    objects = load_all((K8S / "gpu_disaggregated.yaml").read_text())
    broken = next(content for content in objects if content["kind"] == kind)
    check_object(copy.deepcopy(broken))
    break_at(broken, path, change)
    with pytest.raises(jsonschema.ValidationError):
        check_object(broken)


@pytest.mark.parametrize(
    ("check", "kind", "path", "change"),
    [
        (0, "Service", "spec/selector", {ROLE: "front"}),
        (1, "Service", "spec/selector", {ROLE: "prefill"}),
        (2, "PodDisruptionBudget", "spec", {"minAvailable": 2}),
        (3, "PodMonitor", "spec/selector/matchLabels", {ROLE: "prefill"}),
    ],
)
def test_an_object_that_misses_its_pods_fails(check: int, kind: str, path: str, change: Json) -> None:
    objects = load_all((K8S / "gpu_disaggregated.yaml").read_text())
    break_at(next(content for content in objects if content["kind"] == kind), path, change)
    with pytest.raises(AssertionError):
        OBJECT_CHECKS[check](objects)
