"""The log line at the end of every request, successful or not."""

import logging
from typing import TYPE_CHECKING

from raydix.engine.core.log_fields import about

if TYPE_CHECKING:
    from raydix.actors.ingress.job import Job
    from raydix.actors.metrics import FinishedRequest

logger = logging.getLogger(__name__)


def log_request(job: "Job", finished: "FinishedRequest", *, num_cached: int, duration_s: float) -> None:
    """Log a request by the id known to its client; in other lines this id is the beginning of its choices' ids.

    `workers` are the workers of the last attempt.
    """
    ttft_s = finished.ttft_s
    generations = [answer.generation for answer in job.answers]
    workers = {worker for each in generations for worker in (each.prefill, each.decode) if worker is not None}
    failure = next((each.failure for each in generations if each.failure is not None), None)
    logger.info(
        "%s %s: %d prompt tokens (%d cached), %d generated, first after %s, %.3f s in all",
        job.request_id,
        finished.outcome,
        finished.num_prompt,
        num_cached,
        finished.num_generated,
        "-" if ttft_s is None else f"{ttft_s:.3f} s",
        duration_s,
        extra=about(
            "request",
            request=job.request_id,
            tenant=finished.tenant,
            outcome=finished.outcome,
            error=None if failure is None else failure.code,
            choices=len(generations),
            attempts=1 + max(each.attempt for each in generations),
            workers=sorted(workers),
            prompt_tokens=finished.num_prompt,
            hits=finished.hits,
            completion_tokens=finished.num_generated,
            preemptions=sum(each.num_preemptions for each in generations),
            ttft_s=None if ttft_s is None else round(ttft_s, 4),
            duration_s=round(duration_s, 4),
            ignored=list(job.spec.ignored),
        ),
    )
