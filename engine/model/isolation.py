"""Finds the requests that a step cannot be computed for, and computes the others.

A step that raises has changed nothing that counts: its KV lies behind the computed tokens of its requests, in blocks
that nobody else sees, and is written again. So the step is halved, and halved again while a half raises, down to single
requests. One failing request among n costs at most 2 log2(n) runs of ever smaller batches; rows of a batch do not
depend on each other, so the other requests get the same tokens as without the failure.

Some requests do not raise: they end the process, or keep it to themselves for ever. A *suspect* is a request for which
a worker perhaps did so. It is run alone in its first steps, so that the last words of this worker would name it and
nobody else (`raydix.engine.core.ingress.dispatch`). A failure comes again at the same place, so a few tokens suffice.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce

from raydix.engine.core.types import NoteWork, note_nothing
from raydix.engine.core.worker.step import RunnerOutput, ScheduledChunk, SchedulerOutput
from raydix.engine.model.runner import Runner

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


NUM_ALONE = 4  # tokens of a suspect, behind what it brought along, that are computed alone


def run_isolated(runner: Runner, output: SchedulerOutput, note_work: NoteWork = note_nothing) -> IsolatedStep:
    """Run a step, its suspects each alone; if a part raises, run the part without the requests that make it raise.

    Raises:
        Exception: a part's error, if the model then or soon after computes nothing at all (`Runner.check`).
    """
    suspects = [chunk for chunk in output.chunks if _is_alone(chunk)]
    if not suspects:
        return _run_isolated(runner, output, note_work)
    others = tuple(chunk for chunk in output.chunks if not _is_alone(chunk))
    parts = [*([others] if others else []), *[(chunk,) for chunk in suspects]]
    steps = [_run_isolated(runner, replace(output, chunks=part), note_work) for part in parts]
    computed = reduce(_joined, [step.computed for step in steps])
    failed = {request_id: error for step in steps for request_id, error in step.failed.items()}
    return IsolatedStep(computed, failed, is_whole=False)


def _is_alone(chunk: ScheduledChunk) -> bool:
    """True for a suspect that has not computed `NUM_ALONE` tokens here."""
    request = chunk.request
    brought = len(request.assignment.token_ids)
    return request.assignment.is_suspect and len(request.token_ids) - brought < NUM_ALONE


def _run_isolated(runner: Runner, output: SchedulerOutput, note_work: NoteWork) -> IsolatedStep:
    note_work([chunk.request.request_id for chunk in output.chunks])
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
    return _joined(first, second), first_failed | second_failed


def _joined(first: RunnerOutput, second: RunnerOutput) -> RunnerOutput:
    return RunnerOutput(
        sampled={**first.sampled, **second.sampled},
        scores={**first.scores, **second.scores},
        refused={**first.refused, **second.refused},
        sums={**first.sums, **second.sums},
        pooled={**first.pooled, **second.pooled},
    )


def _part(
    runner: Runner, output: SchedulerOutput, chunks: tuple[ScheduledChunk, ...]
) -> tuple[RunnerOutput, dict[str, Exception]]:
    part = replace(output, chunks=chunks)
    try:
        return runner.run(part), {}
    except Exception as error:
        return _halved(runner, part, error)
