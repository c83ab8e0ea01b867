"""The number of elastic workers as Ray Serve's controller finds it, with Serve's own code around the policy."""

import pickle
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingContext

from raydix.actors.scaling import MAY_SHRINK, STALE_S, WANTED, scaled

NOW = 1000.0
ID = DeploymentID("elastic", "raydix")
LEAST, MOST = 1, 5


def decided(
    present: int,
    reports: Mapping[str, Mapping[str, tuple[float, float]]],
    running: int = 2,
    num_requests: float = 0.0,
) -> int:
    """Serve's decision before its bounds. `reports`: age in seconds and value of each replica's last point."""
    config = scaled(LEAST, MOST)
    series = {
        metric: {
            ReplicaID(name, ID): [TimeStampedValue(NOW - 90, 9.0), TimeStampedValue(NOW - age, value)]
            for name, (age, value) in points.items()
        }
        for metric, points in reports.items()
    }
    context = AutoscalingContext(
        deployment_id=ID,
        deployment_name=ID.name,
        app_name=ID.app_name,
        current_num_replicas=running,
        target_num_replicas=present,
        running_replicas=[],
        total_num_requests=num_requests,
        total_queued_requests=0.0,
        aggregated_metrics=None,
        raw_metrics=series,
        capacity_adjusted_min_replicas=LEAST,
        capacity_adjusted_max_replicas=MOST,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=NOW,
        config=config,
    )
    number, state = _apply_autoscaling_config(config.policy.get_policy())(context)
    assert isinstance(state, dict)
    return int(number)


def both(wanted: Mapping[str, tuple[float, float]], may_shrink: float) -> dict[str, Mapping[str, tuple[float, float]]]:
    return {WANTED: wanted, MAY_SHRINK: {name: (age, may_shrink) for name, (age, _) in wanted.items()}}


@pytest.mark.parametrize("present", [1, 3, 5])
def test_without_an_answer_the_number_stays(present: int) -> None:
    assert decided(present, {}) == present
    assert decided(present, {WANTED: {}, MAY_SHRINK: {}}) == present
    assert decided(present, both({"a": (STALE_S + 1, 2.0)}, 1.0)) == present, "the answer is too old"
    assert decided(present, {}, running=0) == present, "all of them are starting"


def test_the_first_worker_is_started_for_a_request_that_waits() -> None:
    assert decided(0, {}, running=0) == 0
    assert decided(0, {}, running=0, num_requests=1.0) == 1
    assert decided(0, both({"gone": (1.0, 3.0)}, 1.0), running=0) == 0
    assert (scaled(0, 3).initial_replicas, scaled(2, 3).initial_replicas) == (1, None)


def test_the_newest_answer_counts() -> None:
    assert decided(2, both({"a": (4.0, 3.0), "b": (1.0, 4.0)}, 1.0)) == 4
    assert decided(2, both({"a": (0.5, 3.0), "b": (1.0, 4.0)}, 1.0)) == 3
    assert decided(4, both({"a": (0.5, 1.0), "b": (1.0, 4.0)}, 1.0)) == 1


def test_a_manager_that_has_not_watched_for_long_can_only_ask_for_more() -> None:
    assert decided(3, both({"a": (0.5, 1.0)}, 0.0)) == 3
    assert decided(3, both({"a": (0.5, 4.0)}, 0.0)) == 4
    assert decided(3, {WANTED: {"a": (0.5, 1.0)}}) == 3


def test_the_controller_needs_nothing_of_raydix() -> None:
    """Serve pickles the policy with its module."""
    policy: Any = scaled(LEAST, MOST).policy
    program = (
        "import pickle, sys; from types import SimpleNamespace as N; "
        "policy = pickle.loads(sys.stdin.buffer.read()); "
        "point = N(timestamp=9.0, value=4.0); "
        f"reports = {{{WANTED!r}: {{'a': [point]}}, {MAY_SHRINK!r}: {{}}}}; "
        "print(policy(N(target_num_replicas=2, raw_metrics=reports, current_time=10.0)), 'raydix' in sys.modules)"
    )
    data = policy.get_serialized_policy_def()
    assert pickle.loads(data) is not None
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], input=data, capture_output=True, check=True, cwd="/", timeout=120
    )
    assert done.stdout.decode().strip() == "(4, {}) False"
