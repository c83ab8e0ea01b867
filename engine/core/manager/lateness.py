"""Refusal of requests that would come too late."""

from engine.core.errors import LateError
from engine.core.manager.placement import Placement
from engine.core.types import Objectives


def check_in_time(placement: Placement, objectives: Objectives) -> None:
    """Raise LateError if late requests are to be refused, and every worker is predicted to give this one's first token
    later than its objective."""
    if not objectives.refuse_late or objectives.ttft_s is None:
        return
    earliest_s = min(prediction.ttft_s for prediction in (placement.chosen, *placement.considered))
    if earliest_s > objectives.ttft_s:
        raise LateError(earliest_s, objectives.ttft_s)
