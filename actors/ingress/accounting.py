"""Accounts for requests: a log line and metrics at the end of each; a count, a log line and a message for a failure."""

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from raydix.actors.ingress.job import Job
from raydix.actors.ingress.refusals import Refusals
from raydix.actors.ingress.request_log import log_request
from raydix.actors.metrics import FinishedRequest
from raydix.engine.core.errors import RaydixError, ServiceError
from raydix.engine.core.log_fields import about

logger = logging.getLogger(__name__)

OTHER_ROUTE, HANDLE, BATCH = "other", "handle", "batch"
"""Places in the metrics of errors that are no route: paths without one, the Python handle, and lines of batches."""


class RequestMetrics(Protocol):
    """Metrics of ended requests (`raydix.actors.metrics.IngressMetrics`)."""

    def finished(self, request: FinishedRequest) -> None: ...

    def know(self, tenants: Iterable[str]) -> None: ...

    def refused(self, route: str, status: int, code: str) -> None: ...


class Accounting:
    """Accounts for the requests of one ingress replica."""

    def __init__(
        self, metrics: RequestMetrics, refusals: Refusals, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics = metrics
        self._refusals = refusals
        self._clock = clock

    def know(self, tenants: Iterable[str]) -> None:
        """Begin the metrics of these tenants, so far as they are new."""
        self._metrics.know(tenants)

    @contextmanager
    def request(self, job: Job) -> Iterator[None]:
        """Account for the request when the block ends, in whatever way."""
        try:
            yield
        finally:
            self._ended(job)

    @contextmanager
    def handle(self) -> Iterator[None]:
        """Account for an error on its way to a caller of the Python handle, and let the error pass."""
        try:
            yield
        except RaydixError as error:
            self.refused(error, HANDLE)
            raise
        except Exception as error:
            log_unexpected(error)
            raise

    def refused(self, error: RaydixError, route: str) -> None:
        """Count one error sent to a client; `route` is one of few, and no client chooses its name."""
        self._metrics.refused(route, error.status, error.code)
        self._refusals.add(error)

    def _ended(self, job: Job) -> None:
        """Log one line and one set of observations per request."""
        now = self._clock()
        usage = job.usage()
        first = min((a.first_token_at for a in job.answers if a.first_token_at is not None), default=None)
        ttft_s = None if first is None else first - job.arrived_at
        tpot_s = None
        if first is not None and len(job.answers) == 1 and usage.completion_tokens > 1:
            tpot_s = (now - first) / (usage.completion_tokens - 1)

        imported = min(
            usage.cached_tokens, sum(a.generation.imported_tokens for a in job.answers[:: job.spec.num_samples])
        )
        hits = {"local": usage.cached_tokens - imported, "imported": imported}
        finished = FinishedRequest(
            tenant=job.tenant.name,
            outcome=outcome_of(job),
            num_prompt=usage.prompt_tokens,
            num_generated=usage.completion_tokens,
            hits=hits,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
        )
        self._metrics.finished(finished)
        log_request(job, finished, num_cached=usage.cached_tokens, duration_s=now - job.arrived_at)


def outcome_of(job: Job) -> str:
    """The way in which a request ended (`raydix.actors.metrics.OUTCOMES`); of several choices the first's."""
    finish = job.answers[0].finish
    if finish is not None and all(answer.finish is not None for answer in job.answers):
        return str(finish)
    failed = any(answer.generation.failure is not None for answer in job.answers)
    return "failed" if failed else "aborted"


def log_unexpected(error: Exception, *, request_id: str | None = None, route: str | None = None) -> str:
    """Log an unforeseen error; returns the id in its log record."""
    error_id = secrets.token_hex(8)
    logger.error(
        "unexpected error %s",
        error_id,
        exc_info=error,
        extra=about("unexpected_error", error=error_id, request=request_id, route=route),
    )
    return error_id


def internal_error(error: Exception, *, request_id: str | None = None, route: str | None = None) -> ServiceError:
    """Log an unforeseen error; returns the error for its client, which names the log record alone."""
    error_id = log_unexpected(error, request_id=request_id, route=route)
    shown = ServiceError(f"An internal error occurred; it has been logged as {error_id}.")
    shown.status = 500
    return shown
