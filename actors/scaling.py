"""The number of elastic workers, from the manager's plan to Ray Serve's autoscaling.

Each elastic worker's host asks the manager for the wanted number (`ActorHost.record_autoscaling_stats`), and Serve
brings the answers to its controller, which calls `number_of_workers` ten times a second. Hosts see no requests, so
Serve's own policy would always shrink the pool to its minimum.

Where there is no worker there is no host to ask. An ingress replica with a request that waits calls the deployment
(`start_first_worker`): Serve counts the call as a request that waits for a replica, and the policy starts one.

The wanted number is the manager's word alone: the planner has the hysteresis, and Serve adds no delay of its own. Where
no host has an answer of the last `STALE_S`, as while the manager is away, the number stays.

Serve copies this module into the controller; so the module imports nothing of raydix.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

POOL = "elastic"  # name of the deployment
WANTED = "raydix_wanted"  # wanted number of workers
MAY_SHRINK = "raydix_may_shrink"  # 1 if the number may be lower than the present one
ASK_S = 2.0  # interval between two questions to a host
KEPT_S = 10.0  # age up to which a host sends its answers again; a fifth of this age is at least `ASK_S`
STALE_S = 10.0


def scaled(least: int, most: int) -> AutoscalingConfig:
    """Serve's settings for a pool of `least` to `most` workers."""
    policy: Any = AutoscalingPolicy  # without annotations
    with warnings.catch_warnings():
        # The interval's successor is a variable of the environment, which Serve does not read yet.
        warnings.simplefilter("ignore", DeprecationWarning)
        return AutoscalingConfig(
            min_replicas=least,
            initial_replicas=None if least else 1,
            max_replicas=most,
            metrics_interval_s=ASK_S,
            look_back_period_s=KEPT_S,
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            policy=policy(policy_function=number_of_workers),
        )


async def start_first_worker(app_name: str) -> None:
    """Have the elastic deployment start a worker; returns when there is one."""
    await serve.get_deployment_handle(POOL, app_name).greet.remote()


def number_of_workers(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """The number of replicas of the elastic deployment; Serve holds the number within the bounds."""
    present = context.target_num_replicas
    if present == 0:
        return (1 if context.total_num_requests else 0), {}
    reports = context.raw_metrics or {}
    wanted = newest(reports.get(WANTED, {}), context.current_time)
    may_shrink = newest(reports.get(MAY_SHRINK, {}), context.current_time)
    if wanted is None or (wanted < present and not may_shrink):
        return present, {}
    return int(wanted), {}


def newest(series: Mapping[Any, Any], now: float | None) -> float | None:
    """The last value of any replica; None if older than `STALE_S`."""
    points = [points[-1] for points in series.values() if points]
    if not points or now is None:
        return None
    last = max(points, key=lambda point: point.timestamp)
    return None if last.timestamp < now - STALE_S else float(last.value)
