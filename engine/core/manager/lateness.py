"""Requests that no worker is predicted to serve in time."""

from raydix.engine.core.errors import LateError
from raydix.engine.core.manager.placement import Placement
from raydix.engine.core.objectives import Late, Objectives, WhenLate


def check_in_time(placement: Placement, objectives: Objectives) -> WhenLate | None:
    """The treatment of a request with an objective for the first token, if all workers are predicted to miss it; None
    in time, or without an objective.

    Raises:
        LateError: the request is to be refused.
    """
    if objectives.ttft_s is None:
        return None
    earliest_s = min(prediction.ttft_s for prediction in (placement.chosen, *placement.considered))
    if earliest_s <= objectives.ttft_s:
        return None
    if objectives.when_late is WhenLate.REFUSE:
        raise LateError(Late(earliest_s, objectives.ttft_s))
    return objectives.when_late or WhenLate.WAIT
