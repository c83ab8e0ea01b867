"""Finds the requests that a step cannot be computed for, and computes the others.

A step that raises has changed nothing that counts: its KV lies behind the computed tokens of its requests, in blocks
that nobody else sees, and is written again. So the step is halved, and halved again while a half raises, down to single
requests. One failing request among n costs at most 2 log2(n) runs of ever smaller batches; rows of a batch do not
depend on each other, so the other requests get the same tokens as without the failure.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from engine.core.worker.step import RunnerOutput, ScheduledChunk, SchedulerOutput
from engine.model.runner import Runner

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IsolatedStep:
    """A step, run whole or in parts."""

    computed: RunnerOutput
    """Results of the requests that could be computed."""
    failed: Mapping[str, Exception]
    """Error that each of the other requests raises when run alone."""
    is_whole: bool
    """True if one run sufficed, so that its time is typical of the step."""


def run_isolated(runner: Runner, output: SchedulerOutput) -> IsolatedStep:
    """Run a step; if it raises, run it without the requests that make it raise.

    Raises:
        Exception: the step's error, if the model then or soon after computes nothing at all (`Runner.check`).
    """
    try:
        return IsolatedStep(runner.run(output), {}, is_whole=True)
    except Exception as error:
        logger.warning("a step of %d requests failed (%r), looking for the one", len(output.chunks), error)
        if not still_runs(runner):
            raise
        computed, failed = _halved(runner, output, error)
        if failed and not still_runs(runner):  # the model broke meanwhile: no request is to blame
            raise
        return IsolatedStep(computed, failed, is_whole=False)


def still_runs(runner: Runner) -> bool:
    """True if the model computes anything: after some errors of a device every later call fails, too."""
    try:
        runner.check()
    except Exception:
        logger.exception("the model computes nothing any more")
        return False
    return True


def _halved(runner: Runner, output: SchedulerOutput, error: Exception) -> tuple[RunnerOutput, dict[str, Exception]]:
    """Return the results of a step that raised `error` as a whole, and the errors of its failing requests."""
    if len(output.chunks) == 1:
        return RunnerOutput(), {output.chunks[0].request.request_id: error}
    middle = len(output.chunks) // 2
    first, first_failed = _part(runner, output, output.chunks[:middle])
    second, second_failed = _part(runner, output, output.chunks[middle:])
    computed = RunnerOutput(
        sampled={**first.sampled, **second.sampled},
        scores={**first.scores, **second.scores},
        refused={**first.refused, **second.refused},
        sums={**first.sums, **second.sums},
        pooled={**first.pooled, **second.pooled},
    )
    return computed, first_failed | second_failed


def _part(
    runner: Runner, output: SchedulerOutput, chunks: tuple[ScheduledChunk, ...]
) -> tuple[RunnerOutput, dict[str, Exception]]:
    part = replace(output, chunks=chunks)
    try:
        return runner.run(part), {}
    except Exception as error:
        return _halved(runner, part, error)
