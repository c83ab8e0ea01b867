"""The number of elastic workers, from the manager's plan to Ray Serve's autoscaling.

Each elastic worker's host asks the manager for the wanted number (`ActorHost.record_autoscaling_stats`), and Serve
brings the answers to its controller, which calls `number_of_workers` ten times a second. Hosts see no requests, so
Serve's own policy would always shrink the pool to its minimum.

The wanted number is the manager's word alone: the planner has the hysteresis, and Serve adds no delay of its own. Where
no host has an answer of the last `STALE_S`, as while the manager is away, the number stays.

Serve copies this module into the controller; so the module imports nothing of raydix.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

WANTED = "raydix_wanted"
"""Wanted number of workers."""
MAY_SHRINK = "raydix_may_shrink"
"""1 if the number may be lower than the present one."""
ASK_S = 2.0
"""Interval between two questions to a host."""
KEPT_S = 10.0
"""Age up to which a host sends its answers again; a fifth of this age is at least `ASK_S`."""
STALE_S = 10.0


def scaled(least: int, most: int) -> AutoscalingConfig:
    """Serve's settings for a pool of `least` to `most` workers."""
    policy: Any = AutoscalingPolicy  # without annotations
    with warnings.catch_warnings():
        # The interval's successor is a variable of the environment, which Serve does not read yet.
        warnings.simplefilter("ignore", DeprecationWarning)
        return AutoscalingConfig(
            min_replicas=least,
            max_replicas=most,
            metrics_interval_s=ASK_S,
            look_back_period_s=KEPT_S,
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            policy=policy(policy_function=number_of_workers),
        )


def number_of_workers(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """The number of replicas of the elastic deployment; Serve holds the number within the bounds."""
    present = context.target_num_replicas
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
