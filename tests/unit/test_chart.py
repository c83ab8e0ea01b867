"""The Helm chart: the committed manifests are its output, and whatever its values turn on passes the same checks."""

import warnings
from pathlib import Path

import pytest
import yaml

from raydix.configs import Config
from tests import helm
from tests.skips import NO_HELM
from tests.unit.manifests import (
    CHECKS,
    OBJECT_CHECKS,
    Json,
    config_of,
    env_of,
    groups,
    load_all,
    ray_container,
    rayservice_in,
    serve_config,
    volumes_of,
)

with warnings.catch_warnings():
    # Ray's own modules use a deprecated spelling of pydantic's when they are imported.
    warnings.simplefilter("ignore", DeprecationWarning)
    from ray.serve._private.deploy_utils import get_app_code_version
    from ray.serve.schema import ServeApplicationSchema

pytestmark = pytest.mark.skipif(helm.executable() is None, reason=NO_HELM)

NAMED = sorted(helm.VALUES.glob("*.yaml"))
CPU = helm.VALUES / "cpu.yaml"
VARIANTS = {
    "cpu_prefill_and_decode": """
        cache: {poolGib: 2, segmentGib: 2}
        pools:
          prefill: {gpus: 0, cpu: 4, memoryGib: 16, storeGib: 4, tolerations: [], worker: {token_budget: 1024}}
          decode: {gpus: 0, cpu: 4.5, memoryGib: 16, storeGib: 4, tolerations: []}
    """,
    "all_roles_of_several": """
        pools: {prefill: {replicas: 2, pods: {min: 2, max: 4}}, mixed: {enabled: true}}
    """,
    "elastic": """
        pools:
          prefill: {enabled: false}
          decode: {enabled: false}
          elastic: {enabled: true, replicas: {min: 2, max: 6}, worker: {shrink_after_s: 300}}
        overrides: {slo: {ttft_ms: 2000, tpot_ms: 50}}
    """,
    "elastic_on_cpus_beside_others": """
        cache: {poolGib: 2, segmentGib: 2}
        pools:
          prefill: {gpus: 0, cpu: 4, memoryGib: 16, storeGib: 4, tolerations: []}
          decode: {gpus: 0, cpu: 4, memoryGib: 16, storeGib: 4, tolerations: []}
          elastic: {enabled: true, gpus: 0, cpu: 4, memoryGib: 16, storeGib: 4, tolerations: []}
    """,
    "tenants_and_secrets": """
        tenants: {secret: raydix-tenants}
        auth: {secret: ray-token}
        envSecret: hub
        image: {pullSecrets: [registry]}
        overrides: {logging: {level: DEBUG}, cache: {eviction: lru}}
    """,
    "disk_in_the_pod": "{cache: {diskGib: 50}, pools: {ingress: {storeGib: 10, memoryGib: 24}}}",
    "disk_of_a_class": """
        cache: {diskGib: 50}
        pools: {ingress: {storeGib: 10, memoryGib: 24}}
        volumes: {disk: {storageClass: fast}}
    """,
    "claims": """
        cache: {diskGib: 50}
        pools: {ingress: {storeGib: 10, memoryGib: 24}}
        upgrade: {type: None}
        volumes: {disk: {claim: kv}, models: {claim: models}, batches: {claim: batches}}
    """,
    "models_of_the_node": "{volumes: {models: {hostPath: /var/lib/raydix/models}}}",
    "pods": """
        pod:
          annotations: {team: search}
          env: [{name: HTTPS_PROXY, value: "http://proxy:3128"}]
          volumes: [{name: certificates, secret: {secretName: certificates}}]
          volumeMounts: [{name: certificates, mountPath: /etc/certificates, readOnly: true}]
          serviceAccount: raydix
          priorityClass: serving
        head: {pod: {priorityClass: critical}, nodeSelector: {pool: system}}
        pools: {decode: {pod: {annotations: {team: decode}, env: [{name: NCCL_DEBUG, value: INFO}]}}}
    """,
    "redis": "{gcs: {backend: redis}}",
    "rocksdb": "{gcs: {backend: rocksdb, rocksdb: {storageClass: fast, keep: true}}}",
    "incremental_upgrade": """
        upgrade: {type: NewClusterWithIncrementalUpgrade, gatewayClass: istio}
    """,
    "ingress": "{http: {ingress: {enabled: true, className: nginx, host: llm.example.org, tlsSecret: llm-tls}}}",
    "gateway": "{http: {gateway: {enabled: true, className: istio, host: llm.example.org, tlsSecret: llm-tls}}}",
    "gateway_that_is_there": """
        http:
          gateway: {enabled: true, host: llm.example.org, parent: {name: shared, namespace: gateways, section: https}}
    """,
    "monitoring": """
        monitoring:
          podMonitor: {enabled: true, labels: {release: prometheus}}
          serviceMonitor: {enabled: true}
          prometheusRule: {enabled: true, labels: {release: prometheus}}
    """,
    "network": """
        networkPolicy:
          operatorNamespace: kuberay
          monitoringNamespace: monitoring
          clients: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: gateways}}}]
          egress: [{to: [{ipBlock: {cidr: 0.0.0.0/0}}], ports: [{protocol: TCP, port: 443}]}]
    """,
    "as_little_as_possible": """
        networkPolicy: {enabled: false}
        disruptionBudget: false
        topologySpread: false
        safeToEvict: true
        autoscaling: {enabled: false}
        monitoring: {podMonitor: {enabled: false}}
    """,
}


def rendered(variant: str) -> list[Json]:
    return load_all(helm.template(overrides=VARIANTS[variant]))


def of_kind(objects: list[Json], kind: str) -> list[Json]:
    return [content for content in objects if content["kind"] == kind]


@pytest.mark.parametrize("values", NAMED, ids=lambda path: path.stem)
def test_a_manifest_is_what_the_chart_makes(values: Path) -> None:
    committed = helm.manifest_of(values).read_text()
    assert load_all(helm.template(values)) == load_all(committed), "run `make manifests`"


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_values_turn_on_passes_every_check(variant: str) -> None:
    objects = rendered(variant)
    for check in CHECKS:
        check(rayservice_in(objects))
    for check_all in OBJECT_CHECKS:
        check_all(objects)


def test_the_chart_has_nothing_to_complain_of() -> None:
    for values in NAMED:
        done = helm.helm("lint", "--strict", "--quiet", ".", "--values", str(values))
        assert done.returncode == 0, done.stdout


def test_what_the_chart_has_from_the_code_is_up_to_date() -> None:
    assert helm.LIVE.read_text() == helm.live_keys(), "run `make manifests`"
    schema = helm.SCHEMA.read_text()
    assert helm.with_generated(schema) == schema, "run `make manifests`"


def test_every_key_of_the_configuration_may_be_an_override_or_has_a_value() -> None:
    """The chart's schema takes the whole configuration's defaults."""
    config = Config.model_validate({"workers": {"mixed": {}}})
    whole = config.model_dump(mode="json", exclude={"workers", "tenants_file"})
    own = ["model.name", "model.source", "batches.gib", "batches.folder"]
    own += [f"cache.{key}" for key in ("pool_gib", "segment_gib", "swap_gib", "disk_gib", "disk_path")]
    for section, _, key in (path.partition(".") for path in own):
        del whole[section][key]
    whole["speculation"]["mode"] = False  # as YAML reads off
    manifest = rayservice_in(load_all(helm.template(overrides=yaml.safe_dump({"overrides": whole}))))
    assert config_of(manifest).speculation.mode == "off"


def test_a_live_value_changes_no_argument() -> None:
    """Serve makes the version of everything that runs of the arguments."""

    def versions(overrides: str) -> set[str]:
        applications = serve_config(rayservice_in(load_all(helm.template(overrides=overrides))))["applications"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of `metrics_interval_s`, as in check_serve_schema
            return {get_app_code_version(ServeApplicationSchema.model_validate(each)) for each in applications}

    before = versions("{}")
    for same in (
        "overrides: {ingress: {max_queued_requests: 7}, slo: {ttft_ms: 100}, logging: {level: DEBUG}}",
        "overrides: {tenants: [{name: a}]}",
        "pools: {prefill: {replicas: 2, worker: {token_budget: 1024}}}",
    ):
        assert versions(same) == before
    assert versions("overrides: {cache: {eviction: lru}}") != before
    elastic = VARIANTS["elastic"]
    assert versions(elastic) == versions(elastic.replace("max: 6", "max: 7").replace("300", "200")) != before


def test_values_reach_the_configuration() -> None:
    config = config_of(rayservice_in(rendered("tenants_and_secrets")))
    assert (config.logging.level, config.cache.eviction, config.cache.segment_gib) == ("DEBUG", "lru", 8)
    config = config_of(rayservice_in(rendered("cpu_prefill_and_decode")))
    assert config.workers.prefill is not None and config.workers.decode is not None
    assert (config.workers.prefill.token_budget, config.workers.prefill.num_threads) == (1024, 4)
    assert (config.workers.decode.device, config.workers.decode.num_threads) == ("cpu", 4)


def test_the_number_of_elastic_workers_is_left_to_serve() -> None:
    manifest = rayservice_in(rendered("elastic"))
    config = config_of(manifest)
    assert config.workers.sections.keys() == {"elastic"} and config.slo.tpot_ms == 50
    assert config.workers.elastic is not None
    assert (config.workers.elastic.numbers, config.workers.elastic.shrink_after_s) == ((2, 6), 300)
    assert groups(manifest)["elastic"]["replicas"] == 2
    beside = config_of(rayservice_in(rendered("elastic_on_cpus_beside_others")))
    assert beside.workers.sections.keys() == {"prefill", "decode", "elastic"}


def test_each_key_makes_its_object() -> None:
    kinds = {variant: {content["kind"] for content in rendered(variant)} for variant in VARIANTS}
    assert {"Ingress"} <= kinds["ingress"]
    assert {"Gateway", "HTTPRoute"} <= kinds["gateway"]
    assert "Gateway" not in kinds["gateway_that_is_there"]
    assert {"ServiceMonitor", "PrometheusRule"} <= kinds["monitoring"]
    assert [variant for variant, made in kinds.items() if "PrometheusRule" in made] == ["monitoring"]
    assert kinds["as_little_as_possible"] == {"RayService", "Service"}
    budgets = of_kind(rendered("all_roles_of_several"), "PodDisruptionBudget")
    assert {content["metadata"]["name"] for content in budgets} == {"raydix-ingress", "raydix-prefill"}


def test_the_rules_of_the_chart_are_those_that_are_tested() -> None:
    assert helm.CHART_ALERTS.read_text() == helm.ALERTS.read_text(), "run `make manifests`"
    [rule] = of_kind(rendered("monitoring"), "PrometheusRule")
    assert rule["spec"] == yaml.safe_load(helm.ALERTS.read_text()), "with Prometheus' own braces"
    assert rule["metadata"]["labels"]["release"] == "prometheus"


def test_pods_get_what_all_get_and_what_their_group_gets() -> None:
    found = {name: group["template"] for name, group in groups(rayservice_in(rendered("pods"))).items()}
    env = {name: env_of(group) for name, group in groups(rayservice_in(rendered("pods"))).items()}
    assert {name: pod["metadata"]["annotations"]["team"] for name, pod in found.items()} == {
        "head": "search", "ingress": "search", "prefill": "search", "decode": "decode"
    }  # fmt: skip
    assert all("karpenter.sh/do-not-disrupt" in pod["metadata"]["annotations"] for pod in found.values())
    assert {name: pod["spec"]["priorityClassName"] for name, pod in found.items()} == {
        "head": "critical", "ingress": "serving", "prefill": "serving", "decode": "serving"
    }  # fmt: skip
    assert {pod["spec"]["serviceAccountName"] for pod in found.values()} == {"raydix"}
    assert all(values["HTTPS_PROXY"] for values in env.values())
    assert [name for name, values in env.items() if "NCCL_DEBUG" in values] == ["decode"]
    for group in groups(rayservice_in(rendered("pods"))).values():
        assert "certificates" in volumes_of(group)
        assert "/etc/certificates" in [mount["mountPath"] for mount in ray_container(group)["volumeMounts"]]


def test_an_image_is_named_by_its_digest() -> None:
    digest = "sha256:" + "0a" * 32
    manifest = rayservice_in(
        load_all(helm.template(overrides=f"image: {{repository: r.example/raydix, digest: '{digest}'}}"))
    )
    images = {ray_container(group)["image"] for group in groups(manifest).values()}
    assert images == {f"r.example/raydix@{digest}"}


def test_names_and_selectors_follow_the_release() -> None:
    objects = load_all(helm.template(CPU, release="other"))
    assert all(content["metadata"]["name"].startswith("other") for content in objects)
    for check_all in OBJECT_CHECKS:
        check_all(objects)
    assert rayservice_in(objects)["metadata"]["labels"]["app.kubernetes.io/instance"] == "other"


DISK_OF_A_CLAIM = """
    cache: {diskGib: 9}
    pools: {ingress: {storeGib: 9, memoryGib: 20}}
    volumes: {disk: {claim: c}}
"""
INCREMENTAL_WITHOUT_AUTOSCALER = """
    upgrade: {type: NewClusterWithIncrementalUpgrade, gatewayClass: c}
    autoscaling: {enabled: false}
"""
REFUSED = {
    "pools: {prefill: {storeGib: 8}}": r"pools\.prefill\.storeGib is 8 and must be above 8\.25: cache\.segmentGib",
    "cache: {segmentGib: 30}": r"pools\.prefill\.storeGib is 20 and must be above 30\.25",
    "pools: {decode: {memoryGib: 24}}": r"pools\.decode\.memoryGib is 24 and must be at least 25: 22 for /dev/shm",
    "pools: {prefill: {gpus: 0}, decode: {gpus: 0, memoryGib: 40}}": r"pools\.decode\.memoryGib.* 20 for the KV pool",
    "pools: {prefill: {enabled: false}}": r"pools\.prefill and pools\.decode belong together",
    "pools: {prefill: {enabled: false}, decode: {enabled: false}}": "no workers",
    "pools: {prefill: {replicas: 9}}": r"pools\.prefill\.replicas is 9 and pods\.max is 8",
    "pools: {elastic: {enabled: true, replicas: {max: 9}}}": r"pools\.elastic\.replicas\.max is 9 and pods\.max is 8",
    "pools: {elastic: {enabled: true, replicas: {min: 9}}}": r"pools\.elastic\.replicas: min is 9 and max is 8",
    "pools: {elastic: {enabled: true, replicas: {min: 0}}}": r"pools\.elastic\.replicas\.min is 0, which needs all",
    "pools: {elastic: {replicas: 3}}": r"/pools/elastic/replicas",
    "pools: {elastic: {worker: {max_replicas: 3}}}": r"/pools/elastic/worker/max_replicas",
    "pools: {elastic: {worker: {num_gpus: 3}}}": r"/pools/elastic/worker/num_gpus",
    "pools: {prefill: {pods: {min: 9}}}": r"pools\.prefill\.pods: min is 9 and max is 8",
    "pools: {ingress: {replicas: {max: 40}}}": r"are 42 CPUs, and pods\.max times cpu is 16",
    "pools: {ingress: {cpu: 1}}": r"pools\.ingress",
    "pools: {ingress: {memoryGib: 2}}": r"pools\.ingress\.memoryGib is 2",
    "cache: {diskGib: 10}": r"pools\.ingress\.storeGib is 0\.5 and must be above cache\.segmentGib",
    "volumes: {models: {hostPath: /m, claim: c}}": r"volumes\.models: give hostPath or claim",
    DISK_OF_A_CLAIM: r"upgrade\.type None",
    "upgrade: {type: NewClusterWithIncrementalUpgrade}": r"upgrade\.gatewayClass is needed",
    INCREMENTAL_WITHOUT_AUTOSCALER: r"autoscaling\.enabled is needed",
    "http: {ingress: {enabled: true, host: a.example}}": r"http\.ingress\.tlsSecret is needed",
    "http: {gateway: {enabled: true, host: a.example, tlsSecret: t}}": r"http\.gateway needs className",
    "overrides: {cache: {segment_gib: 3}}": r"overrides\.cache\.segment_gib: the chart has a value of its own",
    "pod: {env: [{name: HF_HOME, value: /x}]}": r'pod\.env of ingress: "HF_HOME" is there already',
    "head: {pod: {volumes: [{name: tmp}]}}": r'pod\.volumes of head: "tmp" is there already',
    "pod: {labels: {}}": r"'/pod': additional properties 'labels' not allowed",
    "pools: {prefill: {gpus: 4}}": r"pools\.prefill\.gpus is 4 and may be at most 1: .* no tensor parallelism",
    "{tenants: {secret: s}, overrides: {tenants: [{name: a}]}}": r"tenants come from tenants\.secret, or stand in",
    "overrides: {workers: {mixed: {}}}": r"overrides\.workers: use worker of pools",
    "head: {memoryGib: 1}": r"head\.memoryGib is 1",
    # Refused by the schema.
    "overrides: {cache: {evictoin: lru}}": r"'/overrides/cache': additional properties 'evictoin' not allowed",
    "overrides: {cahce: {}}": r"'/overrides': additional properties 'cahce' not allowed",
    "overrides: {ingress: {max_queued_requests: 0}}": r"/overrides/ingress/max_queued_requests",
    "overrides: {logging: {level: LOUD}}": r"/overrides/logging/level",
    "pools: {prefill: {worker: {token_budgt: 64}}}": r"/pools/prefill/worker'.* 'token_budgt' not allowed",
    "pools: {elastic: {worker: {shrink_after: 64}}}": r"/pools/elastic/worker'.* 'shrink_after' not allowed",
    "pool: {}": r"additional properties 'pool' not allowed",
    "pools: {prefill: {gpu: 1}}": r"'/pools/prefill': additional properties 'gpu' not allowed",
    "image: {digest: latest}": r"does not match pattern",
    "cache: {poolGib: 0}": r"/cache/poolGib",
    "pools: {prefill: {worker: {num_gpus: 2}}}": r"/pools/prefill/worker/num_gpus",
    "upgrade: {type: Rolling}": r"/upgrade/type",
    "streamSeconds: 1": r"/streamSeconds",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_values_that_do_not_fit_are_refused_with_a_reason(overrides: str) -> None:
    assert isinstance(yaml.safe_load(overrides), dict)
    with pytest.raises(ValueError, match=REFUSED[overrides]):
        helm.template(overrides=overrides)


def test_a_release_name_that_kuberay_refuses_is_refused() -> None:
    with pytest.raises(ValueError, match="more than the 41 characters"):
        helm.template(release="r" * 42)
