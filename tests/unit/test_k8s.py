"""The files in `k8s/` say what KubeRay and Ray understand, and what they say fits together.

Three kinds of check. *Schema*: `rayservice.schema.yaml` for the RayService and Ray's own for the Serve config inside,
both strict, because KubeRay prunes and Serve ignores what they do not know. Where `RAYDIX_CRD_SCHEMAS` names a folder
with KubeRay's own schema (`rayservice-v1.openapi.json`: the CRD's `openAPIV3Schema`), that is checked, too. *Meaning*:
each `check_*` function holds one property of ours. *Mutations*: a manifest with one thing broken must fail the check
that is there for it.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pydantic
import pytest
import yaml

from configs import load_config
from engine.core.errors import StartupError

with warnings.catch_warnings():
    # Ray's own modules use a deprecated spelling of pydantic's when they are imported.
    warnings.simplefilter("ignore", DeprecationWarning)
    from ray.autoscaler._private.kuberay import autoscaling_config
    from ray.serve.schema import ServeDeploySchema

Json = dict[str, Any]

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
OUR_SCHEMA = Path(__file__).with_name("rayservice.schema.yaml")
KUBERAYS_SCHEMA = Path(os.environ.get("RAYDIX_CRD_SCHEMAS", ""), "rayservice-v1.openapi.json")

HAPROXY = ("RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_THROUGHPUT_OPTIMIZED")
ROLE = "raydix-role"
GROUP_OF = {"kv_cache_manager": "ingress", "ingress": "ingress", "prefill": "prefill", "decode": "decode"}
OBJECT_META = {"name", "namespace", "labels", "annotations"}


# Loading


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys; here they are an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"duplicate key at {node.start_mark}"
        return super().construct_mapping(node, deep=deep)


def load(text: str) -> Json:
    # Round trip: aliases become copies, so that a mutation changes one place.
    copied: Json = json.loads(json.dumps(yaml.load(text, Loader=_UniqueKeyLoader)))
    return copied


def serve_config(manifest: Json) -> Json:
    return load(manifest["spec"]["serveConfigV2"])


def merge_patch(target: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), value)
    return merged


@pytest.fixture
def manifest() -> Json:
    return load((K8S / "rayservice.yaml").read_text())


# The RayService's schema


@functools.cache
def schema_in(path: Path) -> Json:
    return load(path.read_text())  # JSON is YAML


def strict(node: Json) -> Json:
    """The structural schema as plain JSON Schema that rejects keys the API server would prune."""
    out: Json = {}
    for key, value in node.items():
        if key == "properties":
            out[key] = {name: strict(child) for name, child in value.items()}
        elif key in ("items", "additionalProperties") and isinstance(value, dict):
            out[key] = strict(value)
        elif not key.startswith("x-kubernetes-"):
            out[key] = value
    if node.get("x-kubernetes-int-or-string"):
        out["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if "properties" in node and not node.get("x-kubernetes-preserve-unknown-fields"):
        out.setdefault("additionalProperties", False)
    if node.get("nullable"):
        out["type"] = [node["type"], "null"]
    return out


def with_defaults(value: Any, schema: Json) -> Any:
    """A copy of `value` with the schema's defaults filled in, as the API server does before it validates."""
    if isinstance(value, list):
        return [with_defaults(item, schema.get("items", {})) for item in value]
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties", {})
    extra = schema.get("additionalProperties")
    defaults = {k: copy.deepcopy(child["default"]) for k, child in properties.items() if "default" in child}
    fallback = extra if isinstance(extra, dict) else {}
    return {k: with_defaults(v, properties.get(k, fallback)) for k, v in (defaults | value).items()}


@functools.cache
def validator(path: Path) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(strict(schema_in(path)))


def check_our_schema(manifest: Json) -> None:
    validator(OUR_SCHEMA).validate(with_defaults(manifest, schema_in(OUR_SCHEMA)))
    assert set(manifest["metadata"]) <= OBJECT_META  # the schema leaves an object's metadata open


def check_kuberays_schema(manifest: Json) -> None:
    validator(KUBERAYS_SCHEMA).validate(with_defaults(manifest, schema_in(KUBERAYS_SCHEMA)))
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayService")
    assert set(manifest["metadata"]) <= OBJECT_META


SCHEMAS = {OUR_SCHEMA: check_our_schema}
if os.environ.get("RAYDIX_CRD_SCHEMAS"):
    SCHEMAS[KUBERAYS_SCHEMA] = check_kuberays_schema


def fields(schema: Json, path: str = "") -> Iterator[tuple[str, str | None]]:
    """Each field of a structural schema, as a path, with its type."""
    yield path, schema.get("type")
    for name, child in schema.get("properties", {}).items():
        yield from fields(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from fields(schema[key], f"{path}[]")


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.name)
def test_a_schema_knows_the_fields_of_ours(path: Path) -> None:
    assert set(fields(schema_in(OUR_SCHEMA))) <= set(fields(schema_in(path)))


# Ray's schema of the Serve config


def _model_in(annotation: Any) -> type[pydantic.BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return annotation
    return next((model for arg in get_args(annotation) if (model := _model_in(arg))), None)


def unknown_keys(model: type[pydantic.BaseModel], data: Any, path: str = "") -> Iterator[str]:
    """Dotted paths of the keys in `data` that `model`, or a model below it, does not declare."""
    if isinstance(data, list):
        for index, item in enumerate(data):
            yield from unknown_keys(model, item, f"{path}[{index}]")
    elif isinstance(data, dict):
        for key, value in data.items():
            field = model.model_fields.get(key)
            if field is None:
                yield f"{path}.{key}".lstrip(".")
            elif (child := _model_in(field.annotation)) is not None:
                yield from unknown_keys(child, value, f"{path}.{key}")


def check_serve_schema(manifest: Json) -> None:
    config = serve_config(manifest)
    assert list(unknown_keys(ServeDeploySchema, config)) == []
    ServeDeploySchema.model_validate(config)
    # The two open dictionaries.
    (app,) = config["applications"]
    assert set(app["runtime_env"]) == {"env_vars"}
    assert set(app["args"]) <= {"config", "overrides"}


# What we mean by it


def groups(manifest: Json) -> dict[str, Json]:
    cluster = manifest["spec"]["rayClusterConfig"]
    return {"head": cluster["headGroupSpec"]} | {g["groupName"]: g for g in cluster["workerGroupSpecs"]}


def ray_container(group: Json) -> Json:
    container: Json
    (container,) = group["template"]["spec"]["containers"]
    return container


def env_of(group: Json) -> dict[str, str]:
    return {e["name"]: e["value"] for e in ray_container(group)["env"]}


def deployments(manifest: Json) -> dict[str, Json]:
    (app,) = serve_config(manifest)["applications"]
    return {d["name"]: d for d in app["deployments"]}


def num_bytes(quantity: str) -> int:
    found = re.fullmatch(r"(\d+)(Ki|Mi|Gi|Ti)?", quantity)
    assert found is not None, quantity
    return int(found[1]) << 10 * ["", "Ki", "Mi", "Gi", "Ti"].index(found[2] or "")


def node_types(manifest: Json) -> dict[str, Json]:
    """The groups as Ray's autoscaler reads them: resources, labels and bounds of a pod of each."""
    read = autoscaling_config._generate_available_node_types_from_ray_cr_spec(manifest["spec"]["rayClusterConfig"])
    return {"head" if name == "headgroup" else name: node_type for name, node_type in read.items()}


def demand(deployment: Json) -> tuple[dict[str, float], dict[str, str]]:
    """What one replica reserves, and the labels of the node it must be on."""
    if "placement_group_bundles" in deployment:
        (bundle,) = deployment["placement_group_bundles"]
        (selector,) = deployment["placement_group_bundle_label_selector"]
        return bundle, selector
    options = deployment["ray_actor_options"]
    return {"CPU": options["num_cpus"], "GPU": options.get("num_gpus", 0)}, options["label_selector"]


def max_replicas(deployment: Json) -> int:
    return int(deployment.get("autoscaling_config", {}).get("max_replicas") or deployment["num_replicas"])


def check_head_takes_no_work(manifest: Json) -> None:
    head = node_types(manifest)["head"]
    assert head["resources"]["CPU"] == 0
    assert head["resources"].get("GPU", 0) == 0
    assert manifest["spec"]["excludeHeadPodFromServeSvc"] is True
    for deployment in deployments(manifest).values():
        assert demand(deployment)[1][ROLE] != head["labels"][ROLE]


def check_haproxy_everywhere(manifest: Json) -> None:
    for name, group in groups(manifest).items():
        assert [env_of(group).get(variable) for variable in HAPROXY] == ["1", "1"], name


def check_every_replica_has_its_group(manifest: Json) -> None:
    types = node_types(manifest)
    assert set(deployments(manifest)) == set(GROUP_OF)
    for name, deployment in deployments(manifest).items():
        reserved, selector = demand(deployment)
        matching = [g for g, t in types.items() if selector.items() <= t["labels"].items()]
        assert matching == [GROUP_OF[name]], name
        pod = types[matching[0]]["resources"]
        assert all(amount <= pod.get(resource, 0) for resource, amount in reserved.items()), name
    for group, node_type in types.items():
        here = [d for name, d in deployments(manifest).items() if GROUP_OF[name] == group]
        for resource in ("CPU", "GPU"):
            wanted = sum(demand(d)[0].get(resource, 0) * max_replicas(d) for d in here)
            assert wanted <= node_type["resources"].get(resource, 0) * node_type["max_workers"], (group, resource)


def check_leaving_takes_no_longer_than_allowed(manifest: Json) -> None:
    spec = manifest["spec"]
    stops = {name: d["graceful_shutdown_timeout_s"] for name, d in deployments(manifest).items()}
    idle_s = spec["rayClusterConfig"]["autoscalerOptions"]["idleTimeoutSeconds"]
    for name, group in groups(manifest).items():
        hard_stop_s = int(env_of(group)["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"])
        assert stops["ingress"] <= hard_stop_s < idle_s, name
        if name == "head":
            continue
        hook = ray_container(group)["lifecycle"]["preStop"]["exec"]["command"][-1]
        (deadline_s,) = re.findall(r"--deadline-remaining-seconds (\d+)", hook)
        (sleep_s,) = re.findall(r"sleep (\d+)", hook)
        grace_s = group["template"]["spec"]["terminationGracePeriodSeconds"]
        assert max(stops.values()) < int(deadline_s) <= int(sleep_s) < grace_s, name
    assert stops["ingress"] <= spec["rayClusterDeletionDelaySeconds"]


def check_memory_is_reserved(manifest: Json) -> None:
    for name, group in groups(manifest).items():
        resources = ray_container(group)["resources"]
        assert resources["requests"]["memory"] == resources["limits"]["memory"], name
        mounts = {m["mountPath"]: m["name"] for m in ray_container(group)["volumeMounts"]}
        volumes = {v["name"]: v["emptyDir"] for v in group["template"]["spec"]["volumes"]}
        shm = volumes[mounts["/dev/shm"]]
        store_bytes = int(group["rayStartParams"]["object-store-memory"])
        assert shm["medium"] == "Memory", name
        assert store_bytes < num_bytes(shm["sizeLimit"]) < num_bytes(resources["limits"]["memory"]) // 2, name
        has_gpu = "nvidia.com/gpu" in resources["limits"]
        assert (env_of(group).get("RAY_preallocate_plasma_memory") == "1") == has_gpu, name


def check_pods_are_alike(manifest: Json) -> None:
    version = manifest["spec"]["rayClusterConfig"]["rayVersion"]
    assert f"ARG RAY_VERSION={version}\n" in (K8S / "Dockerfile").read_text()
    assert len({ray_container(group)["image"] for group in groups(manifest).values()}) == 1
    for name, group in groups(manifest).items():
        assert group["template"]["spec"]["securityContext"]["runAsNonRoot"] is True, name
        assert {"readinessProbe", "livenessProbe"} <= set(ray_container(group)), name
        ready = ray_container(group)["readinessProbe"].get("exec", {}).get("command", [""])[-1]
        assert name == "head" or ":8000/-/healthz" in ready, name


def check_the_config_fits_the_pods(manifest: Json) -> None:
    (app,) = serve_config(manifest)["applications"]
    config = load_config(ROOT / app["args"]["config"], app["args"]["overrides"])
    for role in ("prefill", "decode"):
        worker = getattr(config.workers, role)
        reserved, _ = demand(deployments(manifest)[role])
        assert worker.num_cpus <= reserved["CPU"], role
        assert worker.num_gpus <= reserved["GPU"], role
        store_bytes = int(groups(manifest)[role]["rayStartParams"]["object-store-memory"])
        assert (config.cache.segment_gib + config.cache.swap_gib) * 1024**3 < store_bytes, role


CHECKS: list[Callable[[Json], None]] = [
    *SCHEMAS.values(),
    check_serve_schema,
    check_head_takes_no_work,
    check_haproxy_everywhere,
    check_every_replica_has_its_group,
    check_leaving_takes_no_longer_than_allowed,
    check_memory_is_reserved,
    check_pods_are_alike,
    check_the_config_fits_the_pods,
]


@pytest.mark.parametrize("check", CHECKS)
def test_rayservice(check: Callable[[Json], None], manifest: Json) -> None:
    check(manifest)


def test_application(manifest: Json) -> None:
    (app,) = serve_config(manifest)["applications"]
    assert app["import_path"] == "serve_app:build"
    assert (app["name"], app["route_prefix"]) == ("raydix", "/")


@pytest.mark.parametrize("check", CHECKS)
def test_gcs_fault_tolerance_patch(check: Callable[[Json], None], manifest: Json) -> None:
    patched = merge_patch(manifest, load((K8S / "gcs-fault-tolerance.yaml").read_text()))
    assert patched["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]["redisAddress"]
    check(patched)


def test_podmonitor_finds_every_pod(manifest: Json) -> None:
    monitor = load((K8S / "podmonitor.yaml").read_text())
    assert (monitor["apiVersion"], monitor["kind"]) == ("monitoring.coreos.com/v1", "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for name, group in groups(manifest).items():
        selected = monitor["spec"]["selector"]["matchLabels"].items()
        assert selected <= group["template"]["metadata"]["labels"].items(), name
        ports = {p["name"]: p["containerPort"] for p in ray_container(group)["ports"]}
        assert ports[endpoint["port"]] == 8080, name


def test_every_yaml_here_is_checked() -> None:
    checked = {"rayservice.yaml", "gcs-fault-tolerance.yaml", "podmonitor.yaml"}
    assert {path.name for path in K8S.glob("*.y*ml")} == checked


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
        (check_the_config_fits_the_pods, "applications/0/args/overrides", {"cache": {"swap_gib": 15}}),
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
