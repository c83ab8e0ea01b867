"""The Serve application of a configuration, as Serve itself compares it with what runs. No Ray is started."""

from typing import Any

import pytest
from ray.serve._private.build_app import build_app
from ray.serve._private.version import DeploymentVersion

from configs import Config
from configs.sections import INGRESS, MANAGER
from serve_app import compose, versions

BASE: dict[str, Any] = {"workers": {"prefill": {}, "decode": {}}}


def serve_versions(**sections: Any) -> dict[str, DeploymentVersion]:
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


def test_each_replica_gets_its_own_part() -> None:
    built = build_app(compose(Config.model_validate(BASE)), name="raydix")
    arguments = {deployment.name: deployment.init_args for deployment in built.deployments}
    assert arguments["decode"][0] == "decode" and arguments["decode"][1].keys() == arguments["prefill"][1].keys()
    assert "ingress" not in arguments["decode"][1] and "http" not in arguments["decode"][1]
    assert arguments[INGRESS][0].keys().isdisjoint({"http", "tenants", "workers"})
