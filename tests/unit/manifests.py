"""Reading of manifests for KubeRay, their schemas, and the properties that each of ours has (`check_*`).

*Schema*: `rayservice.schema.yaml` for the RayService, Ray's own for the Serve config inside, and `objects.schema.yaml`
for other objects; all strict, because KubeRay prunes and Serve ignores what they do not know. Where
`RAYDIX_CRD_SCHEMAS` names a folder with KubeRay's own schema (`rayservice-v1.openapi.json`: the CRD's
`openAPIV3Schema`), that is checked, too. *Meaning*: each other `check_*` function holds one property of ours.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, get_args

import jsonschema
import pydantic
import yaml

from raydix.actors.scaling import number_of_workers, scaled
from raydix.configs import Config, load_config
from raydix.configs.changes import changes
from raydix.configs.load import merge
from raydix.configs.section import Effect
from raydix.configs.sections import base_for, live_part

with warnings.catch_warnings():
    # Ray's own modules use a deprecated spelling of pydantic's when they are imported.
    warnings.simplefilter("ignore", DeprecationWarning)
    from ray.autoscaler._private.kuberay import autoscaling_config
    from ray.serve.config import AutoscalingConfig
    from ray.serve.schema import ServeDeploySchema

Json = dict[str, Any]

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
OUR_SCHEMA = Path(__file__).with_name("rayservice.schema.yaml")
OBJECTS_SCHEMA = Path(__file__).with_name("objects.schema.yaml")
KUBERAYS_SCHEMA = Path(os.environ.get("RAYDIX_CRD_SCHEMAS", ""), "rayservice-v1.openapi.json")

HAPROXY = ("RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_THROUGHPUT_OPTIMIZED")
ROLE = "raydix-role"
POOLS = ("prefill", "decode", "mixed", "elastic")
GROUP_OF = {"kv_cache_manager": "ingress", "ingress": "ingress"} | {role: role for role in POOLS}
OBJECT_META = {"name", "namespace", "labels", "annotations"}
GIB = 1024**3


# Loading


_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is eight times as fast


class _UniqueKeyLoader(_Loader):  # type: ignore[misc]
    """PyYAML keeps the last of two equal keys; here they are an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"duplicate key at {node.start_mark}"
        found: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return found


def load(text: str) -> Json:
    # Round trip: aliases become copies, so that a mutation changes one place.
    copied: Json = json.loads(json.dumps(yaml.load(text, Loader=_UniqueKeyLoader)))
    return copied


def load_all(text: str) -> list[Json]:
    """The objects of a file, in its order."""
    documents = yaml.load_all(text, Loader=_UniqueKeyLoader)
    return [copied for document in documents if (copied := json.loads(json.dumps(document)))]


def rayservice_in(objects: list[Json]) -> Json:
    [found] = [content for content in objects if content["kind"] == "RayService"]
    return found


def serve_config(manifest: Json) -> Json:
    return load(manifest["spec"]["serveConfigV2"])


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


def check_object(content: Json) -> None:
    """An object that is no RayService has the fields of its kind."""
    schema = schema_in(OBJECTS_SCHEMA)[content["kind"]]
    jsonschema.Draft202012Validator(strict(schema)).validate(content)


SCHEMAS: dict[Path, Callable[[Json], None]] = {OUR_SCHEMA: check_our_schema}
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
    with warnings.catch_warnings():
        # The successor of an elastic pool's `metrics_interval_s` is a variable that Serve does not read yet.
        warnings.simplefilter("ignore", DeprecationWarning)
        ServeDeploySchema.model_validate(config)
    # The two open dictionaries.
    (app,) = config["applications"]
    assert set(app["runtime_env"]) == {"env_vars"}
    assert set(app["args"]) <= {"config", "overrides"}


# Properties of ours


def groups(manifest: Json) -> dict[str, Json]:
    cluster = manifest["spec"]["rayClusterConfig"]
    return {"head": cluster["headGroupSpec"]} | {g["groupName"]: g for g in cluster["workerGroupSpecs"]}


def ray_container(group: Json) -> Json:
    container: Json
    (container,) = group["template"]["spec"]["containers"]
    return container


def env_of(group: Json) -> dict[str, str]:
    return {e["name"]: e["value"] for e in ray_container(group)["env"]}


def shell_of(hook: Json) -> str:
    """The command of a probe or hook, as one line."""
    return " ".join(hook["exec"]["command"])


def config_of(manifest: Json) -> Config:
    """The configuration that the application is started with, without what lies in Secrets."""
    live = deployments(manifest)["ingress"]["user_config"]
    return Config.model_validate(merge(base_of(manifest).model_dump(mode="json"), live))


def base_of(manifest: Json) -> Config:
    """The configuration in the application's arguments, a change of which restarts everything."""
    (app,) = serve_config(manifest)["applications"]
    return load_config(app["args"]["config"], app["args"]["overrides"])


def deployments(manifest: Json) -> dict[str, Json]:
    (app,) = serve_config(manifest)["applications"]
    return {d["name"]: d for d in app["deployments"]}


def volumes_of(group: Json) -> dict[str, Json]:
    return {volume["name"]: volume for volume in group["template"]["spec"]["volumes"]}


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


def max_replicas(deployment: Json, config: Config) -> int:
    """The most replicas; those of elastic workers are Serve's to number, by the application's own settings."""
    if deployment["name"] == "elastic":
        least, most = config.workers.sections["elastic"].numbers
        auto: Any = AutoscalingConfig.default  # without annotations
        own, default = scaled(least, most).model_dump(), auto().model_dump()
        policy = {"policy_function": f"{number_of_workers.__module__}:{number_of_workers.__name__}"}
        wanted = {key: own[key] for key in own if own[key] != default[key]}
        wanted |= {"policy": policy, "min_replicas": least, "max_replicas": most}
        assert (deployment["num_replicas"], deployment["autoscaling_config"]) == ("auto", wanted)
        return most
    return int(deployment.get("autoscaling_config", {}).get("max_replicas") or deployment["num_replicas"])


def check_live_keys_stand_apart(manifest: Json) -> None:
    """Every deployment takes its `user_config`, and no argument could have stood there: a change of it would restart
    everything. Numbers of replicas are shown as they are."""
    base, config = base_of(manifest), config_of(manifest)
    for name, deployment in deployments(manifest).items():
        live_part(name, base_for(name, base), deployment["user_config"])
        if name in config.workers.sections and name != "elastic":
            assert config.workers.sections[name].replicas == deployment["num_replicas"]
    (app,) = serve_config(manifest)["applications"]
    default = load_config(app["args"]["config"])
    found = {change.key for change in changes(default, base) if change.effect in (Effect.IN_PLACE, Effect.NUMBER)}
    assert found <= {"tenants_file"}


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
    config = config_of(manifest)
    pools = set(config.workers.sections)
    assert set(deployments(manifest)) == {"kv_cache_manager", "ingress"} | pools
    for name, deployment in deployments(manifest).items():
        reserved, selector = demand(deployment)
        matching = [g for g, t in types.items() if selector.items() <= t["labels"].items()]
        assert matching == [GROUP_OF[name]], name
        pod = types[matching[0]]["resources"]
        assert all(amount <= pod.get(resource, 0) for resource, amount in reserved.items()), name
    for group, node_type in types.items():
        here = [d for name, d in deployments(manifest).items() if GROUP_OF[name] == group]
        for resource in ("CPU", "GPU"):
            wanted = sum(demand(d)[0].get(resource, 0) * max_replicas(d, config) for d in here)
            assert wanted <= node_type["resources"].get(resource, 0) * node_type["max_workers"], (group, resource)


def check_leaving_takes_no_longer_than_allowed(manifest: Json) -> None:
    spec = manifest["spec"]
    stops = {name: d["graceful_shutdown_timeout_s"] for name, d in deployments(manifest).items()}
    idle_s = spec["rayClusterConfig"].get("autoscalerOptions", {}).get("idleTimeoutSeconds")
    for name, group in groups(manifest).items():
        hard_stop_s = int(env_of(group)["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"])
        assert stops["ingress"] <= hard_stop_s, name
        assert idle_s is None or hard_stop_s < idle_s, name
        hook = shell_of(ray_container(group)["lifecycle"]["preStop"])
        (sleep_s,) = re.findall(r"sleep (\d+)", hook)
        grace_s = group["template"]["spec"]["terminationGracePeriodSeconds"]
        assert max(stops.values()) < int(sleep_s) < grace_s, name
        if name != "head":
            (deadline_s,) = re.findall(r"--deadline-remaining-seconds (\d+)", hook)
            assert max(stops.values()) < int(deadline_s) <= int(sleep_s), name
    assert stops["ingress"] <= spec["rayClusterDeletionDelaySeconds"]


def check_memory_is_reserved(manifest: Json) -> None:
    for name, group in groups(manifest).items():
        resources = ray_container(group)["resources"]
        assert resources["requests"] == resources["limits"], name
        mounts = {m["mountPath"]: m["name"] for m in ray_container(group)["volumeMounts"]}
        shm = volumes_of(group)[mounts["/dev/shm"]]["emptyDir"]
        store_bytes = int(group["rayStartParams"]["object-store-memory"])
        assert shm["medium"] == "Memory", name
        memory_bytes = num_bytes(resources["limits"]["memory"])
        assert store_bytes < num_bytes(shm["sizeLimit"]) <= memory_bytes - 2 * GIB, name
        has_gpu = "nvidia.com/gpu" in resources["limits"]
        assert (env_of(group).get("RAY_preallocate_plasma_memory") == "1") == has_gpu, name


def check_the_nodes_disk_is_reserved(manifest: Json) -> None:
    for name, group in groups(manifest).items():
        here = [v["emptyDir"] for v in volumes_of(group).values() if "emptyDir" in v]
        used = sum(num_bytes(v["sizeLimit"]) for v in here if v.get("medium") != "Memory")
        assert used < num_bytes(ray_container(group)["resources"]["limits"]["ephemeral-storage"]), name


def check_pods_are_alike(manifest: Json) -> None:
    cluster = manifest["spec"]["rayClusterConfig"]
    assert f"ARG RAY_VERSION={cluster['rayVersion']}\n" in (K8S / "Dockerfile").read_text()
    for image in ("cpu", "gpu"):
        assert f"\nray=={cluster['rayVersion']} " in (K8S / f"lock/{image}.txt").read_text()
    assert cluster["authOptions"]["mode"] == "token"
    assert len({ray_container(group)["image"] for group in groups(manifest).values()}) == 1
    for name, group in groups(manifest).items():
        container = ray_container(group)
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container), name
        assert container["livenessProbe"]["terminationGracePeriodSeconds"] <= 30, name
        ready = container["readinessProbe"]
        assert name == "head" or ":8000/-/healthz" in shell_of(ready), name
        assert name != "ingress" or ":8000/health " in shell_of(ready), name


def check_root_file_systems_are_read_only(manifest: Json) -> None:
    contexts = {name: ray_container(group)["securityContext"] for name, group in groups(manifest).items()}
    if "autoscalerOptions" in manifest["spec"]["rayClusterConfig"]:
        contexts["autoscaler"] = manifest["spec"]["rayClusterConfig"]["autoscalerOptions"]["securityContext"]
    for name, context in contexts.items():
        assert context["readOnlyRootFilesystem"] is True, name
        assert context["allowPrivilegeEscalation"] is False, name
    for name, group in groups(manifest).items():
        assert group["template"]["spec"]["securityContext"]["runAsNonRoot"] is True, name
        writable = {m["mountPath"] for m in ray_container(group)["volumeMounts"] if not m.get("readOnly")}
        assert {"/tmp", "/dev/shm"} <= writable, name
        written = [value for value in env_of(group).values() if value.startswith("/")]
        if name == "ingress":
            config = config_of(manifest)
            written += [folder for folder in (config.cache.disk_path, config.batches.folder) if folder]
        for path in written:
            assert any(PurePosixPath(path).is_relative_to(folder) for folder in writable), (name, path)


def check_the_config_fits_the_pods(manifest: Json) -> None:
    config = config_of(manifest)
    for role, worker in config.workers.sections.items():
        reserved, _ = demand(deployments(manifest)[role])
        group = groups(manifest)[role]
        pod = node_types(manifest)[role]["resources"]
        assert worker.num_cpus <= reserved["CPU"], role
        assert worker.num_gpus == reserved.get("GPU", 0), role
        assert pod["CPU"] < 2 * reserved["CPU"] or worker.num_gpus, role  # one worker in a pod: it has the threads
        stored = (config.cache.segment_gib + config.cache.swap_gib) * GIB
        assert stored < int(group["rayStartParams"]["object-store-memory"]), role
        if not worker.num_gpus:
            assert 1 <= worker.num_threads <= pod["CPU"], role
            (shm,) = [v["emptyDir"]["sizeLimit"] for name, v in volumes_of(group).items() if name == "shm"]
            left = num_bytes(ray_container(group)["resources"]["limits"]["memory"]) - num_bytes(shm)
            assert config.cache.pool_gib is not None and config.cache.pool_gib * GIB < left, role
    if config.cache.disk_gib:
        store_bytes = int(groups(manifest)["ingress"]["rayStartParams"]["object-store-memory"])
        assert config.cache.segment_gib * GIB < store_bytes
    many = groups(manifest)["ingress"]["maxReplicas"] > 1
    assert not config.batches.gib or config.batches.folder or not many


CHECKS: list[Callable[[Json], None]] = [
    *SCHEMAS.values(),
    check_serve_schema,
    check_live_keys_stand_apart,
    check_head_takes_no_work,
    check_haproxy_everywhere,
    check_every_replica_has_its_group,
    check_leaving_takes_no_longer_than_allowed,
    check_memory_is_reserved,
    check_the_nodes_disk_is_reserved,
    check_pods_are_alike,
    check_root_file_systems_are_read_only,
    check_the_config_fits_the_pods,
]


# The objects beside the RayService


def selectors_in(content: Json) -> list[dict[str, str]]:
    """The labels by which an object finds pods of ours."""
    spec = content["spec"]
    if content["kind"] == "Service":
        return [spec["selector"]]
    if content["kind"] == "NetworkPolicy":
        return [spec["podSelector"]["matchLabels"]]
    if content["kind"] in ("PodMonitor", "PodDisruptionBudget"):
        return [spec["selector"]["matchLabels"]]
    return []


def selected(selector: dict[str, str], manifest: Json) -> set[str]:
    """The groups whose pods have the labels."""
    labels = {name: group["template"]["metadata"]["labels"] for name, group in groups(manifest).items()}
    return {name for name, own in labels.items() if selector.items() <= own.items()}


def check_objects(objects: list[Json]) -> None:
    """Each object has the fields of its kind, a name of its own, and finds pods where it looks for some."""
    manifest = rayservice_in(objects)
    names = [(content["kind"], content["metadata"]["name"]) for content in objects]
    assert len(names) == len(set(names))
    for content in objects:
        if content["kind"] != "RayService":
            check_object(content)
        for selector in selectors_in(content):
            assert selected(selector, manifest), content["metadata"]["name"]


def check_clients_reach_ingress_pods(objects: list[Json]) -> None:
    manifest = rayservice_in(objects)
    name = manifest["metadata"]["name"]
    [service] = [c for c in objects if c["kind"] == "Service" and c["metadata"]["name"] == name]
    assert selected(service["spec"]["selector"], manifest) == {"ingress"}
    ports = {p["name"]: p["containerPort"] for p in ray_container(groups(manifest)["ingress"])["ports"]}
    [port] = service["spec"]["ports"]
    assert ports[port["targetPort"]] == 8000
    # KubeRay's Gateway of an incremental upgrade sends clients to every pod with a proxy.
    is_incremental = manifest["spec"].get("upgradeStrategy", {}).get("type") == "NewClusterWithIncrementalUpgrade"
    reached = set(groups(manifest)) if is_incremental else {"ingress"}
    for content in objects:
        if content["kind"] == "NetworkPolicy" and content["metadata"]["name"].endswith("-clients"):
            assert selected(selectors_in(content)[0], manifest) == reached
            assert content["spec"]["ingress"][0]["ports"] == [{"protocol": "TCP", "port": 8000}]


def check_budgets_let_one_pod_go(objects: list[Json]) -> None:
    manifest = rayservice_in(objects)
    for content in objects:
        if content["kind"] == "PodDisruptionBudget":
            [group] = selected(selectors_in(content)[0], manifest)
            assert 1 <= content["spec"]["minAvailable"] < groups(manifest)[group]["minReplicas"], group


def check_monitors_find_every_pod(objects: list[Json]) -> None:
    manifest = rayservice_in(objects)
    for content in objects:
        if content["kind"] == "PodMonitor":
            assert selected(selectors_in(content)[0], manifest) == set(groups(manifest))
            (endpoint,) = content["spec"]["podMetricsEndpoints"]
            for name, group in groups(manifest).items():
                ports = {p["name"]: p["containerPort"] for p in ray_container(group)["ports"]}
                assert ports[endpoint["port"]] == 8080, name


OBJECT_CHECKS: list[Callable[[list[Json]], None]] = [
    check_objects,
    check_clients_reach_ingress_pods,
    check_budgets_let_one_pod_go,
    check_monitors_find_every_pod,
]
