"""The log of what befalls the requests and workers of one ingress replica."""

import logging
from typing import TypeAlias

from raydix.engine.core.ingress.instructions import (
    AttemptLost,
    FailedOver,
    ModelDiffers,
    MovedOn,
    NamedByLastWords,
    WorkerLost,
    WorkerSilent,
)
from raydix.engine.core.log_fields import about

logger = logging.getLogger(__name__)

Incident: TypeAlias = WorkerLost | WorkerSilent | AttemptLost | NamedByLastWords | FailedOver | MovedOn | ModelDiffers


def log_incident(incident: Incident) -> None:
    """Write an incident to the log, with its facts as fields."""
    match incident:
        case WorkerLost(worker_id, epoch, reason, num_requests, was_leaving):
            extra = about("worker_lost", worker=worker_id, epoch=epoch, reason=reason, requests=num_requests)
            level = logging.INFO if was_leaving and not num_requests else logging.WARNING
            logger.log(level, "lost %s (%s) with %d requests", worker_id, reason, num_requests, extra=extra)
        case WorkerSilent(worker_id, num_requests):
            extra = about("worker_silent", worker=worker_id, requests=num_requests)
            logger.warning("%s answers nothing: %d requests go on elsewhere", worker_id, num_requests, extra=extra)
        case AttemptLost(worker_id, request_id, attempt):
            extra = about("attempt_lost", worker=worker_id, request=request_id, attempt=attempt)
            logger.warning("events of %s were lost on their way from %s", request_id, worker_id, extra=extra)
        case NamedByLastWords(worker_id, request_id, num_named, num_stopped, is_refused):
            extra = about(
                "request_named",
                request=request_id,
                worker=worker_id,
                named=num_named,
                stopped=num_stopped,
                refused=is_refused,
            )
            text = "%s is refused: %s died or fell silent by it, the %d. worker"
            if not is_refused:
                text = "%s begins alone: %s died or fell silent perhaps by it, the %d. worker"
            logger.warning(text, request_id, worker_id, num_stopped, extra=extra)
        case FailedOver(request_id, attempt, left, num_tokens):
            extra = about("failover", request=request_id, attempt=attempt, left=left, tokens=num_tokens)
            logger.info("%s goes on elsewhere after %d tokens", request_id, num_tokens, extra=extra)
        case MovedOn(request_id, attempt, left, num_tokens):
            extra = about("moved", request=request_id, attempt=attempt, left=left, tokens=num_tokens)
            logger.info("%s moves to another worker after %d tokens", request_id, num_tokens, extra=extra)
        case ModelDiffers(theirs, ours):
            extra = about("model_differs", theirs=theirs, ours=ours)
            text = "the workers' model (fingerprint %s) is not this replica's (%s): no request can be served"
            logger.error(text, theirs, ours, extra=extra)
