"""Accounts for requests: a log line and metrics at the end of each; a count, a log line and a message for a failure."""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from raydix.engine.core.errors import RaydixError, ServiceError
from raydix.engine.core.log_fields import about
from raydix.engine.serving.job import Job

logger = logging.getLogger(__name__)

INTERVAL_S = 60.0
AUTHENTICATION_STATUS = 401
OVERLOADED_STATUS = 429
SERVER_ERROR_STATUS = 500


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A client's request at its end, with tokens of all prompts and choices."""

    tenant: str
    """A configured name, so there are few."""
    outcome: str
    """The outcome, one of `raydix.actors.metrics.OUTCOMES`."""
    num_prompt: int
    num_generated: int
    hits: Mapping[str, int]
    """Cached tokens of the prompt by source."""
    ttft_s: float | None
    tpot_s: float | None
    adapter: str | None = None
    """Name of the request's adapter; None: the model alone."""
    duration_s: float = 0.0
    """Seconds from the arrival to the end."""
    decode_s: float | None = None
    """Seconds from the first token to the end."""
    operation: str = "chat"
    """Kind of the request (`operation_of`)."""
    num_computed: int = 0
    """Tokens of the prompt that were found in no cache."""
    num_longest: int = 0
    """Tokens of the longest choice."""
    num_choices: int = 1
    max_tokens: int = 0
    """Limit of a choice's tokens."""


class Refusals:
    """Logs the first refusal at once, and the refusals of each interval after it at the interval's end.

    The line is a warning if an operator may have to act: wrong keys, too much load, failures. Invalid requests are
    their senders' concern. Called in an event loop.
    """

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._counts: Counter[str] = Counter()
        self._is_serious = False
        self._timer: asyncio.TimerHandle | None = None

    def add(self, error: RaydixError) -> None:
        """Count one error sent to a client."""
        self._counts[error.code] += 1
        # One serious refusal makes the whole line a warning: operators look for warnings, and must not miss it among
        # typing errors.
        self._is_serious |= (
            error.status in (AUTHENTICATION_STATUS, OVERLOADED_STATUS) or error.status >= SERVER_ERROR_STATUS
        )
        # The first refusal of an interval is logged at once, the others at its end together.
        if self._timer is None:
            self._report()

    def _report(self) -> None:
        """Log the counts since the last report; the next report follows after the interval, if there is any refusal."""
        self._timer = None
        if not self._counts:
            return
        counts, self._counts = dict(self._counts), Counter()
        level = logging.WARNING if self._is_serious else logging.INFO
        self._is_serious = False
        listed = ", ".join(f"{count} {code}" for code, count in sorted(counts.items()))
        logger.log(level, "requests refused or failed: %s", listed, extra=about("refusals", counts=counts))
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._report)


def log_request(job: Job, finished: FinishedRequest, *, num_cached: int, duration_s: float) -> None:
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
            applied=list(job.spec.applied),
            adapter=finished.adapter,
        ),
    )


def log_begun(job: Job) -> None:
    """Log at debug level that a request begins, so that one which never ends has left a line."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    extra = about(
        "request_begun",
        request=job.request_id,
        tenant=job.tenant.name,
        choices=len(job.answers),
        prompt_tokens=len(job.answers[0].generation.prompt),
        stream=job.spec.form.stream,
    )
    logger.debug("%s begins", job.request_id, extra=extra)


# Places in the metrics of errors that are no route: paths without one, the Python handle, and lines of batches.
OTHER_ROUTE, HANDLE, BATCH = "other", "handle", "batch"


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
        log_begun(job)
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
            # Only of single choices: several decode side by side, and their tokens have no common pace.
            tpot_s = (now - first) / (usage.completion_tokens - 1)

        # More may be imported than is used: of a prompt that is known in full the last token is computed.
        imported = min(
            usage.cached_tokens, sum(a.generation.imported_tokens for a in job.answers[:: job.spec.num_samples])
        )
        hits = {"local": usage.cached_tokens - imported, "imported": imported}
        # All choices of a request are one adapter's: its model names the adapter.
        adapter = job.answers[0].generation.adapter
        finished = FinishedRequest(
            tenant=job.tenant.name,
            outcome=outcome_of(job),
            num_prompt=usage.prompt_tokens,
            num_generated=usage.completion_tokens,
            hits=hits,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            duration_s=now - job.arrived_at,
            decode_s=None if first is None else now - first,
            adapter=None if adapter is None else adapter.name,
            operation=operation_of(job),
            num_computed=_num_computed(job),
            num_longest=max(len(answer.token_ids) for answer in job.answers),
            num_choices=len(job.answers),
            max_tokens=max(answer.generation.sampling.max_tokens for answer in job.answers),
        )
        self._metrics.finished(finished)
        log_request(job, finished, num_cached=usage.cached_tokens, duration_s=now - job.arrived_at)


def _num_computed(job: Job) -> int:
    """Tokens of the prompts that workers computed: none of a prompt that no worker began."""
    prompts = (answer.generation for answer in job.answers[:: job.spec.num_samples])
    return sum(max(0, len(each.prompt) - each.cached_tokens) for each in prompts if each.cached_tokens is not None)


def outcome_of(job: Job) -> str:
    """The way in which a request ended (`raydix.actors.metrics.OUTCOMES`); of several choices the first's."""
    finish = job.answers[0].finish
    if finish is not None and all(answer.finish is not None for answer in job.answers):
        return str(finish)
    failed = any(answer.generation.failure is not None for answer in job.answers)
    return "failed" if failed else "aborted"


def operation_of(job: Job) -> str:
    """The kind of a request in OpenTelemetry's words (`raydix.actors.metrics.OPERATIONS`)."""
    if job.spec.embedding is not None:
        return "embeddings"
    return "chat" if job.spec.kind == "chat" else "text_completion"


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
