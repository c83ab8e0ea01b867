"""The Serve application of a configuration, as Serve itself compares it with what runs. No Ray is started."""

from typing import Any

import pytest
from ray.serve._private.application_state import override_deployment_info
from ray.serve._private.build_app import build_app
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve._private.http_util import ASGIAppReplicaWrapper
from ray.serve._private.replica import _load_deployment_def_from_import_path
from ray.serve._private.version import DeploymentVersion
from ray.serve.schema import ServeApplicationSchema

from raydix.cli.cluster import SERVE_SWITCHES
from raydix.configs import Config
from raydix.configs.sections import INGRESS, MANAGER
from raydix.serve_app import HOST_CLASS, INGRESS_CLASS, STREAM_S, compose, versions

BASE: dict[str, Any] = {"workers": {"prefill": {}, "decode": {}}}


def serve_versions(**sections: Any) -> dict[str, Any]:
    """The versions of the deployments that Serve would make."""
    built = build_app(compose(Config.model_validate({**BASE, **sections})), name="raydix")
    return {
        deployment.name: DeploymentVersion(
            code_version=deployment._version,
            deployment_config=deployment._deployment_config,
            ray_actor_options=deployment._replica_config.ray_actor_options,
            placement_group_bundles=deployment._replica_config.placement_group_bundles,
            placement_group_strategy=deployment._replica_config.placement_group_strategy,
        )
        for deployment in built.deployments
    }


@pytest.mark.parametrize(
    ("sections", "restarted", "reconfigured"),
    [
        ({}, set(), set()),
        ({"ingress": {"max_queued_requests": 7}}, set(), {INGRESS}),
        ({"tenants": [{"name": "bob", "cache_min": 0.5}]}, set(), {INGRESS, MANAGER, "prefill", "decode"}),
        ({"workers": {"prefill": {}, "decode": {"token_budget": 64}}}, set(), {INGRESS, "decode"}),
        ({"workers": {"prefill": {}, "decode": {"replicas": 2}}}, set(), {INGRESS}),
        ({"workers": {"prefill": {}, "decode": {"num_cpus": 2}}}, {"decode"}, {INGRESS}),
        ({"cache": {"segment_gib": 0.5}}, {MANAGER}, {INGRESS}),
        ({"ingress": {"num_cpus": 2}}, {INGRESS}, set()),
    ],
)
def test_serve_restarts_what_it_must_and_reconfigures_the_rest(
    sections: dict[str, Any], restarted: set[str], reconfigured: set[str]
) -> None:
    before, after = serve_versions(), serve_versions(**sections)
    restarts = {name for name in after if before[name].requires_actor_restart(after[name])}
    assert restarts == restarted
    assert {name for name in after if before[name].requires_actor_reconfigure(after[name])} - restarts == reconfigured
    old, new = (versions(Config.model_validate({**BASE, **each})) for each in ({}, sections))
    assert {name for name in new if new[name] != old[name]} == restarted, "what raydix deploy tells"


def test_the_classes_that_replicas_import_by_name_are_there() -> None:
    """As a replica loads them."""
    for path in (INGRESS_CLASS, HOST_CLASS):
        found: Any = _load_deployment_def_from_import_path(path)
        assert f"{found.__module__}.{found.__qualname__}" == path
        assert issubclass(found, ASGIAppReplicaWrapper) == (path == INGRESS_CLASS)


def elastic(**section: Any) -> dict[str, Any]:
    return {"workers": {"elastic": section}}


def test_serve_may_set_the_number_of_elastic_workers_within_bounds() -> None:
    built: Any = build_app(compose(Config.model_validate(elastic(max_replicas=3))), name="raydix")
    scaling = {each.name: each._deployment_config.autoscaling_config for each in built.deployments}
    assert scaling[MANAGER] is None and scaling[INGRESS] is None
    assert (scaling["elastic"].min_replicas, scaling["elastic"].max_replicas) == (1, 3)
    assert scaling["elastic"].initial_replicas is None, "a change of the bounds keeps the present number"
    assert scaling["elastic"].policy.get_policy().__name__ == "number_of_workers"


def test_a_serve_config_keeps_the_policy_of_the_code() -> None:
    """As for `serve deploy` and KubeRay: the config names the deployment, and leaves its number out."""
    built: Any = build_app(compose(Config.model_validate(elastic(max_replicas=3))), name="raydix")
    [deployment] = [each for each in built.deployments if each.name == "elastic"]
    with pytest.warns(DeprecationWarning, match="metrics_interval_s"):  # which nobody sees in the controller
        sent = DeploymentConfig.from_proto_bytes(deployment._deployment_config.to_proto_bytes())
        info = DeploymentInfo(sent, deployment._replica_config, start_time_ms=0, deployer_job_id="")
        options = [{"name": "elastic", "placement_group_bundles": [{"CPU": 4}], "graceful_shutdown_timeout_s": 120}]
        schema = ServeApplicationSchema.model_validate(
            {"name": "raydix", "import_path": "raydix.serve_app:build", "deployments": options}
        )
        config = override_deployment_info({"elastic": info}, schema)["elastic"].deployment_config
    scaling: Any = config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.upscale_delay_s) == (1, 3, 0.0)
    assert scaling.policy.get_policy().__name__ == "number_of_workers"
    assert config.graceful_shutdown_timeout_s == 120


def test_a_fixed_number_and_bounds_change_into_each_other_without_a_restart() -> None:
    fixed, bounds = serve_versions(**elastic(replicas=2)), serve_versions(**elastic(max_replicas=3, shrink_after_s=9))
    assert not [name for name in fixed if fixed[name].requires_actor_restart(bounds[name])]
    changed = {name for name in fixed if fixed[name].requires_actor_reconfigure(bounds[name])}
    assert changed == {INGRESS, MANAGER}, "the manager knows the limits"


def test_each_replica_gets_its_own_part() -> None:
    built: Any = build_app(compose(Config.model_validate(BASE)), name="raydix")
    arguments = {deployment.name: deployment.init_args for deployment in built.deployments}
    assert arguments["decode"][0] == "decode" and arguments["decode"][1].keys() == arguments["prefill"][1].keys()
    assert "ingress" not in arguments["decode"][1] and "http" not in arguments["decode"][1]
    assert arguments[INGRESS][0].keys().isdisjoint({"http", "tenants", "workers"})


def test_haproxy_keeps_connections_as_long_as_an_ingress_replica_keeps_streams() -> None:
    assert SERVE_SWITCHES["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"] == str(STREAM_S)
