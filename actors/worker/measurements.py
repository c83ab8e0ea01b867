"""Figures of one worker: the fitted costs of its steps, its metrics, and sizes of its engine."""

import asyncio
import logging
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from raydix.actors.instruments import families_of
from raydix.actors.messages import WorkerState
from raydix.actors.metric_values import MetricFamily
from raydix.actors.metrics import WorkerMetrics
from raydix.actors.worker.engine_thread import EngineThread
from raydix.engine.core.costs import CostFit, WorkerCosts
from raydix.engine.core.log_fields import about
from raydix.engine.core.types import Role

if TYPE_CHECKING:  # the engine imports torch, which only a worker's process needs
    from raydix.engine.core.worker.request import Request
    from raydix.engine.model.engine import Engine, StepResult

logger = logging.getLogger(__name__)

REPORT_S = 0.5  # interval between two reports of costs and metrics
# Steps of an engine that are not fitted: they read the weights from the disk's cache, and touch memory for the first
# time. One of 0.6 s in place of 0.1 s kept a worker of a quiet cluster from getting a request for half a minute.
FIRST_STEPS = 2


class Measurements:
    """Fits the cost model to the steps of one engine, and counts what the engine does."""

    def __init__(self, worker_id: str, role: Role, prior: WorkerCosts) -> None:
        """`prior`: the engine's costs until steps have been measured."""
        self._metrics = WorkerMetrics(worker_id, role)
        self._costs = CostFit(prior)
        self._has_measured = False
        self._num_first = 0  # steps so far, up to `FIRST_STEPS`
        self.num_prefill_tokens = 0
        """Tokens of prompts that were computed here."""

    def step(self, result: "StepResult") -> None:
        """Count a step, and fit the cost model to its time."""
        for request in result.finished:
            self._metrics.finished(request, result.ended_at)
            log_computed(request, result.ended_at)
        for request in result.answered:
            self._metrics.answered(request, result.ended_at)
        self._metrics.step(result.shape, result.step_s)

        # A step that also did something unusual would teach a wrong time of the usual work.
        if self._num_first < FIRST_STEPS:
            self._num_first += 1
        elif result.is_typical:
            self._costs.step(result.shape, result.step_s)
            self._has_measured = True
        self.num_prefill_tokens += result.shape.num_prefill_tokens

    def imported(self, num_bytes: int, seconds: float) -> None:
        """Count a segment that was fetched and copied into the pool."""
        self._metrics.imported(num_bytes, seconds)
        self._costs.imported(num_bytes, seconds)

    def exported(self, num_bytes: int) -> None:
        """Count a payload that was sent."""
        self._metrics.exported_bytes(num_bytes)

    def state(self, engine: "Engine") -> WorkerState:
        """Costs and room, for the manager. The pool is read beside its own thread: each figure may be a step old."""
        pool = engine.pool
        return WorkerState(
            costs=self._costs.costs() if self._has_measured else None,
            num_free_blocks=pool.num_available,
            num_empty_blocks=pool.num_available - pool.num_cached,
            num_steps=self._costs.num_steps,
            token_budget=engine.scheduler.limits.token_budget,
            num_blocks=pool.num_blocks,
        )

    def families(self) -> tuple[MetricFamily, ...]:
        """The metrics as of the last report."""
        return families_of(self._metrics)

    async def report(self, engine: "Engine", thread: EngineThread) -> None:
        """Keep the metrics up to date, also while nothing happens, and the engine informed of its costs."""
        while True:
            try:
                self._metrics.flush(engine)
            except Exception:  # a metric that cannot be reported must not end the rest
                logger.exception("metrics not reported")
            self._costs.fade()
            if self._has_measured:
                thread.post(partial(_learn_costs, self._costs.costs()))
            await asyncio.sleep(REPORT_S)


def log_computed(request: "Request", at: float) -> None:
    """Log the end of a request's part at this worker."""
    started_at = at if request.started_at is None else request.started_at
    # Of a request that another worker handed over, with the token that came along.
    num_answer = request.num_output - request.num_given
    logger.info(
        "%s: %d tokens of the answer in %.3f s",
        request.request_id,
        num_answer,
        at - started_at,
        extra=about(
            "computed",
            request=request.request_id,
            attempt=request.assignment.attempt,
            stage=request.assignment.stage,
            tokens=len(request.assignment.token_ids),
            cached_tokens=request.num_cached_tokens,
            completion_tokens=num_answer,
            preemptions=request.num_preemptions,
            waited_s=round(started_at - request.submitted_at, 4),
            took_s=round(at - started_at, 4),
        ),
    )


def _learn_costs(costs: WorkerCosts, engine: "Engine") -> None:
    engine.scheduler.learn_costs(costs)


def engine_statistics(engine: "Engine") -> dict[str, Any]:
    """Sizes and counts of an engine, for tests and operators, after a check of its scheduler's integrity."""
    pool, scheduler = engine.pool, engine.scheduler
    scheduler.check_integrity()
    return {
        "num_blocks": pool.num_blocks,
        "num_available_blocks": pool.num_available,
        "num_cached_blocks": pool.num_cached,
        "num_running": len(scheduler.running),
        "num_waiting": scheduler.num_waiting,
        "num_swapped": scheduler.num_swapped,
        "num_idle": len(scheduler.idle),
        "idle": asdict(scheduler.idle.counts),
        "preemptions": asdict(engine.preemptions),
    }
