"""Levels of incidents in the log of an ingress replica."""

import logging

import pytest

from raydix.actors.ingress.dispatcher import log_incident
from raydix.engine.core.ingress.instructions import WorkerLost


@pytest.mark.parametrize(
    ("was_leaving", "num_requests", "level"),
    [(False, 0, logging.WARNING), (True, 0, logging.INFO), (True, 2, logging.WARNING)],
)
def test_a_planned_end_without_requests_is_no_warning(
    was_leaving: bool, num_requests: int, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    log_incident(WorkerLost("w", 1, "ActorDiedError", num_requests, was_leaving))
    assert [record.levelno for record in caplog.records] == [level]
